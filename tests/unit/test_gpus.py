"""Only the GPUs that this process was given are dealt, by the names that it knows them by."""

import pytest

from asyncrl.config.schema import Config
from asyncrl.launch.environment import child_environment
from asyncrl.launch.gpus import count_gpus
from asyncrl.launch.placement import place


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

    placement = place(count_gpus(), ranks=1, generators=2)
    assert given(placement.learner_gpus) == learner
    assert [given(seat.gpus) for seat in placement.generators] == generators
