"""Every point at which saving a checkpoint can be cut off, ours beside DeepSpeed's own.

A state holds when the newest checkpoint whose save had returned, or a newer one, is found whole, with the
ledger and the weights of its step. DeepSpeed's is judged by what its `latest` leads to.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.named_files import EXPORT
from asyncrl.run.checkpoint import CheckpointStore
from reliability.crash.file_trace import Copy, Disk, Operation, Tree, torn_writes
from reliability.crash.saver import KEEP, digest_of_export, ledger_of

PREFIX = {"ours": "checkpoints/", "deepspeed": "deepspeed/"}


@dataclass
class Findings:
    """Counts of one way of being cut off."""

    points: int = 0
    saved_before: int = 0
    """Points at which a save of ours had returned."""
    violations: list[str] = field(default_factory=list)
    """Ours: must stay empty."""
    deepspeed_saved_before: int = 0
    deepspeed: Counter[str] = field(default_factory=Counter)
    """Points after a save had returned: what its `latest` led to, if that was no whole checkpoint."""


class Judge:
    """Looks at states, one after the other."""

    def __init__(self, operations: Sequence[Operation], key: bytes, work: Path) -> None:
        final = Disk()
        for operation in operations:
            final.apply(operation)
        self._final = below(final.after_death(), PREFIX["deepspeed"])
        self._policies = {
            op.path: op.data.decode() for op in operations if op.path.startswith("policy-") and op.data
        }
        self._key = key
        self.findings = {
            kind: Findings() for kind in ("process died", "power loss, strict", "power loss, torn")
        }
        self._copy = {kind: Copy(work / kind) for kind in self.findings}
        self._seen = dict.fromkeys(self.findings, (0, -1))
        self._problem = dict.fromkeys(self.findings, "")

    def look(self, kind: str, tree: Tree, number: int) -> None:
        """Judge one state. `number` names it."""
        findings = self.findings[kind]
        findings.points += 1
        returned = returned_steps(tree)
        changed = self._copy[kind].become(below(tree, PREFIX["ours"]))
        findings.saved_before += returned["ours"] > 0
        seen = (findings.points, returned["ours"]) if changed else (self._seen[kind][0], returned["ours"])
        if seen != self._seen[kind]:  # the same files and the same promise need no second look
            self._seen[kind] = seen
            self._problem[kind] = self._ours(self._copy[kind].directory, returned["ours"])
        if self._problem[kind]:
            findings.violations.append(f"operation {number}: {self._problem[kind]}")
        if returned["deepspeed"]:
            findings.deepspeed_saved_before += 1
            if problem := self._deepspeeds(below(tree, PREFIX["deepspeed"])):
                findings.deepspeed[problem] += 1

    def _ours(self, directory: Path, returned: int) -> str:
        store = CheckpointStore(directory, self._key, KEEP)
        found = store.latest()
        if found is None:
            return f"nothing found although step {returned} was saved" if returned else ""
        step = int(found.name.removeprefix("step-"))
        if step < returned:
            return f"step {step} found although step {returned} was saved"
        if store.state(step) != {"version": step, "ledger": ledger_of(step)}:
            return f"step {step} found with another ledger: {store.state(step)}"
        if (exported := store.latest(exported=True)) is None:
            return f"no model found although that of step {returned} was exported" if returned else ""
        step = int(exported.name.removeprefix("step-"))
        if step < returned:
            return f"the model of step {step} found although that of step {returned} was exported"
        model = (exported / EXPORT / "model.safetensors").read_bytes()
        is_whole = digest_of_export(model) == self._policies[f"policy-{step}"]
        return "" if is_whole else f"step {step} found with other weights"

    def _deepspeeds(self, tree: Tree) -> str:
        latest = tree.get("latest")
        if latest is None:
            return "no `latest`"
        if not latest:
            return "`latest` is empty"
        tag = latest.decode()
        files = {
            path: content
            for path, content in self._final.items()
            if path.startswith(f"{tag}/") and content is not None
        }
        if not files:
            return "`latest` is torn"
        return (
            ""
            if all(tree.get(path) == content for path, content in files.items())
            else "`latest` names torn files"
        )


def enumerate_points(
    operations: Sequence[Operation], key: bytes, work: Path, *, power_loss: bool = True
) -> dict[str, Findings]:
    """Look at the state before, in the middle of and after every operation."""
    judge, disk = Judge(operations, key, work), Disk()
    for number, operation in enumerate(operations):
        for half in torn_writes(operation):
            judge.look("process died", with_half(disk, half), number)
        disk.apply(operation)
        judge.look("process died", disk.after_death(), number)
        if power_loss:
            returned: Tree = {path: None for path in disk.after_death() if path.startswith("returned")}
            judge.look("power loss, strict", disk.after_power_loss(strict=True) | returned, number)
            judge.look("power loss, torn", disk.after_power_loss(strict=False), number)
    return judge.findings


def with_half(disk: Disk, half: Operation) -> Tree:
    """The state in the middle of a write."""
    parent, name = disk.parent(half.path)
    file: Any = parent.entries[name]
    whole = file.content
    disk.apply(half)
    tree = disk.after_death()
    file.content = whole
    return tree


def below(tree: Tree, prefix: str) -> Tree:
    """The part of a tree below a directory."""
    return {path.removeprefix(prefix): content for path, content in tree.items() if path.startswith(prefix)}


def returned_steps(tree: Tree) -> dict[str, int]:
    """The newest step whose save had returned."""
    done = [path.removeprefix("returned/").split("-") for path in tree if path.startswith("returned/")]
    return {kind: max((int(step) for name, step in done if name == kind), default=0) for kind in PREFIX}
