"""One model with its DeepSpeed engine: forward passes, and optimizer steps on a sum of gradients.

The gradient of a step is the plain sum over micro-batches and ranks, so it does not depend on how a batch was
cut. DeepSpeed's mean over ranks is undone, and its division by accumulation steps is switched off. Ranks of
one share of the batch compute the same loss, but each of them only the gradient of its own tokens.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from asyncrl.algo.metrics import merge
from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.errors import CheckpointError, ConfigError, from_extra
from asyncrl.files import plain_path
from asyncrl.hosting.progress import beat
from asyncrl.trainer.base import LossSums, MicroBatch, StepResult
from asyncrl.trainer.collectives import Ranks, Writes
from asyncrl.trainer.deepspeed.engine_settings import engine_settings, size_of
from asyncrl.trainer.rates import rate_share

# Numbers of sharded parameters that are whole on every rank at the same time: about a layer of 8B parameters.
# A gather for each parameter would spend its time on starting collectives.
GATHERED_NUMBERS = 1 << 28
# A step of AdamW changes a matrix by about this many times the rate, in the root of the mean square.
ADAMW_RMS = 0.2
# What the config says of a group of parameters.
NUMBERS = ("initial_lr", "betas", "eps", "weight_decay")


class TrainedModel:
    """A module under ZeRO stage 0 to 3. Every rank calls every method, in the same order."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        dtype: str,
        stage: int,
        offload: bool,
        ranks: Ranks,
    ) -> None:
        """`total_steps` is the number of optimizer steps of the whole run: its rate may fall until then."""
        self._ranks, self._stage = ranks, stage
        settings = engine_settings(module, dtype=dtype, stage=stage, offload=offload) | {
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": optimizer.max_grad_norm,
            # DeepSpeed did not make the optimizer, nor need it be the one that a compiler builds for CPUs.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if stage == 1 and dtype == "bfloat16":
            # DeepSpeed would round the float32 sums of all micro-batches to bfloat16, even on one rank.
            # Higher stages reduce the gradients of each micro-batch, which are in bfloat16 already.
            settings["communication_data_type"] = "fp32"
        share, trained = rate_share(**optimizer.rates(total_steps)), _trained(module)
        if stage == 3 and len(kinds := {str(each.dtype) for each in trained}) > 1:
            found = f"learner.zero_stage is 3, but trained parameters are {' and '.join(sorted(kinds))}"
            raise ConfigError(f"{found}, and DeepSpeed shards those of one type only; set it to 2")
        self.engine: Any = deepspeed.initialize(
            model=module,
            model_parameters=trained,
            optimizer=make_optimizer(optimizer, module, trained),
            config=settings,
            lr_scheduler=lambda made: LambdaLR(made, share),
        )[0]
        # Those of the config, for a state that was saved with others.
        self._groups = [
            {name: value for name, value in group.items() if name in NUMBERS}
            for group in self.engine.optimizer.param_groups
        ]
        self._lr, self._share = optimizer.lr, share

    def step(
        self,
        microbatches: Sequence[MicroBatch],
        outputs: Callable[[MicroBatch], Tensor],
        loss: Callable[[MicroBatch, Tensor], LossSums],
    ) -> StepResult:
        """See `Trainer.step`; `outputs` runs the engine on one micro-batch, `loss` gets its result."""
        lr = self._lr * self._share(self.engine.lr_scheduler.last_epoch)
        if not microbatches:
            return StepResult(metrics={"skipped_steps": 1.0}, grad_norm=0.0, lr=lr)
        sums = []
        for i, microbatch in enumerate(microbatches):
            beat()
            self.engine.set_gradient_accumulation_boundary(i == len(microbatches) - 1)
            sums.append(self._backward(microbatch, outputs(microbatch), loss))
        with torch.compiler.set_stance("force_eager"):  # DeepSpeed's Muon would want a compiler
            grad_norm = self._apply()
        reduced = merge(
            json.loads(part) for part in self._ranks.gather_shares(json.dumps(merge(sums)).encode())
        )
        metrics = reduced | {"skipped_steps": float(not math.isfinite(grad_norm))}
        return StepResult(metrics=metrics, grad_norm=grad_norm, lr=lr)

    def save(self, directory: Path, tag: str, writes: Writes) -> None:
        """Write parameters, optimizer and scheduler into `directory/tag`; `writes` records a failure."""
        files = self.engine.checkpoint_engine
        write = type(files).save
        named = self.engine.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}

        def save(state_dict: dict[str, Any], path: str) -> None:
            # DeepSpeed leaves out a frozen parameter under one of its names; tied ones have several.
            for name in frozen.intersection(state_dict.get("module") or ()):
                del state_dict["module"][name]
            writes.attempt(lambda: write(files, state_dict, path))

        files.save = save
        self.engine.save_checkpoint(
            str(directory), tag=tag, save_latest=False, exclude_frozen_parameters=True
        )

    def load(self, directory: Path, tag: str, pace: float) -> None:
        """The inverse of `save`, but with the config's optimizer numbers. Raises CheckpointError."""
        module = self.engine.module
        are_all = len(_trained(module)) == sum(1 for _ in module.parameters())
        path, _ = self.engine.load_checkpoint(plain_path(str(directory)), tag, load_module_strict=are_all)
        if path is None:
            found = f"{directory / tag}: DeepSpeed finds no state here"
            raise CheckpointError(f"{found}; resume from another checkpoint")
        schedule = self.engine.lr_scheduler
        schedule.last_epoch = round(schedule.last_epoch * pace)  # a batch has `pace` times the steps it had
        schedule.base_lrs = [numbers["initial_lr"] for numbers in self._groups]
        for group, numbers in zip(self.engine.optimizer.param_groups, self._groups, strict=True):
            group.update(numbers, lr=numbers["initial_lr"] * self._share(schedule.last_epoch))
        # DeepSpeed's optimizers, and not those of torch, clip by what they have loaded.
        self.engine.optimizer.clip_grad = self.engine.gradient_clipping()

    def close(self) -> None:
        """Free the engine."""
        self.engine.destroy()

    def _backward(
        self, microbatch: MicroBatch, outputs: Tensor, loss: Callable[[MicroBatch, Tensor], LossSums]
    ) -> Mapping[str, float | Tensor]:
        # Without action tokens the sum is empty, and every parameter gets a zero gradient.
        empty = microbatch.target_T.numel() == 0
        sums = LossSums(loss=outputs.sum()) if empty else loss(microbatch, outputs)
        # A non-finite loss may have a finite gradient. As NaN it reaches the norm, which all ranks share, and
        # the host need not wait for the loss.
        poison = torch.where(sums.loss.detach().isfinite(), 1.0, math.nan)
        self.engine.backward(sums.loss * (self._ranks.count * poison), scale_wrt_gas=False)
        return sums.metrics

    def _apply(self) -> float:
        """Clip and apply the gradient, or drop it if it is not finite; returns its norm before clipping."""
        if self._stage > 0:
            self.engine.step()
            return float(self.engine.get_global_grad_norm())
        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        grad_norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(grad_norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
        return grad_norm


def whole_parameters(
    parameters: Iterable[tuple[str, Any]], *, write: bool = False
) -> Iterator[tuple[str, Any]]:
    """Each of some parameters, gathered if it is sharded, and valid until the next one is requested.

    Every rank must exhaust the iterator. With `write`, rank 0's changes of a parameter go to all shards.
    """
    for members in gathers(parameters):
        sharded = [parameter for _, parameter in members if hasattr(parameter, "ds_tensor")]
        gathered: AbstractContextManager[None] = nullcontext()
        if sharded:
            gathered = deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if write else None)
        with gathered:
            for member in members:
                beat()
                yield member


def _trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen; those of a base below an adapter are."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def gathers(
    parameters: Iterable[tuple[str, Any]], limit: int = GATHERED_NUMBERS
) -> Iterator[list[tuple[str, Any]]]:
    """Cut parameters into runs of at most `limit` numbers, or of one parameter that is larger."""
    members: list[tuple[str, nn.Parameter]] = []
    numbers = 0
    for name, parameter in parameters:
        size = size_of(parameter)
        if members and numbers + size > limit:
            yield members
            members, numbers = [], 0
        members.append((name, parameter))
        numbers += size
    if members:
        yield members


def make_optimizer(config: OptimizerConfig, module: nn.Module, parameters: Sequence[nn.Parameter]) -> Any:
    """Return a function that makes the optimizer of `parameters`, which DeepSpeed calls with them."""
    numbers = config.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    if config.kind == "muon":
        return lambda _: _muon(module, parameters, **numbers)
    if config.kind == "adamw_8bit":
        with from_extra("bitsandbytes"):
            from bitsandbytes.optim import AdamW8bit
        return lambda given: AdamW8bit(given, **numbers)
    if config.kind == "adafactor":
        from transformers import Adafactor

        fixed = {"scale_parameter": False, "relative_step": False}
        return lambda given: Adafactor(given, lr=config.lr, weight_decay=config.weight_decay, **fixed)
    # "fused" has no temporaries of the size of the moments.
    return lambda given: AdamW(given, fused=True, **numbers)


def _muon(
    module: nn.Module, parameters: Sequence[nn.Parameter], *, lr: float, weight_decay: float, **adam: Any
) -> Any:
    """Muon for the matrices of layers, AdamW for the rest: embeddings, heads, norms and biases.

    DeepSpeed's multiplies the rate of a matrix by sqrt(max(1, rows / columns)). With 0.2 sqrt(columns) before
    it, that is 0.2 sqrt(max(rows, columns)), as `adjust_lr_fn="match_rms_adamw"` of `torch.optim.Muon`.
    """
    # Its import takes a second.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    tables |= {id(each) for name, each in module.named_parameters() if "head" in name}
    by_columns: dict[int, list[nn.Parameter]] = defaultdict(list)
    rest: list[nn.Parameter] = []
    for each in parameters:
        is_matrix = each.ndim == 2 and id(each) not in tables
        (by_columns[each.shape[1]] if is_matrix else rest).append(each)
    groups: list[dict[str, Any]] = [
        {"params": rest, "use_muon": False, "lr": lr, "weight_decay": weight_decay, **adam}
    ]
    for columns, matrices in by_columns.items():
        factor = ADAMW_RMS * math.sqrt(columns)
        rates = {"lr": lr * factor, "weight_decay": weight_decay / factor, "ns_method": "standard"}
        groups.append({"params": matrices, "use_muon": True, **rates})
    groups = [group for group in groups if group["params"]]
    return MuonWithAuxAdam(groups, adam_optimizer=AdamW, adam_optimizer_kwargs={"foreach": False})
