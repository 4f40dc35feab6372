"""CartPole, played by a language model of half a million parameters, with 1 and with 4 generators.

    pip install gymnasium
    python examples/cartpole.py --generators 1 --seed 0

The state is four digits: place, speed, angle and angular speed, each from 0 to 9. The model answers `0`
or `1`. Before the run it sees games of a player that draws its moves by lot, so it knows what a move looks
like, and keeps the pole up for about 20 steps. It learns the rest by reinforcement.
"""

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium import spaces

LONGEST = 100  # moves
NAME = "CartPoleDigits-v0"
RULE = "An action is a whole number from 0 to 1.\n"  # what the adapter says first
BEGIN = ":"
GROUPS = 16  # of eight episodes from the same state
# Half of the range of each number that the digits divide.
RANGES = (2.4, 2.0, 0.21, 2.0)


class Digits(gymnasium.ObservationWrapper):
    """Shows the state as four digits, after a delay that stands for a slow environment."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=LONGEST))
        self.observation_space = spaces.Text(4, min_length=4, charset="0123456789")
        self._delay_s = delay_s

    def observation(self, observation: Any) -> str:
        time.sleep(self._delay_s)
        parts = zip(observation.tolist(), RANGES, strict=True)
        return "".join(str(min(9, max(0, int(5 + 5 * value / most)))) for value, most in parts)


gymnasium.register(NAME, entry_point=Digits)


def make_player(directory: Path, seed: int) -> None:
    """Make a model that moves at random."""
    if __package__:
        from . import pupils  # python -m asyncrl.examples.cartpole
    else:
        import pupils  # type: ignore[import-not-found, no-redef]

    characters = "".join(sorted({*RULE, *BEGIN, *"0123456789"}))
    size = pupils.Size(seed=seed, steps=80, batch=16)
    tokenizer, model = pupils.make_tokenizer(characters), pupils.make_model(size, characters)
    draw = random.Random(seed)

    def play() -> list[str]:
        game = Digits()
        state, _ = game.reset(seed=draw.randrange(1 << 30))
        texts, is_over = [BEGIN + RULE + state], False
        while not is_over:
            action = draw.randrange(2)
            state, _, *ends, _ = game.step(action)
            texts += [str(action), state]
            is_over = any(ends)
        return texts

    batches = (pupils.encode_games(tokenizer, [play() for _ in range(size.batch)]) for _ in range(size.steps))
    pupils.train_on(model, batches, size, print)
    model.config.max_position_embeddings = tokenizer.model_max_length = 1024
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def config(name: str, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the config of a run."""
    return {
        "run": {"name": name, "seed": arguments.seed},
        "model": {"path": model, "dtype": "float32"},
        "data": {"train": "seeds:100000", "template": BEGIN},
        "reward": {"functions": []},
        "environment": {"uses": f"gymnasium:cartpole:{NAME}?delay_s={arguments.delay}", "max_turns": LONGEST},
        "algorithm": {"advantage": {"name": "turn_rloo"}},
        "batch": {"groups": GROUPS, "group_size": 8},
        # An answer is a digit and the end; the states between the answers count, too.
        "sampling": {"max_prompt_tokens": 64, "max_response_tokens": 6 * LONGEST},
        "staleness": {"max_lag": 1},
        "learner": {
            "steps": arguments.steps,
            "device": "cpu",
            "threads": 1,
            "optimizer": {"lr": arguments.lr, "warmup_steps": 5},
        },
        "generator": {
            "engine": arguments.engine,
            "count": arguments.generators,
            "threads": 1,
            "max_running": arguments.running,
            "kv_cache_gib": 0.5,
        },
        "checkpoint": {"every": 1000},
    }


def main() -> None:
    """Make the player, train it, and print its curve and the episodes per second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generators", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--delay", type=float, default=0.05, help="seconds that the environment takes to move"
    )
    parser.add_argument("--lr", type=float, default=1.5e-4)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--engine", default="vllm")
    arguments = parser.parse_args()
    import asyncrl

    model = Path(f"build/cartpole/model-{arguments.seed}")
    if not model.exists():
        make_player(model, arguments.seed)
    # Where the environment's process finds this file.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    began_s: list[float] = []

    def see(step: int, metrics: dict[str, float]) -> None:
        began_s.append(time.monotonic())
        rate = 8 * GROUPS * (len(began_s) - 1) / (began_s[-1] - began_s[0]) if step > 1 else 0.0
        print(
            f"step {step:3}  moves {metrics['reward/mean']:5.1f}  episodes per second {rate:.2f}", flush=True
        )

    name = f"cartpole-{arguments.generators}g-{arguments.seed}"
    asyncrl.train(config(name, model, arguments), on_step=see, fresh=True)


if __name__ == "__main__":
    main()
