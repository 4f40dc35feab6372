"""Pushes to a hub: a local server that answers as the API of huggingface.co does, and one that does not."""

import base64
import inspect
import itertools
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from huggingface_hub import close_session, constants

from asyncrl.config.checkpoint_section import HubConfig
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch import learner_parts
from asyncrl.preflight.outside import outside_problems
from asyncrl.run.directory import RunDirectory
from asyncrl.run.exports import LINKS, Pushes, refusal
from tests.support.waiting import wait_until
from tests.support.whole_run import tiny_run

HUB = HubConfig(repo="me/model", every=2)


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks of the service when it uploads small files."""

    daemon_threads = True

    def __init__(self) -> None:
        self.user: dict[str, Any] = {"name": "me", "orgs": [{"name": "us"}]}
        self.refuses, self.made = "", []
        self.hangs, self.is_over = "", threading.Event()  # a part of the paths to which it never answers
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        super().__init__(("127.0.0.1", 0), Answers)


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2":
            self._say(self.server.user)
        else:
            self._say({"error": "Repository not found"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuses and self.server.refuses in self.path:
            self._say({"error": "You have no rights"}, 403)
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            self._say({"url": f"{constants.ENDPOINT}/me/model", "name": "me/model"})
        elif "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self._say({"files": [{"path": name, **modes} for name in names]})
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                one["value"]["path"]: base64.b64decode(one["value"]["content"])
                for one in lines
                if one["key"] == "file"
            }
            self.server.commits.append((lines[0]["value"]["summary"], files))
            self._say(
                {"commitOid": "0", "commitUrl": f"{constants.ENDPOINT}/me/model/commit/0", "hookOutput": ""}
            )

    def _say(self, answer: object, status: int = 200) -> None:
        if self.server.hangs and self.server.hangs in self.path:
            self.server.is_over.wait()
            return
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        yield server
        server.is_over.set()
        server.shutdown()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A client that waits a second for the hub, and not between its attempts."""
    monkeypatch.setattr("asyncrl.run.exports.ANSWER_S", 1.0)
    monkeypatch.setattr("huggingface_hub.utils._http.time", Mock())
    close_session()
    yield
    close_session()


def save(run: Path, step: int) -> None:
    export = run / "checkpoints" / f"step-{step:06}" / "hf"
    export.mkdir(parents=True)
    (export / "config.json").write_text(json.dumps({"step": step}))


def test_due_steps_and_the_last_one_are_pushed(hub: Hub, tmp_path: Path) -> None:
    pushes = Pushes(HUB, tmp_path, threading.Event())
    assert hub.made == [{"name": "model", "organization": "me", "visibility": "private"}]
    for step in (1, 2):
        save(tmp_path, step)
        pushes.saved(step)
    pushes.finish()
    assert hub.commits == [("step 2", {"config.json": b'{"step": 2}'})]
    save(tmp_path, 3)
    pushes.saved(3)
    pushes.finish()
    assert hub.commits[1:] == [("step 3", {"config.json": b'{"step": 3}'})]


def test_a_push_that_fails_says_how_to_push_by_hand_and_is_tried_again(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pushes = Pushes(HUB, tmp_path, threading.Event())
    hub.refuses = "/commit/"
    save(tmp_path, 2)
    with caplog.at_level(logging.WARNING, "asyncrl"):
        pushes.saved(2)
        pushes.finish()
    assert f"hf upload me/model {tmp_path}/checkpoints/step-000002/hf" in caplog.text and not hub.commits
    hub.refuses = ""
    pushes.finish()
    assert [title for title, _ in hub.commits] == ["step 2"]
    assert not (tmp_path / LINKS).exists(), "or the disk keeps the model when its checkpoint is removed"


def test_a_resumed_run_goes_on_without_its_hub_and_pushes_what_it_has(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.refuses = "/create"
    save(tmp_path, 4)
    (tmp_path / LINKS / "of a killed process").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "asyncrl"):
        pushes = Pushes(HUB, tmp_path, threading.Event(), step=4)
    assert "me/model cannot be made or written" in caplog.text and not (tmp_path / LINKS).exists()
    pushes.finish()
    assert [title for title, _ in hub.commits] == ["step 4"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("at", ["/whoami", "/create"])
def test_a_run_is_resumed_though_its_hub_takes_calls_and_never_answers(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    hub.hangs = at
    start = threading.Thread(target=Pushes, args=(HUB, tmp_path, threading.Event()), kwargs={"step": 4})
    start.daemon = True
    with caplog.at_level(logging.WARNING, "asyncrl"):
        start.start()
        start.join(30)
    assert not start.is_alive() and "the run goes on, and tries to push as before" in caplog.text


@pytest.mark.usefixtures("impatient")
def test_a_push_to_which_the_hub_never_answers_fails_and_later_ones_are_made(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pushes = Pushes(HUB, tmp_path, threading.Event())
    hub.hangs = "/preupload/"
    save(tmp_path, 2)
    with caplog.at_level(logging.WARNING, "asyncrl"):
        pushes.saved(2)
        wait_until(lambda: not pushes._thread.is_alive(), 30)
    assert "the model of step 2 is not on the hub" in caplog.text
    hub.hangs = ""
    save(tmp_path, 4)
    pushes.saved(4)
    wait_until(lambda: hub.commits, 30)
    assert [title for title, _ in hub.commits] == ["step 4"]


@pytest.mark.parametrize(("limit_s", "why"), [(600.0, "the run was stopped"), (2.0, "more than 2 s")])
def test_a_run_ends_without_a_push_that_hangs(
    hub: Hub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float,
    why: str,
) -> None:
    monkeypatch.setattr("asyncrl.run.exports.LAST_S", limit_s)
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("asyncrl.run.exports.time", clock)
    monkeypatch.setattr("asyncrl.run.exports.beat", beat := Mock())
    stop, released = threading.Event(), threading.Event()
    pushes = Pushes(HUB, tmp_path, stop)

    def hang(**options: object) -> None:
        if limit_s > 2.0:
            stop.set()
        released.wait()

    monkeypatch.setattr(pushes._api, "upload_folder", hang)
    save(tmp_path, 3)
    pushes.saved(3)
    with caplog.at_level(logging.WARNING, "asyncrl"):
        pushes.finish()
    assert why in caplog.text and "hf upload me/model" in caplog.text
    assert beat.called or stop.is_set(), "a short control.slow_s does not end the learner that waits"
    assert all(one.daemon for one in threading.enumerate() if one.name == "push")
    released.set()


def test_what_would_be_refused_is_named_before(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(HUB) == refusal(HubConfig(repo="us/model")) == ""
    assert "of me, who has me, us, not you" in refusal(HubConfig(repo="you/model"))
    hub.user["auth"] = {"accessToken": {"role": "read"}}
    assert "may only read" in refusal(HUB)
    hub.user.pop("auth")
    hub.refuses = "/create"
    with pytest.raises(
        ConfigError, match=r"checkpoint\.hub\.repo: me/model cannot be made.*You have no rights"
    ):
        Pushes(HUB, tmp_path, threading.Event())
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "found no token for the hub; run `hf auth login`" in refusal(HUB)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the hub refuses to say whose token this is" in refusal(HUB)


def test_no_generator_joins_a_run_that_its_hub_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("open_reporting", "open_taking", "open_publisher", "open_hub", "open_judged", "open_page")
    opened = {name: Mock() for name in (*parts, "record_start", "key_id", "claim_store")}
    for name, opens in opened.items():
        monkeypatch.setattr(learner_parts, name, opens)
    monkeypatch.setattr(Pushes, "__init__", Mock(side_effect=ConfigError("checkpoint.hub.repo: no rights")))
    names = inspect.signature(learner_parts.open_lead_run).parameters
    with pytest.raises(ConfigError, match="no rights"):
        learner_parts.open_lead_run(**dict.fromkeys(names, MagicMock()))
    assert opened["open_publisher"].called and not opened["open_hub"].called


def test_a_run_that_has_saved_something_is_resumed_without_its_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.run.exports.refusal", lambda hub: "no answer")
    with tiny_run(tmp_path) as path:
        config = load_config(path, ["checkpoint.hub.repo=me/model"])
    assert [one.text for one in outside_problems(config, resumes=True, generators=True)] == ["no answer"]
    directory = RunDirectory(config.run.directory)
    directory.make()
    directory.mark_saved()
    assert not [*outside_problems(config, resumes=True, generators=True)]
    assert [*outside_problems(config, resumes=False, generators=True)]
