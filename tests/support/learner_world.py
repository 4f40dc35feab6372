"""The learner's loop with everything around it in memory."""

from dataclasses import replace
from typing import Any

from asyncrl.batch.hooks import Hooks
from asyncrl.batch.recipe import Recipe
from asyncrl.batch.resolve import make_recipe
from asyncrl.buffer.intake import Collected
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.sections import BatchConfig
from asyncrl.learner import Step, run_learner
from tests.support.fake_learner import SETTINGS, FakeTrainer, mixed_batch


class World(FakeTrainer):
    """Trainer, surroundings and hook in one; writes down what happens when."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[Step] = []

    def collect(self, version):
        self.events.append(f"collect {version}")
        return Collected(groups=[*mixed_batch().groups], takes=1)

    def publish(self, version):
        self.events.append(f"publish {version}")

    def report(self, step):
        self.events.append(f"report {step.version}")
        self.reported.append(step)

    def checkpoint(self, version, *, last):
        self.events.append(f"checkpoint {version}{' last' if last else ''}")

    def before_step(self, plan):
        self.events.append(f"before {len(plan.sequences)}")
        return {"planned": len(plan.sequences)}

    def after_step(self, step):
        self.events.append(f"after {step.version}")
        return {"seen": step.hook_metrics["hook/planned"]}


def learn(world: World, *, version: int = 3, steps: int = 5, hooks: Hooks | None = None, **config) -> Recipe:
    part: Any = world
    batch = BatchConfig(
        groups=4, **{key: config.pop(key) for key in ("epochs", "minibatches") if key in config}
    )
    critic = CriticConfig(warmup_steps=config.pop("warmup_steps", 0))
    settings = replace(SETTINGS, minibatches=batch.minibatches)
    algorithm = make_recipe(
        AlgorithmConfig(**config), batch, critic, settings, max_response_tokens=8, reward_parts=()
    )
    run_learner(part, part, algorithm, hooks or Hooks(), version=version, steps=steps)
    return algorithm
