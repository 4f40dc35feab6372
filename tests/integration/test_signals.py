"""Ctrl-C, SIGTERM, a closed terminal and a reader that leaves, in every command, at any moment from its first
line on.

Before that line Python itself is set up (some hundredths of a second): it answers a Ctrl-C there with a
traceback of its own.
"""

import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import typer
import yaml

from asyncrl.cli.app import app
from asyncrl.run.lock import RunLock
from tests.support.model_files import model_files
from tests.support.synthetic_run import SyntheticRun
from tests.support.waiting import HANG, LONG_S, comes_true, let_pass, wait_until

pytestmark = pytest.mark.integration

BEGIN = "import asyncrl.cli.main as ours, sys; print('begun', flush=True); sys.argv[1:] = {}; ours.main()"
COMMANDS = [
    "logs", "logs --follow", "status", "status --watch", "status --json", "samples", "samples --follow", "audit", "report", "compare", "export",
    "down", "scale generators=2", "up task.yaml", "learner task.yaml", "generator --wait 30",
    "rank --config task.yaml --host 1 --learner 127.0.0.1", "validate task.yaml",
    "plan task.yaml", "doctor", "reward test task.yaml", "quickstart", "eval model task.yaml", "version",
    "play task.yaml", "stage stage.yaml", "pipeline pipeline.yaml", "environment test score.py", "dataset reasoning_gym:chain_sum",
    "init new", "sweep task.yaml learner.steps=1,2",
]  # fmt: skip
"""A run is added where one is needed."""
ENDLESS = (
    "status --watch",
    "logs --follow",
    "samples --follow",
    "generator --wait 30",
    "doctor",
    "quickstart",
    "reward test task.yaml",
)
"""Commands that are not done by the time of the signal."""
READ = ["samples runs/old", "status runs/old", "compare runs/old runs/other"]
LATEST_S = 1.0
MARK = "ASYNCRL_TEST_MARK"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs, one of them up, and a task with a slow reward."""
    root = tmp_path_factory.mktemp("project")
    for name in ("old", "other"):
        run = SyntheticRun(root / "runs" / name, generators=1)
        for _ in range(20):
            run.advance()
        (root / "runs" / name / "config.yaml").write_text(f"run: {{name: {name}, root: {root / 'runs'}}}\n")
    (root / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    (root / "score.py").write_text(
        "import threading\ndef slow(prompt, response, **row):\n    threading.Event().wait(5)\n    return 0.0\n"
    )
    model_files(root / "model", num_attention_heads=4)
    values = {
        "run": {"name": "mine"},
        "model": {"path": "model", "chat_template": False},
        "data": {"train": "train.jsonl", "eval": "train.jsonl"},
        "reward": {"functions": [{"function": "score.py:slow"}]},
        "learner": {"device": "cpu"},
    }
    (root / "task.yaml").write_text(yaml.safe_dump(values))
    (root / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    stage = {
        "run": {"name": "stage"},
        "stage": "sft",
        "model": {"path": "model"},
        "data": {"train": "rows.jsonl"},
    }
    (root / "stage.yaml").write_text(yaml.safe_dump(stage))
    (root / "pipeline.yaml").write_text("pipeline: [stage.yaml]\n")
    with RunLock(root / "runs" / "other" / "supervisor.lock"):
        yield root


@dataclass
class Command:
    """One that runs, in a process group of its own as in a terminal."""

    process: "subprocess.Popen[str]"
    mark: str

    def left(self) -> list[str]:
        """What it started and left behind; given a moment to go."""
        comes_true(lambda: not list(_marked(self.mark)), LONG_S)
        return [" ".join(each.cmdline()) for each in _marked(self.mark)]


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def heed() -> None:
    """Tests may run in the background of a script or under nohup, where these are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def started(project: Path, line: str) -> Command:
    """At its first line."""
    words, mark = line.split(), uuid.uuid4().hex
    words += {"compare": ["runs/old", "runs/other"], "export": ["runs/old", "--to", "exported"]}.get(line, [])
    if words[0] in ("logs", "status", "samples", "audit", "report", "down", "scale"):
        words.append("runs/other" if line.endswith(("--watch", "--follow")) else "runs/old")
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN.format(words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=project,
        env=os.environ | {MARK: mark},
        start_new_session=True,
        preexec_fn=heed,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return Command(process, mark)


def ended(command: Command, number: int) -> tuple[int, str]:
    """Exit status and what it said, after a signal to all of its group, or after it was done anyway."""
    if command.process.poll() is None:
        os.killpg(command.process.pid, number)
    _, said = command.process.communicate(timeout=120)
    return command.process.returncode, said


def test_the_list_has_every_command():
    group = typer.main.get_group(app)
    assert set(group.commands) == {line.split()[0] for line in COMMANDS}


@pytest.mark.parametrize("line", COMMANDS)
def test_ctrl_c_at_any_moment(line, project):
    command = started(project, line)
    let_pass(random.Random(line).uniform(0.0, LATEST_S))
    status, said = ended(command, signal.SIGINT)
    assert status == 130 or (status in (0, 2) and line not in ENDLESS), said
    assert "Traceback" not in said and "Exception ignored" not in said and command.left() == []


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("status --watch", signal.SIGHUP),
        ("samples --follow", signal.SIGTERM),
        ("reward test task.yaml", signal.SIGHUP),
        ("eval model task.yaml", signal.SIGTERM),
        ("doctor", signal.SIGHUP),
        ("up task.yaml", signal.SIGTERM),
    ],
)
def test_a_closed_terminal_and_a_batch_system_that_ends_a_command(line, number, project):
    command = started(project, line)
    let_pass(2 * LATEST_S)
    status, said = ended(command, number)
    assert status in (-number, 128 + number) or (status == 2 and line not in ENDLESS), said
    assert "Traceback" not in said and command.left() == []


def test_a_reader_that_leaves(project):
    asyncrl = f"{sys.executable} -m asyncrl.cli.main"
    lines = [f"{asyncrl} {words} | true; echo ${{PIPESTATUS[0]}}" for words in READ]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=project,
    )
    assert (done.stdout, done.stderr) == ("0\n" * len(READ), "")


def test_a_follower_whose_reader_leaves_ends_when_it_has_more_to_say(project):
    command, run = started(project, "samples --follow"), project / "runs" / "other"
    with command.process as process:
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()

        def has_ended_or_has_more_to_say() -> bool:
            with (run / "samples.jsonl").open("a") as file:
                file.write((run / "samples.jsonl").read_text().splitlines()[0] + "\n")
            return process.poll() is not None

        wait_until(has_ended_or_has_more_to_say)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (0, "")


WITHIN = {
    "an import that swallows it": f"try: {HANG}\nexcept BaseException: pass\n{HANG}",
    "an import that makes something else of it": f"try: {HANG}\nexcept BaseException: raise ImportError from None",
}


@pytest.mark.parametrize("where", WITHIN)
def test_ctrl_c_within_an_import_is_not_left_to_the_library(where, tmp_path):
    (tmp_path / "library.py").write_text(f"import threading\nprint('begun', flush=True)\n{WITHIN[where]}\n")
    code = (
        "import asyncrl.cli.main as ours\ndef use(arguments): import library\nours._status = use\nours.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        preexec_fn=heed,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "")
