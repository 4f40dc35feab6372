"""The learning rate of every optimizer step, as a share of the configured rate."""

import math


def rate_share(
    step: int, *, schedule: str, warmup_steps: int, total_steps: int, final_share: float = 0.0
) -> float:
    """Return the share of the learning rate in optimizer step `step`, counted from 0.

    With W = max(1, warmup_steps) and N = total_steps: (step + 1) / W in the first W steps, so that no step
    has the rate 0. After them the share falls from 1 to `final_share` F, along p = (step + 1 - W) / (N + 1 -
    W), which would be 1 in step N, the first after the run:

        constant  1
        linear    F + (1 - F) (1 - p)
        cosine    F + (1 - F) (1 + cos(pi p)) / 2
    """
    rising = max(1, warmup_steps)
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step + 1 - rising) / max(1, total_steps + 1 - rising))
    left = 1.0 - progress if schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return final_share + (1.0 - final_share) * left
