"""pass@k, best@k and maj@k of a prompt's n rollouts: exact means over all C(n, k) choices.

A bootstrap would estimate the same numbers for draws with replacement, with noise.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Probability that one of k samples drawn without replacement is correct: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Mean of the highest reward over all choices of k rewards.

    The i-th smallest (from 0) is the maximum of C(i, k - 1) of the C(n, k) choices.
    """
    total = math.comb(len(rewards), k)  # of many rewards no float has the counts, but their shares
    return sum(math.comb(i, k - 1) / total * reward for i, reward in enumerate(sorted(rewards)))


def maj_at_k(answers: Sequence[str | None], solved: Sequence[bool], k: int) -> float:
    """Mean, over all choices of k rollouts, of the solved share of those with the most frequent answer.

    Ties share the vote equally. A rollout without an answer abstains; if all do, the choice is unsolved.

    The computation draws each rollout independently with probability k/n, on condition that k are drawn. Then
    all choices are equally likely, answers get votes independently, and vote counts add by convolution.

    Source: Wang et al. 2022 (arXiv:2203.11171), self-consistency.
    """
    voters: dict[str, list[bool]] = defaultdict(list)
    for answer, right in zip(answers, solved, strict=True):
        if answer:
            voters[answer].append(right)
    counted = [(len(marks), sum(marks) / len(marks)) for marks in voters.values()]
    highest = max((count for count, _ in counted), default=0)
    if k == len(answers):  # every rollout votes: there is one choice
        first = [worth for count, worth in counted if count == highest]
        return sum(first) / max(len(first), 1)
    drawn, total = _drawn(len(answers), k), 0.0
    for most in range(1, min(k, highest) + 1):
        rivals = [(count, worth) for count, worth in counted if count >= most]
        others = drawn[len(answers) - sum(count for count, _ in rivals)]
        total += float(others[::-1] @ _winners(rivals, drawn, most))
    return total / float(drawn[len(answers), k])


def _winners(
    rivals: Sequence[tuple[int, float]], drawn: NDArray[np.float64], most: int
) -> NDArray[np.float64]:
    """[s]: probability of s votes in all with `most` for the winner, times the winner's solved share.

    A rival is an answer that can get `most` votes: (number of rollouts that gave it, solved share of them).
    """
    k = drawn.shape[1] - 1
    shift = np.subtract.outer(np.arange(k + 1), np.arange(k + 1))
    # Axes: votes in all, number of answers that have `most` votes. `worth` is the probability times the sum
    # of the solved shares of these answers.
    chance = np.zeros((k + 1, k // most + 1))
    chance[0, 0] = 1.0
    worth = np.zeros_like(chance)
    for count, value in rivals:
        # A negative difference indexes from the end, where the zeros are.
        fewer = np.concatenate([drawn[count, :most], np.zeros(2 * (k + 1) - most)])[shift]
        tied = np.zeros_like(chance), np.zeros_like(chance)
        tied[0][most:, 1:] = drawn[count, most] * chance[:-most, :-1]
        tied[1][most:, 1:] = drawn[count, most] * (worth + value * chance)[:-most, :-1]
        chance, worth = fewer @ chance + tied[0], fewer @ worth + tied[1]
    winners: NDArray[np.float64] = (worth[:, 1:] / np.arange(1, worth.shape[1])).sum(axis=1)
    return winners


def _drawn(samples: int, k: int) -> NDArray[np.float64]:
    """[m, j]: probability that j of m rollouts are drawn, each with probability k / samples."""
    drawn = np.zeros((samples + 1, k + 1))
    drawn[0, 0] = 1.0
    for m in range(samples):
        drawn[m + 1] = drawn[m] * (1.0 - k / samples)
        drawn[m + 1, 1:] += drawn[m, :-1] * (k / samples)
    return drawn
