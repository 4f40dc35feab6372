"""Derived quantities and rules between keys."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from asyncrl.algo.ranges import MOST_SEQUENCES
from asyncrl.columns import COLUMNS, EXPERTS, KEPT_COUNTS, KEPT_IDS, TEACHER, of_token
from asyncrl.config import registry, rules
from asyncrl.config.addresses import is_everywhere, is_loopback
from asyncrl.config.algorithm_rules import GROUP_ADVANTAGES
from asyncrl.config.base import Part
from asyncrl.config.document import keys_of
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.outline import all_paths, default_name, kind_at, schema_at
from asyncrl.config.resolved import SHARED
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.launch.own_store import require_password


def config(**parts: Any) -> Config:
    base: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {"path": "m"},
        "data": {"train": "t"},
        "reward": {"functions": [{"function": "exact_match"}]},
    }
    return Config.model_validate(base | parts)


@pytest.mark.parametrize(
    ("groups", "lag", "window", "expected_window", "bound"),
    [
        (32, 4, None, 48, 4 + 2),  # floor(0.3 * 5 * 32) = 48; ceil(47 / 32) = 2
        (32, 4, 1, 1, 4),  # strict order: exactly L
        (32, 0, None, 1, 0),  # on-policy: nobody overtakes
        (32, 0, 9, 9, 1),
        (1, 1, None, 1, 1),  # never below 1
        (4, 2, 9, 9, 2 + 2),
        (30, 2, None, 27, 2 + 1),  # 0.3 * 3 * 30 is less than 27 in floating point
    ],
)
def test_window_and_lag_bound_follow_their_formulas(
    groups: int, lag: int, window: int | None, expected_window: int, bound: int
) -> None:
    made = config(batch={"groups": groups}, staleness={"max_lag": lag, "window_groups": window})
    assert made.window_groups == expected_window
    assert made.lag_bound == bound


def test_all_broken_rules_between_parts_are_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        config(
            batch={"group_size": 1},
            eval={"samples": 2},
            data={"train": "t", "system": "s"},
            learner={"tokens_per_microbatch": 9},
        )
    text = str(caught.value)
    assert all(
        key in text
        for key in ("batch.group_size", "eval.samples", "data.system", "learner.tokens_per_microbatch")
    )


JUDGE = {"url": "http://h:1/v1", "model": "m", "prompt": "a"}
REPEATED = JUDGE | {"pattern": "(a{4294967296})"}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"control": {"heartbeat_s": 10}}, "use timeout_s >= 30 or a shorter heartbeat"),
        (
            {"control": {"bind": "tcp://10.0.0.1:5555"}, "weights": {"transport": "disk"}},
            "weights.transport is disk, but control.bind is tcp://10.0.0.1:5555",
        ),
        ({"telemetry": {"prometheus_port": 65534}}, "allowed is <= 65533, or 0 for any free ports"),
        (
            {"learner": {"steps": 2**53 + 1}},
            "learner.steps is 9007199254740993; allowed is at most 9007199254740992",
        ),
        (
            {"control": {"bind": "tcp://10.0.0.1:65536"}},
            "names port 65536; allowed is 1 to 65535",
        ),
        ({"control": {"bind": "tcp://[::1:5555"}}, "Invalid IPv6 URL"),
        ({"store": {"bind": "tcp://10.0.0.1:0"}}, "names port 0; allowed is 1 to 65535"),
        ({"sampling": {"temperature": 0.001}}, "greater than or equal to 0.01"),
        ({"sampling": {"stop": ["END", ""]}}, "sampling.stop holds an empty text"),
        ({"reward": {"functions": [{"function": "exact_match", "name": "n" * 65}]}}, "should match pattern"),
        (
            {"reward": {"functions": [{"function": "llm_judge", "params": REPEATED}]}},
            "it is not a regular expression: the repetition number is too large",
        ),
    ],
)
def test_what_no_run_can_live_with_is_refused(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        config(**parts)


def test_a_store_that_cannot_hold_what_is_open_is_refused_with_the_arithmetic() -> None:
    parts: dict[str, Any] = {
        "batch": {"groups": 64, "group_size": 8},
        "sampling": {"max_prompt_tokens": 1024, "max_response_tokens": 7168},
        "staleness": {"max_lag": 3},
        "checkpoint": {"every": 25, "keep": 2},
        "learner": {"steps": 1000, "tokens_per_microbatch": 8192},
    }
    group_bytes = 8192 + 8 * (768 + 4 * 1024 + 9 * 7168)
    needed_gib = (3 + 1 + 2 * 25) * 64 * group_bytes / 2**30
    assert 1.8 < needed_gib < 1.9
    assert config(**parts, store={"max_gib": needed_gib + 0.001})
    with pytest.raises(ValidationError) as caught:
        config(**parts, store={"max_gib": needed_gib - 0.001})
    text = str(caught.value)
    assert all(
        part in text
        for part in ("3456 groups", "of up to 0.537 MiB", "50 that the oldest", "set store.max_gib: 2")
    )
    parts["learner"]["steps"] = 10  # a short run never holds more than all of its steps
    assert config(**parts, store={"max_gib": 0.5})


def test_the_bytes_of_a_token_in_the_store_are_the_columns_of_its_axis() -> None:
    def of(axis: str, *recorded: str) -> int:
        return sum(
            np.dtype(column.dtype).itemsize
            for name, column in COLUMNS.items()
            if column.axes == (axis,) and (name in recorded or not column.optional)
        )

    assert of("prompt_tokens") == rules.PROMPT_TOKEN_BYTES
    assert of("response_tokens") == rules.RESPONSE_TOKEN_BYTES
    assert of("response_tokens", TEACHER) == rules.RESPONSE_TOKEN_BYTES + rules.TEACHER_TOKEN_BYTES
    kept = {KEPT_COUNTS, KEPT_IDS}
    assert {np.dtype(COLUMNS[name].dtype).itemsize for name in kept} == {rules.KEPT_ID_BYTES}
    rest = {name for name in COLUMNS if of_token(name)} - {TEACHER, EXPERTS, *kept}
    assert not rest, f"{rest} of a token take room in the store, which config/rules.py does not count"


def test_a_store_without_room_for_the_columns_of_a_teacher_is_refused() -> None:
    parts: dict[str, Any] = {
        "batch": {"groups": 64, "group_size": 8},
        "sampling": {"max_prompt_tokens": 1024, "max_response_tokens": 7168},
        "learner": {"steps": 10, "tokens_per_microbatch": 8192},
        "store": {"max_gib": 0.6},
    }
    assert config(**parts)
    teacher = {"reference": {"path": "large", "scorers": 1}, "kl": {"coefficient": 0.1}}
    with pytest.raises(ValidationError, match=r"store.max_gib is 0.6, but 960 groups of up to 0.756 MiB"):
        config(**parts, algorithm=teacher)


def test_each_shard_gives_a_whole_share_of_every_step_and_of_the_window() -> None:
    made = config(batch={"groups": 8}, staleness={"max_lag": 2}, store={"shards": 4})
    assert made.window_groups == 4, "0.3 * 3 * 8 = 7.2, and a whole number per shard"
    assert made.lag_bound == 2, "a shard's window of 1 is strict order"
    assert config(batch={"groups": 8}, staleness={"max_lag": 0}, store={"shards": 8}).window_groups == 8
    made = config(batch={"groups": 8}, staleness={"max_lag": 2, "window_groups": 20}, store={"shards": 4})
    assert made.lag_bound == 2 + 2, "ceil((20 - 4) / 8)"
    with pytest.raises(ValidationError) as caught:
        config(batch={"groups": 6}, staleness={"window_groups": 7}, store={"shards": 4})
    text = str(caught.value)
    assert "store.shards is 4, which does not divide batch.groups (6)" in text
    assert "store.shards is 4, which does not divide staleness.window_groups (7)" in text


def algorithm(**parts: Any) -> dict[str, Any]:
    return {"algorithm": parts}


def rates(**optimizer: Any) -> dict[str, Any]:
    return {"learner": {"optimizer": optimizer}}


def optimized(kind: str, stage: int, dtype: str = "bfloat16") -> dict[str, Any]:
    learner = {"optimizer": {"kind": kind}, "zero_stage": stage}
    return {"model": {"path": "m", "dtype": dtype}, "learner": learner}


def best_of(steps: int, *, saved: int, evaluated: int) -> dict[str, Any]:
    checkpoint = {"best": "eval/accuracy", "every": saved, "keep": 2}
    parts = {"checkpoint": checkpoint, "eval": {"every": evaluated}, "learner": {"steps": steps}}
    return parts | {"data": {"train": "t", "eval": "e"}}


SEVERAL = {"batch": {"minibatches": 4}}
FRESH = {"staleness": {"max_lag": 0}}
BYPASS = {"proximal": "behaviour", "correction": "none"}
ON_HOSTS = {"cluster": {"kind": "ray"}, "generator": {"count": 1}}
LORA = {"model": {"path": "m", "lora": {}}}
BITS = {"model": {"path": "m", "lora": {"load_in_4bit": True}}}
ON_TRANSFORMERS = {"generator": {"engine": "transformers"}}
KL = {"coefficient": 0.1}
DPO = {
    "advantage": "dpo_pairs",
    "policy_loss": "reinforce",
    "correction": "none",
    "aggregation": "seq-mean-token-sum",
}
TWO_REWARDS = {
    "data": {
        "train": [
            {"path": "a", "reward": [{"function": "format", "weight": 2}]},
            {"path": "b", "reward": [{"function": "exact_match"}]},
        ]
    }
}
WHOLE = "but advantage `dpo_pairs` is the gradient of a loss on whole episodes, at the weights before a step"
RULES: list[tuple[dict[str, Any], str | None]] = [
    *(
        (algorithm(**{**DPO, "advantage": name}, proximal=proximal), None)
        for name in sorted(registry.ON_PAIRS)
        for proximal in ("recompute", "behaviour")
    ),
    (
        algorithm(**{**DPO, "policy_loss": "ppo_clip"}),
        f"algorithm.policy_loss is ppo_clip, {WHOLE}; set it to reinforce",
    ),
    (
        algorithm(**{**DPO, "aggregation": "token-mean"}),
        f"algorithm.aggregation is token-mean, {WHOLE}; set it to seq-mean-token-sum",
    ),
    (
        algorithm(**{**DPO, "correction": "truncate"}),
        f"algorithm.correction is truncate, {WHOLE}; set it to none",
    ),
    (
        algorithm(**DPO, rejections=[{"name": "veto"}]),
        f"algorithm.rejections is [veto], {WHOLE}; set it to []",
    ),
    (
        algorithm(**DPO, mask_truncated=True),
        f"algorithm.mask_truncated is true, {WHOLE}; set it to false",
    ),
    (
        algorithm(**DPO) | {"staleness": {"policy": "mask"}},
        f"staleness.policy is mask, {WHOLE}; set it to correct_only",
    ),
    (algorithm(**DPO) | {"staleness": {"policy": "drop"}}, None),
    (algorithm(**DPO) | SEVERAL, f"batch.minibatches is 4, {WHOLE}; set it to 1"),
    (algorithm(**DPO) | {"batch": {"epochs": 2}}, f"batch.epochs is 2, {WHOLE}; set it to 1"),
    (algorithm(**{**DPO, "policy_loss": "mine:f"}), None),
    (algorithm(**DPO, kl={"coefficient": 0.1}, entropy={"coefficient": 0.01}), None),
    (
        algorithm(**DPO, kl={"coefficient": 0.1, "placement": "reward", "estimator": "k1"}),
        "algorithm.kl.placement is reward, but advantage `dpo_pairs` has its own use of the reference",
    ),
    (
        algorithm(advantage="distill", kl={"coefficient": 0.1, "placement": "reward", "estimator": "k1"}),
        "set placement: loss, or coefficient: 0",
    ),
    (algorithm(**DPO, kl={"reference_decay": 0.9}), None),
    (algorithm(advantage="mine:f", kl={"reference_decay": 0.9}), None),
    (
        algorithm(**{**DPO, "advantage": "best_of_n"}, kl={"reference_decay": 0.9}),
        "there is no reference model",
    ),
    (
        {"batch": {"group_size": 1}} | algorithm(**{**DPO, "advantage": "kto"}),
        "compares rollouts of one group",
    ),
    (
        {"batch": {"group_size": 1}} | algorithm(**{**DPO, "advantage": {"name": "kto", "threshold": 0.5}}),
        None,
    ),
    ({"batch": {"group_size": 1}} | algorithm(advantage="distill"), None),
    (algorithm(advantage="distill", reference={"path": "t"}), None),
    (algorithm(kl={"coefficient": 0.1}, reference={"path": "t"}), None),
    (algorithm(advantage="mine:f", reference={"path": "t"}), None),
    (
        algorithm(reference={"path": "t"}),
        "neither algorithm.kl nor advantage `grpo` uses a reference; drop it, set kl.coefficient",
    ),
    (
        algorithm(advantage="distill", reference={"path": "t"}, kl={"reference_decay": 0.9}),
        "would mix the policy's weights into it; drop one of them",
    ),
    (algorithm(advantage="distill", reference={"template": "{answer}", "scorers": 1}), None),
    (
        algorithm(advantage="distill", reference={"scorers": 1}),
        "algorithm.reference has no path, so it is model.path, and reads what the policy reads; set path, or",
    ),
    (
        algorithm(advantage="distill", reference={"template": "{answer}", "scorers": 1})
        | {"model": {"path": "m", "lora": {"start": "sft"}}},
        "so the teacher is model.path without model.lora.start, and would draw the policy back to it",
    ),
    (
        algorithm(advantage="distill", reference={"path": "t", "template": "{answer}"}),
        "algorithm.reference.template is set, but algorithm.reference.scorers is 0",
    ),
    (
        {"environment": {"uses": "game.py:Game"}}
        | algorithm(advantage="distill", reference={"template": "{answer}", "scorers": 1}),
        "algorithm.reference.template stands in place of the prompt of a row, and episodes have many",
    ),
    (
        {"batch": {"group_size": 1}} | algorithm(advantage={"name": "distill", "reward": 1.0}),
        "compares rollouts of one group",
    ),
    (
        {"weights": {"transport": "slot"}, "control": {"bind": "tcp://10.0.0.1:5555"}},
        "weights.transport is slot, but control.bind is tcp://10.0.0.1:5555",
    ),
    ({"weights": {"transport": "slot"}}, None),
    *(
        ({"weights": {"transport": how}} | ON_HOSTS, f"weights.transport is {how}, but cluster.kind is ray")
        for how in ("slot", "disk")
    ),
    ({"weights": {"transport": "tcp"}} | ON_HOSTS, None),
    (
        algorithm(advantage="distill", reference={"path": "t", "scorers": 1}) | ON_HOSTS,
        None,
    ),
    (
        {
            "reward": {"functions": [{"function": "model_score", "params": {"scorer": "rm"}}]},
            "scorers": {"rm": {"model": "r"}},
        }
        | ON_HOSTS,
        None,
    ),
    (ON_HOSTS | {"store": {"url": "redis://localhost:1"}}, "store.url is redis://localhost:1, which only"),
    (
        ON_HOSTS | {"control": {"bind": "tcp://127.0.0.1:5555"}},
        "which only this host reaches, but cluster.kind is ray; drop control.bind",
    ),
    (ON_HOSTS | {"control": {"bind": "auto"}, "store": {"bind": "tcp://auto:1"}}, None),
    # (parts, what must be said; None: allowed)
    ({"batch": {"group_size": 1}, **algorithm(advantage="gdpo")}, "compares rollouts of one group"),
    (
        {"batch": {"group_size": 1}, **algorithm(advantage="optimal_token_baseline")},
        "compares rollouts of one group",
    ),
    ({"batch": {"group_size": 1}, **algorithm(advantage="gae")}, None),
    ({"batch": {"group_size": 1}, **algorithm(advantage="remax")}, None),
    ({"batch": {"group_size": 1}, **algorithm(advantage="spo")}, None),
    (algorithm(advantage="spo", filters=["mine:f"]), None),
    (
        algorithm(advantage="spo", filters=["zero_variance"]),
        "algorithm.filters is zero_variance, but advantage `spo` learns from equal rewards too",
    ),
    (
        algorithm(advantage="spo") | {"data": {"train": "t", "curriculum": {"floor": 0.1}}},
        "data.curriculum.floor is 0.1, but advantage `spo` needs the row of a ticket",
    ),
    (algorithm(proximal="behaviour"), "every weight would be 1; set correction: none"),
    (algorithm(proximal="behaviour", correction="mine:f"), "set correction: none"),
    (algorithm(proximal="behaviour") | FRESH, "set correction: none"),
    (algorithm(**BYPASS), None),
    (
        algorithm(**BYPASS, policy_loss="reinforce"),
        "has no ratio: nothing corrects tokens of older policies (staleness.max_lag is 4)",
    ),
    (algorithm(**BYPASS, policy_loss="gpg"), "has no ratio"),
    (algorithm(**BYPASS, policy_loss="reinforce") | FRESH, None),
    (algorithm(**BYPASS, policy_loss="truncated_reinforce"), None),
    (algorithm(**BYPASS, policy_loss="mine:f"), None),
    (algorithm(correction="none"), "leaves the age of tokens (staleness.max_lag is 4)"),
    (algorithm(correction="none", policy_loss="reinforce"), "set correction: truncate"),
    (
        algorithm(correction="none", proximal="log_linear") | SEVERAL,
        "algorithm.proximal is log_linear, whose loss leaves",
    ),
    (algorithm(correction="none") | FRESH, None),
    (algorithm(correction="none", policy_loss="mine:f"), None),
    (
        algorithm(rejections=["truncate"]),
        "has `truncate`, which rejects nothing; take mask, reject, veto or m2po",
    ),
    (algorithm(rejections=[{"name": "reject", "high": 1.0}]), "algorithm.rejections.0.high is 1.0"),
    (algorithm(rejections=["veto", {"name": "reject", "high": 1.01, "level": "geometric"}]), None),
    *[
        (
            algorithm(rejections=[{"name": name, key: value} | ({"high": 2.0} if name == "reject" else {})]),
            f"algorithm.rejections has `{name}` with {key}, but only algorithm.correction",
        )
        for name, key, value in [
            ("mask", "normalise", True),
            ("reject", "weights", "sequence"),
            ("veto", "cap", 0.5),
            ("m2po", "cap", 7.0),
        ]
    ],
    (algorithm(rejections=[{"name": "mine:f", "cap": 2.0}]), None),
    (algorithm(**BYPASS, rejections=["veto"]), "algorithm.rejections compare proximal and behaviour policy"),
    (algorithm(correction={"name": "truncate", "normalise": True}), None),
    (
        algorithm(correction={"name": "truncate", "normalise": True}, proximal="log_linear") | SEVERAL,
        "algorithm.correction `truncate` needs the weights of the whole step before it",
    ),
    (algorithm(rejections=["m2po"]), None),
    (
        algorithm(rejections=["m2po"], proximal="log_linear") | SEVERAL,
        "algorithm.rejections.0 `m2po` needs the weights of the whole step before it",
    ),
    *[
        (
            algorithm(correction={"name": name, key: 1.0}),
            f"algorithm.correction.{key} is 1.0, but the ratio of a fresh token is 1",
        )
        for name, key in [("mask", "low"), ("mask", "high"), ("veto", "low"), ("veto", "high")]
    ],
    *[
        (
            algorithm(correction={"name": name, **more, key: bound}),
            f"algorithm.correction.{key} is {bound}, but the ratio of a fresh token is 1, so `{name}` would",
        )
        for name, more, key, bound in [
            ("truncate", {}, "cap", 0.5),
            ("truncate", {}, "floor", 1.5),
            ("reject", {"high": 2.0}, "cap", 0.5),
            ("reject", {"high": 0.1, "divergence": "tv"}, "cap", 0.5),
            ("veto", {}, "cap", 0.99),
        ]
    ],
    (algorithm(correction={"name": "truncate", "cap": 1.0, "floor": 1.0}), None),
    (algorithm(correction={"name": "reject", "high": 1.0, "divergence": "k3"}), None),
    (algorithm(correction={"name": "reject", "high": 1.0}), "set it above 1"),
    (algorithm(proximal="log_linear"), "costs no forward pass; set proximal: recompute"),
    (algorithm(proximal="log_linear") | SEVERAL | FRESH, "is the behaviour policy itself"),
    (algorithm(proximal="log_linear") | SEVERAL, None),
    (algorithm(proximal="log_linear") | {"batch": {"epochs": 2}}, None),
    (
        algorithm(kl={"placement": "reward"}),
        "algorithm.kl.placement is reward, but algorithm.kl.coefficient is 0",
    ),
    (algorithm(kl={"target": 0.1}), "algorithm.kl.target is 0.1, but algorithm.kl.coefficient is 0"),
    (
        algorithm(kl={"reference_decay": 0.9}),
        "algorithm.kl.reference_decay is 0.9, but algorithm.kl.coefficient is 0",
    ),
    (algorithm(kl=KL | {"horizon": 5}), "without algorithm.kl.target the coefficient stays as it is"),
    (algorithm(entropy={"step": 0.1}), "algorithm.entropy.step is 0.1, but without algorithm.entropy.target"),
    (algorithm(entropy={"maximum": 2.0}), "set algorithm.entropy.target, or drop it"),
    (algorithm(kl=KL | {"horizon": 5, "target": 0.1, "reference_decay": 0.9}), None),
    (algorithm(kl=KL | {"estimator": "k1"}), "zero on average; allowed there are k2, k3"),
    (algorithm(kl={"estimator": "k1"}), "algorithm.kl.estimator is k1, but algorithm.kl.coefficient is 0"),
    (algorithm(kl=KL | {"estimator": "k1", "bias_corrected": True}), None),
    (
        algorithm(kl={"bias_corrected": True}),
        "algorithm.kl.bias_corrected is True, but algorithm.kl.coefficient is 0",
    ),
    (algorithm(kl=KL | {"bias_corrected": True, "placement": "reward"}), "where the KL has no gradient"),
    (algorithm(kl=KL | {"bias_corrected": True, "estimator": "k3+"}), None),
    (algorithm(kl=KL | {"placement": "reward", "estimator": "abs+"}), "set abs"),
    *[(algorithm(kl=KL | {"estimator": name}), None) for name in ("k2", "k3", "abs", "k1+", "k3+")],
    (
        algorithm(kl=KL | {"estimator": "k3+", "placement": "reward"}),
        "the reward uses the value only; set k3",
    ),
    (
        algorithm(kl=KL | {"estimator": "k1+", "placement": "reward"}),
        "the reward uses the value only; set k1",
    ),
    *[
        (algorithm(kl=KL | {"estimator": name, "placement": "reward"}), None)
        for name in ("k1", "k2", "k3", "abs")
    ],
    (algorithm(entropy={"target": 0.5, "coefficient": 2.0}), "allowed is 0 to 1.0 (maximum)"),
    (algorithm(entropy={"target": 0.5, "coefficient": -0.1}), "allowed is 0 to 1.0 (maximum)"),
    (algorithm(entropy={"target": 0.5, "coefficient": 0.1, "maximum": 0.1, "step": 0.01}), None),
    (algorithm(entropy={"coefficient": -0.1}), None),
    ({"critic": {"clip": None}}, "advantage `grpo` needs no values"),
    ({"critic": {"warmup_steps": 1}, **algorithm(advantage="mine:f")}, None),
    ({"critic": {"clip": 0.2, "warmup_steps": 99}, **algorithm(advantage="gae")}, None),
    ({"critic": {"warmup_steps": 100}, **algorithm(advantage="gae")}, "the policy would never learn"),
    ({"learner": {"offload_optimizer": True, "zero_stage": 2}}, "for all later steps; set it to 3"),
    ({"learner": {"offload_optimizer": True, "zero_stage": 3, "device": "cpu"}}, "in host memory; drop it"),
    ({"learner": {"offload_optimizer": True, "zero_stage": 3}}, None),
    (LORA | algorithm(kl=KL), None),
    (
        LORA | algorithm(kl=KL | {"reference_decay": 0.9}),
        "the policy as it began, which does not move",
    ),
    (LORA | algorithm(advantage="gae"), "whose critic would train all its weights"),
    ({"model": {"path": "m", "lora": {"sync": "merged", "start": "a"}}}, "set sync: adapter, or merge"),
    (BITS, None),
    (BITS | ON_TRANSFORMERS | {"model": {**BITS["model"], "dtype": "float32"}}, None),
    (
        {"model": {"path": "m", "lora": {"load_in_4bit": True, "sync": "merged"}}},
        "model.lora.sync is merged, which sends whole weights; set sync: adapter",
    ),
    (BITS | {"learner": {"zero_stage": 3}}, "learner.zero_stage is 3, which cannot cut them; set at most 2"),
    (
        BITS | {"generator": {"vllm": {"quantization": "fp8"}}},
        "generator.vllm has quantization: fp8, another",
    ),
    (BITS | {"generator": {"vllm": {"quantization": "bitsandbytes"}}}, None),
    (BITS | {"model": {**BITS["model"], "dtype": "float32"}}, "computes with such weights in bfloat16"),
    (
        rates(schedule_arguments={"power": 2}),
        "schedule_arguments has power, but learner.optimizer.schedule is",
    ),
    (rates(schedule="linear", warmup_steps=99), None),
    (rates(schedule="linear", warmup_steps=0.99), None),
    (rates(schedule="linear", warmup_steps=0.995), "warmup_steps is 0.995 of 100 optimizer steps"),
    (rates(kind="muon"), None),
    (optimized("muon", 1), None),
    (optimized("muon", 1, "float32"), "learner.zero_stage 1 with model.dtype float32 cuts into flat parts"),
    (optimized("muon", 2), "set zero_stage: 1, or kind: adamw"),
    (optimized("adafactor", 0, "float32"), None),
    (optimized("adafactor", 0), "set zero_stage: 0 with dtype: float32, or kind: adamw_8bit"),
    (optimized("adafactor", 1, "float32"), "learner.zero_stage 1 with model.dtype float32 cuts"),
    (optimized("adamw_8bit", 3), None),
    (
        {
            "critic": {"optimizer": {"kind": "muon"}},
            "learner": {"zero_stage": 3},
            **algorithm(advantage="gae"),
        },
        "critic.optimizer.kind is muon, which needs whole matrices",
    ),
    (
        {"learner": {"optimizer": {"kind": "adamw_8bit"}, "zero_stage": 3, "offload_optimizer": True}},
        "learner.offload_optimizer steps AdamW only",
    ),
    (rates(schedule="cosine", warmup_steps=100), "warmup_steps is 100 of 100 optimizer steps"),
    ({"batch": {"epochs": 2}, **rates(schedule="cosine", warmup_steps=100)}, None),
    (
        {
            "critic": {"warmup_steps": 60},
            **algorithm(advantage="gae"),
            **rates(schedule="cosine", warmup_steps=40),
        },
        "of 40 optimizer steps (40 batches",
    ),
    (
        {"critic": {"optimizer": {"schedule": "linear", "warmup_steps": 100}}, **algorithm(advantage="gae")},
        "critic.optimizer.warmup_steps is 100 of 100",
    ),
    (algorithm(correction={"name": "mask", "high": 0.9}), "set it above 1"),
    (algorithm(correction={"name": "veto", "low": 1.1}), "set it below 1"),
    (algorithm(correction={"name": "reject", "high": 0.9}), "set it above 1"),
    (algorithm(correction={"name": "reject", "high": 0.01, "divergence": "k3"}), None),
    (algorithm(correction={"name": "reject", "high": 1.01}), None),
    (
        algorithm(advantage="gdpo", shaping=[{"name": "soft_overlong", "buffer_tokens": 4}]),
        "make it a reward function",
    ),
    (algorithm(advantage="gdpo", kl=KL | {"placement": "reward", "estimator": "k1"}), "set placement: loss"),
    (
        algorithm(advantage={"name": "gdpo", "weights": {"other": 1}}),
        "names other; the parts of the reward are exact_match",
    ),
    (algorithm(advantage={"name": "gdpo", "weights": {"exact_match": 1}}), None),
    (
        algorithm(advantage="gdpo")
        | {"reward": {"functions": [{"function": "exact_match"}, {"function": "format", "weight": -0.5}]}},
        "set algorithm.advantage.weights: {exact_match: 1, format: -0.5}",
    ),
    (
        algorithm(advantage="gdpo") | {"environment": {"uses": "e.py:E", "weight": 2}},
        "set algorithm.advantage.weights: {exact_match: 1, environment: 2}",
    ),
    (
        algorithm(advantage="gdpo") | TWO_REWARDS,
        "set algorithm.advantage.weights: {format: 2, exact_match: 1}",
    ),
    (
        algorithm(advantage={"name": "gdpo", "weights": {"format": 2}}) | TWO_REWARDS,
        "names format; the parts of the reward are format, exact_match; use their names, of each source",
    ),
    (algorithm(advantage={"name": "gdpo", "weights": {"format": 2, "exact_match": 1}}) | TWO_REWARDS, None),
    ({"reward": {"functions": []}}, "nothing scores a response; name a function"),
    ({"reward": {"functions": []}, "environment": {"uses": "e.py:E"}}, None),
    ({"environment": {"max_turns": 3}}, "environment.uses is not; name the environment, or drop it"),
    ({"environment": {"max_turns": 16}}, None),
    (
        {"data": {"train": [{"path": "a", "environment": {"max_turns": 4}}, {"path": "b"}]}},
        "environment.max_turns is set, but environment.uses is not; name the environment, or drop it",
    ),
    ({"batch": {"missing_episodes": 1}}, "only episodes of an environment can fail alone; drop it"),
    ({"batch": {"missing_episodes": 7}, "environment": {"uses": "e.py:E"}}, None),
    (
        {"batch": {"missing_episodes": 8}, "environment": {"uses": "e.py:E"}},
        "batch.missing_episodes is 8, but of batch.group_size 8 at least one episode must be left",
    ),
    (
        {"batch": {"missing_episodes": 1}, "environment": {"uses": "e.py:E"}}
        | algorithm(advantage="grpo_passk"),
        "`grpo_passk` maximises pass@k, where k is the size of a whole group; set it to 0, or take grpo",
    ),
    (
        {"batch": {"missing_episodes": 7}, "environment": {"uses": "e.py:E"}}
        | {"data": {"train": "t", "curriculum": {"floor": 0.1}}},
        "leaves one episode of a group, whose rewards are always equal; set at most 6",
    ),
    ({"telemetry": {"pairs": True}}, None),
    (
        {"telemetry": {"pairs": True}, "environment": {"uses": "e.py:E"}},
        "episodes of an environment are more than an answer to a prompt; drop it",
    ),
    (
        {"telemetry": {"pairs": True}, "data": {"train": "t", "images_key": "image"}}
        | {"model": {"path": "m", "chat_template": True}},
        "telemetry.pairs is true, but data.images_key is set, and TRL's columns hold no image; drop one",
    ),
    (
        {"telemetry": {"pairs": True}, "batch": {"group_size": 1}} | algorithm(advantage="reinforce"),
        "a group has no best and worst",
    ),
    ({"environment": {"uses": ["e.py:f"]}}, "a list of tools, but model.chat_template is false"),
    ({"environment": {"uses": ["e.py:f"]}, "model": {"path": "m", "chat_template": True}}, None),
    ({"data": {"train": "t", "curriculum": {"floor": 0.1}}}, None),
    (
        {"data": {"train": "t", "curriculum": {"floor": 0.1}}, "batch": {"group_size": 1}}
        | algorithm(advantage="reinforce"),
        "data.curriculum.floor is 0.1, but batch.group_size is 1",
    ),
    (
        {"data": {"train": "t", "curriculum": {"floor": 0.1}}, "store": {"shards": 2}},
        "data.curriculum.floor is 0.1, but store.shards is 2",
    ),
    (
        algorithm(advantage="turn_rloo"),
        "turn_rloo, which needs rewards or states of turns",
    ),
    (algorithm(advantage="turn_gae"), "but there is no environment"),
    (algorithm(advantage="gigpo") | {"environment": {"uses": "e.py:E"}}, None),
    (algorithm(advantage="turn_rloo") | {"environment": {"command": ["agent"]}}, None),
    ({"environment": {"command": ["agent"], "frozen": ["judge"]}}, None),
    (
        algorithm(advantage="gigpo") | {"environment": {"command": ["agent"]}},
        "gigpo, which compares turns from the same state, but an agent (environment.command) names no states",
    ),
    (
        algorithm(advantage={"name": "gdpo", "weights": {"environment": 1}})
        | {"environment": {"uses": "e.py:E"}},
        None,
    ),
    (
        {"reward": {"functions": [{"function": "exact_match"}], "sandbox": "bubblewrap"}},
        "a sandbox needs a memory limit; set reward.memory_gib",
    ),
    (
        {"reward": {"functions": [{"function": "code"}], "sandbox": "bubblewrap", "memory_gib": 4}},
        "is bubblewrap, in which `code` cannot make the sandbox that each program has",
    ),
    (
        {"checkpoint": {"every": 20, "hub": {"repo": "a/b", "every": 30}}},
        "checkpoint.hub.every is 30, and checkpoint.every is 20: not every such step has a checkpoint",
    ),
    (best_of(40, saved=50, evaluated=50), "(every 50); set eval.every: 40, and checkpoint.every: 40"),
    (best_of(40, saved=10, evaluated=50), "(every 50); set eval.every: 10"),
    (best_of(50, saved=30, evaluated=20), "(every 20); set checkpoint.every: 20"),
    (best_of(50, saved=20, evaluated=20), None),
    (
        best_of(40, saved=10, evaluated=5) | {"data": {"train": "t", "eval": [{"path": "e", "every": 41}]}},
        "(every 41); set data.eval.0.every: 10",
    ),
    (
        {"control": {"bind": "tcp://10.0.0.1:1"}, "store": {"bind": "tcp://10.0.0.1:1"}},
        "store.bind is tcp://10.0.0.1:1, but control.bind is the same; set another port",
    ),
    ({"control": {"bind": "tcp://auto:16379"}, "store": {"bind": "auto"}}, "but control.bind is the same"),
    ({"control": {"bind": "auto"}, "store": {"bind": "auto"}}, None),
    (ON_HOSTS | {"store": {"bind": "tcp://auto:16380"}}, "but control.bind is the same"),
    (ON_HOSTS | {"control": {"bind": "tcp://auto:16379"}}, "store.bind is tcp://auto:16379, but"),
    (ON_HOSTS | {"store": {"bind": "tcp://auto:16381"}}, None),
    (
        ON_HOSTS | {"control": {"bind": "tcp://10.0.0.1:16379"}},
        "store.bind is tcp://10.0.0.1:16379, but control.bind is the same",
    ),
    (
        {"control": {"bind": "tcp://10.0.0.1:16379"}, "store": {"bind": "tcp://10.0.0.2:16379"}},
        None,
    ),
    (
        {
            "cluster": {"kind": "slurm", "learner_hosts": 2},
            "generator": {"count": 1},
            "learner": {"ranks": 2},
            "store": {"bind": "tcp://auto:16381"},
        },
        "store.bind is tcp://auto:16381, but hosts of the learner meet there",
    ),
    (
        {
            "cluster": {"kind": "slurm", "learner_hosts": 2},
            "generator": {"count": 1},
            "learner": {"ranks": 2},
            "control": {"bind": "tcp://10.0.0.1:65535"},
        },
        "control.bind is tcp://10.0.0.1:65535, and hosts of the learner meet at the next port; choose one",
    ),
    # what the registry refuses with a better message is no crash here
    (algorithm(advantage={"name": "gdpo", "weights": 3}, correction={"name": "mask", "low": "x"}), None),
]


@pytest.mark.parametrize(("parts", "said"), RULES, ids=[str(parts) for parts, _ in RULES])
def test_parts_that_do_not_go_together_are_refused_with_a_way_out(
    parts: dict[str, Any], said: str | None
) -> None:
    if said is None:
        config(**parts)
        return
    with pytest.raises(ValidationError) as caught:
        config(**parts)
    (error,) = caught.value.errors()
    assert said in error["msg"]
    (mistake,) = error["ctx"]["error"].mistakes  # one contradiction, one complaint
    for keys in map(keys_of, mistake.keys):
        is_parameter = any(kind_at(Config, keys[:length]) for length in range(len(keys)))
        assert schema_at(Config, keys) or is_parameter, f"{keys} is not a key"


def test_group_advantages_are_those_that_say_nothing_about_a_group_of_one() -> None:
    import torch

    from asyncrl.algo.group_rewards import GroupRewards

    ones = torch.arange(3)
    rewards = GroupRewards(
        rewards_S=torch.tensor([0.0, 1.0, 3.0]),
        group_S=ones,
        num_groups=3,
        lengths_S=torch.tensor([2, 1, 1]),
        sequence_T=torch.tensor([0, 0, 1, 2]),
        parts={"exact_match": torch.tensor([0.0, 1.0, 3.0])},
        values_T=torch.zeros(4),
        greedy_rewards_group=torch.zeros(3),
        expected_S=torch.zeros(3, dtype=torch.float64),
        logprobs_T=torch.full((4,), -1.0),
        reference_logprobs_T=torch.full((4,), -0.5),
        sum_squared_probs_T=torch.full((4,), 0.5),
        episode_K=torch.tensor([0, 0, 1, 2]),
        turn_T=torch.arange(4),
        turn_rewards_K=torch.ones(4),
        turn_states_K=torch.zeros(4, dtype=torch.int64),
    )
    silent = {
        name
        for name in registry.names("advantage")
        if not registry.resolve("advantage", name, {})(rewards).any()
    }
    assert silent == GROUP_ADVANTAGES


def test_rewritten_turns_are_further_sequences_in_the_store() -> None:
    environment: dict[str, Any] = {"uses": "e.py:E", "max_turns": 500}
    big: dict[str, Any] = {"model": {"path": "m", "chat_template": True}}
    assert config(environment=environment, **big).environment.sequences == 1
    with pytest.raises(ValidationError, match="with 2048 sequences of"):
        config(environment=environment | {"history": "template"}, **big)


def test_a_rollout_function_may_begin_a_conversation_with_each_turn(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    tools = "def tool(): ...\nasync def look(what): ...\ndef late(session): ...\n"
    file.write_text(f"async def rollout(session): ...\nclass Guess: ...\n{tools}")
    most = {"rollout": 9, "Guess": 1, "tool": 1, "look": 1, "late": 1}
    for name, sequences in most.items():
        for uses in (f"{file}:{name}", (f"{file}:{name}",)):
            assert EnvironmentConfig(uses=uses, max_turns=9).sequences == sequences
    assert EnvironmentConfig(command=("a",), max_turns=999).sequences == MOST_SEQUENCES


def test_a_rollout_of_a_module_is_found_without_importing_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_games" / "deep"
    package.mkdir(parents=True)
    for one in (package.parent, package):
        (one / "__init__.py").write_text("raise SystemExit\nasync def rollout(session): ...\n")
    (package / "mine.py").write_text("async def rollout(session): ...\ndef tool(): ...\n")
    (tmp_path / "scattered" / "more").mkdir(parents=True)
    (tmp_path / "scattered" / "more" / "other.py").write_text("async def rollout(session): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {
        "my_games.deep.mine:rollout": 9, "my_games.deep:rollout": 9, "my_games.deep.mine:tool": 1,
        "my_games.deep.mine.more:rollout": 1, "my_games.nothing:rollout": 1, "nothing:rollout": 1,
        "my_games..mine:rollout": 1, ":rollout": 1, "rollout": 1, "math:rollout": 1, "sys:rollout": 1,
        "asyncrl.quickstart.games:Guess": 1, "python": 1,
    }  # fmt: skip
    for uses, sequences in found.items():
        assert EnvironmentConfig(uses=uses, max_turns=9).sequences == sequences, uses
    assert not {"my_games", "scattered"} & sys.modules.keys()
    assert EnvironmentConfig(uses="scattered.more.other:rollout", max_turns=9).sequences in (1, 9)


def test_reward_parts_need_different_names() -> None:
    with pytest.raises(ValidationError, match="`environment` is the name of the environment's own reward"):
        config(reward={"functions": [{"function": "a:environment"}]})
    functions = [{"function": "a:f"}, {"function": "b:f"}]
    with pytest.raises(ValidationError, match="different names"):
        config(reward={"functions": functions})
    functions[1]["name"] = "g"
    assert [function.part for function in config(reward={"functions": functions}).reward.functions] == [
        "f",
        "g",
    ]


def test_a_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ours")
    assert config(run={"name": "a", "root": "~/runs"}).run.root == Path("/home/ours/runs")
    with pytest.raises(ValidationError, match="there is no such home; write the directory out"):
        config(run={"name": "a", "root": "~nobody-here/runs"})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().batch.groups = 3  # type: ignore[misc]


def test_every_default_choice_is_registered() -> None:
    found = set()
    for keys in map(keys_of, all_paths(Config)):
        if kind := kind_at(Config, keys):
            assert not list(registry.mistakes(kind, default_name(Config, keys) or "", {}))
        found |= {kind, kind_at(Config, (*keys, 0))} - {None}
    assert found == set(registry.KINDS)


def test_every_hashed_field_exists() -> None:
    for part, fields in SHARED.items():
        model = getattr(config(), part)
        assert isinstance(model, Part)
        assert set(fields) <= set(type(model).model_fields), part


def test_every_choice_of_the_schema_is_checked_by_the_registry() -> None:
    from asyncrl.config.wording import describe

    for path in all_paths(Config):
        schema = schema_at(Config, keys_of(path))
        for one in (schema, schema.get("items", {})):
            is_hook = path == "learner.hooks"
            assert (one.get("title") == "Choice" and not is_hook) == ("kind" in one), path
    assert (
        describe(schema_at(Config, ("learner", "optimizer", "betas")))
        == "a list of 2: a number >= 0 < 1, a number >= 0 < 1"
    )


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@host", "redis://me:hunter2@host/1", "rediss://host?password=hunter2"]
)
def test_a_password_in_the_stores_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(store={"url": url})
    (error,) = caught.value.errors()
    assert "store.password_env" in str(error["ctx"]["error"])
    assert "hunter2" not in str(error["ctx"]["error"])
    for allowed in ("rediss://me@host/1", "unix:///a/b.sock", "rediss://host?ssl_ca_certs=/ca.pem"):
        assert config(store={"url": allowed}).store.url == allowed


LOOPBACK = ["127.0.0.1", "127.3.2.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "127.1"]
ELSEWHERE = [
    "10.1.2.3",
    "host",
    "localhost.evil.example",
    "[fe80::1]",
    "127.0.0.1.example",
    "::ffff:10.0.0.1",
    "128.0.0.1",
]
EVERYWHERE = ["0.0.0.0", "*", "[::]", "", "0", "0x0", "[::ffff:0.0.0.0]", "[0:0:0:0:0:0:0:0]", "000.0.0.0"]


def test_addresses_are_sorted_by_who_reaches_them() -> None:
    assert all(is_loopback(host) and not is_everywhere(host) for host in LOOPBACK)
    assert not any(is_loopback(host) or is_everywhere(host) for host in ELSEWHERE)
    assert all(is_everywhere(host) and not is_loopback(host) for host in EVERYWHERE)


@pytest.mark.parametrize("host", EVERYWHERE)
@pytest.mark.parametrize("key", ["store.bind", "control.bind", "telemetry.prometheus_host"])
def test_nothing_listens_on_every_interface(key: str, host: str) -> None:
    part, name = key.split(".")
    with pytest.raises(ValidationError, match=rf"{re.escape(key)}\n.* would listen on every interface"):
        config(**{part: {name: host if name != "bind" else f"tcp://{host}:6379"}})


@pytest.mark.parametrize(
    ("url", "why"),
    [
        *((f"redis://{host}:6379", "not encrypted") for host in ELSEWHERE if not host.startswith("::")),
        ("rediss://10.1.2.3:6379?ssl_cert_reqs=none", "lets any server pose as the store"),
        ("rediss://host?ssl_cert_reqs=None", "lets any server pose"),
        ("rediss://host?ssl_cert_reqs=optional", "lets any server pose"),
        ("rediss://host?ssl_ca_certs=a.pem&ssl_check_hostname=False", "lets any server pose"),
    ],
)
def test_a_store_on_another_host_is_guarded_or_said_to_be_open(url: str, why: str) -> None:
    with pytest.raises(ValidationError, match=rf"{why}.*store\.insecure: true"):
        config(store={"url": url})
    assert config(store={"url": url, "insecure": True}).store.url == url


@pytest.mark.parametrize(
    "url",
    [
        *(f"redis://{host}:6379/0" for host in LOOPBACK),
        "unix:///a.sock",
        "rediss://host?ssl_cert_reqs=required",
    ],
)
def test_a_store_of_this_machine_or_behind_tls_needs_nothing_said(url: str) -> None:
    assert config(store={"url": url}).store.url == url


def test_a_store_on_another_host_needs_a_password() -> None:
    far = config(store={"url": "rediss://learner@host"}).store
    with pytest.raises(RunError, match=r"ASYNCRL_STORE_PASSWORD holds no password.*store\.insecure: true"):
        require_password(far, {})
    for fine in (
        {"url": "unix:///a.sock"},
        {"url": "redis://127.0.0.1"},
        {"url": "redis://host", "insecure": True},
        {},
    ):
        require_password(config(store=fine).store, {})
    require_password(far, {"ASYNCRL_STORE_PASSWORD": "x"})


def test_a_store_is_configured_or_started_and_not_both() -> None:
    with pytest.raises(ValidationError, match=r"store\.bind .* store\.url"):
        config(store={"url": "rediss://host", "bind": "tcp://10.0.0.1:6379"})


def test_a_transfer_is_not_taken_for_a_hang() -> None:
    assert config(weights={"deadline_s": 150.0}).control.hang_s == 300.0
    with pytest.raises(ValidationError, match=r"control\.hang_s .* use hang_s >= 302 or lower the deadline"):
        config(weights={"deadline_s": 151.0})
