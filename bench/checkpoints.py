"""Seconds for which a checkpoint stops the learner's loop, and those of its export next to training.

    python -m bench.checkpoints --mib 69 1024 --json bench/results/checkpoints.json

A model of float32 with AdamW: a checkpoint has 16 bytes for each number, a quarter of them its `hf/`.
`loop_s` is the save and the copy of the weights. `export_s` is from there until the export is listed. `sum_s`
is for how long the loop stops if it writes the export itself. Medians.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import asyncrl  # noqa: F401 - before transformers: it hides builds that transformers cannot import
from asyncrl.config.sections import LearnerConfig
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.exports import Exports
from bench.environment import add_options, describe, report
from bench.gpu.training_rate import lone_trainer, rollouts, step_of
from tests.support.models import tiny_qwen2

LAYERS, BYTES = 4, 16


def measure(mib: int, options: argparse.Namespace, root: Path) -> dict[str, float]:
    """Checkpoints of about `mib`, one after the other."""
    numbers = mib * 2**20 / BYTES
    # A layer of the tiny model has about 3 x width x 3 width of its MLP, and 3 x width^2 of attention.
    width = round((numbers / LAYERS / 12) ** 0.5 / 16) * 16
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": LAYERS}
    model = str(tiny_qwen2(root / "model", **sizes))
    device = options.device
    trainer = lone_trainer(model, LearnerConfig(device=device), dtype=options.dtype, auto=device)
    step_of(trainer, rollouts(2, 40, 64, seed=0), budget=128)()  # the optimizer gets its state
    checkpoints, exports = CheckpointStore(root / "checkpoints", b"key", 2), Exports()
    found: dict[str, list[float]] = {}

    def timed(name: str, begun_s: float) -> None:
        found.setdefault(name, []).append(time.perf_counter() - begun_s)

    for number in range(1, options.repetitions + 1):
        begun_s = time.perf_counter()
        checkpoints.save(number, trainer, {"version": number})
        timed("save_s", begun_s)
        copied_s = time.perf_counter()
        export = checkpoints.exporter(number, trainer)
        timed("copy_s", copied_s)
        timed("loop_s", begun_s)
        assert export is not None
        begun_s = time.perf_counter()
        exports.begin(number, export)
        exports.wait()
        timed("export_s", begun_s)
    newest = checkpoints.latest(exported=True)
    assert newest is not None
    size = sum(path.stat().st_size for path in newest.rglob("*"))
    trainer.close()
    medians = {name: round(statistics.median(times), 3) for name, times in found.items()}
    medians["sum_s"] = round(medians["loop_s"] + medians["export_s"], 3)
    return {"checkpoint_mib": round(size / 2**20, 1), **medians}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[69, 1024])
    parser.add_argument("--repetitions", type=int, default=6)
    add_options(parser)
    options = parser.parse_args()
    results = []
    for mib in options.mib:
        with tempfile.TemporaryDirectory(dir=".") as root:
            results.append(measure(mib, options, Path(root)))
    report({"found": results, **describe("torch", "deepspeed", "safetensors")}, options.json)


if __name__ == "__main__":
    main()
