"""The learner runs tokens with the experts that the engine chose, and gradients flow as transformers computes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from asyncrl.algo.trainable import GroupLimits, trainable
from asyncrl.batch.packing import TrainSample, microbatch, samples_of
from asyncrl.columns import EXPERTS
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import ConfigError, WireError
from asyncrl.hosting.machine import read_model, routing_sizes
from asyncrl.preflight.forecast import frame_bytes
from asyncrl.preflight.validate import validated_config
from asyncrl.routing import experts_of_tokens, recorded, routers_of, watch
from asyncrl.routing import routing_sizes as sizes_of
from asyncrl.trainer.attention import SEGMENTS
from asyncrl.trainer.loading import load_model
from asyncrl.trainer.miniature import _built, _miniature
from asyncrl.trainer.policy import PolicyModule, run
from asyncrl.wire.codec import decode_frame, encode_frame
from asyncrl.wire.group_frames import GROUP_LIMITS, decode_group, encode_group
from tests.support.by_hand import ByHand
from tests.support.fake_learner import mixed_batch
from tests.support.models import model_of, tiny_moe, tiny_qwen2
from tests.support.trainer_worker import chosen, loss_over, plain_loss, sequences, tokens_of

CPU = torch.device("cpu")
SIZES = {"layers": 2, "top_k": 2, "experts": 8}
LIMITS = GroupLimits(vocabulary=1 << 20, rollouts=4, max_tokens=64, sizes=SIZES)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe(tmp_path_factory.mktemp("moe"))


def result_of(policy: Any, samples: list[TrainSample]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of a pack, and the gradient of their loss."""
    batch = microbatch(samples, CPU)
    policy.zero_grad()
    columns_RT = run(
        policy, batch, target_T=batch.target_T, temperature=0.7, chunk=8, experts_NLK=batch.experts_NLK
    )
    loss_over(tokens_of(samples))(batch, columns_RT[0], columns_RT[1]).loss.backward()
    gradient = {name: each.grad.clone() for name, each in policy.named_parameters() if each.grad is not None}
    return columns_RT[0].detach(), gradient


def policy_of(path: Path, setting: Any = False) -> PolicyModule:
    model = ModelConfig(path=str(path), dtype="float32", router_replay=True)
    return PolicyModule(load_model(model, CPU, gradient_checkpointing=setting), replays=True)


def with_experts(samples: list[TrainSample], experts_NLK: Tensor) -> list[TrainSample]:
    parts = torch.split(experts_NLK, [sample.tokens for sample in samples])
    return [replace(sample, experts=part.numpy()) for sample, part in zip(samples, parts, strict=True)]


@pytest.mark.parametrize("setting", [False, True, "selective"])
def test_other_experts_give_what_a_forward_pass_by_hand_gives(path: Path, setting: Any) -> None:
    samples = sequences()
    choices = chosen(samples)
    expected_model = model_of(path)
    loss = plain_loss(ByHand(expected_model, choices))
    loss.backward()
    policy = policy_of(path, setting)
    given = [replace(sample, experts=own) for sample, own in zip(samples, choices, strict=True)]
    _, free = result_of(policy, samples)
    _, found = result_of(policy, given)
    _, again = result_of(policy, samples)
    for name, parameter in expected_model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], parameter.grad, atol=1e-6, rtol=1e-5)
    router = "model.model.layers.0.mlp.gate.weight"
    assert not torch.allclose(free[router], found[router], rtol=0.1)
    assert all(torch.equal(free[name], again[name]) for name in free)  # nothing stays


# Routers of several makes. The miniatures of others are large.
KINDS = ["deepseek_v3", "granitemoe", "mixtral", "olmoe", "qwen3_moe"]
SMALL = {
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_own_choice_changes_no_bit_and_another_one_is_what_experts_get(kind: str) -> None:
    with torch.no_grad():
        small: Any = _miniature(AutoConfig.for_model(kind, **SMALL))
        policy = PolicyModule(_built(small, SEGMENTS).train(), replays=True)
    samples = sequences()
    with recorded() as choices:
        free, gradient = result_of(policy, samples)
    sizes = sizes_of(policy, kind)
    assert len(choices) == sizes["layers"] > 0
    own_NLK = torch.stack(choices, dim=1)
    found, replayed = result_of(policy, with_experts(samples, own_NLK))
    assert torch.equal(found, free) and replayed.keys() == gradient.keys()
    assert all(torch.equal(replayed[name], gradient[name]) for name in gradient)

    seen: list[Tensor] = []
    for module in policy.modules():
        if hasattr(module, "experts"):
            module.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    other_NLK = (own_NLK + 1) % sizes["experts"]
    moved, _ = result_of(policy, with_experts(samples, other_NLK))
    assert not torch.allclose(moved, free, atol=1e-3)
    assert torch.equal(torch.stack(seen, dim=1).short(), other_NLK)


def test_what_is_recorded_of_tokens_is_theirs_in_every_pass(path: Path) -> None:
    """A prompt of three tokens for two responses, whose tokens are run one by one with a cache."""
    model = model_of(path)
    routers = watch(model)
    ids_BN = torch.tensor([[3, 9, 4, 30, 12, 2], [3, 9, 4, 7, 21, 8]])
    with recorded() as choices, torch.no_grad():
        cache = model(ids_BN[:, :3], use_cache=True).past_key_values
        for at in (3, 4):
            cache = model(ids_BN[:, at : at + 1], past_key_values=cache).past_key_values
    experts_BNLK = experts_of_tokens(choices, len(routers), count=2)
    with recorded() as whole, torch.no_grad():
        model(ids_BN[:, :5], use_cache=False)
    expected = torch.stack(whole, dim=1).view(2, 5, 2, 2)
    assert torch.equal(experts_BNLK[:, :5], expected) and (experts_BNLK[:, 5] == -1).all()


def test_the_column_reaches_the_trainer_through_the_wire() -> None:
    groups = []
    for group in mixed_batch().groups[1:]:
        samples = samples_of([group], 1)
        made = chosen(list(samples))
        rollouts = [
            replace(one, recorded={EXPERTS: own}) for one, own in zip(group.rollouts, made, strict=True)
        ]
        groups.append(replace(group, rollouts=tuple(rollouts)))
    bare = mixed_batch().groups[0]
    read = [decode_group(encode_group(group)) for group in (bare, *groups)]
    assert [trainable(group, LIMITS) for group in read] == [None] * len(read)
    samples = list(samples_of(read, 1))
    experts_NLK = microbatch(samples, CPU).experts_NLK
    assert experts_NLK is not None and experts_NLK.dtype == torch.int16
    expected = [
        one.recorded.get(EXPERTS, np.full((len(one.prompt_ids) + len(one.response_ids), 2, 2), -1))
        for group in (bare, *groups)
        for one in group.rollouts
    ]
    np.testing.assert_array_equal(experts_NLK.numpy(), np.concatenate(expected))
    assert microbatch(samples_of([bare], 1), CPU).experts_NLK is None


WRONG = {
    "routed_experts has entries of the shape": np.zeros((3, 2), np.int16),
    "entry of routed_experts (experts) is 8, -1 to 7 ": np.full((2, 2), 8, np.int16),
    "entry of routed_experts (experts) is -2, -1 to 7 ": np.full((2, 2), -2, np.int16),
}


@pytest.mark.parametrize("reason", WRONG)
def test_experts_that_the_model_lacks_are_a_reason_to_reject_the_group(reason: str) -> None:
    group = mixed_batch().groups[0]
    rollouts = [
        replace(
            one, recorded={EXPERTS: np.stack([WRONG[reason]] * (len(one.prompt_ids) + len(one.response_ids)))}
        )
        for one in group.rollouts
    ]
    read = decode_group(encode_group(replace(group, rollouts=tuple(rollouts))))
    assert reason in (trainable(read, LIMITS) or "")
    assert "routed_experts has entries" in (trainable(read, replace(LIMITS, sizes={})) or "")


def test_a_column_of_another_length_is_neither_sent_nor_read() -> None:
    group = mixed_batch().groups[0]
    short = replace(group.rollouts[0], recorded={EXPERTS: np.zeros((1, 2, 2), np.int16)})
    with pytest.raises(WireError, match="routed_experts has the shape"):
        encode_group(replace(group, rollouts=(short, *group.rollouts[1:])))
    meta, arrays = decode_frame(GROUP_LIMITS, encode_group(group))
    lie = {EXPERTS: np.zeros((1, 2, 2), np.int16)}
    with pytest.raises(WireError, match="routed_experts has 1 tokens instead of"):
        decode_group(encode_frame(GROUP_LIMITS, meta, arrays | lie))


def test_a_store_without_room_for_the_experts_of_each_token_is_refused(tmp_path: Path) -> None:
    tiny_moe(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    values = {
        "run": {"name": "experts", "root": str(tmp_path)},
        "model": {"path": str(tmp_path / "model"), "router_replay": True},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "reward": {"functions": [{"function": "exact_match"}]},
        "sampling": {"max_prompt_tokens": 256, "max_response_tokens": 256},
        "generator": {"engine": "transformers"},
        "learner": {"device": "cpu"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    config = validated_config(tmp_path / "run.yaml")
    token_bytes = SIZES["layers"] * SIZES["top_k"] * 2
    plain = config.model_copy(update={"model": config.model.model_copy(update={"router_replay": False})})
    assert frame_bytes(config) - frame_bytes(plain) >= config.batch.group_size * 512 * token_bytes
    groups = (config.staleness.max_lag + 1 + config.learner.steps) * config.batch.groups
    limit = f"store.max_gib={0.9 * groups * frame_bytes(config) / 2**30}"
    short = ["checkpoint.every=100000", limit]
    assert validated_config(tmp_path / "run.yaml", [*short, "model.router_replay=false"])
    with pytest.raises(ConfigError, match=r"store\.max_gib: is .*; a full store would stop the run"):
        validated_config(tmp_path / "run.yaml", short)


def test_a_model_without_experts_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    assert routing_sizes(ModelConfig(path=str(path), router_replay=True)) == SIZES
    assert routing_sizes(ModelConfig(path=str(path))) == {}
    dense = ModelConfig(path=str(tiny_qwen2(tmp_path)), router_replay=True)
    with pytest.raises(ConfigError, match=r"^model.router_replay: .* has no experts; remove the key"):
        read_model(dense)
    assert not routers_of(model_of(tmp_path))
