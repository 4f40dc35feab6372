"""The trainer on DeepSpeed: ZeRO 0 to 3, any number of ranks, micro-batches of any number and size.

The gradient of a step is the plain sum over micro-batches and ranks: DeepSpeed's mean over ranks is undone and its division by
accumulation steps switched off, so that the gradient does not depend on how a batch was cut.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from asyncrl.algo.metrics import merge
from asyncrl.config.schema import LearnerConfig, ModelConfig
from asyncrl.errors import CheckpointError
from asyncrl.trainer.base import LossFunction, LossSums, MicroBatch, StepResult
from asyncrl.trainer.collectives import Ranks, Rendezvous
from asyncrl.trainer.engine_settings import choose_device, engine_settings, join_deepspeed, warm_up, zero_stage
from asyncrl.trainer.loading import export_model, load_policy
from asyncrl.trainer.rng import load_rng, save_rng

TAG = "engine"
"""Directory of DeepSpeed's own files inside a checkpoint."""


class DeepSpeedTrainer:
    """`Trainer` on a DeepSpeed engine; one per process at a time, because the process group is global."""

    def __init__(
        self,
        model: ModelConfig,
        learner: LearnerConfig,
        *,
        temperature: float,
        rendezvous: Rendezvous | None = None,
        reference: bool = False,
    ) -> None:
        """Load the policy, and once more as the frozen reference if asked. Raises DataError, ConfigError, RunError."""
        rendezvous = rendezvous or Rendezvous()
        self._model_config, self._temperature, self._chunk = model, temperature, learner.logprob_chunk_tokens
        self.device = choose_device(learner, rendezvous.local_rank)
        self._ranks = Ranks(rendezvous, self.device)
        join_deepspeed(rendezvous.local_rank)
        self._stage = zero_stage(model, learner)
        settings = engine_settings(model, learner, self._stage)
        policy = load_policy(model, self.device, gradient_checkpointing=learner.gradient_checkpointing)
        self._engine = deepspeed.initialize(
            model=policy, config=settings, lr_scheduler=lambda optimizer: warm_up(optimizer, learner.optimizer.warmup_steps)
        )[0]
        self._reference = self._load_reference(settings) if reference else None

    @property
    def rank(self) -> int:
        """0 .. ranks - 1."""
        return self._ranks.rank

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return self._ranks.count

    def logprobs(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """See `Trainer`."""
        return self._logprobs(self._engine, microbatches)

    def reference_logprobs(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """See `Trainer`."""
        if self._reference is None:
            raise RuntimeError("DeepSpeedTrainer was built without a reference model; pass reference=True")
        return self._logprobs(self._reference, microbatches)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Trainer`."""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        positions = torch.arange(len(ids), device=self.device)
        with torch.no_grad():
            logprobs_T, _ = self._engine(ids, positions, (0, len(ids)), positions[:-1], ids[1:], 1.0, self._chunk)
        return [float(value) for value in logprobs_T]

    def step(self, microbatches: Sequence[MicroBatch], loss: LossFunction) -> StepResult:
        """See `Trainer`. A non-finite loss or gradient changes nothing but the metric `skipped_steps`."""
        lr = float(self._engine.get_lr()[0])
        if not microbatches:
            return StepResult(metrics={"skipped_steps": 1.0}, grad_norm=0.0, lr=lr)
        sums: Mapping[str, float] = {}
        for i, microbatch in enumerate(microbatches):
            self._engine.set_gradient_accumulation_boundary(i == len(microbatches) - 1)
            sums = merge([sums, self._backward(microbatch, loss)])
        grad_norm = self._apply()
        metrics = self._reduce(sums) | {"skipped_steps": float(not math.isfinite(grad_norm))}
        return StepResult(metrics=metrics, grad_norm=grad_norm, lr=lr)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `Trainer`. A tensor is valid until the next one is asked for; exhaust the iterator on every rank."""
        for name, parameter in self._engine.module.model.named_parameters():
            gather: AbstractContextManager[Any] = (
                deepspeed.zero.GatheredParameters([parameter]) if self._stage == 3 else nullcontext()
            )
            with gather:
                yield name, parameter.detach()

    def broadcast(self, value: bytes | None) -> bytes:
        """See `Trainer`."""
        return self._ranks.broadcast(value)

    def save(self, directory: Path) -> None:
        """See `Trainer`. Returns when the files of all ranks are there; making them durable is the caller's."""
        self._engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
        save_rng(directory / f"rng-{self.rank:04}.safetensors")
        state = {name: tensor.cpu().clone() for name, tensor in self.parameters() if self.rank == 0}
        if self.rank == 0:
            export_model(self._engine.module.model, state, self._model_config, directory / "hf")
            (directory / "trainer.json").write_text(json.dumps(self._layout))
        self._ranks.barrier()

    def load(self, directory: Path) -> None:
        """See `Trainer`. Unpickles DeepSpeed's files: verify them first. Raises CheckpointError for another layout."""
        found = json.loads((directory / "trainer.json").read_text())
        if found != self._layout:
            raise CheckpointError(
                f"{directory}: written by {found}, but this learner is {self._layout}; resume with the same learner.ranks, "
                f"learner.zero_stage and model.dtype, or start a new run with model.path={directory / 'hf'}"
            )
        self._engine.load_checkpoint(str(directory), tag=TAG)
        load_rng(directory / f"rng-{self.rank:04}.safetensors")

    def close(self) -> None:
        """Free the engine and leave the process group."""
        self._engine.destroy()
        deepspeed.comm.destroy_process_group()

    @property
    def _layout(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "zero_stage": self._stage, "dtype": self._model_config.dtype}

    def _load_reference(self, settings: dict[str, Any]) -> Any:
        policy = load_policy(self._model_config, self.device).requires_grad_(False)
        if self._stage < 3:
            return policy
        inference = {key: value for key, value in settings.items() if key != "optimizer"}
        return deepspeed.initialize(model=policy, config=inference)[0]

    def _logprobs(self, module: Any, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            return [self._forward(module, microbatch)[0] for microbatch in microbatches]

    def _forward(self, module: Any, microbatch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(logprobs_T, entropy_T); an empty micro-batch runs one token, because sharded ranks gather weights together."""
        empty = microbatch.input_ids_N.numel() == 0
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        ran = replace(microbatch, input_ids_N=zero, position_ids_N=zero, sequence_starts=(0, 1)) if empty else microbatch
        logprobs_T, entropy_T = module(
            ran.input_ids_N, ran.position_ids_N, ran.sequence_starts, ran.source_T, ran.target_T, self._temperature, self._chunk
        )
        return logprobs_T, entropy_T

    def _backward(self, microbatch: MicroBatch, loss: LossFunction) -> Mapping[str, float]:
        logprobs_T, entropy_T = self._forward(self._engine, microbatch)
        # Without action tokens: the sum of nothing, a zero gradient for every parameter.
        empty = microbatch.target_T.numel() == 0
        sums = LossSums(loss=logprobs_T.sum()) if empty else loss(microbatch, logprobs_T, entropy_T)
        # A non-finite loss may still have a finite gradient; as NaN it reaches the norm, which all ranks see.
        poison = 1.0 if math.isfinite(float(sums.loss.detach())) else math.nan
        self._engine.backward(sums.loss * (self.ranks * poison), scale_wrt_gas=False)
        return sums.metrics

    def _apply(self) -> float:
        """Clip and apply the gradient if it is finite, else drop it; the norm before clipping, inf or nan if dropped."""
        if self._stage > 0:
            self._engine.step()
            return float(self._engine.get_global_grad_norm())
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        grad_norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(grad_norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
        return grad_norm

    def _reduce(self, sums: Mapping[str, float]) -> dict[str, float]:
        return merge(json.loads(part) for part in self._ranks.gather(json.dumps(sums).encode()))
