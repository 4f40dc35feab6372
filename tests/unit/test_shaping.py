"""Reward shaping on plain floats."""

import pytest

from asyncrl.config import registry


def shaped(tokens: int, reward: float = 0.5, **params: float) -> float:
    shape = registry.resolve("shaping", "soft_overlong", {"buffer_tokens": 20, **params})
    return shape(reward, response_tokens=tokens, max_response_tokens=100, finish_reason="stop")


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (79, 0.0), (80, 0.0), (81, 0.05), (85, 0.25), (90, 0.5), (99, 0.95), (100, 1.0), (150, 1.0)],
)
def test_soft_overlong_is_linear_within_the_buffer(tokens, penalty):
    assert shaped(tokens) == pytest.approx(0.5 - penalty)
    assert shaped(tokens, reward=-2.0, penalty=3.0) == pytest.approx(-2.0 - 3 * penalty)


def test_soft_overlong_agrees_with_the_paper():
    """DAPO eq. 13 with L_max 20480, L_cache 4096: 0, ((L_max - L_cache) - L) / L_cache, or -1."""
    shape = registry.resolve("shaping", "soft_overlong", {"buffer_tokens": 4096})
    for length in (1, 16384, 16385, 18000, 20480, 20481):
        expected = 0.0 if length <= 16384 else (16384 - length) / 4096 if length <= 20480 else -1.0
        assert shape(
            0.0, response_tokens=length, max_response_tokens=20480, finish_reason="stop"
        ) == pytest.approx(expected)
