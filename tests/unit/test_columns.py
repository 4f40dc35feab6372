"""One line in the table of columns is enough: the column comes from the generator's rollouts to the loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.algo.trainable import GroupLimits, trainable
from asyncrl.columns import COLUMNS, Column
from asyncrl.errors import ShapeError, WireError
from asyncrl.types import Group
from asyncrl.wire.codec import decode_frame, encode_frame
from asyncrl.wire.group_frames import GROUP_LIMITS, decode_group, encode_group
from tests.support.fake_learner import Batch, mixed_batch, planned

LAYERS, TOP_K, WIDTH = 3, 2, 4
NEW = {
    "attended": Column(np.uint16, ("response_tokens", "layers", "top_k"), optional=True, default=999),
    "prompt_is_image": Column(np.bool_, ("prompt_tokens",), optional=True),
    "image_features": Column(np.float32, ("images", "width"), optional=True),
}
LIMITS = GroupLimits(
    vocabulary=1 << 20, rollouts=4, max_tokens=64, sizes={"layers": LAYERS, "top_k": TOP_K, "width": WIDTH}
)


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    for name, column in NEW.items():
        monkeypatch.setitem(COLUMNS, name, column)


def experts_of(token_ids: np.ndarray) -> np.ndarray:
    """Another number for each token, layer and place."""
    places = np.arange(LAYERS * TOP_K).reshape(LAYERS, TOP_K)
    return (token_ids[:, None, None] * LAYERS * TOP_K + places).astype(np.uint16)


def recorded(group: Group) -> Group:
    rollouts = [
        replace(
            rollout,
            recorded={
                "attended": experts_of(rollout.response_ids),
                "prompt_is_image": rollout.prompt_ids % 2 == 0,
            },
        )
        for rollout in group.rollouts
    ]
    images = np.arange(2 * WIDTH, dtype=np.float32).reshape(2, WIDTH) + group.ticket_id
    return replace(group, rollouts=tuple(rollouts), recorded={"image_features": images})


def batch_of(groups: list[Group]) -> Batch:
    batch = Batch()
    batch.groups = groups
    return batch


def test_columns_reach_the_loss_with_their_types_and_axes():
    """The first group has none, so its tokens get the default."""
    bare, *others = mixed_batch().groups
    sent = [bare, *map(recorded, others)]
    batch = batch_of([decode_group(encode_group(group)) for group in sent])
    for group, original in zip(batch.groups, sent, strict=True):
        assert trainable(group, LIMITS) is None
        pairs = [(group.recorded, original.recorded)]
        pairs += [(a.recorded, b.recorded) for a, b in zip(group.rollouts, original.rollouts, strict=True)]
        for read, written in pairs:
            assert read.keys() == written.keys()
            for name, column in read.items():
                assert column.dtype == NEW[name].dtype and not column.flags.owndata
                np.testing.assert_array_equal(column, written[name])
    without = {token for rollout in bare.rollouts for token in rollout.response_ids.tolist()}
    seen = set()
    for minibatch in planned(batch).minibatches:
        for one in minibatch.microbatches:
            experts_T = one.tokens.recorded["attended"]
            assert experts_T.dtype == torch.uint16 and experts_T.shape == (one.tokens.tokens, LAYERS, TOP_K)
            for token, experts in zip(one.target_T.tolist(), experts_T.numpy(), strict=True):
                expected = (
                    np.full((LAYERS, TOP_K), 999) if token in without else experts_of(np.array([token]))[0]
                )
                np.testing.assert_array_equal(experts, expected)
                seen.add(token in without)
    assert seen == {True, False}


def test_a_group_mixes_rollouts_with_and_without_a_column():
    group = recorded(mixed_batch().groups[0])
    first, second = group.rollouts
    mixed = decode_group(encode_group(replace(group, rollouts=(first, replace(second, recorded={})))))
    assert (mixed.rollouts[1].recorded["attended"] == 999).all()
    assert not mixed.rollouts[1].recorded["prompt_is_image"].any()
    np.testing.assert_array_equal(mixed.rollouts[0].recorded["attended"], experts_of(first.response_ids))


WRONG = {
    "routing is not declared as recorded": {"routing": np.zeros(3, np.uint16)},
    "rewards is not declared as recorded": {"rewards": np.zeros(3)},
    r"attended has the shape \(1, 3, 2\)": {"attended": np.zeros((1, LAYERS, TOP_K), np.uint16)},
    "Cannot cast .*int64.* to .*uint16": {"attended": np.zeros((3, LAYERS, TOP_K), np.int64)},
    "with 2 axes; uint16 .response_tokens, layers, top_k. is needed": {
        "attended": np.zeros((3, LAYERS), np.uint16)
    },
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_column_that_is_not_as_declared_is_not_sent(reason):
    group = mixed_batch().groups[0]
    rollout = group.rollouts[0]
    size = len(rollout.response_ids)
    ((name, column),) = WRONG[reason].items()
    column = np.resize(column, (size, *column.shape[1:])) if len(column) == 3 else column
    with pytest.raises(WireError, match=reason):
        encode_group(replace(group, rollouts=(replace(rollout, recorded={name: column}),)))


LIES = {
    "a negative|instead of": {"prompt_is_image": np.zeros(1, np.bool_)},
    "image_features that are not finite": {"image_features": np.full((1, WIDTH), np.nan, np.float32)},
    "image_features of float64": {"image_features": np.zeros((1, WIDTH))},
    "attended of uint16 with 1 axes": {"attended": np.zeros(3, np.uint16)},
    "response_tokens instead of": {"attended": np.zeros((1, LAYERS, TOP_K), np.uint16)},
}


@pytest.mark.parametrize("reason", LIES)
def test_a_column_that_is_not_as_declared_is_not_read(reason):
    meta, arrays = decode_frame(GROUP_LIMITS, encode_group(recorded(mixed_batch().groups[0])))
    with pytest.raises(WireError, match=reason):
        decode_group(encode_frame(GROUP_LIMITS, meta, arrays | LIES[reason]))


@pytest.mark.parametrize("shape", [(LAYERS + 1, TOP_K), (LAYERS, 0), (0, 2**31)])
def test_entries_of_another_size_than_the_runs_are_not_trained_on(shape):
    """They would fit into no batch."""
    group = recorded(mixed_batch().groups[0])
    rollouts = [
        replace(rollout, recorded={"attended": np.zeros((len(rollout.response_ids), *shape), np.uint16)})
        for rollout in group.rollouts
    ]
    read = decode_group(encode_group(replace(group, rollouts=tuple(rollouts))))
    assert "attended has entries of the shape" in (trainable(read, LIMITS) or "")
    bare = tuple(replace(rollout, recorded={}) for rollout in group.rollouts)
    wide = replace(group, rollouts=bare)
    assert trainable(wide, LIMITS) is None
    assert "image_features has entries" in (trainable(wide, replace(LIMITS, sizes={})) or "")


def test_a_frame_with_a_column_that_this_process_does_not_know_is_refused_by_its_name(monkeypatch):
    frame = encode_group(recorded(mixed_batch().groups[0]))
    monkeypatch.delitem(COLUMNS, "image_features")
    with pytest.raises(WireError, match="'image_features'; allowed are prompt_tokens"):
        decode_group(frame)


def test_a_sample_needs_an_entry_for_each_token():
    sample = planned(batch_of([recorded(group) for group in mixed_batch().groups])).sequences[0]
    with pytest.raises(ShapeError, match="attended"):
        replace(sample, recorded={"attended": sample.recorded["attended"][1:]})
