"""The reference model: frozen, a moving average of the policy, or a teacher.

With an adapter and without a teacher it is the policy as it began.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncrl.trainer.collectives import Writes
from asyncrl.trainer.deepspeed.engine_settings import engine_settings
from asyncrl.trainer.deepspeed.trained_model import whole_parameters
from asyncrl.trainer.policy import PolicyModule

FILE = "model.safetensors"


class Reference:
    """A copy of the policy's model, or a teacher, sharded alike. Every rank calls every method, in order."""

    def __init__(self, policy: PolicyModule, *, dtype: str, stage: int) -> None:
        """`policy` must be a separate copy of the model, or another one; it is frozen."""
        self._policy = policy.requires_grad_(False)
        # Below stage 3 every rank has all weights, and no engine is needed.
        settings = engine_settings(policy, dtype=dtype, stage=stage)
        self.module: Any = deepspeed.initialize(model=policy, config=settings)[0] if stage == 3 else policy
        self._updates = 0

    @property
    def moved(self) -> bool:
        """Whether the weights have changed since they were loaded."""
        return self._updates > 0

    def update(self, policy: PolicyModule, decay: float) -> None:
        """reference = decay * reference + (1 - decay) * policy, in place and only on this rank's shards."""
        self._updates += 1
        # The noise is the same on every rank and after a resume, so that replicas stay equal.
        noise = torch.Generator(next(policy.parameters()).device).manual_seed(self._updates)
        for mine, theirs in zip(self._policy.parameters(), policy.parameters(), strict=True):
            mix(_shard(mine), _shard(theirs), decay, noise)
            _drop_gathered(mine)

    def save(self, directory: Path, rank: int, writes: Writes) -> None:
        """Write the weights into `directory`, on rank 0; `writes` records a failure."""
        whole = whole_parameters(self._policy.model.named_parameters())
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in whole if rank == 0}
        if rank == 0:
            writes.attempt(directory.mkdir)
            metadata = {"updates": str(self._updates)}
            writes.attempt(lambda: save_file(state, directory / FILE, metadata=metadata))

    def load(self, directory: Path) -> None:
        """The inverse of `save`."""
        with safe_open(directory / FILE, framework="pt") as file:
            self._updates = int(file.metadata()["updates"])
            for name, tensor in whole_parameters(self._policy.model.named_parameters(), write=True):
                tensor.data.copy_(file.get_tensor(name))

    def close(self) -> None:
        """Free the engine of a sharded reference."""
        if self.module is not self._policy:
            self.module.destroy()


class StartAdapter:
    """The values with which an adapter began, on this rank's shards."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._values = [_shard(parameter).clone() for parameter in parameters]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the adapter these values for the body."""
        own = [_shard(parameter).clone() for parameter in self._parameters]
        self._put(self._values)
        try:
            yield
        finally:
            self._put(own)

    def _put(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            _shard(parameter).copy_(value)
            _drop_gathered(parameter)


def _drop_gathered(parameter: Any) -> None:
    """Drop the gathered copy of a small parameter of ZeRO 3, which would be out of date."""
    if hasattr(parameter, "partition"):
        parameter.partition()


def _shard(parameter: Any) -> Tensor:
    """Return this rank's part of the parameter; flat if it is sharded."""
    shard: Tensor = getattr(parameter, "ds_tensor", parameter).data
    return shard


def mix(mine: Tensor, theirs: Tensor, decay: float, noise: torch.Generator) -> None:
    """mine = decay * mine + (1 - decay) * theirs, in place.

    Rounded to the nearest bfloat16, a change below 0.4 % would vanish in every update. So bfloat16 is rounded
    up or down at random, and the mean is exact. bfloat16 is the upper half of a float32: a random number
    added to the lower half carries into the upper half with the right probability.
    """
    if mine.dtype != torch.bfloat16:
        mine.lerp_(theirs.to(mine.dtype), 1 - decay)
        return
    mixed = torch.lerp(mine.float(), theirs.float(), 1 - decay)
    bits = mixed.view(torch.int32)
    bits += torch.randint(1 << 16, bits.shape, generator=noise, dtype=torch.int32, device=bits.device)
    bits &= -(1 << 16)
    mine.copy_(mixed)
