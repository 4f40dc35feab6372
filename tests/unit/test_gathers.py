"""How sharded parameters are cut into the lists that one collective gathers."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.collectives import Ranks
from asyncrl.trainer.deepspeed.trained_model import TrainedModel, gathers


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 20))
def test_runs_are_in_order_within_the_limit_and_as_long_as_it_allows(sizes: list[int], limit: int) -> None:
    named = [(str(i), torch.nn.Parameter(torch.empty(size))) for i, size in enumerate(sizes)]
    runs = list(gathers(named, limit))
    assert [member for run in runs for member in run] == named
    counts = [[parameter.numel() for _, parameter in run] for run in runs]
    assert all(len(run) == 1 or sum(run) <= limit for run in counts)
    for run, following in pairwise(counts):
        assert sum(run) + following[0] > limit


def test_a_shard_counts_as_the_whole_parameter() -> None:
    sharded = torch.nn.Parameter(torch.empty(0))
    sharded.ds_numel = 6  # type: ignore[attr-defined]
    assert [len(run) for run in gathers([("a", sharded), ("b", sharded), ("c", sharded)], 12)] == [2, 1]


def test_trained_parameters_of_several_types_are_not_sharded() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2).bfloat16(), torch.nn.Linear(2, 2))
    ranks = object.__new__(Ranks)  # nothing is asked of it
    with pytest.raises(ConfigError, match=r"is 3, but .* torch.bfloat16 and torch.float32, .* set it to 2"):
        TrainedModel(
            module, OptimizerConfig(), total_steps=1, dtype="bfloat16", stage=3, offload=False, ranks=ranks
        )
