"""The moving average of the reference: its closed form, its ends, and that bfloat16 does not stop it."""

import pytest
import torch

from asyncrl.trainer.deepspeed.reference import mix


def noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decay_1_changes_nothing_and_decay_0_copies(dtype: torch.dtype) -> None:
    theirs = torch.randn(1000, generator=noise(1)).to(dtype)
    mine = torch.randn(1000, generator=noise(2)).mul(100).to(dtype)
    before = mine.clone()
    mix(mine, theirs, 1.0, noise(0))
    assert torch.equal(mine, before)
    mix(mine, theirs, 0.0, noise(0))
    assert torch.equal(mine, theirs)


def test_what_the_reference_keeps_in_float32_takes_a_policy_in_bfloat16() -> None:
    mine, theirs = torch.zeros(1000), torch.randn(1000, generator=noise(1)).bfloat16()
    mix(mine, theirs, 0.5, noise(0))
    assert torch.equal(mine, theirs.float() / 2)


def test_towards_a_policy_that_stands_still_the_distance_shrinks_by_decay_to_the_n() -> None:
    start, theirs = torch.randn(1000, generator=noise(1)), torch.randn(1000, generator=noise(2))
    mine = start.clone()
    for step in range(20):
        mix(mine, theirs, 0.9, noise(step))
    torch.testing.assert_close(mine, theirs + 0.9**20 * (start - theirs), atol=1e-5, rtol=0)


def test_bfloat16_goes_the_same_way_in_the_mean_where_rounding_to_the_nearest_stands_still() -> None:
    start, theirs = torch.full((100_000,), 1.0), torch.full((100_000,), 1.25)
    mine, nearest, steps = start.bfloat16(), start.bfloat16(), 100
    for step in range(steps):
        mix(mine, theirs.bfloat16(), 0.999, noise(step))
        nearest = nearest.float().lerp(theirs, 0.001).bfloat16()
    assert torch.equal(nearest, start.bfloat16())
    expected = 1.25 - 0.999**steps * 0.25  # 1.0238
    # One step's rounding is at most 2^-7 * 0.5 off per element; the mean of 1e5 elements and 100 steps is far
    # closer.
    assert float(mine.float().mean()) == pytest.approx(expected, abs=5e-4)


def test_the_noise_makes_replicas_equal() -> None:
    theirs = torch.randn(1000, generator=noise(1)).bfloat16()
    one, two = torch.zeros(1000).bfloat16(), torch.zeros(1000).bfloat16()
    mix(one, theirs, 0.99, noise(7))
    mix(two, theirs, 0.99, noise(7))
    assert torch.equal(one, two) and not torch.equal(one, (theirs * 0.01).bfloat16())
