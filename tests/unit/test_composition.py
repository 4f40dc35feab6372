"""From groups to gradients, whole: plan, masks, packing, ranks, counts, coefficients, losses, against loops
over single tokens.

The parts have tests of their own. Here a trainer without a model calls the losses that it is given on one
parameter per token, adds up gradients over micro-batches and ranks, and takes the step. The oracle has no
micro-batches, no ranks and no tensors.
"""

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algo.metrics import merge
from asyncrl.batch.resolve import make_recipe
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.sections import BatchConfig
from asyncrl.trainer.base import LOSS, StepResult
from asyncrl.types import Group, Rollout, Turns
from tests.support.fake_learner import SETTINGS, Batch, Meeting
from tests.support.steps import beginning

VERSION, MAX_LAG, LIMIT, LR = 5, 2, 8, 0.4
CAP, CLIP, CRITIC_CLIP, ENTROPY, SCALE = 1.2, 0.2, 0.05, 0.03, 7.0
M2 = 0.05
KL = {"coefficient": 0.3, "target": 0.01, "horizon": 20.0}
SHAPING = {"buffer_tokens": 4, "penalty": 0.5}

Flat = dict[int, float]
"""Token id -> a number."""


def groups() -> list[Group]:
    """The second minibatch has more tokens. At version 5 one sequence is too old whole and others in part, at
    6 more of them."""
    batch = Batch()
    batch.group(batch.rollout(1.0, [5, 5, 5]), batch.rollout(0.0, [1, 4, 5, 5, 5], tools=[4]))
    batch.group(batch.rollout(2.0, [2, 1]), batch.rollout(0.0, [5]))
    batch.group(
        batch.rollout(0.5, [3, 3, 4, 4, 4, 5, 5], tools=[0, 1, 3]),
        batch.rollout(0.25, [4] * 8, finish="length"),
    )
    batch.group(batch.rollout(3.0, [4, 4, 5, 5, 5, 5, 5], tools=[3]), batch.rollout(1.0, [5] * 6))
    return batch.groups


SPLIT_REWARDS = (0.25, 0.5)


def first_turn(actions: int) -> int:
    """Of the two turns of an episode in branches, the number of actions of the first."""
    return (actions + 1) // 2 if actions > 1 else 0


def in_branches(groups: list[Group]) -> list[Group]:
    """The same episodes in two sequences each: the second turn, whose context is the first, is stored first."""
    found = []
    for group in groups:
        rollouts, episode_of = [], []
        for episode, rollout in enumerate(group.rollouts):
            size, first = len(rollout.response_ids), first_turn(rollout.actions)
            cut = int(np.flatnonzero(rollout.action_mask)[first - 1]) + 1 if first else 0
            parts = [branch(rollout, cut, size, order=1)]
            if first:
                parts.append(branch(rollout, 0, cut, order=0))
            rollouts += parts
            episode_of += [episode] * len(parts)
        of = np.array(episode_of, dtype=np.int32)
        found.append(replace(group, rollouts=tuple(rollouts), episode_of=of))
    return found


def branch(rollout: Rollout, start: int, end: int, *, order: int) -> Rollout:
    mask = rollout.action_mask[:end] & (np.arange(end) >= start)
    turns = Turns(
        ends=np.array([end], np.int32),
        rewards=np.array([SPLIT_REWARDS[order]], np.float32),
        order=np.array([order], np.int32),
    )
    return beginning(rollout, mask, turns)


def initial(seed: int, low: float, high: float) -> Flat:
    draw = np.random.default_rng(seed)
    tokens = [
        int(token) for group in groups() for rollout in group.rollouts for token in rollout.response_ids
    ]
    return {token: float(draw.uniform(low, high)) for token in tokens}


REFERENCE = initial(1, -1.6, -0.4)


@dataclass
class Model:
    """One parameter per token for each of log-probability, entropy and value."""

    logprobs: Flat = field(default_factory=lambda: initial(2, -1.6, -0.4))
    entropies: Flat = field(default_factory=lambda: initial(3, 0.1, 1.0))
    values: Flat = field(default_factory=lambda: initial(4, -0.5, 1.5))

    def descend(self, parameters: Flat, gradient: Flat) -> None:
        for token, slope in gradient.items():
            parameters[token] -= LR * slope


@dataclass
class Done:
    """One optimizer step."""

    loss: float
    gradients: tuple[Flat, ...]


# What is tested.


class SummingTrainer:
    """`Trainer` on a `Model` of each rank, a thread each."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.share, self.shares = meeting, rank, rank, meeting.ranks
        self.model = Model()
        self.done: list[Done] = []
        self.microbatches = 0

    def gather(self, value: bytes) -> list[bytes]:
        return self._meeting.gather(self.rank, value)

    def measure(self, microbatches, columns):
        known = {
            "logprobs_T": self.model.logprobs,
            "values_T": self.model.values,
            "reference_logprobs_T": REFERENCE,
        }
        return [
            {name: torch.tensor([known[name][t] for t in one.target_T.tolist()]) for name in columns}
            for one in microbatches
        ]

    def step(self, microbatches, loss, *, entropy_gradient=True):
        def of_head(one, logprobs_T, entropies_T):
            return loss(one, logprobs_T, entropies_T if entropy_gradient else entropies_T.detach())

        return self._step(microbatches, of_head, self.model.logprobs, self.model.entropies)

    def critic_step(self, microbatches, loss):
        return self._step(microbatches, loss, self.model.values)

    def _step(self, microbatches, loss, *parameters: Flat):
        gradients: tuple[Flat, ...] = tuple({} for _ in parameters)
        sums: dict[str, float] = {}
        for one in microbatches:
            tokens = one.target_T.tolist()
            if not tokens:
                continue
            self.microbatches += 1
            leaves = [
                torch.tensor([flat[t] for t in tokens], dtype=torch.float64, requires_grad=True)
                for flat in parameters
            ]
            result = loss(one, *leaves)
            result.loss.backward()
            sums = merge([sums, result.metrics])
            for gradient, leaf in zip(gradients, leaves, strict=True):
                gradient |= zip(
                    tokens, [0.0] * len(tokens) if leaf.grad is None else leaf.grad.tolist(), strict=True
                )
        parts = [json.loads(part) for part in self.gather(json.dumps([sums, gradients]).encode())]
        whole = tuple(
            {int(t): slope for _, found in parts for t, slope in found[i].items()}
            for i in range(len(parameters))
        )
        for flat, gradient in zip(parameters, whole, strict=True):
            self.model.descend(flat, gradient)
        metrics = merge(part for part, _ in parts)
        self.done.append(Done(metrics[LOSS], whole))
        return StepResult(metrics=metrics, grad_norm=1.0, lr=LR)


def trained(
    config: dict[str, Any], batch: dict[str, int], ranks: int, budget: int
) -> tuple[list[Done], float, int]:
    """Two batches in a row: the optimizer steps, the final KL coefficient, micro-batches of all ranks."""
    trainers = [SummingTrainer(meeting, rank) for meeting in [Meeting(ranks)] for rank in range(ranks)]
    coefficients: dict[int, float] = {}
    known = {key: value for key, value in config.items() if key != "branches"}
    batches = in_branches(groups()) if "branches" in config else groups()

    def run(trainer: SummingTrainer) -> None:
        mask_truncated = config.get("mask_truncated", False)
        settings = replace(
            SETTINGS,
            max_lag=MAX_LAG,
            mask_truncated=mask_truncated,
            tokens_per_microbatch=budget,
            minibatches=batch.get("minibatches", 1),
            share=trainer.rank,
            shares=ranks,
        )
        algorithm = make_recipe(
            AlgorithmConfig.model_validate(known),
            BatchConfig(groups=4, **batch),
            CriticConfig(clip=CRITIC_CLIP),
            settings,
            max_response_tokens=LIMIT,
            reward_parts=(),
        )
        for version in (VERSION, VERSION + 1):
            sequences = algorithm.planner.assemble(batches, version)
            measured = algorithm.planner.measure(trainer, sequences)
            plan = algorithm.planner.plan(batches, sequences, measured, algorithm.coefficients.kl)
            if algorithm.critic:
                algorithm.critic.train(trainer, plan)
            algorithm.train_policy(trainer, plan, version)
        coefficients[trainer.rank] = algorithm.coefficients.kl

    threads = [threading.Thread(target=run, args=[trainer]) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(coefficients) == ranks and len(set(coefficients.values())) == 1
    assert len({json.dumps([done.loss for done in trainer.done]) for trainer in trainers}) == 1
    return trainers[0].done, coefficients[0], sum(trainer.microbatches for trainer in trainers)


# What it is compared with.


@dataclass
class Row:
    """One sequence: its action tokens, and which of them train."""

    tokens: list[int]
    behaviour: list[float]
    keep: list[bool]
    reward: float
    cut: bool
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)

    @property
    def kept(self) -> list[int]:
        return [position for position, kept in enumerate(self.keep) if kept]


def rows_of(config: dict[str, Any], version: int) -> list[list[list[Row]]]:
    """[group][sequence]"""

    def row(rollout: Rollout) -> Row:
        actions = [i for i, is_action in enumerate(rollout.action_mask) if is_action]
        cut = config.get("mask_truncated", False) and rollout.finish_reason == "length"
        reward = rollout.reward
        if "shaping" in config:
            over = rollout.actions - (LIMIT - SHAPING["buffer_tokens"])
            reward -= SHAPING["penalty"] * min(max(over / SHAPING["buffer_tokens"], 0.0), 1.0)
        return Row(
            tokens=[int(rollout.response_ids[i]) for i in actions],
            behaviour=[float(rollout.behaviour_logprobs[i]) for i in actions],
            keep=[version - int(rollout.versions[i]) <= MAX_LAG and not cut for i in actions],
            reward=reward,
            cut=rollout.finish_reason == "length",
        )

    return [[row(rollout) for rollout in group.rollouts] for group in groups()]


Past = dict[int, tuple[float, float]]
"""Group -> sum and number of its rewards in earlier batches, discounted."""


def estimate(config: dict[str, Any], batch: list[list[Row]], model: Model, beta: float, past: Past) -> None:
    """Advantages and returns: reward minus the mean of the group, turns likewise, or generalised advantage
    estimation. A sequence is an episode here, however it is stored."""
    in_reward, everything = config.get("kl", {}).get("placement") == "reward", []
    for group in batch:
        paid = [
            [-beta * (model.logprobs[t] - REFERENCE[t]) if in_reward else 0.0 for t in row.tokens]
            for row in group
        ]
        totals = [row.reward + sum(tokens) for row, tokens in zip(group, paid, strict=True)]
        everything.append(totals)
        for row, total, tokens in zip(group, totals, paid, strict=True):
            row.advantages = [total - sum(totals) / len(totals)] * len(row.tokens)
            if config["advantage"]["name"] == "turn_rloo":
                row.advantages = of_turns(row, tokens, list(zip(group, paid, strict=True)))
            if config["advantage"]["name"] == "gae":
                gamma, lam = config["advantage"]["gamma"], config["advantage"]["gae_lambda"]
                rewards = [*tokens[:-1], tokens[-1] + row.reward]
                values = [model.values[t] for t in row.tokens]
                after = values[-1] if config["advantage"].get("bootstrap") and row.cut else 0.0
                deltas = [
                    r + gamma * v - now
                    for r, v, now in zip(rewards, [*values[1:], after], values, strict=True)
                ]
                row.advantages = discounted(deltas, gamma * lam)
                gains = discounted(deltas, gamma * config["advantage"].get("critic_lambda", lam))
                row.returns = [gain + value for gain, value in zip(gains, values, strict=True)]

    if config["advantage"]["name"] == "spo":
        compare_with_the_past(batch, everything, past, config["advantage"]["decay"])


def compare_with_the_past(
    batch: list[list[Row]], totals: list[list[float]], past: Past, decay: float
) -> None:
    unknown = (float(np.mean([total for group in totals for total in group])), 1.0)
    before = [past.get(g, unknown) for g in range(len(batch))]
    gains = [total - a / n for group, (a, n) in zip(totals, before, strict=True) for total in group]
    scale = math.sqrt(np.var(gains, ddof=1) + 1e-8)
    for row, gain in zip([row for group in batch for row in group], gains, strict=True):
        row.advantages = [(gain - float(np.mean(gains))) / scale] * len(row.tokens)
    for g, (group, (a, n)) in enumerate(zip(totals, before, strict=True)):
        past[g] = (decay * a + sum(group), decay * n + len(group))


def to_come(row: Row, paid: list[float]) -> list[float]:
    """What each turn and the later ones were paid; what no turn was given is paid with the last one."""
    first = first_turn(len(row.tokens))
    given = SPLIT_REWARDS if first else SPLIT_REWARDS[1:]
    parts = [paid[:first], paid[first:]] if first else [paid]
    turns = [reward + sum(part) for reward, part in zip(given, parts, strict=True)]
    turns[-1] += row.reward - sum(given)
    return [sum(turns[k:]) for k in range(len(turns))]


def of_turns(row: Row, paid: list[float], group: list[tuple[Row, list[float]]]) -> list[float]:
    first, own = first_turn(len(row.tokens)), to_come(row, paid)
    others = [to_come(other, tokens) for other, tokens in group if other is not row]
    compared = [[other[k] for other in others if k < len(other)] for k in range(len(own))]
    turns = [g - (sum(among) / len(among) if among else 0.0) for g, among in zip(own, compared, strict=True)]
    return [turns[0]] * first + [turns[-1]] * (len(row.tokens) - first)


def discounted(values: list[float], discount: float) -> list[float]:
    return [sum(discount ** (k - t) * values[k] for k in range(t, len(values))) for t in range(len(values))]


def clamped(x: float) -> float:
    return max(-20.0, min(20.0, x))


def weights_of(config: dict[str, Any], minibatch: list[Row], proximal: Flat) -> list[dict[int, float]]:
    """[sequence] position -> weight of its kept tokens."""
    distances = [
        {i: clamped(proximal[row.tokens[i]] - row.behaviour[i]) for i in row.kept} for row in minibatch
    ]
    correction = config.get("correction", {})
    if correction.get("level") == "sequence":
        weights = [dict.fromkeys(ds, min(math.exp(clamped(sum(ds.values()))), CAP)) for ds in distances]
        means = [next(iter(ws.values())) for ws in weights if ws]
        weights = [{i: w * len(means) / sum(means) for i, w in ws.items()} for ws in weights]
    else:
        weights = [{i: min(math.exp(d), CAP) for i, d in ds.items()} for ds in distances]
    for rejection in config.get("rejections", ()):
        if rejection["name"] == "m2po":
            squares = sorted(d * d for ds in distances for d in ds.values())
            while squares and sum(squares) / len(squares) > rejection["limit"]:
                squares.pop()
            for ws, ds in zip(weights, distances, strict=True):
                ws |= {i: 0.0 for i, d in ds.items() if not squares or d * d > squares[-1]}
            continue
        low, high = 1 / rejection["high"], rejection["high"]
        for ws, ds in zip(weights, distances, strict=True):
            inside = low <= math.exp(sum(ds.values()) / max(len(ds), 1)) <= high
            ws |= dict.fromkeys(ws, 0.0) if not inside else {}
    return weights


def reduction(name: str, minibatch: list[Row]) -> Iterator[tuple[Row, int, float]]:
    """Every kept token with its factor in the loss."""
    tokens = sum(len(row.kept) for row in minibatch)
    sequences = sum(1 for row in minibatch if row.kept)
    for row in minibatch:
        factor = {
            "token-mean": 1 / tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / sequences,
            "seq-mean-token-mean": 1 / sequences / max(len(row.kept), 1),
            "seq-mean-token-sum-norm": 1 / sequences / SCALE,
        }[name]
        for position in row.kept:
            yield row, position, factor


def policy_step(
    config: dict[str, Any], minibatch: list[Row], model: Model, proximal: Flat, beta: float
) -> tuple[Done, float]:
    """The step, and the sum of the KL over its tokens."""
    loss = divergence = 0.0
    slopes, bonuses = {}, {}
    weights = weights_of(config, minibatch, proximal)
    for row, i, factor in reduction(config["aggregation"]["name"], minibatch):
        token, advantage = row.tokens[i], row.advantages[i]
        weight = next(ws for ws, other in zip(weights, minibatch, strict=True) if other is row)[i]
        now, before = model.logprobs[token], proximal[token]
        ratio = math.exp(now - before)
        clipped = max(1 - CLIP, min(1 + CLIP, ratio))
        value, slope = -weight * min(ratio * advantage, clipped * advantage), -weight * ratio * advantage
        if (advantage > 0 and ratio > 1 + CLIP) or (advantage < 0 and ratio < 1 - CLIP):
            slope = 0.0
        d = now - REFERENCE[token]
        if "kl" in config:
            in_reward = config["kl"].get("placement") == "reward"
            divergence += d if in_reward else math.exp(-d) - 1 + d
            estimate, pull = math.exp(-d) - 1 + d, 1 - math.exp(-d)
            if config["kl"].get("bias_corrected"):
                estimate, pull = weight * ratio * estimate, weight * ratio * (estimate + pull)
            if not in_reward:
                value, slope = value + beta * estimate, slope + beta * pull
        if "imitation" in config and row.reward >= config["imitation"]["solved"]:
            solved = sum(len(one.kept) for one in minibatch if one.reward >= config["imitation"]["solved"])
            push = config["imitation"]["coefficient"] / solved
            loss, slope = loss - push * now, slope - push / factor
        loss += factor * (value - ENTROPY * model.entropies[token])
        slopes[token], bonuses[token] = factor * slope, -factor * ENTROPY
    return Done(loss, (slopes, bonuses)), divergence


def critic_step(minibatch: list[Row], model: Model, before: Flat) -> Done:
    loss, slopes = 0.0, {}
    for row, i, factor in reduction("token-mean", minibatch):
        token, target = row.tokens[i], row.returns[i]
        value, old = model.values[token], before[token]
        held = max(old - CRITIC_CLIP, min(old + CRITIC_CLIP, value))
        is_held = (held - target) ** 2 > (value - target) ** 2
        loss += factor * max((held - target) ** 2, (value - target) ** 2) / 2
        slopes[token] = 0.0 if is_held else factor * (value - target)
    return Done(loss, (slopes,))


def expected(config: dict[str, Any], batch: dict[str, int]) -> tuple[list[Done], float]:
    """The optimizer steps of two batches, and the KL coefficient at the end."""
    model, done, past = Model(), [], {}
    beta = config.get("kl", {}).get("coefficient", 0.0)
    epochs, number = batch.get("epochs", 1), batch.get("minibatches", 1)
    for version in (VERSION, VERSION + 1):
        rows = rows_of(config, version)
        estimate(config, rows, model, beta, past)
        size = len(rows) // number
        minibatches = [
            [row for group in rows[k : k + size] for row in group] for k in range(0, len(rows), size)
        ]
        old_values, start = dict(model.values), dict(model.logprobs)
        for minibatch in minibatches * epochs if config["advantage"]["name"] == "gae" else []:
            done.append(critic_step(minibatch, model, old_values))
            model.descend(model.values, done[-1].gradients[0])
        divergence = tokens = 0.0
        for minibatch in minibatches * epochs:
            step, added = policy_step(config, minibatch, model, start, beta)
            for parameters, gradient in zip((model.logprobs, model.entropies), step.gradients, strict=True):
                model.descend(parameters, gradient)
            done.append(step)
            divergence, tokens = divergence + added, tokens + sum(len(row.kept) for row in minibatch)
        if target := config.get("kl", {}).get("target"):
            error = max(-0.2, min(0.2, divergence / tokens / target - 1))
            beta *= 1 + error * min(sum(map(len, rows)) / config["kl"]["horizon"], 1)
    return done, beta


# The comparison.

BASE: dict[str, Any] = {
    "advantage": {"name": "dr_grpo"},
    "correction": {"name": "truncate", "cap": CAP},
    "aggregation": {"name": "token-mean"},
    "entropy": {"coefficient": ENTROPY},
}
GAE = {"name": "gae", "gamma": 0.9, "gae_lambda": 0.7, "whitened": False}
IN_REWARD = {"placement": "reward", "estimator": {"name": "k1"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "KL in the loss, steered": {"kl": KL},
    "KL in the reward, steered": {"kl": {**KL, **IN_REWARD}},
    "critic": {"advantage": GAE},
    "KL in the loss, bias-corrected": {"kl": {**KL, "bias_corrected": True}},
    "critic with a lambda of its own, cut answers go on": {
        "advantage": {**GAE, "critic_lambda": 1.0, "bootstrap": True}
    },
    "critic, KL in the reward": {"advantage": GAE, "kl": {**KL, **IN_REWARD}},
    "overlong answers shaped": {"shaping": [{"name": "soft_overlong", **SHAPING}]},
    "truncated answers masked": {"mask_truncated": True, "kl": KL},
    "weights normalised": {
        "correction": {"name": "truncate", "cap": CAP, "level": "sequence", "normalise": True}
    },
    "turns in branches, steered KL in the reward": {
        "branches": True,
        "advantage": {"name": "turn_rloo"},
        "aggregation": {"name": "seq-mean-token-mean"},
        "kl": {**KL, **IN_REWARD},
    },
    "branches, critic": {"branches": True, "advantage": GAE, "kl": KL},
    "expected rewards": {"advantage": {"name": "spo", "decay": 0.5}},
    "expected rewards, KL in the reward, in branches": {
        "branches": True,
        "advantage": {"name": "spo", "decay": 0.75},
        "kl": {**KL, **IN_REWARD},
    },
    "good answers imitated, in branches": {
        "branches": True,
        "aggregation": {"name": "seq-mean-token-mean"},
        "imitation": {"coefficient": 0.2, "solved": 1.0},
    },
    "good answers imitated, overlong ones less so": {
        "shaping": [{"name": "soft_overlong", **SHAPING}],
        "mask_truncated": True,
        "imitation": {"coefficient": 0.2, "solved": 0.25},
    },
    "two criteria, one over the step": {
        "rejections": [{"name": "m2po", "limit": M2}, {"name": "reject", "high": 1.25, "level": "geometric"}]
    },
    "two criteria": {"rejections": [{"name": "reject", "high": 1.25, "level": "geometric"}]},
    **{
        f"aggregation {name}": {"aggregation": {"name": name, **params}, "kl": KL}
        for name, params in [
            ("token-sum", {}),
            ("seq-mean-token-sum", {}),
            ("seq-mean-token-mean", {}),
            ("seq-mean-token-sum-norm", {"scale": SCALE}),
        ]
    },
}
BATCHES = [{}, {"minibatches": 2}, {"epochs": 2}, {"minibatches": 2, "epochs": 2}]
CUTS = [(1, 1000), (1, 12), (2, 24), (4, 20)]
"""(ranks, tokens per micro-batch); a sequence has up to 10."""


def assert_equal(actual: list[Done], wanted: list[Done]) -> None:
    assert len(actual) == len(wanted)
    for number, (mine, other) in enumerate(zip(actual, wanted, strict=True)):
        assert mine.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-5), f"loss of optimizer step {number}"
        for gradient, right in zip(mine.gradients, other.gradients, strict=True):
            assert gradient == pytest.approx(right, rel=1e-4, abs=1e-5), (
                f"gradient of optimizer step {number}"
            )


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_a_step_are_those_of_single_tokens_however_it_is_cut(variant, batch):
    config = {**BASE, **VARIANTS[variant]}
    wanted, beta = expected(config, batch)
    microbatches = []
    for ranks, budget in CUTS:
        actual, coefficient, count = trained(config, batch, ranks, budget)
        assert_equal(actual, wanted)
        assert coefficient == pytest.approx(beta, rel=1e-5)
        microbatches.append(count)
    assert microbatches[1] > microbatches[0]


def test_the_batches_have_what_can_go_wrong():
    """Else the comparison above would pass without looking."""
    for version in (VERSION, VERSION + 1):
        rows = [row for group in rows_of(BASE, version) for row in group]
        halves = [sum(len(row.kept) for row in half) for half in (rows[:4], rows[4:])]
        assert halves[0] != halves[1]
        assert any(not row.kept for row in rows) and any(0 < len(row.kept) < len(row.tokens) for row in rows)
        weights = [w for ws in weights_of(BASE, rows, Model().logprobs) for w in ws.values()]
        assert min(weights) < 0.9 and weights.count(CAP) > 1
    assert any(rollout.finish_reason == "length" for group in groups() for rollout in group.rollouts)
    assert any(
        len(r.response_ids) > LIMIT - 4 >= int(r.action_mask.sum())
        for group in groups()
        for r in group.rollouts
    )
    config = {**BASE, **VARIANTS["two criteria"]}
    weights = [w for ws in weights_of(config, rows, Model().logprobs) for w in ws.values()]
    assert 0 < weights.count(0.0) < len(weights)
    assert expected({**BASE, "kl": KL}, {})[1] != pytest.approx(KL["coefficient"], rel=0.05)
