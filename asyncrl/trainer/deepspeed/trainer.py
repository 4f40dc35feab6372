"""The trainer on DeepSpeed: ZeRO stages 0 to 3, any number of ranks, micro-batches of any number and size."""

import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from asyncrl import lora
from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.hosting.machine import read_model, sees_images
from asyncrl.hosting.memory_use import Rank, zero_stage
from asyncrl.hosting.progress import beat
from asyncrl.trainer.base import CriticLossFunction, LossFunction, MicroBatch, StepResult, Usage
from asyncrl.trainer.collectives import Ranks, Rendezvous, Writes
from asyncrl.trainer.deepspeed.engine_settings import join_deepspeed, require_device, shard_settings
from asyncrl.trainer.deepspeed.reference import Reference, StartAdapter
from asyncrl.trainer.deepspeed.trained_model import TrainedModel, whole_parameters
from asyncrl.trainer.kept import counted
from asyncrl.trainer.loading import export_model, load_model
from asyncrl.trainer.meter import Meter
from asyncrl.trainer.policy import PolicyModule, ValueModule, packed_logprobs, plain_logprobs, run
from asyncrl.trainer.sequence_parallel import SequenceRanks
from asyncrl.weights.base import TensorSpec

# Directories inside a checkpoint. A frozen reference has none, because it is loaded again from its source.
POLICY, CRITIC, REFERENCE = "engine", "critic", "reference"


class DeepSpeedTrainer:
    """`base.Trainer` on DeepSpeed engines; one at a time, because the process group is global."""

    def __init__(
        self,
        model: ModelConfig,
        learner: LearnerConfig,
        *,
        temperature: float,
        optimizer_steps: int,
        device: torch.device,
        rendezvous: Rendezvous = Rendezvous(),  # noqa: B008 - it is frozen
        reference: ModelConfig | None = None,
        critic: CriticConfig | None = None,
        slots: int = 0,
        as_stored: bool = False,
    ) -> None:
        """Load the policy, the reference's model, and the policy's again for a critic.

        `temperature` divides the logits of a step; `optimizer_steps` is their number per batch. All ranks
        meet at `rendezvous`; by default there is one. `slots` is the number of published versions that rank 0
        will have on its GPU. With `as_stored`, weights are published as a checkpoint would hold them.

        Raises DataError, RunError, and ConfigError, also if DeepSpeed runs on another kind of device.
        """
        require_device(device)
        self._optimizer_steps = optimizer_steps
        self._device, self._temperature, self._chunk = device, temperature, learner.logprob_chunk_tokens
        together = learner.sequence_parallel
        self._ranks = Ranks(rendezvous, device, per_share=together)
        sequence = SequenceRanks(together) if together > 1 else None
        join_deepspeed(rendezvous.local_rank)
        stage = zero_stage(learner.zero_stage, model.dtype)
        load: Callable[..., Any] = partial(load_model, device=device, sequence_parallel=together)
        if stage == 3:
            load = partial(load_in_shards, device=device, ranks=self._ranks, sequence_parallel=together)
        load_trained = partial(load, model, gradient_checkpointing=learner.gradient_checkpointing)
        shared: dict[str, Any] = {"dtype": model.dtype, "stage": stage}
        engine = {**shared, "offload": learner.offload_optimizer, "ranks": self._ranks}
        self._lora, self._target = model.lora, model.update_target
        self._as_stored = as_stored and self._target == "weights"
        policy = load_trained()
        if self._lora is not None:
            lora.inject(policy, self._lora)
        idle = critic.warmup_steps if critic is not None else 0
        self._policy = TrainedModel(
            PolicyModule(policy, sequence, replays=model.router_replay),
            learner.optimizer,
            total_steps=(learner.steps - idle) * optimizer_steps,
            **engine,
        )
        # With its adapter as it began, or without the one that began as nothing, the policy is the reference.
        copied = reference if reference is not None and reference.lora is None else None
        self._reference = Reference(PolicyModule(load(copied), sequence), **shared) if copied else None
        adapter = [parameter for _, parameter in lora.adapter_tensors(policy)]
        self._start = StartAdapter(adapter) if self._lora is not None and self._lora.start else None
        self._critic: TrainedModel | None = None
        if critic is not None:
            # A value head takes the place of the output layer.
            values = ValueModule(load_trained().base_model, sequence)
            total_steps = learner.steps * optimizer_steps
            self._critic = TrainedModel(values, critic.optimizer, total_steps=total_steps, **engine)
        self._reference_shape = read_model(copied)[1] if copied else None
        shape = counted(read_model(model)[1], policy.config, model, learner.gradient_checkpointing)
        planned_bytes = Rank(shape, model, learner).torch_bytes(
            self.rank,
            reference=self._reference_shape,
            critic=critic.optimizer if critic else None,
            slots=slots,
        )
        self._meter = Meter(
            shape, device=device, dtype=model.dtype, planned_bytes=planned_bytes, per_share=together
        )
        self._export = partial(export_model, policy, model)
        # A learner with another layout cannot load the checkpoints of this one.
        self._layout: dict[str, Any] = {
            "ranks": self._ranks.count,
            "zero_stage": stage,
            "offload_optimizer": learner.offload_optimizer,
            "optimizers": [learner.optimizer.kind, *([critic.optimizer.kind] if critic else [])],
            "dtype": model.dtype,
            "critic": critic is not None,
            "lora": model.lora and model.lora.model_dump(mode="json", include={"rank", "alpha", "targets"}),
        }

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def share(self) -> int:
        return self.rank // self._ranks.per_share

    @property
    def shares(self) -> int:
        return self._ranks.count // self._ranks.per_share

    @property
    def device(self) -> torch.device:
        return self._device

    def measure(
        self, microbatches: Sequence[MicroBatch], columns: Collection[str]
    ) -> list[dict[str, Tensor]]:
        """Run each model once per micro-batch, for any number of columns."""
        with torch.no_grad():
            return [self._measure(microbatch, columns) for microbatch in microbatches]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        with torch.no_grad():
            logprobs = packed_logprobs(self._policy.engine, sequences, self.device, chunk=self._chunk)
        return [each.tolist() for each in logprobs]  # one wait for the device for each, not for each number

    def score_plainly(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        model = self._policy.engine.module.model
        with torch.no_grad():
            return [plain_logprobs(model, ids, self.device).tolist() for ids in sequences]

    def step(
        self, microbatches: Sequence[MicroBatch], loss: LossFunction, *, entropy_gradient: bool = True
    ) -> StepResult:
        self._meter.step(microbatches)
        return self._policy.step(
            microbatches,
            lambda microbatch: self._token_columns(
                self._policy.engine,
                microbatch,
                entropy_gradient=entropy_gradient,
                experts_NLK=microbatch.experts_NLK,
            ),
            lambda microbatch, columns_RT: loss(microbatch, columns_RT[0], columns_RT[1]),
        )

    def critic_step(self, microbatches: Sequence[MicroBatch], loss: CriticLossFunction) -> StepResult:
        assert self._critic is not None
        critic = self._critic
        self._meter.step(microbatches, logits=False)
        return critic.step(microbatches, lambda microbatch: run(critic.engine, microbatch), loss)

    def update_reference(self, decay: float) -> None:
        assert self._reference is not None
        self._reference.update(self._policy.engine.module, decay)

    def usage(self) -> list[Usage]:
        own = json.dumps(asdict(self._meter.read())).encode()
        return [Usage(**json.loads(one)) for one in self._ranks.gather(own)]

    def specs(self) -> list[TensorSpec]:
        """Describe what is published of the policy, without gathering it."""
        empty = (
            (name, torch.empty(getattr(each, "ds_shape", each.shape), dtype=each.dtype, device="meta"))
            for name, each in self._published()
        )
        return [
            TensorSpec(name=name, dtype=str(each.dtype).removeprefix("torch."), shape=tuple(each.shape))
            for name, each in self._stored(empty)
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        whole: Iterable[tuple[str, Tensor]] = whole_parameters(self._published())
        if self._lora is not None and self._target == "weights":
            adapter = whole_parameters(lora.adapter_tensors(self._policy.engine.module.model))
            kept = {name: each.detach().clone() for name, each in adapter}
            whole = lora.merged(whole, kept, self._lora)
        return self._stored((name, each.detach()) for name, each in whole)

    def export(self) -> Callable[[Path], None]:
        model = self._policy.engine.module.model
        exported = whole_parameters(
            model.named_parameters() if self._lora is None else lora.adapter_tensors(model)
        )
        state = {name: each.detach().to("cpu", copy=True) for name, each in exported if self.rank == 0}
        return partial(self._export, state)

    def broadcast(self, value: bytes | None) -> bytes:
        return self._ranks.broadcast(value)

    def gather(self, value: bytes) -> list[bytes]:
        return self._ranks.gather_shares(value)

    def save(self, directory: Path) -> None:
        writes = Writes()
        self._policy.save(directory, POLICY, writes)
        if self._critic is not None:
            self._critic.save(directory, CRITIC, writes)
        if self._reference is not None and self._reference.moved:
            self._reference.save(directory / REFERENCE, self.rank, writes)
        writes.attempt(lambda: save_rng(directory / f"rng-{self.rank:04}.safetensors"))
        if self.rank == 0:
            layout = self._layout | {"moved_reference": self._reference is not None and self._reference.moved}
            layout |= {"optimizer_steps": self._optimizer_steps}
            writes.attempt(lambda: (directory / "trainer.json").write_text(json.dumps(layout)))
        writes.conclude(directory, self._ranks)

    def load(self, directory: Path) -> None:
        """Unpickle DeepSpeed's files. Raises ConfigError for another layout."""
        found = json.loads((directory / "trainer.json").read_text())
        if found != (layout := found | self._layout):
            raise ConfigError(
                f"{directory}: written by {found}, but this learner is {layout}; resume with the same "
                "learner.ranks, learner.zero_stage, learner.offload_optimizer, learner.optimizer.kind, "
                "model.dtype, model.lora and algorithm, or start a new run with model.path=DIRECTORY of "
                "`asyncrl export --merge`"
            )
        if found.get("moved_reference") and self._reference is None:
            raise ConfigError(
                f"{directory}: its reference has moved (algorithm.kl.reference_decay), and without a KL it "
                "would be lost; keep algorithm.kl.coefficient above 0, such as 1e-9"
            )
        pace = self._optimizer_steps / found.get("optimizer_steps", self._optimizer_steps)
        self._policy.load(directory, POLICY, pace)
        if self._critic is not None:
            self._critic.load(directory, CRITIC, pace)
        if self._reference is not None and found.get("moved_reference"):
            self._reference.load(directory / REFERENCE)
        load_rng(directory / f"rng-{self.rank:04}.safetensors")

    def close(self) -> None:
        """Free the engines and leave the process group."""
        for model in (self._policy, self._critic, self._reference):
            if model is not None:
                model.close()
        deepspeed.comm.destroy_process_group()

    def _measure(self, microbatch: MicroBatch, columns: Collection[str]) -> dict[str, Tensor]:
        beat()
        measured: dict[str, Tensor] = {}
        if "logprobs_T" in columns or "sum_squared_probs_T" in columns:
            squares = "sum_squared_probs_T" in columns
            self._meter.forward(microbatch)
            columns_RT = self._token_columns(
                self._policy.engine, microbatch, with_squares=squares, experts_NLK=microbatch.experts_NLK
            )
            measured |= zip(("logprobs_T", "entropy_T", "sum_squared_probs_T"), columns_RT, strict=False)
        if "reference_logprobs_T" in columns:
            self._meter.forward(microbatch, shape=self._reference_shape)
            measured["reference_logprobs_T"] = self._reference_logprobs_T(microbatch)
        if "values_T" in columns:
            assert self._critic is not None
            self._meter.forward(microbatch, logits=False)
            measured["values_T"] = run(self._critic.engine, microbatch)
        return {name: measured[name] for name in columns}

    def _reference_logprobs_T(self, microbatch: MicroBatch) -> Tensor:
        if self._reference is not None:
            return self._token_columns(self._reference.module, microbatch)[0]
        assert self._lora is not None
        without = lora.adapters_off(self._policy.engine.module)
        with self._start.restored() if self._start else without:
            return self._token_columns(self._policy.engine, microbatch)[0]

    def _published(self) -> Iterator[tuple[str, Tensor]]:
        """What engines get, in shards, under the names of the model; the adapter is not merged yet."""
        model = self._policy.engine.module.model
        found = lora.adapter_tensors(model) if self._target == "adapter" else lora.base_parameters(model)
        if self._lora is None and (sees_images(model.config) or not self._as_stored):
            found = ((name, each) for name, each in found if each.requires_grad)
        held = model.state_dict(keep_vars=True).items() if self._as_stored else ()
        return chain(found, ((name, each) for name, each in held if not isinstance(each, nn.Parameter)))

    def _stored(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename and cut them as in a checkpoint, which has each expert apart; one is whole at a time."""
        if not self._as_stored:
            return iter(tensors)
        model = self._policy.engine.module.model
        return (one for each in tensors for one in revert_weight_conversion(model, dict([each])).items())

    def _token_columns(self, policy: Any, microbatch: MicroBatch, **how: Any) -> Tensor:
        """Run a policy; without `experts_NLK`, such as a reference, it chooses its own experts."""
        how |= {"target_T": microbatch.target_T, "kept_TK": microbatch.kept_TK}
        return run(policy, microbatch, temperature=self._temperature, chunk=self._chunk, **how)


def save_rng(path: Path) -> None:
    """Write the state of torch's, numpy's and Python's random generators: plain tensors, and no pickle."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    # The layout of CPython's and numpy's global generators.
    assert (version, numpy_state["bit_generator"]) == (3, "MT19937")
    keys, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    state = {
        "torch": torch.get_rng_state(),
        "python_words": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy_keys": torch.tensor(keys.astype(np.int64)),
        "numpy_position": torch.tensor([position, numpy_state["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    save_file(state, path)


def load_rng(path: Path) -> None:
    """The inverse of `save_rng`."""
    state = load_file(path)
    torch.set_rng_state(state["torch"])
    gauss = next(iter(state["python_gauss"].tolist()), None)
    random.setstate((3, tuple(state["python_words"].tolist()), gauss))
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(state["numpy_gauss"][0])))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class _Shards:
    """What transformers asks of its own HfDeepSpeedConfig, which needs accelerate."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


def load_in_shards(config: ModelConfig, device: torch.device, ranks: Ranks, **how: Any) -> Any:
    """Load a model as `load_model` does, but with a part of every parameter on each rank.

    Transformers shares out each module's parameters for ZeRO 3, as soon as the module is constructed. Rank 0
    then reads the checkpoint, one module at a time. DeepSpeed would also convert what constructors compute to
    `model.dtype`, such as the float32 frequencies of rotary embeddings; `tensor_overrides` prevents this.
    """
    shards, init = _Shards(shard_settings(config.dtype)), deepspeed.zero.Init
    set_hf_deepspeed_config(shards)  # transformers keeps a weak reference
    deepspeed.zero.Init = partial(init, tensor_overrides=())
    try:
        return load_model(config, device, sharers=ranks, **how)
    finally:
        deepspeed.zero.Init = init
        unset_hf_deepspeed_config()
