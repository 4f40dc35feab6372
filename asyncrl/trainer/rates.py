"""The learning rate of every optimizer step, as a share of the configured rate."""

from collections.abc import Callable, Mapping
from typing import Any


def rate_share(
    schedule: str, arguments: Mapping[str, Any], *, lr: float, warmup_steps: int, total_steps: int
) -> Callable[[int], float]:
    """Return a function from an optimizer step, counted from 0, to its share of the rate `lr`.

    It is a schedule of transformers without the first step of a warm-up, whose rate is 0. What it falls to is
    the share of every step after the run. Raises ValueError or TypeError for wrong `arguments`.
    """
    # Both take seconds to import, and commands read the parameters of this package's functions.
    import torch
    from transformers import get_scheduler

    left_out = min(warmup_steps, 1)
    share = get_scheduler(
        "constant_with_warmup" if schedule == "constant" else schedule,
        torch.optim.SGD([torch.zeros(1)], lr=lr),
        num_warmup_steps=warmup_steps,
        num_training_steps=max(total_steps, warmup_steps, 1) + left_out,
        scheduler_specific_kwargs=dict(arguments),
    ).lr_lambdas[0]
    return lambda step: float(share(min(step, total_steps) + left_out))
