"""Pushes to a hub: a local server that answers as the API of huggingface.co does, and one that does not."""

import base64
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from asyncrl.config.checkpoint_section import HubConfig
from asyncrl.errors import ConfigError
from asyncrl.run.pushes import Pushes, refusal

HUB = HubConfig(repo="me/model", every=2)


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks of the service when it uploads small files."""

    daemon_threads = True

    def __init__(self) -> None:
        self.user: dict[str, Any] = {"name": "me", "orgs": [{"name": "us"}]}
        self.refuses, self.made = "", []
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
        server.shutdown()


def save(run: Path, step: int) -> None:
    export = run / "checkpoints" / f"step-{step:06}" / "hf"
    export.mkdir(parents=True)
    (export / "config.json").write_text(json.dumps({"step": step}))


def test_due_steps_and_the_last_one_are_pushed(hub: Hub, tmp_path: Path) -> None:
    pushes = Pushes(HUB, tmp_path)
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


def test_a_push_that_fails_says_how_to_push_by_hand(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pushes = Pushes(HUB, tmp_path)
    hub.refuses = "/commit/"
    save(tmp_path, 2)
    with caplog.at_level(logging.WARNING, "asyncrl"):
        pushes.saved(2)
        pushes.finish()
    assert f"hf upload me/model {tmp_path}/checkpoints/step-000002/hf" in caplog.text and not hub.commits
    hub.refuses = ""
    save(tmp_path, 4)
    pushes.saved(4)
    pushes.finish()
    assert [title for title, _ in hub.commits] == ["step 4"]


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
        Pushes(HUB, tmp_path)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "found no token for the hub; run `hf auth login`" in refusal(HUB)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the hub refuses to say whose token this is" in refusal(HUB)
