"""Exports of checkpoints as Hugging Face models, and their pushes to the hub, next to training."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import LocalTokenNotFoundError
from huggingface_hub.utils import _http

from asyncrl.config.checkpoint_section import HubConfig
from asyncrl.config.named_files import EXPORT
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.hosting.progress import Pace, beat, begin

log = logging.getLogger(__name__)

# Pause between two attempts at an export, and their number: a user may make room on a full disk.
AGAIN_S, ATTEMPTS = 1.0, 60
LAST_S, LOOK_S = 1200.0, 0.1  # longest wait for the last export or push, and from one look to the next
ANSWER_S = 60.0  # longest silence of the hub, for which its client would wait without end
LINKS = "hub"  # in a run's directory, of what is pushed: a checkpoint may be removed in the meantime


class Exports:
    """The exports of one run. At most one is under way, in a thread that ends with the process."""

    def __init__(self, done: Callable[[int], object] = lambda step: None) -> None:
        """Call `done` in that thread with each step whose model is exported."""
        self._done, self._step, self._failure = done, 0, ""
        self._thread = Thread()
        self._hurries = Event()

    def begin(self, step: int, export: Callable[[], object]) -> None:
        """Begin with the export of `step`; no other is under way."""
        self._step, self._failure = step, ""
        self._hurries.clear()
        # A daemon: the export of a process that ends early is made when the run goes on.
        self._thread = Thread(target=self._run, args=(export,), name="export", daemon=True)
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        """Whether an export is not over yet, nor has failed."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the export that is under way. If it has failed, it is not tried again."""
        self._hurries.set()
        self._join("the next checkpoint gets no model; see whether the disk hangs")

    def finish(self) -> None:
        """Wait for the last export and its attempts. Raises CheckpointError if all of them failed."""
        begin("export", Pace.SLOW)
        if self._join("the run ends; `asyncrl up` on it makes it") and self._failure:
            raise CheckpointError(
                f"step {self._step} is saved, but its model is not exported: {self._failure}"
            )

    def _join(self, otherwise: str) -> bool:
        """Wait for the export that is under way; return whether it is over. If not, say what that means."""
        if not (is_over := _joined(self._thread)):
            log.warning("the export of step %d takes more than %g s: %s", self._step, LAST_S, otherwise)
        return is_over

    def _run(self, export: Callable[[], object]) -> None:
        for _ in range(ATTEMPTS):
            try:
                export()
            except Exception as error:  # noqa: BLE001 - libraries wrap the error of a full disk
                if not self._failure:
                    text = "step %d is saved, its model is not exported yet, which is tried again: %s"
                    log.error(text, self._step, error)
                self._failure = f"{type(error).__name__}: {error}"
            else:
                self._failure = ""
                self._done(self._step)
                return
            if self._hurries.wait(AGAIN_S):
                break
        log.error("the checkpoint of step %d stays without a model (%s)", self._step, self._failure)


def _impatient(made: Callable[[], Any]) -> Any:
    client = made()
    client.timeout = ANSWER_S
    return client


# What makes clients may be of code of the user. A release without this name waits without end.
if made := getattr(_http, "_GLOBAL_CLIENT_FACTORY", None):
    set_client_factory(partial(_impatient, made))


def refusal(hub: HubConfig) -> str:
    """Say why this machine may not push to `hub`, by one question to the service; empty if it may."""
    owner = hub.repo.partition("/")[0]
    login = "run `hf auth login`, or set HF_TOKEN"
    try:
        me = HfApi().whoami()
    except LocalTokenNotFoundError:
        return f"found no token for the hub; {login} to one that may write to {owner}"
    except Exception as error:  # noqa: BLE001 - the service and its client raise anything
        return f"the hub refuses to say whose token this is ({_line(error)}); {login}, or drop checkpoint.hub"
    owners = [me["name"], *(one["name"] for one in me.get("orgs", ()))]
    if owner not in owners:
        return f"the token is of {me['name']}, who has {', '.join(owners)}, not {owner}; name one of them"
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        return f"the token of {me['name']} may only read; make one that may write, and {login}"
    return ""


class Pushes:
    """The pushes of one run. At most one is under way, in a thread that ends with the process."""

    def __init__(self, hub: HubConfig, directory: Path, stop: Event, *, step: int = 0) -> None:
        """Make the repository if it is missing. A refusal raises ConfigError at step 0, and later only warns.

        `step` is that of the newest model. When `stop` is set, the run does not wait for its last push.
        """
        self._hub, self._directory, self._api, self._stop = hub, directory, HfApi(), stop
        self._newest, self._pushed = step, 0
        shutil.rmtree(directory / LINKS, ignore_errors=True)  # of a process that was killed in a push
        self._thread = Thread()
        text = refusal(hub)
        if not text:
            try:
                self._api.create_repo(hub.repo, private=hub.private, exist_ok=True)
            except Exception as error:  # noqa: BLE001 - the service and its client raise anything
                text = f"{hub.repo} cannot be made or written ({_line(error)}); make it, or name another"
        if text and step == 0:
            raise ConfigError(f"checkpoint.hub.repo: {text}")
        if text:
            log.warning("checkpoint.hub.repo: %s; the run goes on, and tries to push as before", text)

    def saved(self, step: int) -> None:
        """Begin to push the model of an exported step, if it is due and no other push is under way."""
        self._newest = step
        if self._hub.every and step % self._hub.every == 0 and not self._thread.is_alive():
            self._push(step)

    def finish(self) -> None:
        """Push the newest model, if it is not yet, and wait for that. A failed push is tried again."""
        self._wait()
        if self._pushed != self._newest and not self._thread.is_alive():
            self._push(self._newest)
            self._wait()

    def _model(self, step: int) -> Path:
        return self._directory / "checkpoints" / f"step-{step:06}" / EXPORT

    def _push(self, step: int) -> None:
        links = self._directory / LINKS
        try:
            shutil.rmtree(links, ignore_errors=True)
            shutil.copytree(self._model(step), links, copy_function=os.link)
        except OSError as error:
            self._failed(step, _line(error))
        else:
            # A daemon: no thread of huggingface_hub, whose end the interpreter would wait for.
            self._thread = Thread(target=self._upload, args=(step, links), name="push", daemon=True)
            self._thread.start()

    def _upload(self, step: int, links: Path) -> None:
        try:
            title = f"step {step}"
            done = self._api.upload_folder(repo_id=self._hub.repo, folder_path=links, commit_message=title)
        except Exception as error:  # noqa: BLE001 - no push may end the run
            self._failed(step, _line(error))
        else:
            self._pushed = step
            log.info("the model of step %d is on the hub: %s", step, done)
        shutil.rmtree(links, ignore_errors=True)

    def _failed(self, step: int, why: str) -> None:
        by_hand = f"hf upload {self._hub.repo} {self._model(step)}"
        log.warning("the model of step %d is not on the hub (%s); push it by hand: %s", step, why, by_hand)

    def _wait(self) -> None:
        begin("last push to the hub", Pace.SLOW)
        if not _joined(self._thread, self._stop):
            why = "the run was stopped" if self._stop.is_set() else f"its push takes more than {LAST_S:g} s"
            self._failed(self._newest, why)


def _joined(thread: Thread, stop: Event | None = None) -> bool:
    """Wait for a thread for `LAST_S` at most, and until `stop`; return whether it is over."""
    until_s = time.monotonic() + LAST_S
    while thread.is_alive() and not (stop and stop.is_set()) and time.monotonic() < until_s:
        thread.join(LOOK_S)
        beat()  # this wait has a limit of its own
    return not thread.is_alive()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
