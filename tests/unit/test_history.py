"""A history has exactly the weights that led to those being trained: held against a tree of learners."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.lineage import INITIAL, History, Weights


class Learners:
    """Every learner that ever started, each from another's checkpoint; knows what every name stands for."""

    def __init__(self, longest_lag: int) -> None:
        self.longest_lag = longest_lag
        self.made: dict[Weights, tuple[int, ...]] = {}
        """Name -> the steps that made these weights; each step is another number."""
        self.checkpoints: list[tuple[History, tuple[int, ...]]] = [(INITIAL, ())]
        self.lineages = self.steps = 0

    def run(self, random: random.Random) -> tuple[History, tuple[int, ...]]:
        """One learner from its start, at any checkpoint, to its death."""
        saved, past = random.choice(self.checkpoints[-3:])
        self.lineages += 1
        history = saved.resumed(len(past), lineage=self.lineages, longest_lag=self.longest_lag)
        self._publish(history, past)
        for _ in range(random.randint(0, 5)):
            self.steps += 1
            past = (*past, self.steps)
            self._publish(history, past)
            if random.random() < 0.4:
                self.checkpoints.append((History.parse(str(history)), past))
        return history, past

    def _publish(self, history: History, past: tuple[int, ...]) -> None:
        name = history.weights(len(past))
        assert self.made.setdefault(name, past) == past, "one name for two"


@given(st.integers(0, 1 << 32), st.integers(0, 6))
def test_a_history_has_what_led_to_it_and_nothing_that_was_lost(seed, longest_lag):
    chance, learners = random.Random(seed), Learners(longest_lag)
    for _ in range(12):
        history, past = learners.run(chance)
        for name, made in learners.made.items():
            is_ours = past[: len(made)] == made
            if is_ours and len(made) >= len(past) - longest_lag:
                assert name in history, "still young enough to be trained on"
            assert is_ours or name not in history


def test_a_start_without_progress_renames_nothing():
    """Groups that its generators have sampled stay good for the learner after it."""
    saved = INITIAL.resumed(0, lineage=7, longest_lag=3)
    first, second = (saved.resumed(5, lineage=lineage, longest_lag=3) for lineage in (8, 9))
    assert first.weights(5) == second.weights(5) == Weights(5, 7)
    assert first.weights(6) == Weights(6, 8) and Weights(6, 8) not in second and Weights(6, 7) not in second


def test_the_initial_model_is_the_same_for_every_learner():
    for lineage in (7, 8):
        assert INITIAL.resumed(0, lineage=lineage, longest_lag=3).weights(0) == Weights(0) in INITIAL


def test_it_does_not_grow_with_the_run():
    history = INITIAL
    for start in range(200):
        history = history.resumed(2 * start, lineage=start + 1, longest_lag=6)
        assert len(history.before) <= 4


@given(
    st.integers(0, 2**32),
    st.lists(st.builds(Weights, st.integers(0, 2**40), st.integers(0, 2**32)), max_size=5),
)
def test_its_text_says_all(lineage, before):
    history = History(lineage, tuple(before))
    assert History.parse(str(history)) == history


@pytest.mark.parametrize("version", [-1, 0, 3])
def test_before_any_learner_came_every_number_is_of_the_initial_lineage(version):
    assert Weights(version) in INITIAL and Weights(version, 1) not in INITIAL
