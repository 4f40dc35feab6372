"""GPUs are dealt without overlap while they last, and shared when they do not."""

import pytest

from asyncrl.config.schema import Config
from asyncrl.launch.environment import child_environment
from asyncrl.launch.gpus import count_gpus, generator_gpus, learner_gpus


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


@pytest.mark.parametrize(
    ("ours", "learner", "generators"),
    [
        ("4,5, 6", "4", ["5", "6"]),
        ("GPU-1f,GPU-2e,GPU-3d", "GPU-1f", ["GPU-2e", "GPU-3d"]),
        ("3", "3", ["3", "3"]),
    ],
)
def test_only_gpus_that_we_were_given_are_dealt(monkeypatch, tmp_path, ours, learner, generators):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)

    parts = {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"train": "t"}}
    config = Config.model_validate(parts | {"reward": {"functions": [{"function": "exact_match"}]}})

    def given(gpus):
        return child_environment(config, tmp_path, threads=1, gpus=gpus)["CUDA_VISIBLE_DEVICES"]

    assert given(learner_gpus(count_gpus(), 1)) == learner
    assert [given(generator_gpus(count_gpus(), index, ranks=1, width=1)) for index in range(2)] == generators
