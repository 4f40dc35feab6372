"""Names of models and datasets on the hub: a local server answers as huggingface.co does, or none does."""

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants

from asyncrl.config.schema import Config
from asyncrl.preflight.outside import absent_names
from tests.support.command import ASYNCRL
from tests.support.task_config import config_of

NOWHERE = "http://127.0.0.1:9"


class Answers(BaseHTTPRequestHandler):
    """The headers of the service. What is not listed it calls unknown, as it does to strangers."""

    said: ClassVar[dict[str, tuple[int, str]]] = {
        "/org/model/resolve/main/config.json": (200, ""),
        "/org/gated/resolve/main/config.json": (403, "GatedRepo"),
        "/org/model/resolve/v9/config.json": (404, "RevisionNotFound"),
        "/org/gguf/resolve/main/config.json": (404, "EntryNotFound"),
        "/datasets/org/rows/resolve/main/README.md": (404, "EntryNotFound"),
        "/datasets/org/rows/resolve/v1/README.md": (200, ""),
    }
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        status, code = self.said.get(self.path, (401, "RepoNotFound"))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The paths that were asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        point_to(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        Answers.asked.clear()
        yield Answers.asked
        server.shutdown()


def point_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    url = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)


def named(model: str, data: str = "org/rows", **more: str) -> Config:
    return config_of(model={"path": model, **more}, data={"train": data, "eval": "here.jsonl"})


@pytest.mark.parametrize(
    ("config", "key", "said"),
    [
        (named("org/none"), "model.path", "found no model org/none on this machine, and .* not for you"),
        (named("org/gated"), "model.path", "accepted its conditions there; .*hf auth login"),
        (
            named("org/model", revision="v9"),
            "model.path",
            "found no model org/model@v9 .* without this revision",
        ),
        (named("org/gguf"), "model.path", r"without config\.json"),
        (named("org/a..b"), "model.path", "takes no such name"),
        (
            named("org/model", "org/no-rows:main"),
            "data.train",
            "found no dataset org/no-rows .*repo-type dataset",
        ),
        (named("org/model", "org/rows@v2"), "data.train", "dataset org/rows@v2"),
        (named("org/model", "org/rows:main@v1"), "", ""),
        (named("org/model"), "", ""),
    ],
)
def test_what_the_hub_refuses_is_named_with_its_key(
    hub: list[str], config: Config, key: str, said: str
) -> None:
    found = [*absent_names(config)]
    assert [one.keys for one in found] == ([(key,)] if key else [])
    assert re.search(said, " ".join(one.text for one in found))


def test_a_copy_on_this_machine_is_enough(
    hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, NOWHERE)
    snapshot = tmp_path / "hub" / "models--org--model"
    (snapshot / "snapshots" / "1").mkdir(parents=True)
    (snapshot / "snapshots" / "1" / "config.json").write_text("{}")
    (snapshot / "refs").mkdir()
    (snapshot / "refs" / "main").write_text("1")
    (tmp_path / "datasets" / "Org___my_rows").mkdir(parents=True)
    assert not [*absent_names(named("org/model", "Org/MyRows"))]
    found = [*absent_names(named("org/other", "org/rows"))]
    assert [one.keys for one in found] == [("model.path",), ("data.train",)]
    assert all(f"{NOWHERE} cannot be asked" in one.text for one in found)


@pytest.mark.parametrize("command", ["validate", "plan", "reward test", "up"])
def test_without_the_hub_no_process_is_started(command: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    keys = ["model.path=org/model", "data.train=rows.jsonl", "reward.functions=[gsm8k]"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*ASYNCRL, *command.split(), *keys],
        cwd=tmp_path, env=os.environ | offline, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "model.path: found no model org/model on this machine" in done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
