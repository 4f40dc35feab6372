"""A learner that saves a few steps, ours and DeepSpeed's own way: `python -m reliability.crash.saver MODEL
ROOT STEPS`.

Below ROOT: `checkpoints/` ours, `deepspeed/` DeepSpeed's with its `latest`. `returned/ours-N` and
`returned/deepspeed-N` are made when a save has returned; `policy-N` holds the digest of the weights of step N
from before the save.
"""

import hashlib
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load

from asyncrl.batch.packing import microbatch
from asyncrl.run.checkpoint import CheckpointStore
from tests.support import trainer_worker as worker
from tests.support.fake_trainer import save_whole

KEY, KEEP = worker.KEY, 2


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of names and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def digest_of_export(data: bytes) -> str:
    """Of the weights in a safetensors file."""
    return digest(load(data))


def ledger_of(step: int) -> list[int]:
    """Stands for the groups of the first `step` steps."""
    return list(range(1, 4 * step + 1))


def main() -> None:
    """Train and save."""
    model, root, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job = {"rank": 0, "ranks": 1, "model": model, "address": "127.0.0.1"}
    trainer = worker.build(job, {"stage": 0, "port": 0}, lr=1e-2)
    items = worker.sequences()
    store = CheckpointStore(root / "checkpoints", KEY, KEEP)
    (root / "returned").mkdir()
    for step in range(1, steps + 1):
        trainer.step([microbatch(items, worker.CPU)], worker.loss_over(60))
        (root / f"policy-{step}").write_text(
            digest({name: tensor.clone() for name, tensor in trainer.tensors()})
        )
        save_whole(store, step, trainer, {"version": step, "ledger": ledger_of(step)})
        (root / "returned" / f"ours-{step}").mkdir()
        engine = trainer._policy.engine
        engine.save_checkpoint(str(root / "deepspeed"), tag=f"step-{step}")
        (root / "returned" / f"deepspeed-{step}").mkdir()
    trainer.close()


if __name__ == "__main__":
    main()
