"""A whole run whose machine loses its power: `python -m reliability.crash.whole_run [--starts 300] [--seed 1]
[--json FILE]`.

Every change of a file by the supervisor, the learner and the store of `small_run` is traced, from the first
directory on, while the run is started, trained, and resumed. Then the disk is rebuilt as it may be after each
of these changes, in three ways (see `file_trace`), and the run is asked to go on. It must, without a person:
from the newest checkpoint that it had told of, or from a newer one.

    looked at    all that `asyncrl up` and its learner read before the first step, in this process; every state
    started      the whole run as processes, until it has trained on; most after a sync or a rename, the others by chance
"""

import argparse
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.best_effort import BestEffort
from asyncrl.commands import supervising
from asyncrl.commands.inspect import status_values
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.data_files import DataFiles
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from asyncrl.run.saved import nothing_left, read_saved, refuse_changes
from reliability.crash.file_trace import Copy, Disk, Operation, Tree, record, tree_of
from reliability.crash.small_run import GROUPS, NAME, Weights, config_in

TRAINED, RESUMED, LONGER = 2, 4, 6
"""Steps of the first start, of the second, and of the one after the power is back."""
BIND = "tcp://127.0.0.1:45671"
"""Nobody binds it; with it join.key is written."""
KINDS: dict[str, Callable[[Disk, random.Random], Tree]] = {
    "strict": lambda disk, rng: disk.after_power_loss(strict=True),
    "torn": lambda disk, rng: disk.after_power_loss(strict=False),
    "mixed": lambda disk, rng: disk.after_mixed_power_loss(rng),
}


@dataclass(slots=True)
class State:
    """What a disk may hold when the power comes back."""

    kind: str
    operation: Operation
    """The last before the power went."""
    tree: Tree
    promised: int
    """The newest step that the run had told of: saved before."""

    @property
    def file(self) -> str:
        """Which the last operation was about; those of one directory of data count as one."""
        path = (
            re.sub(r"(^|/)\.?([a-z.]+)\.\d+$", r"\1\2", self.operation.path)
            .removeprefix(f"runs/{NAME}")
            .lstrip("/")
        )
        return re.sub(r"^(checkpoints|store)/.*", r"\1/", path) or "directories above"


@dataclass(slots=True)
class Findings:
    """Counts by the file that was changed last, and what went wrong."""

    looked_at: Counter[str] = field(default_factory=Counter)
    started: Counter[str] = field(default_factory=Counter)
    promised: int = 0
    """Of all, those that had told of a step."""
    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)

    def add(self, counts: Counter[str], state: State, problem: str) -> None:
        counts[state.file] += 1
        self.promised += state.promised > 0
        self.failed[state.file] += bool(problem)
        if problem:
            op = state.operation
            self.wrong.append(
                f"{state.kind}, after {op.kind} {op.path} {op.other}, step {state.promised} promised: "
                f"{problem}"
            )


def up_command(config: Path, steps: int) -> list[str]:
    """Trains up to `steps`."""
    return [sys.executable, "-m", "reliability.crash.small_run", "up", str(config), str(steps)]


def trace(work: Path) -> list[Operation]:
    """What a run does to its files, while it is started and resumed; checked to be all of it."""
    root = work / "root"
    root.mkdir()
    config = config_in(work, root, bind=BIND)
    starts = " && ".join(" ".join(up_command(config, steps)) for steps in (TRAINED, RESUMED))
    operations = record(["sh", "-c", starts], root, work, timeout_s=280, children=True)
    disk = Disk()
    for operation in operations:
        disk.apply(operation)
    assert disk.after_death() == tree_of(root), "the trace misses operations"
    return operations


def states(operations: Sequence[Operation], rng: random.Random) -> Iterator[State]:
    """After each operation, in each way; the same files under the same promise once."""
    disk, promised, seen = Disk(), 0, set()
    for operation in operations:
        disk.apply(operation)
        if operation.kind == "w" and operation.path.endswith("metrics/learner.jsonl"):
            promised = json.loads(operation.data)["step"]
        for kind, rebuilt in KINDS.items():
            tree = rebuilt(disk, rng)
            mark = hash((promised, frozenset(tree.items())))
            if mark not in seen:
                seen.add(mark)
                yield State(kind, operation, tree, promised)


def look(state: State, work: Path) -> str:
    """What keeps the run from going on, as far as reading tells; empty when nothing does."""
    config, directory = rebuilt(state, work)
    weights = Weights()
    try:
        before = read_saved(directory)
        nothing_left(config, directory, before)
        status_values(directory)

        def refuse() -> None:
            refuse_changes(config, directory, before, DataFiles(config))

        with supervising.claimed(directory, config, refuse, BestEffort(), fresh=False):
            StepDeaths(directory.step_under_way)
            saved = CheckpointStore(directory.checkpoints, directory.checkpoint_key(), 2).load(weights)
    except Exception as error:  # noqa: BLE001 - whatever it is, a person would be needed
        return f"{type(error).__name__}: {error}"
    version = saved["version"] if saved else 0
    if version < state.promised:
        return f"goes on from step {version}"
    return "" if weights.ids == whole(version) else f"step {version} has other weights"


def start(state: State, work: Path) -> str:
    """What went wrong when the run was started; empty when it went on."""
    config, directory = rebuilt(state, work)
    argv = up_command(config_in(work, directory.path.parents[1], bind=BIND), config.learner.steps)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    if done.returncode or "Traceback" in said:
        return f"exit status {done.returncode}: {said[-2000:]}"
    begun = json.loads(directory.starts.read_text().splitlines()[-1])["step"]
    if begun < state.promised:
        return f"went on from step {begun}"
    trained = directory.checkpoints / f"step-{config.learner.steps:06}" / "hf" / "model.safetensors"
    return "" if json.loads(trained.read_text()) == whole(config.learner.steps) else "trained on other groups"


def rebuilt(state: State, work: Path) -> tuple[Config, RunDirectory]:
    """The state on the real disk, and the config that the run is resumed with."""
    root = Path(tempfile.mkdtemp(dir=work)) / "root"
    Copy(root).become(state.tree)
    config = load_config(config_in(work, root, bind=BIND), [f"learner.steps={LONGER}"])
    return config, RunDirectory(config.run.directory)


def whole(steps: int) -> list[int]:
    """The ids that so many steps are trained on."""
    return list(range(1, GROUPS * steps + 1))


def chosen(found: Sequence[State], count: int, rng: random.Random) -> list[State]:
    """`count` states, by chance; three in four after a sync or a rename, if there are as many."""
    mixed = rng.sample(found, len(found))
    ordering = [state for state in mixed if state.operation.kind in "fr"]
    others = [state for state in mixed if state.operation.kind not in "fr"]
    most = ordering[: count - count // 4]
    return most + others[: count - len(most)]


def try_all(
    operations: Sequence[Operation], work: Path, *, looks: int | None, starts: int, seed: int
) -> Findings:
    """Look at `looks` states (default: all), start `starts`."""
    rng, findings = random.Random(seed), Findings()
    found = list(states(operations, rng))
    before = os.umask(0o077)  # as the files were, secrets among them
    try:
        for state in chosen(found, looks or len(found), rng):
            findings.add(findings.looked_at, state, look(state, work))
        for state in chosen(found, starts, rng):
            findings.add(findings.started, state, start(state, work))
    finally:
        os.umask(before)
    return findings


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # passing over what is torn is what is tested
    with tempfile.TemporaryDirectory() as work:
        operations = trace(Path(work))
        findings = try_all(operations, Path(work), looks=None, starts=arguments.starts, seed=arguments.seed)
    files = sorted(findings.looked_at)
    rows = {file: [findings.looked_at[file], findings.started[file], findings.failed[file]] for file in files}
    for file, counts in rows.items():
        print(file, *counts, sep=" | ")  # noqa: T201 - the command's output
    print(f"{len(operations)} operations, {len(findings.wrong)} wrong", *findings.wrong, sep="\n")  # noqa: T201
    if arguments.json:
        result = {
            "operations": len(operations),
            "promised": findings.promised,
            "files": rows,
            "wrong": findings.wrong,
        }
        arguments.json.write_text(json.dumps(result, indent=1))
    sys.exit(bool(findings.wrong))


if __name__ == "__main__":
    main()
