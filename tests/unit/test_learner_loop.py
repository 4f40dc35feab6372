"""The order of one optimizer step is part of the contract."""

from types import SimpleNamespace

from asyncrl.learner import run_learner


class Recorder:
    """Trainer, surroundings and objective in one; writes down what happens when."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def collect(self, version):
        self.events.append(f"collect {version}")
        return f"groups {version}"

    def plan(self, collected, version):
        self.events.append("plan")
        half = SimpleNamespace(microbatches=(), counts=None)
        return SimpleNamespace(minibatches=(half, half))

    def fill(self, trainer, microbatches):
        self.events.append("proximal")
        return microbatches

    def loss(self, counts):
        return None

    def step(self, microbatches, loss):
        self.events.append("step")

    def publish(self, version):
        self.events.append(f"publish {version}")

    def report(self, step):
        self.events.append(f"report {step.version}")

    def checkpoint(self, version, *, last):
        self.events.append(f"checkpoint {version}{' last' if last else ''}")


def test_weights_are_out_before_anything_slow_and_proximal_logprobs_before_the_first_step():
    world = Recorder()
    run_learner(world, world, world, world.plan, version=3, steps=5, epochs=1)
    assert world.events == [
        "publish 3",
        *["collect 3", "plan", "proximal", "proximal", "step", "step", "publish 4", "report 4", "checkpoint 4"],
        *["collect 4", "plan", "proximal", "proximal", "step", "step", "publish 5", "report 5", "checkpoint 5 last"],
    ]


def test_epochs_repeat_the_steps_and_not_the_proximal_policy():
    world = Recorder()
    run_learner(world, world, world, world.plan, version=0, steps=1, epochs=2)
    assert world.events.count("step") == 4
    assert world.events.count("proximal") == 2


def test_a_finished_run_only_publishes():
    world = Recorder()
    run_learner(world, world, world, world.plan, version=5, steps=5, epochs=1)
    assert world.events == ["publish 5"]
