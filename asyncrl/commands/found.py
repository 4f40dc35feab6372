"""The run that generators join: where its store and its config are, and what it may do on this host."""

import hmac
import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.probe import SKEW_S, clock_skew_s
from asyncrl.buffer.run_record import RunRecord, StoredRun
from asyncrl.buffer.users import GENERATOR, user_of, with_user
from asyncrl.config.addresses import CONTROL_PORT, filled_in, insecurities
from asyncrl.config.base import SECTIONS_ONLY
from asyncrl.config.load import load_config
from asyncrl.config.resolved import config_hash, dump_config
from asyncrl.config.reward_section import HttpReward, Judge, RewardFunctionConfig
from asyncrl.config.schema import Config
from asyncrl.config.store import StoreConfig, holds_password
from asyncrl.environments.named import ADAPTERS, TOOLS
from asyncrl.errors import ForeignRunError, RunError, RunNotUp, StoreError, StoreRefused
from asyncrl.files import replace_text
from asyncrl.hosting.route import of_generators, unreached
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.run.keys import JoinKeys, is_given, join_keys
from asyncrl.version import __version__

GAMES = "asyncrl.quickstart.games"  # of the shipped configs
Wish = tuple[str, str]


# A generator that joins with only an address uses what the store says. The run's learner has signed it, but
# the learner's user need not own this host: each piece of code and each variable must be allowed by name. A
# wish is the key of the config, and the argument of `--allow`: a file, a module, an environment of another
# library, `model:PATH`, with `@REVISION` if it has one, `command:LINE`, `vllm:NAME=VALUE`, `url:ADDRESS` or
# `variable:NAME`.
def wishes(config: Config) -> Iterator[Wish]:
    """Yield code outside this package that a generator would load, and variables that it would inherit."""
    for key, function in config.reward_functions.items():
        yield from _reward(key, function)
    yield from _environments(config)
    # Generators read the rows, too, and know by the advantage whether a greedy response is needed.
    named = config.data.functions | {"algorithm.advantage": config.algorithm.advantage.name}
    yield from ((key, name.rpartition(":")[0]) for key, name in named.items() if ":" in name)
    if config.model.trust_remote_code:
        # Judges, and a teacher in processes of its own, are loaded with their code, too.
        teacher = [config.reference] if config.teacher else []
        models = [(one.path, one.revision) for one in (config.model, *teacher)]
        models += [(one.model, None) for name, one in config.scorers.items() if name in config.judges]
        for path, revision in dict.fromkeys(models):
            yield "model.trust_remote_code", f"model:{path}{f'@{revision}' if revision else ''}"
    if config.store.url and (name := config.store.password_env) != StoreConfig().password_env:
        yield "store.password_env", f"variable:{name}"
    # Some arguments of vLLM name code or files, such as `scheduler_cls`; its next release may have others.
    for name, value in config.generator.vllm.items():
        yield f"generator.vllm.{name}", f"vllm:{name}={json.dumps(value)}"
    for name in config.run.environment:
        yield "run.environment", f"variable:{name}"


def _reward(key: str, function: RewardFunctionConfig) -> Iterator[Wish]:
    if ":" in function.function:
        yield key, function.function.rpartition(":")[0]
    if isinstance(remote := function.remote, HttpReward):
        yield f"{key}.params.url", f"url:{remote.url}"
        if remote.key_env:
            yield f"{key}.params.key_env", f"variable:{remote.key_env}"
    if isinstance(remote, Judge):
        yield f"{key}.params.prompt", str(remote.prompt)


def _environments(config: Config) -> Iterator[Wish]:
    for key, name, _ in config.environment_names:
        if name.partition(":")[0] in ADAPTERS:  # the rest of the name may be a command, or name a module
            yield key, name
        elif name not in TOOLS and (place := name.rpartition(":")[0]) != GAMES:
            yield key, place
    for key, environment in config.environments.items():
        if environment.command:
            yield f"{key}.command", f"command:{shlex.join(environment.command)}"
        if environment.python:
            yield f"{key}.python", str(environment.python)


def check_allowed(config: Config, allowed: Collection[str]) -> None:
    """Raise RunError if something is not allowed; the message says what is missing and how to allow it."""
    missing = [wish for wish in wishes(config) if wish[1] not in allowed]
    if not missing:
        return
    lines = "".join(f"  {key} wants {text}\n" for key, text in missing)
    options = " ".join(f"--allow '{text}'" for text in dict.fromkeys(text for _, text in missing))
    raise RunError(
        f"run {config.run.name} would run code or read variables on this host that you have not allowed:\n"
        f"{lines}look at them, then add {options}, or give your own copy of the run's config with --config"
    )


class _Found(NamedTuple):
    """A run to join."""

    url: str
    keys: JoinKeys
    record: StoredRun
    learners: RunDirectory | None  # the learner's run directory, where this machine sees it
    skew_s: float  # the store's clock minus ours

    def directory(self, config: Config, own: Config | None) -> RunDirectory:
        """Return the learner's run directory, or one for this host, with the config. Raises RunError."""
        if self.learners is not None:
            return self.learners
        # The run.root of a record is a path of the learner's host, which need not be this one.
        for root in [config.run.root] if own else [config.run.root, Path("runs")]:
            directory = RunDirectory(root / config.run.name)
            is_learners = os.path.exists(directory.secret_path)  # False also without the right to look there
            if is_learners and directory.keys().join == self.keys:  # whose join.key is not seen yet
                return directory
        if is_learners:
            what = f"{directory.path} is the directory of another run, whose config would be replaced"
            raise RunError(f"{what}; start the generators in another working directory")
        directory.create(fresh=False)
        # Generators of another command here may be reading it.
        replace_text(directory.config, dump_config(config))
        return directory


def found_run(
    own: Config | None,
    *,
    store_url: str | None,
    allowed: Collection[str],
    wait_s: float,
    report: Callable[[str], object],
) -> tuple[_Found, Config]:
    """Return the run to join, and the config of its generators. Raises RunError.

    A run that is not up yet is waited for, at most `wait_s`; errors that waiting cannot cure are raised
    immediately. `own` is the user's config. For `allowed` see `check_allowed`.
    """
    # Read once: the file may be a pipe. A failure is not kept.
    given = cache(partial(join_keys, os.environ)) if is_given(os.environ) else None
    until_s, reported = time.monotonic() + wait_s, ""
    while True:
        try:
            found = _find(store_url, own, given)
            config = _config_of(found, own, allowed)
            require_learner(found.url, config, found.record.control_endpoint, report)
            break
        except (StoreRefused, ForeignRunError):
            raise
        except (StoreError, RunNotUp) as error:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise
            if str(error) != reported:
                reported = str(error)
                report(f"waiting for the run, {left_s:.0f} s more at most: {reported}")
            time.sleep(min(1.0, left_s))
    if abs(found.skew_s) > SKEW_S:
        report(
            f"! the clock of {socket.gethostname()} is {-found.skew_s:+.0f} s from that of the store; let a "
            "time service set both, so that logs can be compared: timedatectl set-ntp true"
        )
    return found, config


def require_learner(store_url: str, config: Config, recorded: str, report: Callable[[str], object]) -> None:
    """Raise RunError if a port of the learner is closed to this host, whose model may load for minutes.

    The learner runs on the host of its own store, which has answered. Of another store, the record says where
    the learner is or an earlier one was: RunNotUp. A port that refuses is reported.
    """
    host, is_own, wait_s = urlsplit(store_url).hostname, config.store.url is None, config.control.timeout_s
    supposed = filled_in(config.control.bind, host, CONTROL_PORT) if host else None
    control = (supposed or "") if is_own else recorded
    ports = of_generators(control) if control.startswith("tcp://") else []
    refused = list[str]()
    for closed in unreached(ports, wait_s, refused.append):
        raise RunError(closed) if is_own else RunNotUp(closed)
    for text in refused if recorded else ():
        report(f"! {text}; a learner that starts again refuses, too, until it has loaded its model")


def _find(store_url: str | None, own: Config | None, given: Callable[[], JoinKeys] | None) -> _Found:
    url = store_url or os.environ.get("ASYNCRL_STORE_URL")
    if url is None:
        newest = find_run(None)
        url = newest.store_url()
    if url is None:
        raise RunNotUp(
            f"run {newest.path} has no store that is running; start it with `asyncrl up`, or give --store URL"
        )
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise RunError(
            f"--store is {url}; allowed is redis://, rediss:// or unix://, such as "
            f"redis://{url.split('://')[-1]}/0"
        )
    variable = (own.store if own else StoreConfig()).password_env
    try:
        holds = holds_password(url)
    except ValueError as error:
        raise RunError(f"--store is not a URL: {error}; give one such as redis://HOST:6379/0") from error
    if holds:
        raise RunError(f"the store's URL holds a password, which process lists show; put it into {variable}")
    if not (own and own.store.insecure) and url.startswith("rediss://") and (ways := list(insecurities(url))):
        raise RunError(f"--store is {url}: {'; '.join(ways)}")
    key = given() if given else None
    learners = _run_here(url, own, key)
    keys = key or (learners.keys().join if learners else join_keys(os.environ))
    learners = learners or _run_of(keys, own)
    password = os.environ.get(variable) or keys.store_password(user_of(url))
    with closing(StoreConnection(url, password=password, retry_s=5.0)) as connection:
        record = RunRecord(connection, keys.record).read()
        return _Found(url, keys, record, learners, clock_skew_s(connection))


def _run_here(url: str, config: Config | None, key: JoinKeys | None) -> RunDirectory | None:
    """Return the learner's run directory, which holds the secret, if it is on this machine.

    Of several runs with this store it is that of the config, or the newest; with a `key`, that of the key.
    """
    candidates = [] if config is None else [config.run.directory]
    if url.startswith("unix:"):  # RUN/store/store.sock
        candidates.append(Path(unquote(urlsplit(url).path)).parent.parent)
    begun = sorted(Path("runs").glob("*/store.url"), key=lambda path: -path.stat().st_mtime)
    place = with_user(url, GENERATOR)  # the learner may use another user of the store
    for found in map(RunDirectory, [*candidates, *(path.parent for path in begun)]):
        if (known := found.store_url()) and with_user(known, GENERATOR) == place:
            with suppress(RunError):
                if key is None or found.keys().join == key:
                    return found
    return None


def _run_of(keys: JoinKeys, config: Config | None) -> RunDirectory | None:
    """Return the learner's run directory if this host shares its file system."""
    text, own = keys.text(), [config.run.directory] if config else []
    # The look for config.yaml is last: if the learner has yet to write it, NFS remembers that it is missing.
    for path in chain(own, (found.parent for found in Path("runs").glob("*/config.yaml"))):
        with suppress(OSError):
            if hmac.compare_digest(RunDirectory(path).join_key.read_bytes(), text.encode()):
                return RunDirectory(path)
    return None


def _config_of(found: _Found, own: Config | None, allowed: Collection[str]) -> Config:
    """Return the config of the generators. Raises ConfigError for code that is not allowed.

    Raises RunNotUp for a release or config that the learner would refuse, before a model is loaded. The store
    may still hold the record of an earlier start, which the learner replaces.
    """
    record = found.record
    if record.release != __version__:  # first: another release may have other keys
        raise RunNotUp(
            f"run {record.name} is of asyncrl {record.release}, this is {__version__}; "
            "install the same release"
        )
    config = own
    if config is None and found.learners is not None:
        config = load_config(found.learners.config)
    if config is None:
        # Without the rules between sections, which load an advantage before anything is allowed.
        config = Config.model_validate_json(record.config_json, context=SECTIONS_ONLY)
        check_allowed(config, allowed)
    if record.config_hash != config_hash(config):
        raise RunNotUp(
            f"run {record.name} has another config (hash {record.config_hash}, yours {config_hash(config)}); "
            "leave out --config to use the run's own"
        )
    return config
