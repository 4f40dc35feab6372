"""How well a critic foresees."""

import pytest
import torch

from asyncrl.algo.losses import explained_variance


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 1.0),
        ([7.0, 7.0], [1.0, 2.0], 0.0),
        ([2.0, 1.0], [1.0, 2.0], -3.0),
        ([1.0, 2.0], [3.0, 3.0], 0.0),
    ],
)
def test_explained_variance_is_that_of_the_errors(values, returns, expected):
    assert explained_variance(torch.tensor(values), torch.tensor(returns)) == pytest.approx(expected)
