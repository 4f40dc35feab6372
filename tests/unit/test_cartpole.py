"""The game of examples/cartpole.py, as the adapter plays it."""

import math

import gymnasium
import numpy as np
import pytest

from asyncrl.addons.adapters.gymnasium import environment
from examples import cartpole


def test_a_state_is_four_digits_that_divide_the_range():
    game = cartpole.Digits()
    for value, digits in ((-1.0, "0000"), (-0.01, "4444"), (0.0, "5555"), (0.99, "9999"), (5.0, "9999")):
        assert game.observation(np.array(cartpole.RANGES) * value) == digits


@pytest.mark.filterwarnings("error")
def test_the_adapter_plays_the_game_of_gymnasium_move_by_move():
    player = environment(f"examples.cartpole:{cartpole.NAME}?delay_s=0.0")()
    oracle = gymnasium.make("CartPole-v1", max_episode_steps=cartpole.LONGEST)
    state, _ = oracle.reset(seed=7)
    shown, _ = player.reset(seed=7)
    done, moves = False, 0
    while not done:
        assert shown.removeprefix(cartpole.RULE) == cartpole.Digits().observation(state)
        # Towards the side to which the pole falls.
        action = int(state[2] + 0.3 * state[3] > 0)
        state, reward, *ends, _ = oracle.step(action)
        shown, paid, *said, _ = player.step(str(action))
        assert (paid, said) == (reward, ends) and math.isfinite(paid)
        done, moves = any(ends), moves + 1
    assert moves == cartpole.LONGEST
