"""Pushes of the model to the Hugging Face hub, next to training, which none of them ends."""

import logging
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from asyncrl.config.checkpoint_section import HubConfig
from asyncrl.config.named_files import EXPORT
from asyncrl.errors import ConfigError
from asyncrl.hosting.progress import Pace, begin

log = logging.getLogger(__name__)

LINKS = "hub"  # in a run's directory, of what is pushed: a checkpoint may be removed in the meantime
LAST_S = 1200.0  # longest wait for the last push


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
    """The pushes of one run. At most one is under way, in a thread of huggingface_hub."""

    def __init__(self, hub: HubConfig, directory: Path) -> None:
        """Make the repository if it is missing. Raises ConfigError if that is refused."""
        self._hub, self._directory, self._api = hub, directory, HfApi()
        self._newest = self._pushed = 0
        self._idle = Event()  # set after what is said of a push, which a future wakes its waiters before
        self._idle.set()
        if text := refusal(hub):
            raise ConfigError(f"checkpoint.hub.repo: {text}")
        try:
            self._api.create_repo(hub.repo, private=hub.private, exist_ok=True)
        except Exception as error:
            text = f"{hub.repo} cannot be made or written ({_line(error)}); make it by hand, or name another"
            raise ConfigError(f"checkpoint.hub.repo: {text}") from error

    def saved(self, step: int) -> None:
        """Begin to push the model of an exported step, if it is due and no other push is under way."""
        self._newest = step
        if self._hub.every and step % self._hub.every == 0 and self._idle.is_set():
            self._push(step)

    def finish(self) -> None:
        """Push the newest model, if it is not yet, and wait for that."""
        begin("last push to the hub", Pace.SLOW)
        self._wait()
        if self._pushed != self._newest and self._idle.is_set():
            self._push(self._newest)
            self._wait()

    def _push(self, step: int) -> None:
        source, links = self._directory / "checkpoints" / f"step-{step:06}" / EXPORT, self._directory / LINKS
        try:
            shutil.rmtree(links, ignore_errors=True)
            shutil.copytree(source, links, copy_function=os.link)
            push: Future[Any] = self._api.upload_folder(
                repo_id=self._hub.repo, folder_path=links, commit_message=f"step {step}", run_as_future=True
            )
        except Exception as error:  # noqa: BLE001 - no push may end the run
            self._failed(step, source, error)
        else:
            self._pushed = step
            self._idle.clear()
            push.add_done_callback(lambda done: self._done(step, source, done))

    def _done(self, step: int, source: Path, done: Future[Any]) -> None:
        if error := done.exception():
            self._failed(step, source, error)
        else:
            log.info("the model of step %d is on the hub: %s", step, done.result())
        self._idle.set()

    def _failed(self, step: int, source: Path, error: BaseException) -> None:
        text = "the model of step %d is not on the hub, and training goes on (%s); push it by hand: %s"
        log.warning(text, step, _line(error), f"hf upload {self._hub.repo} {source}")

    def _wait(self) -> None:
        if not self._idle.wait(LAST_S):
            log.warning("the last push to %s takes more than %g s; the run ends", self._hub.repo, LAST_S)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
