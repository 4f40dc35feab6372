"""Sampling among a few tokens: these are recorded, reach the learner whole, and all that it measures is among
them. Real processes and engines are in tests/integration/test_kept_tokens.py."""

import asyncio
from dataclasses import replace
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from asyncrl.algo.ranges import MOST_KEPT
from asyncrl.algo.trainable import GroupLimits, trainable
from asyncrl.columns import KEPT_COUNTS, KEPT_IDS
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.transformers import TransformersEngine
from asyncrl.engine.vllm.outputs import kept_tokens
from asyncrl.errors import ResultError, WireError
from asyncrl.session.base import Turn
from asyncrl.session.tree import sequences_of
from asyncrl.trainer.head import TokenLogprobs
from asyncrl.types import Group, Rollout
from asyncrl.wire.group_frames import decode_group, encode_group
from tests.support.agent_talks import character_tokenizer
from tests.support.fake_learner import Batch, mixed_batch, planned
from tests.support.talks import rollout_of

VOCABULARY = 1000
LIMITS = GroupLimits(
    vocabulary=VOCABULARY,
    rollouts=4,
    max_tokens=64,
    required=(KEPT_COUNTS, KEPT_IDS),
    sizes={"token_ids": VOCABULARY},
)
TOKENIZER = character_tokenizer()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_values_and_gradients_are_those_of_a_softmax_with_all_others_at_minus_infinity(chunk: int) -> None:
    torch.manual_seed(0)
    vocabulary, target_T = 11, torch.tensor([0, 6, 3, 3, 10, 9, 5])
    order_TV = torch.rand(len(target_T), vocabulary).scatter_(-1, target_T[:, None], 2.0).argsort(-1)
    kept_TK = order_TV[:, -5:].flip(-1).roll(1, dims=-1).int()  # the target is the second of five
    kept_TK[2, 0], kept_TK[2, 2:], kept_TK[4, 3:] = -1, -1, -1  # one is left; three are
    kept_TK[4, 2] = 0  # beside places for no token
    slopes_RT, results = torch.randn(2, len(target_T), dtype=torch.float64), []
    for ours in (True, False):
        generator = torch.Generator().manual_seed(1)
        hidden_TD, weight_VD = (
            torch.randn(size, 5, generator=generator, dtype=torch.float64, requires_grad=True)
            for size in (len(target_T), vocabulary)
        )
        if ours:
            columns_RT = TokenLogprobs.apply(hidden_TD, weight_VD, target_T, 0.7, chunk, True, True, kept_TK)
        else:
            is_kept_TV = torch.zeros(len(target_T), vocabulary, dtype=torch.bool)
            for row, kept in zip(is_kept_TV, kept_TK, strict=True):
                row[kept[kept >= 0].long()] = True
            logits_TV = (hidden_TD @ weight_VD.T / 0.7).masked_fill(~is_kept_TV, -torch.inf)
            table = logits_TV.log_softmax(-1)
            p_TV = table.exp()
            columns_RT = torch.stack(
                [
                    table.gather(-1, target_T[:, None])[:, 0],
                    -(p_TV * table.masked_fill(~is_kept_TV, 0.0)).sum(-1),
                    p_TV.square().sum(-1).detach(),
                ]
            )
        (columns_RT[:2] * slopes_RT).sum().backward()
        results.append((columns_RT.detach(), hidden_TD.grad, weight_VD.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert results[0][0][:, 2].tolist() == [0.0, 0.0, 1.0]  # nothing else could have been sampled


def kept_of(token: int) -> list[int]:
    """Another set for each token, of another size."""
    return sorted({token, *range(500 + token, 500 + token + token % 4)})


def with_kept(rollout: Rollout) -> Rollout:
    sets = [kept_of(token) * bool(sampled) for token, sampled in pairs(rollout)]
    counts = np.array([len(ids) for ids in sets], np.int32)
    ids = np.array([one for ids in sets for one in ids], np.int32)
    return replace(rollout, recorded={KEPT_COUNTS: counts, KEPT_IDS: ids})


def pairs(rollout: Rollout) -> Any:
    return zip(rollout.response_ids.tolist(), rollout.action_mask.tolist(), strict=True)


def with_sets(group: Group) -> Group:
    return replace(group, rollouts=tuple(map(with_kept, group.rollouts)))


def test_each_token_reaches_the_loss_with_its_own_set() -> None:
    """Through the frame, masks for age, packing, minibatches and epochs; tool tokens have none."""
    batch, sent = Batch(), [with_sets(group) for group in mixed_batch().groups]
    batch.groups = [decode_group(encode_group(group)) for group in sent]
    assert all(trainable(group, LIMITS) is None for group in batch.groups)
    for group, original in zip(batch.groups, sent, strict=True):
        for one, other in zip(group.rollouts, original.rollouts, strict=True):
            for name, column in other.recorded.items():
                np.testing.assert_array_equal(one.recorded[name], column)
                assert one.recorded[name].dtype == np.int32
    plan = planned(batch, proximal="behaviour", correction={"name": "none"})
    microbatches = [one for minibatch in plan.minibatches for one in minibatch.microbatches]
    assert sum(one.tokens.tokens for one in microbatches) > 20
    for one in microbatches:
        for token, kept in zip(one.target_T.tolist(), one.kept_TK.tolist(), strict=True):
            assert sorted({*kept} - {-1}) == kept_of(token)


def test_a_run_that_samples_among_all_has_no_sets() -> None:
    plan = planned(mixed_batch())
    assert {one.kept_TK for minibatch in plan.minibatches for one in minibatch.microbatches} == {None}
    assert trainable(mixed_batch().groups[0], replace(LIMITS, required=())) is None


def moved(counts: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sets, each at the next token."""
    sets = np.split(ids, np.cumsum(counts)[:-1])
    sets = [sets[-1], *sets[:-1]]
    return np.array([len(one) for one in sets], np.int32), np.concatenate(sets)


FAULTS = {
    "a set moved by one token": (moved, "each sampled token among those of its place"),
    "no set of a sampled token": (lambda counts, ids: (counts * 0, ids[:0]), "each sampled token among"),
    "the sampled token is not in it": (lambda counts, ids: (counts, ids + 1), "each sampled token among"),
    "fewer ids than counted": (lambda counts, ids: (counts, ids[:-1]), "contradict each other"),
    "an id beyond the vocabulary": (
        lambda counts, ids: (counts, np.where(ids == ids.max(), VOCABULARY, ids).astype(np.int32)),
        f"entry of kept_ids (token_ids) is {VOCABULARY}, ",
    ),
    "a negative id": (
        lambda counts, ids: (counts, np.where(ids > 500, -1, ids).astype(np.int32)),
        "contradict",
    ),
    "more than are allowed": (
        lambda counts, ids: (counts + np.int32(MOST_KEPT), np.repeat(ids, 99)),
        "contradict",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rollout_whose_sets_are_wrong_is_rejected_with_the_reason(fault: str) -> None:
    change, reason = FAULTS[fault]
    group = with_sets(mixed_batch().groups[0])
    counts, ids = change(*group.rollouts[1].recorded.values())
    wrong = replace(group.rollouts[1], recorded={KEPT_COUNTS: counts, KEPT_IDS: ids})
    assert reason in trainable(replace(group, rollouts=(group.rollouts[0], wrong)), LIMITS)


def test_sets_are_rejected_where_none_are_recorded_and_asked_for_where_they_are() -> None:
    group = with_sets(mixed_batch().groups[0])
    assert "entry of kept_ids (token_ids) is" in trainable(group, replace(LIMITS, required=(), sizes={}))
    assert "no column kept_counts" in trainable(mixed_batch().groups[0], LIMITS)
    many = group.rollouts[0]
    counts = many.recorded[KEPT_COUNTS] + np.int32(MOST_KEPT)
    ids = np.repeat(many.response_ids, counts)
    many = replace(many, recorded={KEPT_COUNTS: counts, KEPT_IDS: ids})
    assert f"{MOST_KEPT} are allowed" in trainable(replace(group, rollouts=(many,)), LIMITS)


def test_a_frame_needs_both_columns_and_as_many_ids_as_are_counted() -> None:
    group = with_sets(mixed_batch().groups[0])
    for name in (KEPT_COUNTS, KEPT_IDS):
        torn = [
            replace(one, recorded={key: column for key, column in one.recorded.items() if key != name})
            for one in group.rollouts
        ]
        with pytest.raises(WireError):
            encode_group(replace(group, rollouts=tuple(torn)))
    some = decode_group(
        encode_group(replace(group, rollouts=(mixed_batch().groups[0].rollouts[0], group.rollouts[1])))
    )
    assert not some.rollouts[0].recorded[KEPT_COUNTS].any() and not len(some.rollouts[0].recorded[KEPT_IDS])
    np.testing.assert_array_equal(some.rollouts[1].recorded[KEPT_IDS], group.rollouts[1].recorded[KEPT_IDS])


def flat(places: list[list[tuple[int, float]]]) -> Any:
    """What vLLM gives: the sampled token, then the most probable ones, at each place."""
    starts = np.cumsum([0, *map(len, places)]).tolist()
    entries = [entry for place in places for entry in place]
    return SimpleNamespace(
        start_indices=starts[:-1],
        end_indices=starts[1:],
        token_ids=[token for token, _ in entries],
        logprobs=[float(np.log(p)) if p else -np.inf for _, p in entries],
    )


def test_the_finite_ones_of_the_most_probable_tokens_are_the_set() -> None:
    found = kept_tokens(
        flat([[(7, 0.3), (5, 0.7), (7, 0.3), (0, 0.0)], [(2, 1.0), (2, 1.0), (9, 0), (8, 0)]])
    )
    assert found[KEPT_COUNTS].tolist() == [2, 1] and found[KEPT_IDS].tolist() == [5, 7, 2]
    with pytest.raises(ResultError, match=r"lack 0\.25 of the probability"):
        kept_tokens(flat([[(7, 0.25), (5, 0.25), (6, 0.25), (4, 0.25)]]))


@pytest.fixture
def engine():
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 1, "initializer_range": 0.5}
    config = GPT2Config(vocab_size=len(TOKENIZER), **sizes, bos_token_id=0, eos_token_id=0)
    made = TransformersEngine(GPT2LMHeadModel(config).eval(), TOKENIZER, target="weights", deadline_s=60)
    yield made
    asyncio.run(made.close())


@pytest.mark.parametrize(
    "limits", [{"top_k": 9}, {"top_k": 9, "top_p": 0.8}, {"top_k": 9, "min_p": 0.3}, {"top_k": 1}]
)
def test_transformers_records_the_set_and_the_probability_among_it(engine, limits: dict[str, Any]) -> None:
    """Against sorted probabilities of the model itself."""
    spec = SamplingSpec(temperature=0.7, max_response_tokens=12, **limits)
    rollouts = asyncio.run(engine.sample(TOKENIZER("xyz")["input_ids"], 8, spec))
    sizes = set()
    for rollout in rollouts:
        ids = torch.tensor([*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()])
        with torch.no_grad():
            table = (engine._model(ids[None]).logits[0, len(rollout.prompt_ids) - 1 : -1] / 0.7).softmax(-1)
        sets = np.split(rollout.recorded[KEPT_IDS], np.cumsum(rollout.recorded[KEPT_COUNTS])[:-1])
        for p, kept, token, logprob in zip(
            table.double().numpy(), sets, rollout.response_ids, rollout.behaviour_logprobs, strict=True
        ):
            order = np.argsort(-p)[: limits["top_k"]]
            p_of = p[order] / p[order].sum()
            before = np.append(0.0, np.cumsum(p_of)[:-1])
            order = order[(before < limits.get("top_p", 1.0)) & (p_of >= limits.get("min_p", 0.0) * p_of[0])]
            assert {*kept.tolist()} == {*order.tolist()}
            assert logprob == pytest.approx(np.log(p[token] / p[kept].sum()), abs=1e-5)
            sizes.add(len(kept))
        assert (
            trainable(
                Group(ticket_id=1, rollouts=(rollout,), generator_id="g", finished_version=0),
                replace(LIMITS, vocabulary=len(TOKENIZER), sizes={"token_ids": len(TOKENIZER)}),
            )
            is None
        )
    assert len(sizes) > 1 or limits["top_k"] == 1 or limits == {"top_k": 9}
    greedy = asyncio.run(engine.sample([5], 1, replace(spec, temperature=0.0)))
    assert greedy[0].recorded == {}


def turn(index: int, parent: Turn | None, delta: tuple[int, ...], sampled: tuple[int, ...]) -> Turn:
    before = (*(parent.ids if parent else ()), *delta)
    if parent:
        parent.children += 1
    return Turn(
        index=index,
        parent=parent,
        delta_ids=delta,
        prompt_digest=blake2b(np.array(before, dtype=np.int32).tobytes()).digest(),
        rollout=with_kept(rollout_of(before, sampled)),
        message={"role": "assistant", "content": ""},
        said=None,
        is_trained=True,
    )


def test_the_sequences_of_a_conversation_have_the_sets_of_their_own_turns() -> None:
    """Two branches share their first turn, which the first of them trains."""
    root = turn(0, None, (1, 2), (3, 4, 6))
    children = [turn(1, root, (8,), (9, 10, 11)), turn(2, root, (12, 13), (14, 15))]
    first, second = sequences_of([root, *children])
    for rollout in (first, second):
        assert with_kept(rollout).recorded.keys() == rollout.recorded.keys()
        for name, column in with_kept(rollout).recorded.items():
            np.testing.assert_array_equal(rollout.recorded[name], column)
    assert not second.action_mask.all() and second.recorded[KEPT_COUNTS].any()
