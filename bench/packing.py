"""How busy ranks are: bins in whole rounds of the ranks, against as few bins as possible, on the same
lengths.

Utilisation is tokens / (ranks x the largest bin of each round, added up): ranks meet after every micro-batch,
so each round takes as long as its largest bin. Log-normal lengths (sigma 0.6), cut off at a micro-batch's
budget; mean of the draws.

    python -m bench.packing [--draws 30] [--out bench/results/packing.json]
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np

from asyncrl.batch.packing import pack, share_out
from bench.environment import describe

SIGMA = 0.6
CASES = [
    # (ranks, budget, sequences, mean tokens)
    (4, 16_384, 32, 800),
    (8, 16_384, 64, 800),
    (8, 16_384, 64, 2_000),
    (8, 8_192, 256, 300),
    (4, 16_384, 64, 2_000),
    (8, 16_384, 512, 2_000),
    (4, 16_384, 40, 100),
]

Packed = list[list[int]]


def lengths_of(rng: np.random.Generator, sequences: int, mean: int, budget: int) -> list[int]:
    drawn = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, sequences)
    return [int(length) for length in np.clip(drawn, 1, budget)]


def utilisation(lengths: list[int], bins: Packed, ranks: int) -> float:
    shares = share_out(bins, ranks, lengths)
    loads = [[sum(lengths[i] for i in members) for members in share] for share in shares]
    return sum(lengths) / (ranks * sum(max(turn) for turn in zip(*loads, strict=True)))


def measure(
    case: tuple[int, int, int, int], draws: int, method: Callable[[list[int], int, int], Packed]
) -> float:
    ranks, budget, sequences, mean = case
    drawn = [lengths_of(np.random.default_rng(seed), sequences, mean, budget) for seed in range(draws)]
    return fmean(utilisation(lengths, method(lengths, budget, ranks), ranks) for lengths in drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [
        {
            **dict(zip(("ranks", "budget_tokens", "sequences", "mean_tokens"), case, strict=True)),
            "fewest_bins": round(
                measure(case, options.draws, lambda lengths, budget, ranks: pack(lengths, budget)), 3
            ),
            "whole_rounds": round(measure(case, options.draws, pack), 3),
        }
        for case in CASES
    ]
    result = {**describe("asyncrl", "numpy"), "draws": options.draws, "sigma": SIGMA, "rows": rows}
    print("ranks  budget  sequences x mean  fewest bins  whole rounds")
    for row in rows:
        print(
            f"{row['ranks']:>5}  {row['budget_tokens']:>6}  {row['sequences']:>9} x {row['mean_tokens']:<4}"
            f"  {row['fewest_bins']:>11.2f}  {row['whole_rounds']:>12.2f}"
        )
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
