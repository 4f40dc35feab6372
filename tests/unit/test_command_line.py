"""What people type, and how it ends: every mistake is a message that says where, what, what is allowed and
what to do."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import proxy_bypass

import pytest

from asyncrl import __version__
from asyncrl.cli import running
from asyncrl.cli.arguments import required_config
from asyncrl.cli.main import main
from asyncrl.config.load import read_draft
from asyncrl.config.schema import Config
from tests.support.command import ASYNCRL
from tests.support.model_files import model_files
from tests.support.waiting import let_pass

GOOD = """\
run: {name: mine}
model: {path: ./model}
data: {train: train.jsonl}
reward: {functions: [{function: "score.py:right"}]}
sampling: {max_prompt_tokens: 64, max_response_tokens: 64}
"""
HELP = "--help` says more"
MISTAKES: dict[str, tuple[str, ...]] = {
    # no command, a wrong one
    "": ("Usage: asyncrl", "Commands"),
    "foo": ("found no command `foo`", "allowed is", "validate", HELP),
    "vaildate task.yaml": ("found no command `vaildate`", "did you mean `validate`?", HELP),
    "uP task.yaml": ("found no command `uP`", "did you mean `up`?"),
    "task.yaml": ("found no command `task.yaml`", "allowed is"),
    "reward": ("asyncrl reward", "Missing command", "`asyncrl reward --help` says more"),
    "reward tset task.yaml": ("asyncrl reward", "found no command `tset`", "did you mean `test`?"),
    # options that are none
    "--bogus": ("found no option `--bogus`", "allowed is --version", HELP),
    "-x": ("found no option `-x`", "allowed is", HELP),
    "-V": ("found no option `-V`", "--version"),
    "up task.yaml --plian": ("asyncrl up", "found no option `--plian`", "did you mean `--plain`?"),
    "up task.yaml --resume": ("asyncrl up", "found no option `--resume`", "allowed is", "--fresh"),
    "up task.yaml -f": ("asyncrl up", "found no option `-f`", "--fresh"),
    "up --learning_rate 1e-5 task.yaml": (
        "found no option `--learning_rate`",
        "did you mean `learner.optimizer.lr=VALUE`",
    ),
    "up task.yaml --max_steps=5": ("found no option `--max_steps`", "did you mean `learner.steps=VALUE`"),
    "up task.yaml --group-size=5": (
        "found no option `--group-size`",
        "did you mean `batch.group_size=VALUE`",
    ),
    "status --bogus": ("asyncrl status", "found no option `--bogus`", "--json"),
    "status --jsn": ("found no option `--jsn`", "did you mean `--json`?"),
    "samples --wrost": ("found no option `--wrost`", "did you mean `--worst`?"),
    "eval mine --set a=1": ("asyncrl eval", "found no option `--set`", HELP),
    # values of options
    "samples --count x": ("asyncrl samples", "'--count'", "valid integer", HELP),
    "samples --count 0": ("asyncrl samples", "'--count'", "greater than or equal to 1", HELP),
    "generator --count -3": ("asyncrl generator", "'--count'", "greater than or equal to 1", HELP),
    "reward test task.yaml --n 0": ("asyncrl reward test", "'--n'", "greater than or equal to 1", HELP),
    "generator --store": ("asyncrl generator", "'--store' requires an argument", HELP),
    "up --config": ("asyncrl up", "'--config' requires an argument", HELP),
    "up task.yaml --plain=yes": ("asyncrl up", "'--plain' does not take a value", HELP),
    "generator --store localhost:6379": ("localhost:6379", "redis://"),
    # arguments that are missing, or too many
    "up": ("found no config", "give the YAML file", "here are task.yaml"),
    "learner model.path=m data.train=train.jsonl": (
        "1 problem in the command line",
        "reward: found nothing; it is needed",
    ),
    "Logs": ("found no command `Logs`", "did you mean `logs`?"),
    "train task.yaml": ("found no command `train`", "did you mean `up`?"),
    "validate": ("found no config", "give the YAML file", "here are task.yaml"),
    "plan": ("found no config", "here are task.yaml"),
    "reward test": ("found no config", "here are task.yaml"),
    "compare": ("asyncrl compare", "Missing argument", HELP),
    "scale": ("asyncrl scale", "Missing argument", "CHANGE", HELP),
    "eval": ("asyncrl eval", "Missing argument", HELP),
    "status a b": (
        "asyncrl status",
        "unexpected extra argument",
        "(b)",
        "allowed is `asyncrl status [OPTIONS] [run]`",
    ),
    "up task.yaml other.yaml": (
        "found `other.yaml` in addition to the config task.yaml",
        "allowed are one YAML file",
        "leave it out",
    ),
    "validate task.yaml learner.steps 5": (
        "found `learner.steps` in addition",
        "KEY=VALUE",
        "write `learner.steps=VALUE`",
    ),
    "validate --config task.yaml other.yaml": (
        "found `other.yaml` in addition to the config task.yaml",
        "leave it out",
    ),
    "validate --config task.yaml --config other.yaml": ("`--config` 2 times", "one YAML file", "`extends`"),
    "generator -c task.yaml --config=other.yaml": ("`--config` 2 times", "one YAML file", "`extends`"),
    # the file
    "validate nowhere.yaml": ("cannot read nowhere.yaml", "No such file", "give the path of a YAML file"),
    "validate a\x1b[2J.yaml": ("cannot read a␛[2J.yaml", "give the path of a YAML file"),
    "validate tsak.yaml": ("cannot read tsak.yaml", "did you mean `task.yaml`?"),
    "validate runs/old": ("cannot read runs/old: it is a directory", "give its config, runs/old/config.yaml"),
    "validate ~/task.yaml": ("cannot read ~/task.yaml", "write ~ and variables out"),
    "validate files/latin.yaml": ("files/latin.yaml:2", "not UTF-8", "save the file as UTF-8"),
    "validate files/binary.yaml": ("files/binary.yaml:2", "UTF-8"),
    "validate files/deep.yaml": ("files/deep.yaml", "nested too deeply", "remove brackets"),
    "validate files/empty.yaml": ("files/empty.yaml:1", "found nothing", "key: value"),
    "validate files/list.yaml": (
        "files/list.yaml:1",
        "found no section",
        "allowed are `key: value` lines",
    ),
    # overrides
    "validate task.yaml learner.stepz=5": ("learner.stepz", "unknown key", "did you mean `steps`?"),
    "validate task.yaml --learner.stepz=5": ("learner.stepz", "unknown key", "did you mean `steps`?"),
    "validate task.yaml +learner.stepz=5": ("learner.stepz", "unknown key", "did you mean `steps`?"),
    "validate task.yaml --learner.steps five": ("learner.steps", "found 'five'", "a whole number >= 1"),
    "validate task.yaml --learner.steps": (
        "override `--learner.steps`",
        "found no value",
        "write for example",
    ),
    "validate task.yaml +learner.steps": ("override `+learner.steps`", "found no value", "write for example"),
    "validate task.yaml learner.steps=": ("learner.steps", "found nothing", "a whole number >= 1"),
    "validate task.yaml steps=5": ("steps", "unknown key", "did you mean `learner.steps`?"),
    "validate task.yaml ~data.train=1": (
        "override `~data.train=1`",
        "found no `key.path=value`",
        "write for example",
    ),
    "validate task.yaml =5": ("override `=5`", "found no `key.path=value`"),
    "validate task.yaml learner.steps=[": ("learner.steps=[", "is not YAML", "check"),
    # runs
    "status": ("no run found at runs", "give the directory"),
    "status nowhere": ("no run found at nowhere", "give the directory"),
    "samples nowhere": ("no run found at nowhere", "give the directory"),
    "down nowhere": ("no run found at nowhere", "give the directory"),
    "audit nowhere": ("no run found at nowhere", "give the directory"),
    "export nowhere --to x": ("no run found at nowhere", "give the directory"),
    "analyze runs/old": ("found no command `analyze`", "curves are in `asyncrl report`"),
    "warmup quick --seed 0": ("found no command `warmup`", "`python -m asyncrl.examples.pupils`"),
    "scale learner=+2": ("found `learner=+2`", "allowed is generators=+2"),
    "eval model": ("model is a model, not a run", "asyncrl eval model FILE"),
    "generator": ("no run found at runs", "give the directory"),
    # places that cannot be written
    "up task.yaml run.root=task.yaml": ("task.yaml/mine", "Not a directory", "run.root=DIRECTORY"),
    "up task.yaml run.root=/proc/nowhere": (
        "/proc/nowhere",
        "No such file or directory",
        "run.root=DIRECTORY",
    ),
    "up task.yaml run.root=/dev/full": ("/dev/full/mine", "Not a directory", "run.root=DIRECTORY"),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.yaml").write_text(GOOD)
    (tmp_path / "score.py").write_text(
        "def right(prompt, response, answer):\n    return float(answer in response)\n"
    )
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    model_files(tmp_path / "model", num_attention_heads=4)
    files = tmp_path / "files"
    files.mkdir()
    (files / "list.yaml").write_text("- run\n")
    (files / "latin.yaml").write_bytes(b"run:\n  name: caf\xe9\n")
    (files / "binary.yaml").write_bytes(bytes(range(256)))
    (files / "deep.yaml").write_text("a: " + "[" * 5000)
    (files / "empty.yaml").write_text("")
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "config.yaml").write_text(GOOD)
    return tmp_path


@pytest.fixture
def typed(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[object]:
    """Type a line: (exit status, what it said)."""
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("COLUMNS", "200")

    def type_(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["asyncrl", *shlex.split(line)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    yield type_
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("line", MISTAKES, ids=lambda line: line or "nothing")
def test_a_mistake_is_a_message(line, typed, project):
    if line in ("status", "generator"):  # of which there is one in the directory otherwise
        (project / "runs" / "old" / "config.yaml").unlink()
    status, out, said = typed(line)
    assert status == 2, said
    assert "Traceback" not in said + out and bool(out) == (not line), (
        "only help, which nobody asked for, is no error message"
    )
    for words in MISTAKES[line]:
        assert words in said + out
    if line:
        assert len(said.strip().splitlines()) <= 3, "a slip is worth a line, not a page"


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize(
    "line",
    [
        "validate task.yaml",
        "validate --config task.yaml",
        "validate -c task.yaml learner.steps=5",
        "validate learner.steps=5 task.yaml",
        "validate task.yaml --learner.steps=5",
        "validate task.yaml --learner.optimizer.lr 1e-5 --batch.groups=8",
        "validate task.yaml ++learner.steps=5 +batch.groups=8",
        "validate task.yaml --reward.functions.0.weight -1.5",
        f"validate 'generator.vllm={{hf_overrides: {{note: {'x' * 300}}}}}' task.yaml",
    ],
)
def test_a_config_and_its_overrides_in_every_way_people_write_them(line, typed):
    assert typed(line) == (0, "task.yaml: fine\n", "")


def test_a_sweep_asks_for_the_library_of_its_page_before_it_trains(typed, monkeypatch):
    begun = []
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr(running, "run_up", lambda *arguments, **_: begun.append(arguments) or 0)
    status, out, said = typed("sweep task.yaml learner.steps=1,2")
    assert (status, out, begun) == (2, "", []) and "pip install 'asyncrl[report]'" in said


@pytest.mark.parametrize("line", ["-h", "--help", "up -h", "reward test -h"])
def test_help_is_found(line, typed):
    status, out, said = typed(line)
    assert status == 0 and "Usage: asyncrl" in out and not said


@pytest.mark.parametrize("line", ["--version", "version"])
def test_the_version_is_found(line, typed):
    assert typed(line) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_refuses_is_named_with_the_place_and_the_way_out(number, typed, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), "/mnt/runs/mine/logs")

    monkeypatch.setattr("asyncrl.preflight.fit.validated_config", refuse)
    status, _, said = typed("up task.yaml")
    assert status == 2 and said.startswith(f"/mnt/runs/mine/logs: {os.strerror(number)}; ")
    assert "run.root=DIRECTORY" in said and "Traceback" not in said


def test_a_fault_of_ours_is_told_from_a_mistake(typed, monkeypatch):
    def break_(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("asyncrl.preflight.validate.validated_config", break_)
    status, _, said = typed("validate task.yaml")
    assert status == 1 and "Traceback" in said, "whoever mends it needs the place"
    assert said.endswith(
        "asyncrl is at fault, not you: ZeroDivisionError. Please report it with the lines above\n"
    )


# --- with a real process: its pipes, signals and imports ------------------------------------------


def test_a_reader_that_leaves_has_what_it_wanted(project):
    for command in ("--help", "validate task.yaml"):
        done = subprocess.run(
            f"{shlex.join(ASYNCRL)} {command} | true; echo ${{PIPESTATUS[0]}}",
            shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout == "0\n" and done.stderr == ""


@pytest.mark.parametrize("given", ["", "*", "intra.net", "intra.net,localhost,127.0.0.1,::1"])
def test_no_proxy_of_the_internet_is_asked_for_services_of_this_host(given, typed, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, given)
    typed("version")
    bypassed = [host for host in ("localhost:8000", "127.0.0.1", "intra.net", "x.org") if proxy_bypass(host)]
    assert bypassed[:2] == ["localhost:8000", "127.0.0.1"]
    assert ("intra.net" in bypassed, "x.org" in bypassed) == (given != "", given == "*")
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
    assert os.environ["no_proxy"].endswith(given or "::1") or given == "intra.net"


def test_output_that_cannot_be_written_or_is_closed(project):
    lines = ("version > /dev/full", "version >&-", "validate absent.yaml 2>&-", "init new <&- >&2")
    script = "\n".join(f"{shlex.join(ASYNCRL)} {line}; echo $?" for line in lines)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "2\n0\n2\n0\n" and "No space left on device; free some space" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_ctrl_c_at_any_moment_is_quiet(project):
    """From the first line of ours on: before it, Python itself is being set up."""
    slow = (
        "import asyncrl.cli.main as ours, sys; print('begun', flush=True); sys.argv[1:] = ['validate', "
        "'task.yaml']; ours.main()"
    )
    for wait_s in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4):
        process = subprocess.Popen(
            [sys.executable, "-c", slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        let_pass(wait_s)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=60)
        # On a slow machine the last comes early, on a fast one late: when the answer is out already.
        assert process.returncode == 130 or (process.returncode, out) == (0, "task.yaml: fine\n"), said
        assert said == ""


def test_a_command_that_a_batch_system_ends_cleans_up():
    """`up` does so before it supervises anything: it puts back the config of the last start."""
    code = (
        "import threading, asyncrl.cli.app as app, asyncrl.cli.main as ours\n"
        "def run(arguments, completes):\n"
        "    try: print('begun', flush=True); threading.Event().wait(600)\n"
        "    finally: print('cleaned up', flush=True)\n"
        "app.run = run\n"
        "ours.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.terminate()
    assert process.communicate(timeout=60) == ("cleaned up\n", "")
    assert process.returncode == 128 + signal.SIGTERM


def test_the_package_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "version"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{__version__}\n"


def test_keys_alone_are_a_config_and_a_reward_needs_only_its_name(typed, project):
    rows = project / "rows.jsonl"
    rows.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    keys = ["model.path=org/model", f"data.train={rows}", "reward.functions=[math, {function: length}]"]
    draft = read_draft(Config, *required_config(keys, None))
    assert draft.config.run.name == "first" and draft.config.data.train[0].path == str(rows)
    assert [one.function for one in draft.config.reward.functions] == ["math", "length"]


def test_keys_alone_are_checked_by_every_command(typed, monkeypatch):
    for kind in ("machine_checks", "run_checks"):
        monkeypatch.setattr(f"asyncrl.preflight.doctor.{kind}", lambda config: [])
    keys = "model.path=./model data.train=train.jsonl reward.functions='[score.py:right]'"
    keys += " sampling.max_prompt_tokens=64 sampling.max_response_tokens=64"
    assert typed(f"validate {keys}") == (0, "the command line: fine\n", "")
    status, out, _ = typed(f"doctor {keys}")
    assert status == 0 and "the command line: every key, file and function is as it should be" in out
    status, out, _ = typed(f"doctor {keys} learner.stepz=5")
    assert status == 1 and "1 problem in the command line" in out and "did you mean `steps`?" in out


def test_the_shell_is_told_what_a_word_can_become(project):
    asking = {"_ASYNCRL_COMPLETE": "complete_bash", "COMP_WORDS": "asyncrl va", "COMP_CWORD": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "asyncrl"], env=os.environ | asking, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["validate"]


def test_the_completion_that_is_installed_asks_the_command(tmp_path):
    """In a bash that has read the file which the option writes."""
    home = os.environ | {"HOME": str(tmp_path)}
    # It asks which shell has called it: here none may have.
    install = ["bash", "-c", '"$0" -m asyncrl --install-completion bash && echo done', sys.executable]
    subprocess.run(install, env=home, capture_output=True, check=True)
    (tmp_path / "asyncrl").write_text(f'#!/bin/sh\nexec {sys.executable} -m asyncrl "$@"\n')
    (tmp_path / "asyncrl").chmod(0o755)
    typed = (
        "PATH=$HOME:$PATH; . $HOME/.bash_completions/asyncrl.sh; COMP_WORDS=(asyncrl sta); COMP_CWORD=1; "
        "_asyncrl_completion asyncrl; echo ${COMPREPLY[@]}"
    )
    found = subprocess.run(["bash", "-c", typed], env=home, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["stage", "status"]
