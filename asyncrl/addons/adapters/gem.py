"""`gem:ID`, for example `gem:game:GuessTheNumber-v0-easy`: environments of GEM (the package gem-llm)."""

from collections.abc import Mapping

import gem

from asyncrl.addons.adapters.base import split_options


def environment(name: str) -> type:
    """Return the class of a text environment. Options are those of `gem.make`. Raises ValueError."""
    env_id, options = split_options(name)
    gem.make(env_id, **options)

    class Game:
        def reset(self, seed: int) -> str:
            self._env = gem.make(env_id, **options)
            return _shown(*self._env.reset(seed=seed))

        def step(self, response: str) -> tuple[str, float, bool, bool, dict[str, str]]:
            observation, reward, terminated, truncated, info = self._env.step(response)
            return _shown(observation, info), float(reward), bool(terminated), bool(truncated), {}

    return Game


def _shown(observation: object, info: Mapping[str, object]) -> str:
    """The observation with the reminder that belongs behind it."""
    return f"{observation}\n{info.get('suffix', '')}".rstrip()
