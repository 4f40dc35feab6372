"""The weights of a learner without a model: a hash of everything that was trained, in order, and the proof of
how it came about.

Every checkpoint names a *manifest*: an immutable file with the steps since the previous checkpoint, the hash
after them, and the manifest before it. Whoever walks from the newest checkpoint back to the first manifest
has the lineage that lasts, whatever was trained and lost again on the way, and can compute the weights anew.
"""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from asyncrl.buffer.ledger import EMPTY_CHAIN, next_chain

FIRST = "0" * 64
FILE = "weights.json"


def fold(weights: str, step: Mapping[str, Any]) -> str:
    """The weights after one more step."""
    return hashlib.sha256(f"{weights} {json.dumps(step, sort_keys=True)}".encode()).hexdigest()


def digest(frame: bytes) -> str:
    """Of the content of one group."""
    return hashlib.sha256(frame).hexdigest()[:20]


@dataclass(slots=True)
class FoldedWeights:
    """A trainer for `CheckpointStore`."""

    manifests: Path
    rank: int = 0
    value: str = FIRST
    manifest: str = ""
    _steps: list[dict[str, Any]] = field(default_factory=list)

    def train(self, step: dict[str, Any]) -> None:
        self.value = fold(self.value, step)
        self._steps.append(step)

    def broadcast(self, value: bytes | None) -> bytes:
        assert value is not None
        return value

    def save(self, directory: Path) -> None:
        text = json.dumps({"parent": self.manifest, "steps": self._steps, "weights": self.value})
        self.manifest, self._steps = hashlib.sha256(text.encode()).hexdigest()[:32], []
        self.manifests.mkdir(exist_ok=True)
        writing = self.manifests / f".{os.getpid()}"
        writing.write_text(text)
        writing.rename(self.manifests / f"{self.manifest}.json")
        (directory / FILE).write_text(json.dumps({"weights": self.value, "manifest": self.manifest}))

    def load(self, directory: Path) -> None:
        saved = json.loads((directory / FILE).read_text())
        self.value, self.manifest, self._steps = saved["weights"], saved["manifest"], []


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of the ids 1..N of one run. Lost, duplicated and wrong must be 0 or empty."""

    groups: int
    steps: int
    rejected: int
    lost: int
    duplicated: int
    wrong: tuple[str, ...]
    """Broken promises other than those two."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why those were rejected that were, by id."""

    @classmethod
    def stuck(cls, reason: str) -> Self:
        """Of a run that did not go on."""
        return cls(groups=0, steps=0, rejected=0, lost=0, duplicated=0, wrong=(reason,))

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.duplicated or self.wrong)


def lineage(manifests: Path, newest: str) -> list[dict[str, Any]]:
    """The manifests from the first to `newest`."""
    found = []
    while newest:
        text = (manifests / f"{newest}.json").read_text()
        assert hashlib.sha256(text.encode()).hexdigest()[:32] == newest, f"manifest {newest} was altered"
        found.append(json.loads(text))
        newest = found[-1]["parent"]
    return found[::-1]


def handed_over(directory: Path) -> dict[int, set[str]]:
    """Digests of what the generators of a world offered, by id."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in directory.glob("put-*.txt"):
        for line in path.read_text().splitlines():
            ticket_id, content, _ = line.split(" ")
            found[int(ticket_id)].add(content)
    return found


def judge(checkpoint: Path, manifests: Path, handed_over: Mapping[int, set[str]]) -> Verdict:
    """Recompute everything that the last checkpoint claims.

    Args:
        checkpoint: directory of the last one, whose last step took in strict order, so that consumed ids are
        1..N. handed_over: digests of the frames that generators offered, by id.
    """
    saved, ledger = (
        json.loads((checkpoint / FILE).read_text()),
        json.loads((checkpoint / "state.json").read_text())["ledger"],
    )
    weights, chain, takes, wrong = FIRST, EMPTY_CHAIN, 0, []
    consumed, steps, rejected, reasons = Counter[int](), 0, 0, dict[int, str]()
    for manifest in lineage(manifests, saved["manifest"]):
        for step in manifest["steps"]:
            weights, steps = fold(weights, step), steps + 1
            if step["version"] != steps - 1:
                wrong.append(f"step {steps} of the lineage trained version {step['version']}")
            for ids in step["takes"]:
                chain, takes = next_chain(chain, tuple(ids)), takes + 1
                consumed.update(ids)
            rejected += len(step["rejected"])
            reasons |= dict(step["rejected"])
            wrong += _strangers(step, handed_over)
        if weights != manifest["weights"]:
            wrong.append(f"weights after step {steps} are not what their manifests make")
    if weights != saved["weights"]:
        wrong.append("the weights of the checkpoint are not what its manifests make")
    if (chain, takes) != (ledger["chain"], ledger["takes"]):
        wrong.append(
            f"the ledger's chain after take {ledger['takes']} is not that of the {takes} takes in the lineage"
        )
    last, counted = max(consumed, default=0), consumed.total()
    if (ledger["watermark"], ledger["above"]) != (last, []):
        wrong.append(
            f"the ledger says watermark {ledger['watermark']} and {ledger['above']}, the lineage ends at "
            f"{last}"
        )
    if (
        ledger["trained"] + sum(ledger["rejected"].values()) != counted
        or sum(ledger["rejected"].values()) != rejected
    ):
        wrong.append(
            f"the ledger books {ledger['trained']} trained and {ledger['rejected']}, the lineage consumed "
            f"{counted}"
        )
    return Verdict(
        groups=len(consumed),
        steps=steps,
        rejected=rejected,
        lost=last - len(consumed),
        duplicated=counted - len(consumed),
        wrong=tuple(wrong),
        reasons=reasons,
    )


def _strangers(step: Mapping[str, Any], handed_over: Mapping[int, set[str]]) -> list[str]:
    """Groups of a step that were not taken in it, or whose content no generator made."""
    taken = Counter(i for ids in step["takes"] for i in ids)
    used = Counter(i for i, _ in step["trained"]) + Counter(i for i, _ in step["rejected"])
    wrong = (
        []
        if taken == used
        else [f"step of version {step['version']} took {dict(taken)} and used {dict(used)}"]
    )
    return wrong + [
        f"group {i}: its content {content} was never handed over"
        for i, content in step["trained"]
        if content not in handed_over.get(i, ())
    ]
