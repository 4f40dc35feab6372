"""Time of every estimator, loss, correction, aggregation and KL beside one elementwise exp over the same
tokens.

    python -m bench.algo [--sequences 512] [--length 4096] [--repeats 3] [--out bench/results/algo.json]

One thread, float32. Losses and KL are timed with their backward pass. The ratio to one exp pass is what
carries over to other machines.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asyncrl import __version__
from asyncrl.algo.aggregation import Counts
from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.metrics import policy_metrics
from asyncrl.algo.tokens import TokenBatch
from asyncrl.config import registry

REQUIRED: dict[str, dict[str, Any]] = {
    "dro": {"beta": 1.0},
    "reject": {"high": 2.0},
    "seq-mean-token-sum-norm": {"scale": 4096.0},
}
GROUP_SIZE = 8


def make_inputs(sequences: int, length: int) -> tuple[TokenBatch, torch.Tensor, torch.Tensor, GroupRewards]:
    """Batch, current log-probabilities, entropies, rewards."""
    torch.manual_seed(0)
    tokens = sequences * length
    sequence_T = torch.arange(sequences).repeat_interleave(length)
    behaviour_T = -torch.rand(tokens) * 3
    proximal_T = behaviour_T + 0.1 * torch.randn(tokens)
    batch = TokenBatch(
        sequence_T=sequence_T,
        num_sequences=sequences,
        behaviour_logprobs_T=behaviour_T,
        proximal_logprobs_T=proximal_T,
        reference_logprobs_T=behaviour_T,
        advantages_T=torch.randn(sequences)[sequence_T],
        weights_T=torch.rand(tokens),
        lag_T=torch.randint(0, 4, (tokens,)),
    )
    rewards = GroupRewards(
        rewards_S=torch.rand(sequences),
        group_S=torch.arange(sequences) // GROUP_SIZE,
        num_groups=-(-sequences // GROUP_SIZE),
        lengths_S=torch.full((sequences,), length),
        sequence_T=sequence_T,
        parts={"a": torch.rand(sequences), "b": torch.rand(sequences)},
        values_T=torch.rand(tokens),
        greedy_rewards_group=torch.rand(-(-sequences // GROUP_SIZE)),
        logprobs_T=behaviour_T,
        reference_logprobs_T=proximal_T,
        # Every sequence has two turns.
        episode_K=torch.arange(sequences).repeat_interleave(2),
        turn_T=torch.arange(2 * sequences).repeat_interleave(length // 2),
        turn_rewards_K=torch.rand(2 * sequences),
        turn_states_K=torch.randint(1, 9, (2 * sequences,)),
        sum_squared_probs_T=torch.rand(tokens),
    )
    return batch, proximal_T + 0.1 * torch.randn(tokens), torch.rand(tokens), rewards


def median_s(function: Callable[[], Any], repeats: int) -> float:
    """Median processor time after one warm-up call: one thread, so a busy machine does not count."""
    function()
    times = []
    for _ in range(repeats):
        started_s = time.process_time()
        function()
        times.append(time.process_time() - started_s)
    return statistics.median(times)


def workloads(sequences: int, length: int) -> dict[str, Callable[[], Any]]:
    """Name -> one call."""
    batch, current_T, entropy_T, rewards = make_inputs(sequences, length)
    counts = Counts.of(batch)
    found: dict[str, Callable[[], Any]] = {"exp": current_T.exp}

    def backward(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        loss(current_T.detach().requires_grad_()).sum().backward()

    for kind in ("advantage", "correction", "policy_loss", "kl", "aggregation"):
        for name in registry.names(kind):
            function = registry.resolve(kind, name, REQUIRED.get(name, {}))
            calls: dict[str, Callable[[], Any]] = {
                "advantage": lambda f=function: f(rewards),
                "correction": lambda f=function: f(batch),
                "policy_loss": lambda f=function: backward(lambda logprobs_T: f(batch, logprobs_T).losses_T),
                "kl": lambda f=function: backward(
                    lambda logprobs_T: f(logprobs_T, batch.reference_logprobs_T)
                ),
                "aggregation": lambda f=function: backward(lambda losses_T: f(losses_T, batch, counts)),
            }
            found[f"{kind}/{name}"] = calls[kind]
    found["policy_loss/ppo_clip top_entropy"] = lambda: backward(
        lambda logprobs_T: (
            registry.resolve("policy_loss", "ppo_clip", {"top_entropy": 0.2})(
                batch, logprobs_T, entropy_T=entropy_T
            ).losses_T
        )
    )
    found["metrics/policy_metrics"] = lambda: policy_metrics(batch, current_T, entropy_T)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/results/algo.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds = {
        name: median_s(call, options.repeats)
        for name, call in workloads(options.sequences, options.length).items()
    }
    workload = f"{options.sequences} sequences x {options.length} tokens, float32"
    report = {
        "workload": f"{workload}, one thread, median processor time of {options.repeats}",
        "hardware": {
            "machine": platform.machine(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": {"asyncrl": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "results": {
            name: {"ms": round(1e3 * value, 2), "exp_passes": round(value / seconds["exp"], 1)}
            for name, value in seconds.items()
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
