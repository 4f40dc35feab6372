"""Optimizers of a DeepSpeed engine, by the `kind` of the config."""

from collections import defaultdict
from collections.abc import Sequence
from math import sqrt
from typing import Any

from torch import nn
from torch.optim import AdamW

from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.extras import from_extra

# A step of AdamW changes a matrix by about this many times the rate, in the root of the mean square.
ADAMW_RMS = 0.2


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
        factor = ADAMW_RMS * sqrt(columns)
        rates = {"lr": lr * factor, "weight_decay": weight_decay / factor, "ns_method": "standard"}
        groups.append({"params": matrices, "use_muon": True, **rates})
    groups = [group for group in groups if group["params"]]
    return MuonWithAuxAdam(groups, adam_optimizer=AdamW, adam_optimizer_kwargs={"foreach": False})
