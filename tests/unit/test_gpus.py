"""GPUs are dealt without overlap while they last, and shared when they do not."""

import pytest

from asyncrl.launch.gpus import generator_gpus, learner_gpus


@pytest.mark.parametrize(
    ("gpus", "ranks", "generators", "width", "learner", "expected"),
    [
        (8, 2, 6, 1, [0, 1], [[2], [3], [4], [5], [6], [7]]),
        (8, 4, 2, 2, [0, 1, 2, 3], [[4, 5], [6, 7]]),
        (2, 1, 1, 1, [0], [[1]]),
        (1, 1, 2, 1, [0], [[0], [0]]),
        (4, 2, 4, 1, [0, 1], [[2], [3], [2], [3]]),
        (0, 1, 2, 1, [], [[], []]),
        (4, 0, 2, 2, [], [[0, 1], [2, 3]]),
    ],
)
def test_deal(gpus, ranks, generators, width, learner, expected):
    assert learner_gpus(gpus, ranks) == learner
    assert [generator_gpus(gpus, index, ranks=ranks, width=width) for index in range(generators)] == expected
