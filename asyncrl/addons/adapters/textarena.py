"""`textarena:ID`, for example `textarena:Sokoban-v0`: the games of TextArena for one player.

The model sees each message of the game once, because the conversation keeps them. The reward is the game's
own at its end. Games draw from the process's random numbers, so every episode has a process of its own.
"""

import textarena

from asyncrl.addons.adapters.base import split_options

OWN_MOVE = textarena.core.ObservationType.PLAYER_ACTION


def environment(name: str) -> type:
    """Return the class of a text environment. Options are those of `textarena.make`. Raises ValueError."""
    game_id, options = split_options(name)
    # Without the wrapper that repeats all messages in every observation.
    raw = game_id if game_id.endswith("-raw") else f"{game_id}-raw"
    textarena.make(raw, **options).reset(num_players=1, seed=0)

    class Game:
        def reset(self, seed: int) -> str:
            self._game = textarena.make(raw, **options)
            self._game.reset(num_players=1, seed=seed)
            return self._news()

        def step(self, response: str) -> tuple[str, float, bool]:
            done, _ = self._game.step(action=response)
            if not done:
                return self._news(), 0.0, False
            rewards, _ = self._game.close()
            return "", float(rewards[0]), True

        def _news(self) -> str:
            _, messages = self._game.get_observation()
            return "\n".join(text for _, text, kind in messages if kind != OWN_MOVE)

    return Game
