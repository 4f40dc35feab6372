"""What the guides tell a reader to type, typed: in a project of a tiny model, one real run and everything that looks at it.

test_doc_pages.py holds every other command to the options, configs and keys that exist.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_docs import ROOT, commands, files
from helpers_models import tiny_qwen2

from asyncrl.launch.down import processes_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GUIDES = [ROOT / "README.md", ROOT / "docs" / "first-run.md", ROOT / "docs" / "own-task.md"]
TYPED = [command for page in GUIDES for command in commands(page, {"asyncrl"})]
SMALL = "--plain learner.steps=3 generator.count=1 batch.groups=4 eval.prompts=8 eval.every=3 checkpoint.every=2"
LONG = {
    "asyncrl up --config configs/quickstart.yaml learner.steps=300": "as the `up` of the guide to an own task",
    "asyncrl up --config configs/quickstart.yaml --fresh": "the same",
    "asyncrl up --config task.yaml learner.steps=200": "README.md: needs a model of the hub",
    "asyncrl up --config gpu-task.yaml": "needs a GPU and a model of the hub",
    "asyncrl doctor": "its answer is about the machine; it has tests of its own",
    "asyncrl eval runs/quickstart": "starts one more engine",
}
"""Only parsed, and their configs loaded, with the reason."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone after the warm-up of the quick start, which is another model here, with the files of the guide."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "configs", project / "configs")
    quickstart = project / "build" / "quickstart"
    tiny_qwen2(quickstart / "model")
    for name, start in (("train", 10), ("test", 50)):
        sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(start, start + 10) for b in range(10, 20)]
        (quickstart / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    for file, content in files(ROOT / "docs" / "own-task.md").items():
        (project / file).write_text(content)
    (project / "bin").mkdir()
    program = project / "bin" / "asyncrl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m asyncrl.cli.main "$@"\n')
    program.chmod(0o700)
    return project


def typed(project: Path, text: str, wait_s: float = 200.0) -> str:
    environment = os.environ | {"PATH": f"{project}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", text], cwd=project, env=environment, capture_output=True, text=True, timeout=wait_s, check=False
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
    for name in ("quickstart", "another"):
        shutil.copytree(run, project / "runs" / name, ignore=shutil.ignore_patterns("*.sock"))

    reasons = LONG | {"asyncrl up --config task.yaml": "typed above"}
    listed = {command.text: command.page for command in TYPED}
    assert reasons.keys() <= listed.keys(), "a reason for what no page says any more"
    for text in sorted(listed.keys() - reasons.keys()):
        assert typed(project, text).strip(), f"{listed[text]}: {text} says nothing"
    assert list((project / "model").glob("*.safetensors"))
    assert list(project.glob("runs/*/report.html"))
    assert processes_of(run) == []
