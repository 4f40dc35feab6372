"""Every preset trains: real rollouts of one engine, the real trainer, two steps of lag; and three of
them as whole runs."""

import asyncio
import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer

from asyncrl.batch.hooks import Hooks
from asyncrl.batch.resolve import recipe_of
from asyncrl.buffer.intake import Collected
from asyncrl.buffer.lanes import group_limits
from asyncrl.columns import TEACHER
from asyncrl.commands.down import processes_of
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, vocabulary_size
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.open import open_engine
from asyncrl.engine.sampler import Sampler
from asyncrl.launch.training import trainer_of
from asyncrl.learner import Step, run_learner
from asyncrl.report.step_metrics import step_metrics
from asyncrl.rewards.opened import Rewards
from asyncrl.trainer.base import Trainer
from asyncrl.trainer.collectives import Rendezvous
from asyncrl.trainer.device import choose_device
from asyncrl.types import Group, Rollout
from examples.pupils import Sums, make_sums
from tests.support.command import ASYNCRL

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PRESETS = sorted((Path(__file__).parents[2] / "configs" / "algorithms").glob("*.yaml"))
NAMES = [path.stem for path in PRESETS]
B, G, STEPS = 8, 8, 3

FITTED = {
    "dr_grpo": ["algorithm.aggregation.scale=5"],
    "dapo": ["algorithm.shaping.0.buffer_tokens=2"],
    "ppo": ["critic.warmup_steps=1"],
    "distill": ["algorithm.advantage.reward=1"],  # the teacher of this run is the model that it starts from
}
"""What a preset asks to be adapted to the length of a response or of a run."""

REWARDS = """
def digits(prompt, response, answer, **row):
    return sum(a == b for a, b in zip(response, answer)) / len(answer)


def odd_only(prompt, response, answer, **row):
    return digits(prompt, response, answer) if int(answer) % 2 else 0.0
"""

HOOK = """
import json
from pathlib import Path


class Rows:
    def before_step(self, plan):
        rewards = plan.rewards
        found = {"rows": rewards.row_S.tolist(), "expected": rewards.expected_S.tolist()}
        found["rewards"] = rewards.totals_S.tolist()
        found["prompts"] = [one.prompt_ids.tolist() for one in plan.sequences]
        with Path(__file__).with_name("rows.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\\n")
        return {}


class Baseline:
    def before_step(self, plan):
        rewards = plan.rewards
        baseline = rewards.greedy_rewards_group[rewards.group_S]
        first = [one.advantages[one.keep.argmax()] for one in plan.sequences]
        error = max(abs(float(r - b) - a) for r, b, a in zip(rewards.rewards_S, baseline, first))
        return {"greedy/mean": float(baseline.mean()), "greedy/error": error}
"""


@dataclass(frozen=True, kw_only=True)
class World:
    """A model that can hardly add, its config, and what it was seen to answer."""

    directory: Path
    batches: tuple[tuple[Group, ...], ...]
    """One per step, all sampled by the weights of version 0: step k trains with a lag of k."""

    def config(self, preset: Path, *overrides: str) -> Config:
        run = self.directory / f"{preset.stem}.yaml"
        run.write_text(f"extends: {preset}\n{(self.directory / 'base.yaml').read_text()}")
        return load_config(run, [*FITTED.get(preset.stem, ()), *overrides])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    directory = tmp_path_factory.mktemp("presets")
    tiny = Sums(
        layers=1,
        hidden=64,
        heads=2,
        intermediate=128,
        test_rows=16,
        batch=64,
        steps=60,
        report_every=60,
        lr=3e-3,
    )
    made = directory / "quickstart"
    make_sums(made, tiny, lambda line: None)
    (directory / "rewards.py").write_text(REWARDS)
    (directory / "hook.py").write_text(HOOK)
    base = {
        "run": {"name": "presets", "root": str(directory / "runs")},
        "model": {"path": str(made / "model"), "dtype": "float32"},
        "data": {"train": str(made / "train.jsonl"), "eval": str(made / "test.jsonl")},
        "reward": {
            "functions": [
                {"function": "arithmetic"},
                {"function": f"{directory}/rewards.py:digits", "name": "digits"},
            ]
        },
        "batch": {"groups": B, "group_size": G},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 5},
        "staleness": {"max_lag": STEPS - 1},
        "learner": {"steps": STEPS, "device": "cpu", "threads": 1, "optimizer": {"lr": 1e-3}},
        "generator": {
            "engine": "transformers",
            "count": 1,
            "threads": 1,
            "max_running": 64,
            "kv_cache_gib": 0.25,
            "lease_s": 10,
        },
        "eval": {"every": 2, "prompts": 8},
        "checkpoint": {"every": 10},
    }
    (directory / "base.yaml").write_text(yaml.safe_dump(base))
    config = load_config(directory / "base.yaml")
    groups = record(config, STEPS * B)
    return World(directory=directory, batches=tuple(tuple(groups[i : i + B]) for i in range(0, STEPS * B, B)))


def record(config: Config, count: int) -> list[Group]:
    """Groups with greedy rewards, from one real engine, scored by real reward processes."""
    prompts = PromptSource(config.data, config.model, config.sampling, seed=0)
    spec = SamplingSpec(
        temperature=config.sampling.temperature, max_response_tokens=config.sampling.max_response_tokens
    )

    limits, _ = group_limits(config, vocabulary_size(config.model))

    async def sample() -> list[Group]:
        pool = Rewards(config.reward, config.run.root)
        await pool.start()
        engine = await open_engine(
            config.model, config.generator, config.sampling, config.weights, device="cpu"
        )
        try:
            sampler = Sampler(engine, pool, prompts.decode, "g0")
            tickets = range(1, count + 1)
            return await asyncio.gather(
                *(sampler.group(prompts.prompt(i), i, limits, spec, greedy=True) for i in tickets)
            )
        finally:
            await engine.close()
            await pool.close()

    groups = asyncio.run(sample())
    rewards = {rollout.reward for group in groups for rollout in group.rollouts}
    assert len(rewards) > 3 and len({group.greedy_reward for group in groups}) > 1, "nothing to learn from"
    return groups


@dataclass(kw_only=True)
class Recorded:
    """`learner.Run` on recorded batches; remembers the weights of every version."""

    trainer: Trainer
    batches: Sequence[Sequence[Group]]
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def collect(self, version: int) -> Collected:
        return Collected(groups=[*self.batches[version]], takes=1)

    def publish(self, version: int) -> None:
        self.weights.append({name: tensor.clone() for name, tensor in self.trainer.tensors()})

    def report(self, step: Step) -> None:
        self.steps.append(step)

    def checkpoint(self, version: int, *, last: bool) -> None:
        pass


def train(config: Config, batches: Sequence[Sequence[Group]]) -> Recorded:
    """One step per batch with the real trainer, as the learner's process would."""
    rendezvous, device = Rendezvous(), choose_device(config.learner, local_rank=0, auto="cpu")
    recipe = recipe_of(config, share=0, device=device, row=int)
    trainer = trainer_of(config, recipe.planner.columns, rendezvous, device)
    try:
        run = Recorded(trainer=trainer, batches=batches)
        run_learner(trainer, run, recipe, Hooks(), version=0, steps=len(batches))
    finally:
        trainer.close()
    return run


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of any weight."""
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def with_teacher(batches: Sequence[Sequence[Group]]) -> list[list[Group]]:
    """The groups with the column that a teacher in processes of its own would add."""
    draw = np.random.default_rng(0)

    def taught(one: Rollout) -> Rollout:
        logprobs = -draw.random(len(one.response_ids), np.float32)
        return replace(one, recorded={**one.recorded, TEACHER: logprobs})

    return [[replace(g, rollouts=tuple(map(taught, g.rollouts))) for g in batch] for batch in batches]


TRAINED: dict[str, dict[str, torch.Tensor]] = {}
"""Final weights by preset, for the test that follows."""


@pytest.mark.parametrize("preset", PRESETS, ids=NAMES)
def test_a_preset_trains_on_stale_rollouts(world: World, preset: Path) -> None:
    config = world.config(preset)
    run = train(config, with_teacher(world.batches) if config.teacher else world.batches)
    warmup = config.critic.warmup_steps if preset.stem == "ppo" else 0
    for version, (before, after) in enumerate(zip(run.weights, run.weights[1:], strict=False)):
        assert (distance(before, after) > 1e-5) == (version >= warmup), f"step {version}"
    for version, step in enumerate(run.steps):
        metrics = step_metrics(step)
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
        assert metrics["staleness/max"] == metrics["staleness/mean"] == version
        assert metrics["policy/skipped_steps"] == 0
        expected = config.batch.minibatches * config.batch.epochs
        assert len(step.results) == (expected if version >= warmup else 0)
        for result in (*step.results, *step.critic_results):
            assert math.isfinite(result.metrics["loss"]) and math.isfinite(result.grad_norm)
        assert len(step.critic_results) == (expected if preset.stem == "ppo" else 0)
    TRAINED[preset.stem] = run.weights[-1]


def test_no_two_presets_are_the_same() -> None:
    for i, one in enumerate(TRAINED):
        for other in list(TRAINED)[i + 1 :]:
            assert distance(TRAINED[one], TRAINED[other]) > 1e-6, (one, other)


def test_the_critic_of_ppo_learns_to_tell_good_states_from_bad(world: World) -> None:
    """One batch again and again, the policy at rest: the values move towards the returns."""
    ppo = next(path for path in PRESETS if path.stem == "ppo")
    again = [world.batches[0]] * 12
    config = world.config(
        ppo, "critic.warmup_steps=12", "learner.steps=13", "staleness.max_lag=12", "critic.optimizer.lr=3e-3"
    )
    run = train(config, again)
    assert distance(run.weights[0], run.weights[-1]) == 0
    losses = [sum(result.metrics["loss"] for result in step.critic_results) for step in run.steps]
    assert losses[-1] < 0.9 * losses[0]
    first, last = (step.plan.rewards.values_T for step in (run.steps[0], run.steps[-1]))
    assert first is not None and last is not None and not torch.equal(first, last)


LINEAR = ["learner.optimizer.lr=1000", "learner.optimizer.eps=1000", "learner.optimizer.max_grad_norm=1e9"]
"""AdamW's first step is lr * g / (|g| + eps): with these the gradient itself."""
FRESH = [
    "staleness.max_lag=0",
    "batch.minibatches=1",
    "algorithm.proximal=recompute",
    "algorithm.correction=none",
    "critic.warmup_steps=0",
]
NO_CANDIDATES = {
    "clip_cov": ["algorithm.policy_loss.covariance_low=1e6", "algorithm.policy_loss.covariance_high=1e7"]
}
RATIO = [
    path
    for path in PRESETS
    if "policy_loss: {name: reinforce}" not in path.read_text() and path.stem != "gpg"
]
"""tests/unit/test_losses.py has the same identity for every loss."""


@pytest.mark.parametrize("preset", RATIO, ids=[path.stem for path in RATIO])
def test_where_nothing_is_old_every_ratio_loss_is_the_policy_gradient(world: World, preset: Path) -> None:
    """One step per fresh batch: the gradient of -A ln pi under the preset's advantage and aggregation."""
    gradients = []
    for loss in (NO_CANDIDATES.get(preset.stem, []), ["algorithm.policy_loss=reinforce"]):
        before, after = train(world.config(preset, *FRESH, *LINEAR, *loss), world.batches[:1]).weights
        gradients.append({name: before[name] - after[name] for name in before})
    size = max(float(gradient.abs().max()) for gradient in gradients[0].values())
    assert size > 1e-5
    assert distance(*gradients) < 1e-3 * size


def whole_run(
    world: World, preset: str, *overrides: str, steps: int = 3
) -> tuple[Path, list[dict[str, float]]]:
    """`asyncrl up` to its end; the run directory and the learner's metrics of each step."""
    path = next(path for path in PRESETS if path.stem == preset)
    world.config(path)  # writes the file
    run = world.directory / "runs" / preset
    arguments = [
        f"run.name={preset}",
        f"learner.steps={steps}",
        "learner.optimizer.lr=1e-3",
        *FITTED.get(preset, ()),
        *overrides,
    ]
    command = [*ASYNCRL, "up", "--plain", "--config", str(world.directory / f"{preset}.yaml"), *arguments]
    try:
        with (world.directory / f"{preset}.out").open("w+") as output:
            done = subprocess.run(command, stdout=output, stderr=output, timeout=400, check=False)
            output.seek(0)
            assert done.returncode == 0, output.read()[-4000:]
        assert processes_of(run) == []
    finally:
        for process in processes_of(run):
            process.kill()
    rows = [json.loads(line) for line in (run / "metrics" / "learner.jsonl").read_text().splitlines()]
    found = [row for row in rows if "time/step" in row]
    assert [row["step"] for row in found] == [*range(1, steps + 1)]
    assert all(row["groups/trained"] == B and None not in row.values() for row in found)
    return run, found


def state_of(run: Path, step: int = 3) -> dict[str, Any]:
    return json.loads((run / "checkpoints" / f"step-{step:06}" / "state.json").read_text())


def test_ppo_as_a_whole_run(world: World) -> None:
    _, steps = whole_run(world, "ppo")
    for row in steps:
        assert all(
            math.isfinite(row[f"critic/{name}"])
            for name in ("loss", "explained_variance", "value_mean", "grad_norm")
        )
    assert [row["policy/lr"] > 0 for row in steps] == [False, True, True]  # one step of warm-up
    assert steps[1]["policy/kl_coefficient"] == 0.001
    assert all(row["time/critic"] > 0 and row["time/measure"] > 0 for row in steps)


def test_dpo_as_a_whole_run_writes_what_it_compared(world: World) -> None:
    run, steps = whole_run(world, "dpo", "telemetry.pairs=true")
    printed = subprocess.run(
        [*ASYNCRL, "samples", "--pairs", str(run)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(printed) == sum(row["preference/pairs"] for row in steps) > B
    rows = [
        json.loads(line) for line in (world.directory / "quickstart/train.jsonl").read_text().splitlines()
    ]
    asked = {row["prompt"] for row in rows}
    for pair in map(json.loads, printed):
        assert pair["prompt"] in asked and pair["chosen"] != pair["rejected"]
    assert all(abs(row["preference/margin"]) < 1e-6 for row in steps[:1]), "the policy is its own reference"


def test_remax_as_a_whole_run_takes_its_baseline_from_greedy_responses(world: World) -> None:
    _, steps = whole_run(world, "remax", f"learner.hooks=[{world.directory}/hook.py:Baseline]")
    for row in steps:
        assert row["hook/greedy/error"] < 1e-6
        assert not any(value for name, value in row.items() if name.startswith("groups/rejected"))
    assert max(row["hook/greedy/mean"] for row in steps) > 0.1


def test_spo_as_a_whole_run_knows_its_rows_and_continues_with_what_it_expects(world: World) -> None:
    """One answer per prompt, and a few prompts, so that they come again; the second half is a resumed run."""
    few = world.directory / "few.jsonl"
    rows = (world.directory / "quickstart/train.jsonl").read_text().splitlines()[: B + 3]
    few.write_text("\n".join(rows))
    overrides = [f"data.train={few}", "batch.group_size=1", f"learner.hooks=[{world.directory}/hook.py:Rows]"]
    overrides += ["batch.minibatches=2"]
    whole_run(world, "spo", *overrides)
    run, steps = whole_run(world, "spo", *overrides, steps=6)
    sums: dict[str, tuple[float, float]] = {}
    batches = [json.loads(line) for line in (world.directory / "rows.jsonl").read_text().splitlines()]
    assert len(batches) == 6
    tokenizer = AutoTokenizer.from_pretrained(world.directory / "quickstart/model")
    for batch in batches:
        known = [sums.get(str(row), (float(np.mean(batch["rewards"])), 1.0)) for row in batch["rows"]]
        assert batch["expected"] == [total / number for total, number in known]
        for row, prompt in zip(batch["rows"], batch["prompts"], strict=True):
            assert json.loads(rows[row])["prompt"] in tokenizer.decode(prompt)
        for row in {*batch["rows"]}:
            paid = [reward for one, reward in zip(batch["rows"], batch["rewards"], strict=True) if one == row]
            total, number = known[batch["rows"].index(row)]
            sums[str(row)] = (0.9 * total + sum(paid), 0.9 * number + len(paid))
    assert {row: tuple(found) for row, found in state_of(run, 6)["tracker"].items()} == sums
    assert len(sums) == B + 3 and steps[0]["baseline/explained_variance"] == pytest.approx(0.0)
    assert not any(row.get("group/zero_variance") or row.get("alarm/no_signal") for row in steps)


def test_dapo_as_a_whole_run_samples_flat_groups_anew(world: World) -> None:
    """Half of the prompts earn nothing: their groups are rejected, counted and refilled, without deadlock."""
    run, steps = whole_run(
        world, "dapo", f"reward.functions=[{{function: {world.directory}/rewards.py:odd_only}}]"
    )
    rejected = sum(row.get("groups/rejected_zero_variance", 0) for row in steps)
    ledger = state_of(run)["ledger"]
    assert rejected >= B
    assert ledger["trained"] == 3 * B
    assert ledger["rejected"].get("zero_variance") == rejected
    assert max(row["groups/takes"] for row in steps) > 1
    # Not group/zero_variance: that is of shaped rewards, and a penalty may make two of them equal.
    flat = sum(value for row in steps for name, value in row.items() if name.startswith("groups/collapsed_"))
    assert flat == rejected
