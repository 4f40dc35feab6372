"""One rank of a learner, as a process of its own: runs the scenarios of a job such as `{"rank": 0, ...}`.

Each scenario writes what rank 0 saw to `<out>/<name>.safetensors` and `<name>.json`.
"""

import ctypes
import json
import math
import os
import random
import resource
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.batch.masks import PlanSettings
from asyncrl.batch.packing import TrainSample, deal, microbatch
from asyncrl.batch.resolve import make_recipe
from asyncrl.columns import KEPT_COUNTS
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig, OptimizerConfig
from asyncrl.config.sections import BatchConfig, LearnerConfig, ModelConfig
from asyncrl.errors import CheckpointError, DataError
from asyncrl.hosting.machine import read_model
from asyncrl.hosting.memory_use import Rank
from asyncrl.hosting.processes import die_with_parent
from asyncrl.preflight.fit import read_trained_shape
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.trainer.base import LossSums, MicroBatch, StepResult
from asyncrl.trainer.collectives import Ranks, Rendezvous
from asyncrl.trainer.deepspeed.engine_settings import join_deepspeed
from asyncrl.trainer.deepspeed.trained_model import whole_parameters
from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer, load_in_shards
from asyncrl.trainer.device import choose_device
from asyncrl.trainer.loading import load_model
from asyncrl.types import Group, Rollout, VersionSpan
from tests.support.fake_trainer import save_whole
from tests.support.vlm_models import images_of, with_pictures

KEY = b"5" * 64
# Rises for 3 steps and falls for `RUN_STEPS` - 3.
RATES: dict[str, Any] = {
    "lr": 1e-2,
    "warmup_steps": 3,
    "schedule": "cosine_with_min_lr",
    "schedule_arguments": {"min_lr_rate": 0.1},
}
RUN_STEPS = 8
CPU = torch.device("cpu")
CLONE_NEWNET = 0x40000000  # of sched.h


def sequences(number: int = 7, seed: int = 3) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(number):
        prompt, response = int(rng.integers(1, 8)), int(rng.integers(1, 24))
        result.append(
            TrainSample(
                prompt_ids=rng.integers(2, 40, prompt, dtype=np.int32),
                response_ids=rng.integers(2, 40, response, dtype=np.int32),
                keep=rng.random(response) < 0.8,
                behaviour_logprobs=np.zeros(response, np.float32),
                advantages=rng.normal(size=response).astype(np.float32),
                lag=np.zeros(response, np.int64),
            )
        )
    return result


def chosen(items: list[TrainSample], experts: int = 8, layers: int = 2, top_k: int = 2) -> list[Any]:
    """[N, layers, top_k] experts for each sequence, at random; a fifth of the tokens has none."""
    rng = np.random.default_rng(11)
    found = []
    for item in items:
        own = rng.permuted(np.tile(np.arange(experts), (item.tokens, layers, 1)), axis=-1)[..., :top_k]
        own[rng.random((item.tokens, layers)) < 0.2] = -1
        found.append(own.astype(np.int16))
    return found


def with_kept(items: list[TrainSample], vocabulary: int = 40) -> list[TrainSample]:
    """The same, each action sampled among 1 to 6 tokens at random, and itself."""
    rng, found = np.random.default_rng(5), []
    for item in items:
        sets = [
            np.union1d(rng.integers(2, vocabulary, rng.integers(0, 6)), [token]).astype(np.int32)[: 9 * keep]
            for token, keep in zip(item.response_ids, item.keep, strict=True)
        ]
        counts = np.array([len(one) for one in sets], dtype=np.int32)
        found.append(replace(item, recorded={KEPT_COUNTS: counts}, kept_ids=np.concatenate(sets)))
    return found


def tokens_of(items: list[TrainSample]) -> int:
    return int(sum(one.keep.sum() for one in items))


def loss_over(total: int) -> Any:
    def loss(batch: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossSums:
        value = (-(logprobs_T * batch.tokens.advantages_T).sum() - 0.1 * entropy_T.sum()) / total
        return LossSums(
            loss=value, metrics={"loss": float(value.detach()), "tokens": float(batch.tokens.tokens)}
        )

    return loss


def plain_loss(policy: Any, kept: bool = False) -> Tensor:
    """The loss of a stock model: one sequence at a time, full logits, no packing, no DeepSpeed."""
    items = with_kept(sequences()) if kept else sequences()
    total = torch.zeros(())
    for one in items:
        ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids]).astype(np.int64))
        logits = policy(input_ids=ids[None]).logits[0][len(one.prompt_ids) - 1 : -1] / 0.7
        never = torch.zeros_like(logits, dtype=torch.bool)
        if one.kept_ids is not None:
            counts = one.recorded[KEPT_COUNTS]
            never[torch.from_numpy(counts > 0)] = True
            never[np.repeat(np.arange(len(counts)), counts), one.kept_ids] = False
        table = logits.masked_fill(never, -torch.inf).log_softmax(-1)
        chosen = table.gather(-1, torch.from_numpy(one.response_ids.astype(np.int64))[:, None]).squeeze(-1)
        entropy = -(table.exp() * table.masked_fill(never, 0.0)).sum(-1)
        keep = torch.from_numpy(one.keep)
        total = total - (chosen * torch.from_numpy(one.advantages))[keep].sum() - 0.1 * entropy[keep].sum()
    return total / tokens_of(items)


def critic_loss_over(total: int, target: float | None = None) -> Any:
    """Squared distance of the values to `target`, or to the advantages."""

    def loss(batch: MicroBatch, values_T: Tensor) -> LossSums:
        value = (values_T - (batch.tokens.advantages_T if target is None else target)).square().sum() / total
        return LossSums(
            loss=value, metrics={"loss": float(value.detach()), "tokens": float(batch.tokens.tokens)}
        )

    return loss


def build(job: dict[str, Any], scenario: dict[str, Any], **optimizer: Any) -> DeepSpeedTrainer:
    """The critic, if any, gets the policy's optimizer too."""
    learner = LearnerConfig(
        steps=RUN_STEPS,
        ranks=job["ranks"],
        sequence_parallel=scenario.get("sequence_parallel", 1),
        device="cpu",
        threads=1,
        zero_stage=scenario["stage"],
        offload_optimizer=scenario.get("offload", False),
        logprob_chunk_tokens=8,
        gradient_checkpointing=scenario.get("checkpointing", False),
        optimizer=OptimizerConfig(**optimizer),
    )
    model = ModelConfig(
        path=job["model"],
        dtype=scenario.get("dtype", "float32"),
        lora=scenario.get("lora"),
        router_replay=scenario.get("experts", False),
    )
    trainer = DeepSpeedTrainer(
        model,
        learner,
        temperature=0.7,
        optimizer_steps=scenario.get("optimizer_steps", 1),
        device=choose_device(learner, job["rank"], auto="cpu"),
        rendezvous=Rendezvous(
            rank=job["rank"], ranks=job["ranks"], address=job["address"], port=scenario["port"], timeout_s=60
        ),
        reference=_reference_of(model, scenario.get("reference")),
        critic=CriticConfig(optimizer=OptimizerConfig(**optimizer)) if scenario.get("critic") else None,
    )
    assert isinstance(trainer, DeepSpeedTrainer)
    return trainer


def _reference_of(model: ModelConfig, wanted: bool | str | None) -> ModelConfig | None:
    """The policy's model, or that in the directory of a teacher."""
    return model.model_copy(update={"path": wanted}) if isinstance(wanted, str) else model if wanted else None


def parameters(trainer: DeepSpeedTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.tensors()}


def everything(trainer: DeepSpeedTrainer) -> dict[str, Tensor]:
    """The parameters of all models that the trainer has."""
    models = {"policy": trainer._policy.engine.module}
    if trainer._critic is not None:
        models["critic"] = trainer._critic.engine.module
    if trainer._reference is not None:
        models["reference"] = trainer._reference._policy
    return {
        f"{model}.{name}": tensor.detach().clone()
        for model in models
        for name, tensor in whole_parameters(models[model].named_parameters())
    }


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """The models of which a parameter differs."""
    return sorted(
        {name.split(".")[0] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    )


def gradient(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """The gradient that was applied: AdamW's first step with learning rate r and eps 1 subtracts
    u = r g / (|g| + 1), so g = u / (r - |u|)."""
    lr, most = scenario.get("lr", 1.0), scenario.get("max_grad_norm", 1e9)
    trainer = build(job, scenario, lr=lr, eps=1.0, max_grad_norm=most)
    items, images = sequences(), None
    if "experts" in scenario:
        items = [replace(item, experts=experts) for item, experts in zip(items, chosen(items), strict=True)]
    if scenario.get("kept"):
        items = with_kept(items)
    if "images" in scenario:
        items, images = with_pictures(items, job["model"]), images_of(job["model"], scenario["images"])
    mine = [microbatch([items[i] for i in members], CPU, images) for members in scenario["cut"][job["rank"]]]
    before = parameters(trainer)
    measured = trainer.measure(mine, scenario.get("measured", ()))
    result = trainer.step(mine, loss_over(tokens_of(items)))
    after = parameters(trainer)
    steps = {name: before[name].double() - after[name].double() for name in before}
    report = {
        "metrics": dict(result.metrics),
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "names": list(before),
        "measured": [{name: column_T.tolist() for name, column_T in one.items()} for one in measured],
    }
    if "export" in scenario:
        write = trainer.export()
        if trainer.rank == 0:
            write(Path(scenario["export"]))
    trainer.close()
    return {name: (u / (lr - u.abs())).contiguous() for name, u in steps.items()}, report


def accumulated(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """How much of the gradients that the optimizer got is lost in bfloat16: the median of this rank's.

    AdamW's first moment is a tenth of them after one step.
    """
    trainer = build(job, scenario, max_grad_norm=1e9)
    items = sequences()
    mine = [microbatch([items[i] for i in members], CPU) for members in scenario["cut"][job["rank"]]]
    trainer.step(mine, loss_over(tokens_of(items)))
    states = trainer._policy.engine.optimizer.optimizer.state.values()
    found = torch.cat([state["exp_avg"].flatten() for state in states]) * 10
    found = found[found != 0]
    trainer.close()
    return {}, float(((found - found.bfloat16().float()) / found).abs().median())


def stepped(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """The parameters after one step of `plain_loss`, which this rank's share of the sequences makes.

    Muon orthogonalizes in float32, so that what it is compared with does not depend on the order of sums.
    """
    if scenario["optimizer"]["kind"] == "muon":
        import deepspeed.runtime.zero.muon.original_muon as muon

        muon.ns_compute_dtype = lambda method: torch.float32
    trainer = build(job, scenario, **scenario["optimizer"])
    items = sequences()
    mine = microbatch(items[job["rank"] :: job["ranks"]], CPU)
    result = trainer.step([mine], loss_over(tokens_of(items)))
    found = parameters(trainer)
    trainer.close()
    return found, {"grad_norm": result.grad_norm, "lr": result.lr}


def nonfinite(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Good, bad, good: what is bad is bad on the last rank only."""
    trainer = build(job, scenario, lr=1e-2, warmup_steps=4)
    items = sequences()
    batches = [microbatch(items, CPU)] if job["rank"] == 0 else [microbatch(items[:3], CPU)]
    good = loss_over(100)

    def bad(batch: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossSums:
        sums = good(batch, logprobs_T, entropy_T)
        if job["rank"] != job["ranks"] - 1:
            return sums
        if scenario["bad"] == "gradient":  # finite value, infinite slope
            return LossSums(loss=sums.loss + ((logprobs_T - logprobs_T.detach()).abs() + 0.0).sqrt().sum())
        return LossSums(loss=sums.loss + float(scenario["bad"]))  # infinite value, finite slope

    reports, states = [], []
    for loss in (good, bad, good) if scenario["with_bad"] else (good, good):
        result = trainer.step(batches, loss)
        reports.append(
            {
                "skipped": result.metrics["skipped_steps"],
                "finite": math.isfinite(result.grad_norm),
                "lr": result.lr,
            }
        )
        states.append(parameters(trainer))
    trainer.close()
    return {
        f"{i}.{name}": tensor for i, state in enumerate(states) for name, tensor in state.items()
    }, reports


def two_steps(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Two steps of policy and critic on one batch, packed into `budget` tokens and dealt to the ranks.

    With eps 1 the step of AdamW is nearly proportional to the gradient, so it shows a wrong scale and hides
    rounding.
    """
    trainer = build(job, scenario, lr=0.1, eps=1.0, max_grad_norm=1e9)
    items = sequences(12)
    bins = deal(items, scenario["budget"], job["ranks"])[job["rank"]]
    mine = [microbatch([items[i] for i in members], CPU) for members in bins]
    norms = []
    for _ in range(2):
        norms.append(trainer.critic_step(mine, critic_loss_over(tokens_of(items))).grad_norm)
        norms.append(trainer.step(mine, loss_over(tokens_of(items))).grad_norm)
    result = everything(trainer)
    trainer.close()
    return result, {"norms": norms, "microbatches": len(mine)}


def critic(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Which models a step changes, one with a NaN on the last rank; how a critic learns a constant return."""
    trainer = build(job, scenario, lr=3e-3)
    items = sequences()
    batches = [microbatch(items[job["rank"] :: job["ranks"]], CPU), microbatch([], CPU)]
    total = tokens_of(items)
    state, moved = everything(trainer), {}

    def poisoned(batch: MicroBatch, values_T: Tensor) -> LossSums:
        return LossSums(loss=values_T.sum() * (math.nan if job["rank"] == job["ranks"] - 1 else 1.0))

    def learn() -> StepResult:
        return trainer.critic_step(batches, critic_loss_over(total, 0.7))

    results = []
    for name, step in {
        "step": lambda: trainer.step(batches, loss_over(total)),
        "bad": lambda: trainer.critic_step(batches, poisoned),
        "none": lambda: trainer.critic_step([], poisoned),
        "critic_step": learn,
    }.items():
        before = state
        results.append(step())
        state = everything(trainer)
        moved[name] = [results[-1].metrics["skipped_steps"], changed(before, state)]
    losses = [result.metrics["loss"] for result in (results[-1], *(learn() for _ in range(20)))]
    values = trainer.measure(batches, ["values_T"])
    report = {
        "moved": moved,
        "losses": losses,
        "columns": [sorted(part) for part in values],
        "with_gradient": values[0]["values_T"].requires_grad,
    }
    trainer.close()
    return {"values_T": values[0]["values_T"]}, report


def reference(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """A reference that follows the policy, by the trainer and beside it."""
    trainer = build(job, scenario, lr=1e-2)
    items = sequences()
    batches = [microbatch(items[job["rank"] :: job["ranks"]], CPU)]
    columns = ["logprobs_T", "reference_logprobs_T"]

    def apart() -> float:
        measured = trainer.measure(batches, columns)[0]
        return float((measured["logprobs_T"] - measured["reference_logprobs_T"]).abs().max())

    def models() -> tuple[dict[str, Tensor], ...]:
        state = everything(trainer)
        return tuple(
            {name.partition(".")[2]: state[name] for name in state if name.startswith(m)}
            for m in ("policy", "reference")
        )

    expected, far = models()[1], []
    for _ in range(4):
        trainer.step(batches, loss_over(50))
        far.append(apart())  # the forward pass before the update gathers what the update makes stale
        trainer.update_reference(0.6)
        policy = models()[0]
        expected = {name: 0.6 * expected[name] + 0.4 * policy[name] for name in expected}
    followed = apart()
    average = models()[1]
    trainer.update_reference(1.0)
    still = all(torch.equal(average[name], tensor) for name, tensor in models()[1].items())
    trainer.update_reference(0.0)
    policy, copy = models()
    report = {
        "far": far,
        "followed": followed,
        "still": still,
        "equal": all(torch.equal(policy[name], copy[name]) for name in policy),
        "apart": apart(),
        "error": max(float((average[name] - expected[name]).abs().max()) for name in expected),
        "span": max(float((average[name] - policy[name]).abs().max()) for name in expected),
    }
    trainer.close()
    return {"done": torch.zeros(1)}, report


def surface(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Everything but the step: values before and after one."""
    trainer = build(job, scenario, lr=scenario.get("lr", 1e-2))
    items = sequences()
    batches = (
        [microbatch(items[:4], CPU), microbatch([], CPU)]
        if job["rank"] == 0
        else [microbatch(items[4:5], CPU)] * 2
    )
    columns = ("logprobs_T", "reference_logprobs_T")
    before = trainer.measure(batches, columns)
    none = trainer.step([], loss_over(1))
    trainer.step(batches, loss_over(50))
    after = trainer.measure(batches, columns)
    _, score = trainer.score([[7, 2, 11], [3, 9, 4, 30, 12]])
    (plain,) = trainer.score_plainly([[3, 9, 4, 30, 12]])
    again = trainer.measure(batches, columns)
    sent = trainer.broadcast(b"bytes \x00 of rank 0" * 1000 if job["rank"] == 0 else None)
    empty = trainer.broadcast(b"" if job["rank"] == 0 else None)
    report = {
        "score": score,
        "plain": plain,
        "as_before": all(
            torch.equal(one[name], other[name])
            for one, other in zip(after, again, strict=True)
            for name in columns
        ),
        "broadcast": [sent == b"bytes \x00 of rank 0" * 1000, empty == b""],
        "empty": before[1]["logprobs_T"].numel() if job["rank"] == 0 else 0,
        "none": [none.metrics["skipped_steps"], none.grad_norm],
        "dtype": sorted({str(tensor.dtype) for _, tensor in trainer.tensors()}),
        "specs": [(spec.name, f"torch.{spec.dtype}", spec.shape) for spec in trainer.specs()]
        == [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in trainer.tensors()],
        "logprob_dtype": str(before[0]["logprobs_T"].dtype),
        "with_gradient": any(column.requires_grad for part in before for column in part.values()),
    }
    trainer.close()
    return {
        "before": before[0]["logprobs_T"],
        "reference": before[0]["reference_logprobs_T"],
        "after": after[0]["logprobs_T"],
        "still": after[0]["reference_logprobs_T"],
    }, report


def train(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Steps that depend on all random generators; loads before and saves after where the scenario says so."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(17 + job["rank"])
    np.random.normal(), random.gauss(0, 1)  # leaves a cached second value in either state
    trainer = build(job, scenario, **RATES | {"weight_decay": 0.1} | scenario.get("optimizer", {}))
    store = CheckpointStore(Path(scenario["store"]), KEY, 2) if "store" in scenario else None
    start, stop = scenario["steps"]
    state = store.load(trainer) if store and start else None
    items = sequences()
    losses, rates = [], []
    for step in range(start, stop):
        noise = torch.rand(()).item() + np.random.normal() + random.gauss(0, 1)
        members = [items[(step + job["rank"] + i) % len(items)] for i in range(3)]
        plain = loss_over(60)

        def loss(
            batch: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor, noise: float = noise, plain: Any = plain
        ) -> LossSums:
            sums = plain(batch, logprobs_T, entropy_T)
            return LossSums(loss=sums.loss * noise, metrics=sums.metrics)

        batches = [microbatch(members[:2], CPU), microbatch(members[2:], CPU)]
        results = [trainer.step(batches, loss)]
        if scenario.get("critic"):
            results.append(trainer.critic_step(batches, critic_loss_over(60)))
        losses += [result.metrics["loss"] for result in results]
        rates += [result.lr for result in results]
        if scenario.get("reference") and (decay := scenario.get("decay", 0.9)):
            trainer.update_reference(decay)
    if store and not start:
        save_whole(store, stop, trainer, {"version": stop, "ledger": [1, 2]})
    result = everything(trainer)
    models = [model for model in (trainer._policy, trainer._critic) if model is not None]
    optimizers = [model.engine.optimizer for model in models]
    numbers = [
        {name: one.param_groups[0][name] for name in ("lr", "initial_lr", "eps", "weight_decay")}
        | {"clip_grad": getattr(one, "clip_grad", None)}
        for one in optimizers
    ]
    trainer.close()
    return result, {"losses": losses, "rates": rates, "state": state, "numbers": numbers}


def groups(number: int = 4, seed: int = 5) -> list[Group]:
    """Pairs of responses, some with tool tokens, some cut off, all of several versions up to 5."""
    rng = np.random.default_rng(seed)

    def rollout() -> Rollout:
        prompt, response = int(rng.integers(1, 8)), int(rng.integers(2, 30))
        old = int(rng.integers(1, response))
        mask = rng.random(response) < 0.8
        return Rollout(
            prompt_ids=rng.integers(2, 40, prompt, dtype=np.int32),
            response_ids=rng.integers(2, 40, response, dtype=np.int32),
            action_mask=mask,
            behaviour_logprobs=np.where(mask, rng.normal(-3.7, 0.3, response), 0).astype(np.float32),
            version_spans=(VersionSpan(int(rng.integers(1, 4)), old), VersionSpan(5, response - old)),
            finish_reason="stop" if rng.random() < 0.7 else "length",
            reward=float(rng.normal()),
        )

    return [
        Group(ticket_id=i, rollouts=(rollout(), rollout()), generator_id="g", finished_version=5)
        for i in range(number)
    ]


def recipes(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """A step of a recipe for each of `scenario["algorithms"]`: measured columns, plan, critic, policy,
    reference. Loads before and saves after where the scenario says so."""
    trainer = build(job, scenario, lr=0.01, eps=1.0, max_grad_norm=1e9)
    results, measured = [], {}
    if "load" in scenario:
        CheckpointStore(Path(scenario["load"]), KEY, 2).load(trainer)
    for number, algorithm in enumerate(scenario["algorithms"], start=scenario.get("first", 0)):
        settings = PlanSettings(
            max_lag=2,
            mask_stale=True,
            mask_truncated=True,
            minibatches=2,
            tokens_per_microbatch=scenario["budget"],
            share=trainer.share,
            shares=trainer.shares,
            device=CPU,
        )
        recipe = make_recipe(
            AlgorithmConfig.model_validate(algorithm),
            BatchConfig(groups=4, group_size=2, minibatches=2),
            CriticConfig(),
            settings,
            max_response_tokens=30,
            reward_parts=(),
        )
        batch = groups(seed=number)
        samples = recipe.planner.assemble(batch, 5)
        columns = recipe.planner.measure(trainer, samples)
        measured |= {f"measured.{number}.{name}": column for name, column in columns.items()}
        plan = recipe.planner.plan(batch, samples, columns, recipe.coefficients.kl)
        results += recipe.critic.train(trainer, plan) if recipe.critic else ()
        results += recipe.train_policy(trainer, plan, 5)
    if "save" in scenario:
        CheckpointStore(Path(scenario["save"]), KEY, 2).save(1, trainer, {"version": 1})
    report = {
        "steps": [dict(result.metrics) | {"norm": result.grad_norm} for result in results],
        "score": trainer.score([[7, 2, 11], [3, 9, 4, 30, 12]])[1],
        "plain": trainer.score_plainly([[3, 9, 4, 30, 12]])[0],
        "flops": sum(one.flops or 0 for one in trainer.usage()),
    }
    state = everything(trainer)
    trainer.close()
    return measured | state, report


def full_disk(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Save while files of the last rank may not exceed some size, as on a full disk; then with room again."""
    trainer = build(job, scenario, lr=1e-2)
    store = CheckpointStore(Path(scenario["store"]), KEY, 2)
    store.save(1, trainer, {"version": 1})
    errors = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in scenario["limits"]:
        trainer.step([microbatch(sequences(), CPU)], loss_over(60))
        if job["rank"] == job["ranks"] - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            store.save(2, trainer, {"version": 2})
        except CheckpointError as error:
            errors.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert store.latest() == Path(scenario["store"]) / "step-000001"
    store.save(2, trainer, {"version": 2})
    expected = everything(trainer)
    assert store.load(trainer) == {"version": 2}
    assert all(torch.equal(expected[name], tensor) for name, tensor in everything(trainer).items())
    trainer.close()
    return {"done": torch.zeros(1)}, errors


def checkpoint(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """One step, a checkpoint of it, what it publishes, and the score of a sequence before and after."""
    trainer = build(job, scenario, lr=1e-2)
    scores = [trainer.score([scenario["ids"]])[0]]
    mine = [microbatch(sequences()[trainer.share :: trainer.shares], CPU)]
    trainer.step(mine, loss_over(60))
    scores.append(trainer.score([scenario["ids"]])[0])
    save_whole(CheckpointStore(Path(scenario["store"]), KEY, 2), 1, trainer, {"version": 1})
    published = parameters(trainer)
    trainer.close()
    return published, scores


class Held(TorchDispatchMode):
    """The bytes of tensors that torch has allocated within, now and at most; mapped files do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_storage(one)._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(result):
            if not isinstance(one, Tensor) or one.is_meta or (storage := _storage(one))._cdata in known:
                continue
            known.add(storage._cdata)
            self._hold(storage.nbytes())
            weakref.finalize(storage, self._hold, -storage.nbytes())
        return result

    def _hold(self, size_bytes: int) -> None:
        self.now += size_bytes
        self.peak = max(self.peak, self.now)


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


def loading(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """A model that the ranks load in parts; the bytes that each rank holds of it then, and held at most."""
    ranks = Ranks(Rendezvous(rank=job["rank"], ranks=job["ranks"], port=scenario["port"], timeout_s=60), CPU)
    join_deepspeed(job["rank"])
    with Held() as held:
        config = ModelConfig(path=job["model"], dtype=scenario["dtype"])
        model = load_in_shards(config, CPU, ranks)
        kept = held.now
    tensors = {
        name: parameter.detach().clone() for name, parameter in whole_parameters(model.named_parameters())
    }
    tensors |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    report = {"bytes": [json.loads(one) for one in ranks.gather(json.dumps([kept, held.peak]).encode())]}
    deepspeed.comm.destroy_process_group()
    return tensors, report


def misfit(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """What each rank raises, in rank order, of a model whose tensors have other shapes than its config."""
    ranks = Ranks(Rendezvous(rank=job["rank"], ranks=job["ranks"], port=scenario["port"], timeout_s=60), CPU)
    join_deepspeed(job["rank"])
    errors = []
    config = ModelConfig(path=job["model"], dtype="float32")
    for load in (partial(load_in_shards, config, CPU, ranks), partial(load_model, config, CPU)):
        try:
            load()
        except DataError as error:
            errors.append(str(error))
    report = [json.loads(one) for one in ranks.gather(json.dumps(errors).encode())]
    deepspeed.comm.destroy_process_group()
    return {"done": torch.zeros(1)}, report


def memory(job: dict[str, Any], scenario: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Bytes that a rank holds between the steps of policy and critic and at their peak, and those of `plan`."""
    items = sequences(2)
    batches, has_critic = [microbatch(items, CPU)] * 3, scenario.get("critic", False)
    optimizer = {"lr": 1e-3} | scenario.get("optimizer", {})
    with Held() as held:
        trainer = build(job, scenario, **optimizer)
        for _ in range(2):
            held.peak = held.now
            trainer.step(batches, loss_over(10))
            if has_critic:
                trainer.critic_step(batches, critic_loss_over(10))
        resting = held.now
    model = ModelConfig(path=job["model"], dtype=scenario["dtype"], lora=scenario.get("lora"))
    learner = LearnerConfig(
        ranks=job["ranks"], zero_stage=scenario["stage"], tokens_per_microbatch=len(batches[0].input_ids_N)
    )
    chosen = {"logprob_chunk_tokens": 8, "optimizer": OptimizerConfig(**optimizer)}
    learner = learner.model_copy(update=chosen)
    shape = read_trained_shape(model, learner) if model.lora else read_model(model)[1]
    rank = Rank(shape, model, learner)
    parts = rank.parts(
        reference=None if has_critic or shape.adapter else shape,
        critic=learner.optimizer if has_critic else None,
    )
    planned = {part.name: part.size_bytes for part in parts}
    trainer.close()
    report = {"peak": held.peak, "resting": resting, "plan": planned}
    return {"done": torch.zeros(1)}, report | {"policy": rank.resting(learner.optimizer)}


def enter(network: str) -> None:
    """Move this process into a network, whose file is given."""
    with open(network) as file:
        assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0


def work(job: dict[str, Any], log: Path) -> None:
    """Run the scenarios of `job`; the output goes to `log`."""
    die_with_parent(os.getppid())
    with log.open("w") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    torch.set_num_threads(1)
    if "network" in job:
        enter(job["network"])
    for scenario in job["scenarios"]:
        tensors, report = globals()[scenario["run"]](job, scenario)
        if job["rank"] == 0:
            save_file(tensors, Path(job["out"]) / f"{scenario['name']}.safetensors")
            (Path(job["out"]) / f"{scenario['name']}.json").write_text(json.dumps(report))
