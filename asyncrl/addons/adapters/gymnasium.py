"""`gymnasium:ID`, for example `gymnasium:FrozenLake-v1?render_mode=ansi`: actions and observations as text.

With `render_mode=ansi` the model sees the rendering, otherwise the observation as JSON. The action is the
last whole number in an answer, the last JSON list for spaces of arrays, or the answer itself for spaces of
text. An answer without an action changes nothing, and the model reads what is allowed.
"""

import re
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from asyncrl.addons.adapters.base import last_json, split_options
from asyncrl.environments.json_frames import as_text

NUMBER = re.compile(r"-?\d+")
# A rendering marks places, such as that of the player, by colours of a terminal, which become brackets.
COLOUR, PLAIN = re.compile(r"\x1b\[[0-9;]+m"), re.compile(r"\x1b\[0m")
ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


def environment(name: str) -> type:
    """Return the class of a text environment. Options are those of `gymnasium.make`. Raises TypeError."""
    env_id, options = split_options(name)
    space = gymnasium.make(env_id, **options).action_space
    if not isinstance(space, (spaces.Discrete, spaces.Text, *ARRAYS)):
        raise TypeError(f"{name} has actions {space}; allowed are Discrete, Text, Box and arrays of integers")

    class Game:
        def reset(self, seed: int) -> tuple[str, dict[str, str]]:
            self._env = gymnasium.make(env_id, **options)
            self._state = as_text(self._env.reset(seed=seed)[0])
            return f"An action is {_described(space)}.\n{self._shown()}", {"state": self._state}

        def step(self, response: str) -> tuple[Any, ...]:
            action = read_action(space, response)
            if action is None:
                error = f"error: found no action; an action is {_described(space)}"
                return error, 0.0, False, False, {"state": self._state}
            observation, reward, terminated, truncated, _ = self._env.step(action)
            self._state = as_text(observation)
            ended = bool(terminated), bool(truncated)
            return self._shown(), float(reward), *ended, {"state": self._state}

        def _shown(self) -> str:
            if self._env.render_mode == "ansi":
                return COLOUR.sub("[", PLAIN.sub("]", str(self._env.render())))
            return self._state

    return Game


def _described(space: spaces.Space[Any]) -> str:
    """Say which actions a space has."""
    if isinstance(space, spaces.Discrete):
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    return "a text" if isinstance(space, spaces.Text) else f"a JSON list, an element of {space}"


def read_action(space: spaces.Space[Any], response: str) -> Any:
    """Return the action in a response, or None if it has none."""
    action: Any = response.strip()
    if isinstance(space, spaces.Discrete):
        numbers = NUMBER.findall(response)
        action = np.int64(numbers[-1]) if numbers and len(numbers[-1]) < 19 else None
    elif isinstance(space, ARRAYS):
        try:
            given = np.array(last_json(response, "[") or []).reshape(space.shape)
            action = given.astype(space.dtype)
            if space.dtype.kind != "f" and not np.array_equal(given, action):
                action = None  # it was rounded
        except (ValueError, TypeError, OverflowError):
            action = None
    return action if action is not None and space.contains(action) else None
