"""What a sandbox shows and hides, from the command that makes it; `tests/integration/test_reward_sandbox.py`
has the real one."""

import platform
import re
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from asyncrl.config.reward_section import RewardConfig
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.preflight.validate import validated_config
from asyncrl.rewards.reward_process import reward_sandbox
from asyncrl.sandbox import bubblewrap, seccomp
from asyncrl.sandbox.bubblewrap import environment, limits
from tests.support.pages import ROOT


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a reward, secrets, and a run below it, as the working directory."""
    for name in (
        "rewards/task.py",
        "runs/first/run.key",
        ".env",
        "join.key",
        ".venv/bin/python",
        ".git/config",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mounts(words: list[str]) -> list[tuple[str, str]]:
    """Kind and place of each mount, in their order."""
    kinds = {"--ro-bind": 2, "--ro-bind-try": 2, "--tmpfs": 1, "--remount-ro": 1, "--proc": 1, "--dev": 1}
    return [(word, words[index + kinds[word]]) for index, word in enumerate(words) if word in kinds]


def test_the_last_mount_of_a_place_decides(project, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(project / ".venv"))
    made = mounts(
        reward_sandbox(["rewards/task.py:right", "exact_match"], Path("runs")).wrap(["true"], filter_fd=9)
    )
    last = {place: kind for kind, place in made if kind != "--remount-ro"}
    assert last[str(project)] == last[str(project / "rewards")] == "--ro-bind"
    assert last[str(project / "runs")] == last[str(project / ".git")] == "--tmpfs"
    assert last[str(project / ".venv")] == "--ro-bind"  # private by its name, but it is this Python
    for secret in (".env", "join.key"):
        words = reward_sandbox([], Path("runs")).wrap(["true"], filter_fd=9)
        assert words[words.index(str(project / secret)) - 1] == "/dev/null"
    remounted = [place for kind, place in made if kind == "--remount-ro"]
    assert {"/", "/dev", "/proc"} <= set(remounted)
    assert {place for kind, place in made if kind == "--tmpfs"} <= {*remounted, "/tmp", "/dev/shm"}
    # Nothing is mounted afterwards.
    assert made[-len(remounted) :] == [("--remount-ro", place) for place in remounted]


def test_what_is_private_is_hidden_some_directories_down_and_other_runs_whole(project):
    for name in (
        "a/.env",
        "a/b/c/token.key",
        "a/b/c/d/deep.key",
        "older/second/run.key",
        "older/second/config.yaml",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    words = reward_sandbox([], Path("runs")).wrap(["true"], filter_fd=9)
    hidden = {
        words[index + 2]
        for index, word in enumerate(words)
        if word == "--ro-bind" and words[index + 1] == "/dev/null"
    }
    assert {str(project / name) for name in (".env", "join.key", "a/.env", "a/b/c/token.key")} <= hidden
    assert str(project / "a/b/c/d/deep.key") not in hidden, "as deep as docs/security.md says, no deeper"
    assert ("--tmpfs", str(project / "older" / "second")) in mounts(words)


def call_numbers(header: str) -> dict[str, int]:
    found = subprocess.run(
        ["cpp", "-dM"], input=f"#include <{header}>\n", capture_output=True, text=True, check=False
    )
    return {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", found.stdout)}


def judged(program: bytes, architecture: int, number: int, first: int = 0) -> int:
    """What the filter returns: an interpreter of the four instructions that it uses."""
    lines, at, value = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, jump, fall, k = lines[at]
        at += 1
        if code == 0x06:
            return k
        if code == 0x20:
            value = {0: number, 4: architecture, 16: first}[k]
        else:
            at += jump if (value == k if code == 0x15 else value >= k) else fall


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("machine", "architecture", "column"), [("x86_64", 0xC000003E, 0), ("aarch64", 0xC00000B7, 1)]
)
def test_the_filter_refuses_what_it_names_and_nothing_else(machine, architecture, column, strict):
    program = seccomp.program(machine, strict=strict)
    named = seccomp.REFUSED | (seccomp.STRICT if strict else {})
    refused = {numbers[column] for numbers in named.values()} - {-1}
    for number in range(600):
        assert judged(program, architecture, number) == (0x00050001 if number in refused else 0x7FFF0000)
        of_another = refused | ({seccomp.LIMITS_OF[column]} if strict else set())
        assert (judged(program, architecture, number, first=1) == 0x00050001) is (number in of_another)
    for other, number in (
        (0x40000003, 1),
        (architecture ^ 1, 0),
        (architecture, 0x40000000),
        (architecture, 0x40000000 + 321),
    ):
        assert judged(program, other, number) == 0x80000000, "another numbering ends the process"


def test_the_numbers_are_those_of_the_kernel():
    known = call_numbers("sys/syscall.h")
    if not known or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("no headers of the system calls of this machine")
    column = ["x86_64", "aarch64"].index(platform.machine())
    named = seccomp.REFUSED | seccomp.STRICT | {"prlimit64": seccomp.LIMITS_OF}
    ours = {name: numbers[column] for name, numbers in named.items() if name in known}
    assert len(ours) > 40 and ours == {name: known[name] for name in ours}


def test_a_reward_file_below_the_run_root_is_shown_alone(project):
    (project / "runs" / "task.py").write_text("")
    made = mounts(reward_sandbox(["runs/task.py:right"], Path("runs")).wrap(["true"], filter_fd=9))
    places = [place for _, place in made]
    assert places.index(str(project / "runs")) < len(places)
    after = made[
        [index for index, one in enumerate(made) if one == ("--tmpfs", str(project / "runs"))][-1] + 1 :
    ]
    assert [place for kind, place in after if kind == "--ro-bind"] == [str(project / "runs" / "task.py")]


def test_the_temporary_directory_of_the_host_is_never_shown(project, monkeypatch):
    monkeypatch.setattr(sys, "path", ["/tmp", *sys.path])
    assert ("--ro-bind", "/tmp") not in mounts(reward_sandbox([], Path("runs")).wrap(["true"], filter_fd=9))


def test_a_working_directory_that_would_show_everything_is_refused(project, monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.chdir("/")
    assert "would show every file" in str(reward_sandbox([], Path("runs")).problem())


@pytest.mark.parametrize(
    ("bwrap", "problem"),
    [
        (None, r"found no program `bwrap`.*apt-get install bubblewrap"),
        (
            "echo 'bwrap: No permissions to create new namespace' >&2; exit 1",
            "cannot make a sandbox.*No permissions.*seccomp",
        ),
        ("echo 'bwrap: Unknown option --disable-userns' >&2; exit 1", "Unknown option.*0.8 or newer"),
        ("exec sleep 60", "starts nothing within 0.5 s"),
        ("exit 0", None),
    ],
)
def test_why_there_can_be_no_sandbox_is_said_with_the_fix(bwrap, problem, tmp_path, monkeypatch):
    if bwrap is not None:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{bwrap}\n")
        (tmp_path / "bwrap").chmod(stat.S_IRWXU)
    monkeypatch.setattr(bubblewrap, "PROBE_S", 0.5 if bwrap == "exec sleep 60" else 20.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere" if bwrap is None else f"{tmp_path}:/usr/bin:/bin")
    found = reward_sandbox([], tmp_path / "runs").problem()
    assert found is None if problem is None else re.search(problem, str(found))


def test_the_variables_that_are_inherited_are_those_of_the_page():
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"^\| environment \| `(PATH[^`]*)`", page, re.MULTILINE)
    assert names == bubblewrap._VARIABLES


def test_no_secret_is_inherited(monkeypatch):
    for name in ("HF_TOKEN", "ASYNCRL_SECRET", "ASYNCRL_STORE_PASSWORD", "WANDB_API_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "canary")
    assert "canary" not in environment().values()
    assert environment()["PATH"] and environment()["HOME"] == "/tmp"


def test_the_number_of_processes_is_limited_where_the_kernel_counts_them_by_namespace(monkeypatch):
    for release, counted in (("5.10.0-28-amd64", False), ("5.14.0-427.el9", True), ("6.8.0", True)):
        monkeypatch.setattr(
            bubblewrap.os, "uname", lambda release=release: type("Uname", (), {"release": release})
        )
        assert ("NPROC" in limits()) is counted


def test_a_sandbox_without_a_memory_limit_is_refused():
    functions = {"functions": [{"function": "exact_match"}]}
    others = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": "d"}}
    with pytest.raises(ValidationError, match=r"needs a memory limit; set reward\.memory_gib"):
        Config.model_validate({**others, "reward": {**functions, "sandbox": "bubblewrap"}})
    with pytest.raises(ValidationError, match="greater than or equal"):
        RewardConfig.model_validate({**functions, "memory_gib": 0.1})
    assert (
        RewardConfig.model_validate({**functions, "sandbox": "bubblewrap", "memory_gib": 1}).memory_gib == 1
    )


def test_validate_names_the_line_of_a_sandbox_that_cannot_be_had(tmp_path, monkeypatch):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.yaml").write_text(
        f"run: {{name: x}}\nmodel: {{path: owner/name}}\ndata: {{train: {tmp_path}/train.jsonl}}\n"
        "reward:\n  functions: [{function: exact_match}]\n  memory_gib: 1\n  sandbox: bubblewrap\n"
    )
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"(?s):7.*found no program"):
        validated_config(tmp_path / "run.yaml")
