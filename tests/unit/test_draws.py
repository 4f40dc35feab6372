"""pass@k, best@k and maj@k against the mean over every choice of k rollouts."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.draws import best_at_k, maj_at_k, pass_at_k


def test_pass_at_k_is_the_share_of_draws_with_a_correct_one():
    for samples in range(1, 6):
        for correct in range(samples + 1):
            marks = [True] * correct + [False] * (samples - correct)
            for k in range(1, samples + 1):
                draws = list(combinations(marks, k))
                assert pass_at_k(correct, samples, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_best_at_k_is_the_mean_maximum_of_all_draws():
    for rewards in ([0.3], [1.0, 0.0], [0.5, -1.0, 0.5, 2.0], [0.0, 1.0, 1.0, 0.25, 3.0]):
        for k in range(1, len(rewards) + 1):
            draws = list(combinations(rewards, k))
            assert best_at_k(rewards, k) == pytest.approx(sum(map(max, draws)) / len(draws))
    # Of 4,096 rewards, C(4096, 2048) is no float.
    assert best_at_k([0.0] * 4095 + [1.0], 2048) == pytest.approx(0.5)
    marks = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert all(best_at_k(marks, k) == pytest.approx(pass_at_k(2, 5, k)) for k in range(1, 6))


def one_vote(chosen: Sequence[tuple[str | None, bool]]) -> float:
    """Share of solved rollouts behind the most frequent answer; tied answers count alike."""
    counts = Counter(answer for answer, _ in chosen if answer)
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    worth = [sum(right for other, right in chosen if other == answer) / counts[answer] for answer in first]
    return sum(worth) / len(worth) if worth else 0.0


def all_votes(rollouts: Sequence[tuple[str | None, bool]], k: int) -> float:
    draws = list(combinations(rollouts, k))
    return sum(map(one_vote, draws)) / len(draws)


rollouts = st.lists(
    st.tuples(st.sampled_from(["1", "2", "3", "4", "", None]), st.booleans()), min_size=1, max_size=8
)


@given(rollouts)
def test_maj_at_k_is_the_mean_vote_of_all_draws(drawn):
    answers, solved = zip(*drawn, strict=True)
    for k in range(1, len(drawn) + 1):
        assert maj_at_k(answers, solved, k) == pytest.approx(all_votes(drawn, k), abs=1e-12)


def test_every_pattern_of_four_votes_is_counted():
    for answers in product(["1", "2", "3", None], repeat=4):
        solved = [answer == "1" for answer in answers]
        for k in range(1, 5):
            expected = all_votes(list(zip(answers, solved, strict=True)), k)
            assert maj_at_k(answers, solved, k) == pytest.approx(expected, abs=1e-12), (answers, k)


def test_ties_are_shared_and_those_without_an_answer_abstain():
    assert maj_at_k(["1", "2"], [True, False], 2) == 0.5
    assert maj_at_k(["2", "1"], [False, True], 2) == 0.5  # not whoever comes first
    # Three without an answer do not win.
    assert maj_at_k([None, "", None, "1"], [False, False, False, True], 4) == 1.0
    assert maj_at_k([None, ""], [True, True], 2) == 0.0
    # The same answer in a form that is not accepted.
    assert maj_at_k(["1", "1", "2"], [True, False, True], 3) == 0.5


def test_one_vote_is_the_share_of_solved_answers_and_order_does_not_matter():
    answers, solved = ["1", "2", "1", "3", "2", "2"], [True, False, True, False, False, False]
    assert maj_at_k(answers, solved, 1) == pytest.approx(2 / 6)
    for k in range(1, 7):
        assert maj_at_k(answers[::-1], solved[::-1], k) == pytest.approx(maj_at_k(answers, solved, k))


def test_many_rollouts_neither_overflow_nor_lose_precision():
    """300 of one answer, 100 of another, 63 votes: the first wins with the tail of a hypergeometric."""
    answers, solved = ["1"] * 300 + ["2"] * 100, [True] * 300 + [False] * 100
    wins = sum(math.comb(300, j) * math.comb(100, 63 - j) for j in range(32, 64))
    assert maj_at_k(answers, solved, 63) == pytest.approx(wins / math.comb(400, 63), rel=1e-9)
    assert maj_at_k(["1"] * 2000, [True] * 2000, 4) == pytest.approx(1.0)
    assert maj_at_k([str(i % 7) for i in range(4096)], [i % 7 == 0 for i in range(4096)], 4096) == 1.0
