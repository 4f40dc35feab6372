"""Try the crash points of real saves: `python -m reliability.crash [--steps 5] [--json FILE]`."""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

from reliability.crash.file_trace import Disk, Operation, record, tree_of
from reliability.crash.points import Findings, enumerate_points
from reliability.crash.saver import KEY
from tests.support.models import tiny_qwen2


def trace(steps: int, work: Path) -> list[Operation]:
    """The operations of real saves; checked to be all of them."""
    model, root = tiny_qwen2(work / "model"), work / "root"
    root.mkdir()
    command = [sys.executable, "-m", "reliability.crash.saver", str(model), str(root), str(steps)]
    operations = record(command, root, work, timeout_s=280)
    disk = Disk()
    for operation in operations:
        disk.apply(operation)
    assert disk.after_death() == tree_of(root), "the trace misses operations"
    return operations


def table(findings: dict[str, Findings]) -> str:
    """For people."""
    rows = [
        "cut off by | points | one of ours saved | ours lost or wrong | one of DeepSpeed's saved | its "
        "latest unusable"
    ]
    for kind, found in findings.items():
        reasons = ", ".join(f"{count} {reason}" for reason, count in found.deepspeed.most_common()) or "none"
        rows.append(
            f"{kind} | {found.points} | {found.saved_before} | {len(found.violations)} | "
            f"{found.deepspeed_saved_before} | {found.deepspeed.total()}: {reasons}"
        )
    return "\n".join(rows)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # passing over a torn checkpoint is what is tested
    with tempfile.TemporaryDirectory() as work:
        operations = trace(arguments.steps, Path(work))
        findings = enumerate_points(operations, KEY, Path(work) / "states")
    print(f"{arguments.steps} saves, {len(operations)} operations on files")
    print(table(findings))
    if arguments.json:
        result = {kind: vars(found) for kind, found in findings.items()}
        arguments.json.write_text(
            json.dumps({"steps": arguments.steps, "operations": len(operations), "found": result}, indent=1)
        )
    sys.exit(any(found.violations for found in findings.values()))


if __name__ == "__main__":
    main()
