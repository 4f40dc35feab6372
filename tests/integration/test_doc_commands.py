"""What the documents tell a reader to type, typed: in a project of a tiny model, one real run and everything
that looks at it.

Every command of every page is executed here, or stands in `NOT_TYPED` with the reason. test_doc_pages.py
holds all of them, those too, to the options, configs, keys, modules and extras that exist.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.commands.down import processes_of
from tests.support.models import tiny_qwen2
from tests.support.pages import PAGES, ROOT, commands, files, inline_commands

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SMALL = "--plain learner.steps=3 generator.count=1 generator.engine=transformers batch.groups=4 eval.prompts=8 eval.every=2 checkpoint.every=2 checkpoint.best=eval/accuracy"
SMALLER = {
    "python -m bench.transfer --transport tcp": "python -m bench.transfer --transport tcp --mib 8 --rounds 2",
    "python -m bench.transfer --transport slot": "python -m bench.transfer --transport slot --mib 8 --rounds 2",
    "python -m bench.fanout": "python -m bench.fanout --hosts 1 2 --mib 4 --rounds 1",
    "python -m bench.fp8 --model MODEL": "python -m bench.fp8 --model build/quickstart/model --probes 2",
    "python -m bench.peers": "python -m bench.peers --show",
    "python -m bench.maths MATH500.jsonl GSM8K.jsonl": "python -m bench.maths build/quickstart/train.jsonl",
    "python -m bench.dashboard --generators 64 --steps 2000": "python -m bench.dashboard --steps 20 --seconds 1",
}
"""Typed with numbers for a test: the measurement is not the point here."""
NOT_TYPED = {
    "ASYNCRL_SECRET_FILE=join.key asyncrl generator": "two hosts: tests/integration/test_hardening.py has both ends on one",
    "asyncrl environment test": "tests/integration/test_environment_command.py types it with these files",
    "asyncrl dataset": "needs libraries, from the network: tests/integration/test_adapters.py and test_verifiers.py",
    "asyncrl doctor": "half a minute of trying out the machine: tests/integration/test_doctor_checks.py types it",
    "python -m bench.gpu": "needs a GPU: tests/unit/test_gpu_check.py has its verdicts and limits",
    "python -m bench.gpu --device cpu": "minutes: tests/integration/test_gpu_rehearsal.py types it",
    "asyncrl export runs/quickstart --best": "tests/integration/test_early_end.py types it",
    "asyncrl export --merge": "needs a run with an adapter: tests/integration/test_lora_run.py types it",
    "asyncrl generator": "runs until its run ends: tests/integration/test_composed_run.py, with `learner`",
    "asyncrl quickstart": "minutes: as `make quickstart`; tests/integration/test_wheel.py has what comes before it",
    "asyncrl learner": "runs until its run ends: tests/integration/test_composed_run.py",
    "asyncrl eval MODEL": "needs named sets: tests/integration/test_tasks_run.py types it",
    "asyncrl samples --dropped": "the run here drops no group: tests/unit/test_samples.py shows such samples",
    "asyncrl samples --pairs": "needs a run with telemetry.pairs: tests/integration/test_presets.py types it",
    "asyncrl up --config configs/quickstart.yaml learner.steps=300 --from": "needs that step: tests/integration/test_early_end.py types it",
    "asyncrl rank": "runs until its learner ends: tests/integration/test_rank_hosts.py",
    "asyncrl scale": "needs a run that is up: tests/integration/test_scale.py",
    "asyncrl up": "minutes; typed once, for all of them, as `asyncrl up --config task.yaml` with smaller numbers",
    "asyncrl up --config gpu-task.yaml": "GPU, and a model of the hub",
    "asyncrl pipeline": "TRL trains: tests/integration/test_stages.py has one with a run at its end",
    "asyncrl sweep": "several runs: tests/integration/test_first_run.py",
    "asyncrl stage": "TRL trains: tests/integration/test_stages.py has each kind of stage",
    "asyncrl play": "an engine's start: tests/unit/test_play.py has what it shows of an episode",
    "cd /shared/task": "a directory that nodes share: tests/integration/test_ray.py has one",
    "cp": "tests/unit/test_deploy.py types the lines that fill in .env",
    "docker": "Docker: tests/integration/test_composed_run.py starts what the Compose file says, by podman",
    "environments/bin/pip": "network; tests/integration/test_adapters.py installs the library by pip",
    "git": "network",
    "time asyncrl validate": "here runs/quickstart is a copy of another run, and is refused: tests/unit/test_validate.py",
    "export RAY_AUTH_MODE=token": "says nothing; tests/integration/test_ray.py has the same variable",
    "kubectl": "a cluster: tests/integration/test_kubernetes_run.py starts what the manifests say, without one",
    "make gpu-check": "is `python -m bench.gpu`",
    "make install": "minutes and network; `make test` begins with it",
    "make lock": "network: tests/unit/test_deploy.py holds what it wrote to pyproject.toml",
    "make release-check": "minutes: tests/integration/test_wheel.py and tests/unit/test_project_files.py are its parts",
    "make quickstart": "minutes: tests/integration/test_warmup.py and tests/integration/test_run.py are its parts",
    "asyncrl up model.path=MODEL": "a model: tests/unit/test_command_line.py reads such keys",
    "asyncrl down /shared/runs/task": "a run on a Ray cluster: tests/integration/test_ray.py ends one",
    "bash .ci/run": "is what runs this",
    "ASYNCRL_EXTRA=cpu make install": "as `make install`",
    "PYTHON=python3.13 make test": "network: the workflow's job pythons installs and tests each of them",
    "make test": "lint, types and other tests than this one",
    "make test-all": "is what runs this",
    "make test-group": "a group of tests: tests/unit/test_groups.py has what it records",
    "mkdir": "tests/unit/test_deploy.py, as `cp`",
    "pip": "network; that the extra exists is held by tests/unit/test_doc_pages.py",
    "OMP_NUM_THREADS=1 python -m bench.learner": "minutes: tests/unit/test_attention.py has the dispatches",
    "OMP_NUM_THREADS=1 python -m bench.layers": "minutes of compiling, with the trainer of bench.learner",
    "python -m bench.crowd": "minutes: tests/integration/test_control_plane.py has generators that join",
    "python -m bench.hosts": "tens of minutes: tests/integration/test_hosts.py and test_rank_hosts.py lose such hosts",
    "python -m bench.cores": "minutes of measuring: tests/unit/test_gpus.py has what processes are told",
    "python -m bench.asynchrony": "two runs of `asyncrl up`, minutes",
    "python examples/pupils.py": "a minute each: tests/unit/test_games.py has what these models are shown",
    "python examples/stories.py": "network; tests/unit/test_stories.py makes it of another model",
    "python -m bench.environments": "half a minute of measuring: its parts are in tests/integration/test_environments.py",
    "python -m bench.endpoint": "minutes: its parts are in tests/unit/test_endpoint.py and test_duty.py",
    "python -m bench.sandbox": "half a minute of measuring: tests/integration/test_program_box.py runs such programs",
    "python -m bench.stages": "tens of minutes: tests/integration/test_stages.py and test_run.py are its parts",
    "python bench/stage_overhead.py": "minutes of measuring: tests/integration/test_stages.py has such stages",
    "python -m bench.scorers": "minutes: two engines; tests/integration/test_scorers.py asks such a scorer",
    "python -m bench.lora": "minutes: two engines under load; tests/integration/test_engine_lora.py has the updates",
    "python -m bench.stall": "minutes: an engine under load; its parts are in tests/integration/test_engine.py",
    "python -m bench.stops": "whole runs, ten minutes: tests/integration/test_stopped_run.py has a shorter one",
    "python -m pytest": "is what runs this",
    "python -m reliability.chaos": "minutes: tests/chaos/test_chaos.py has every kind of fault for seconds",
    "python -m reliability.chaos.bounds": "minutes: tests/chaos/test_bounds.py has each for seconds",
    "python -m reliability.chaos.page": "rewrites a page: tests/chaos/test_chaos.py holds it to what it writes",
    "python -m reliability.chaos.weights": "minutes: tests/chaos/test_weights.py has a few of each fault",
    "python -m reliability.crash": "minutes: tests/integration/test_crash_points.py has one save",
    "python -m reliability.crash.full_disk": "fills disks, as root: tests/unit/test_failed_saves.py has saves that fail",
    "python -m reliability.crash.whole_run": "minutes: tests/integration/test_power_loss.py starts two",
    "python -m reliability.fuzz.fuzz_frames": "a package of its own, and hours: tests/unit/test_wire_fuzz.py has seconds of it",
    "python -m reliability.fuzz.structured_frames": "minutes: tests/unit/test_wire_fuzz.py has seconds of it",
    "python -m reliability.mutation.mutate": "minutes: a copy of the unit tests for each mutant",
    "python -m reliability.simulation": "minutes: tests/simulation has 500 seeds in every run",
    "python -m reliability.simulation.mutants": "minutes: tests/simulation/test_mutants.py tries some",
    "python deploy/wandb_overview.py": "network; what it would save is held by tests/unit/test_wandb_overview.py",
    "python examples/smollm2.py": "a package with a model: tests/integration/test_warmup.py goes without it",
    "python docs/examples/plain.py": "writes into build/ of a clone: tests/unit/test_tutorial.py runs it elsewhere",
    "python docs/generate.py": "rewrites pages: tests/unit/test_docs.py holds them to what it writes",
    "python examples/cartpole.py": "many minutes; tests/unit/test_cartpole.py plays its game",
    "python examples/one_process.py": "a file of the clone: tests/unit/test_whole_loop.py runs it",
    "RAY_AUTH_MODE=token ray": "nodes: tests/integration/test_ray.py has some on one machine",
    "ray": "a cluster and its token: tests/integration/test_ray.py has both",
    "ruff": "a part of `make test`",
    "scp": "another machine",
    "sed": "tests/unit/test_deploy.py, as `cp`",
    "source .venv/bin/activate": "`make install` makes it",
    "tensorboard": "serves until it is stopped; tests/integration/test_trackers.py reads its files",
    "wandb": "network; tests/integration/test_wandb_offline.py reads its files",
}
"""The beginning of a command, and why nobody types it here; of two that fit, the longer one says it."""


def listed() -> dict[str, str]:
    """Every command of every page, as typed in this project: its page; the changelog tells nobody to type one."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    found = [command for page in pages for command in (*commands(page), *inline_commands(page))]
    # A command that needs a file is only named where none follows it.
    named = {command.text.removesuffix(" FILE") for command in found if command.text.endswith(" FILE")}
    return {filled(command.text): command.page for command in reversed(found) if command.text not in named}


def filled(text: str) -> str:
    """Optional parts and all, with runs, files and metrics that the project has."""
    names = {
        "RUN RUN": "runs/quickstart runs/another",
        "RUN": "runs/quickstart",
        "FILE": "task.yaml",
        "METRIC": "reward/mean",
        "HOST": "learner",
        "NAME": "g0",
    }
    words = re.sub(r"[\[\]…]", "", text) if text.startswith("asyncrl ") else text
    words = words.removeprefix(".venv/bin/")
    for name, value in names.items():
        words = re.sub(rf"(?<![\w.]){name}\b", value, words)
    return " ".join(words.split())


def reason(text: str) -> str | None:
    """The longest entry of `NOT_TYPED` that `text` begins with, word by word."""
    return max((start for start in NOT_TYPED if f"{text} ".startswith(f"{start} ")), key=len, default=None)


def test_every_reason_is_one_for_a_command_of_a_page_and_names_tests_that_exist() -> None:
    texts = listed()
    assert {reason(text) for text in texts} >= NOT_TYPED.keys(), "a reason for what no page says any more"
    assert texts.keys() >= SMALLER.keys()
    for path in re.findall(r"tests/[\w/]+\.py", " ".join(NOT_TYPED.values())):
        assert (ROOT / path).is_file(), path


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone after the quick start, with another model and the files of the guide."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "configs", project / "configs")
    quickstart = project / "build" / "quickstart"
    tiny_qwen2(quickstart / "model")
    for name, start in (("train", 10), ("test", 50)):
        sums = [
            {"prompt": f"{a}+{b}=", "answer": str(a + b)}
            for a in range(start, start + 10)
            for b in range(10, 20)
        ]
        (quickstart / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    for page in ("own-task.md", "own-environment.md"):
        for file, content in files(ROOT / "docs" / page).items():
            (project / file).write_text(content)
    (project / "bin").mkdir()
    for name, arguments in (("asyncrl", "-m asyncrl.cli.main "), ("python", "")):
        program = project / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        program.chmod(0o700)
    return project


def typed(project: Path, text: str, wait_s: float = 300.0) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PATH": f"{project}/bin:{os.environ['PATH']}", "PYTHONPATH": path}
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_every_command_is_typed_or_has_a_reason_not_to_be(project: Path) -> None:
    run = project / "runs" / "my-task"
    try:
        training = typed(project, f"asyncrl up --config task.yaml {SMALL}", wait_s=600.0)
    finally:
        for process in processes_of(run):
            process.kill()
    assert "step 3/3" in training
    assert "reward/right/mean" in (run / "metrics" / "learner.jsonl").read_text()
    for name in ("quickstart", "another", "plain", "hosts"):
        shutil.copytree(run, project / "runs" / name, ignore=shutil.ignore_patterns("*.sock"))

    for text, page in sorted(listed().items()):
        if not reason(text):
            assert typed(project, SMALLER.get(text, text)).strip(), f"{page}: {text} says nothing"
    assert list((project / "model").glob("*.safetensors"))
    assert list(project.glob("runs/*/report.html"))
    assert processes_of(run) == []
