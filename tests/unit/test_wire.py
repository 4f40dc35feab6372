import dataclasses
import hashlib
import math
import pathlib
import re
import resource
import struct
from collections.abc import Mapping
from typing import Any

import hypothesis.extra.numpy as hnp
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.rules import GROUP_BYTES, PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES, ROLLOUT_BYTES
from asyncrl.config.sections import BatchConfig
from asyncrl.control.base import Heartbeat, Hello, Leave, Refused, Stop, Welcome
from asyncrl.errors import WireError, WireVersionError
from asyncrl.lineage import Weights
from asyncrl.rewards.forms import ANSWER_CHARACTERS
from asyncrl.types import Group, GroupTimes, Rollout, Turns, VersionSpan, version_spans
from asyncrl.version import __version__
from asyncrl.weights.base import UpdateOrder, UpdateReport
from asyncrl.wire import codec
from asyncrl.wire import group_frames as schema
from asyncrl.wire.codec import HEADER_BYTES, Limits, MessageCodec, decode_frame, encode_frame
from asyncrl.wire.group_frames import (
    GROUP_LIMITS,
    MAX_ROLLOUTS,
    MAX_SPANS,
    REASON_CHARACTERS,
    decode_group,
    encode_group,
)

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
KEY = b"the run's key"
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
names = st.text(max_size=12)


@st.composite
def rollouts(draw, with_turns=False):
    length = draw(st.integers(0, 12))
    versions = sorted(draw(st.lists(st.integers(0, 2**40), min_size=length, max_size=length)))
    ids = st.integers(0, 2**31 - 1)
    return Rollout(
        prompt_ids=np.array(draw(st.lists(ids, max_size=6)), dtype=np.int32),
        response_ids=draw(hnp.arrays(np.int32, length, elements=ids)),
        action_mask=draw(hnp.arrays(np.bool_, length)),
        behaviour_logprobs=draw(hnp.arrays(np.float32, length, elements=finite)),
        version_spans=version_spans(
            Weights(version, draw(st.integers(0, 2**32 - 1))) for version in versions
        ),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        reward=draw(finite),
        reward_parts=draw(st.dictionaries(names, finite, max_size=3)),
        answer=draw(st.none() | names),
        turns=draw(st.none() | turns_within(length)) if with_turns else None,
    )


@st.composite
def turns_within(draw, length):
    ends = sorted(draw(st.sets(st.integers(1, length), max_size=4))) if length else []
    return Turns(
        ends=np.array(ends, dtype=np.int32),
        rewards=draw(hnp.arrays(np.float32, len(ends), elements=finite)),
        states=draw(hnp.arrays(np.uint64, len(ends))),
        order=draw(hnp.arrays(np.int32, len(ends))),
    )


@st.composite
def episodes(draw):
    """Groups of episodes with several sequences and turns."""
    many = draw(st.lists(rollouts(with_turns=True), max_size=5))
    steps = draw(st.lists(st.integers(0, 1), min_size=len(many), max_size=len(many)))
    of = np.cumsum([0, *steps[1:]], dtype=np.int32)[: len(many)]
    count = int(of[-1]) + 1 if many else 0
    metric = hnp.arrays(np.float32, count, elements=st.floats(allow_infinity=False, width=32))
    return Group(
        ticket_id=1,
        rollouts=tuple(many),
        generator_id="g",
        finished_version=3,
        episode_of=draw(st.just(of) | st.none()) if count == len(many) else of,
        episode_metrics=draw(st.dictionaries(names, metric, max_size=3)),
        missing=draw(st.dictionaries(names, st.integers(-1, 2**40), max_size=3)),
    )


groups = st.builds(
    Group,
    ticket_id=st.integers(1, 2**53),
    rollouts=st.lists(rollouts(), max_size=4).map(tuple),
    generator_id=names,
    finished_version=st.integers(-1, 2**40),
    sampling_s=finite,
    reward_s=finite,
    times=st.none() | st.builds(GroupTimes, finite, finite, finite),
    greedy_reward=st.none() | finite,
    dead_reason=st.none() | names,
)


def assert_same_group(left, right):
    for field in dataclasses.fields(Group):
        if field.name != "rollouts":
            assert_same(getattr(left, field.name), getattr(right, field.name), field.name)
    assert len(left.rollouts) == len(right.rollouts)
    for one, other in zip(left.rollouts, right.rollouts, strict=True):
        for field in dataclasses.fields(Rollout):
            assert_same(getattr(one, field.name), getattr(other, field.name), field.name)


def assert_same(a, b, name):
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, Turns):
        for field in dataclasses.fields(Turns):
            assert_same(getattr(a, field.name), getattr(b, field.name), field.name)
    elif name in ("episode_metrics", "recorded"):
        assert a.keys() == b.keys()
        for metric in a:
            assert_same(a[metric], b[metric], metric)
    else:
        assert a == b, name


@given(groups | episodes(), st.binary(max_size=32))
def test_a_group_survives_the_wire(group, key):
    assert_same_group(decode_group(encode_group(group, key), key), group)


def group_of(rng, rollouts_count=3, tokens=20):
    return Group(
        ticket_id=41,
        rollouts=tuple(
            Rollout(
                prompt_ids=rng.integers(0, 1000, 5, dtype=np.int32),
                response_ids=rng.integers(0, 1000, tokens, dtype=np.int32),
                action_mask=rng.random(tokens) < 0.8,
                behaviour_logprobs=-rng.random(tokens, dtype=np.float32),
                version_spans=(VersionSpan(6, tokens - 3, 4_000_000_000), VersionSpan(7, 3, 12345)),
                finish_reason=("stop", "length")[r % 2],
                reward=r / 2,
                reward_parts={"exact": float(r), f"only_{r}": 0.25},
                answer=(None, "", "42", "½")[r % 4],
            )
            for r in range(rollouts_count)
        ),
        generator_id="generator-1",
        finished_version=7,
        sampling_s=1.5,
        reward_s=0.125,
    )


GROUP = group_of(np.random.default_rng(0))
GREEDY = dataclasses.replace(GROUP, greedy_reward=0.75)
EPISODES = dataclasses.replace(
    group_of(np.random.default_rng(1), rollouts_count=4),
    episode_of=np.array([0, 0, 1, 2], dtype=np.int32),
    episode_metrics={
        "calls": np.array([2, 0, np.nan], dtype=np.float32),
        "seconds/model": np.array([0.5, 1.25, 3], dtype=np.float32),
    },
)
EPISODES = dataclasses.replace(
    EPISODES,
    rollouts=tuple(
        dataclasses.replace(
            rollout,
            finish_reason=("turns", "turns", "stop", "time")[r],
            turns=Turns(
                ends=np.array(ends, dtype=np.int32),
                rewards=np.arange(len(ends), dtype=np.float32) / 4,
                states=np.arange(len(ends), dtype=np.uint64) + 2**63,
            ),
        )
        for r, (rollout, ends) in enumerate(
            zip(EPISODES.rollouts, [[4, 9], [20], [1, 2, 20], []], strict=True)
        )
    ),
)
DEAD = Group.dead(7, "reward worker was killed", generator_id="generator-1", version=3)
MESSAGES = MessageCodec((Hello, Heartbeat, Leave, Welcome, Refused, Stop, UpdateOrder, UpdateReport))
ORDER = UpdateOrder(
    version=3,
    transport="gloo",
    deadline_s=60.0,
    details={
        "address": "127.0.0.1:29500",
        "buckets": [[0, 4], [4, 9]],
        "checksums": [1, 2**63],
        "more": {"keep": True},
    },
    probe_ids=((1, 2), (3,)),
    probe_logprobs=(-0.5, -1.25),
    initial_logprobs=(-0.75, -1.5),
    history="12345 0 0 4000000000 2",
)
FRAMES = {
    "group.v2": (encode_group(GROUP, KEY), lambda data: assert_same_group(decode_group(data, KEY), GROUP)),
    "greedy_group.v2": (
        encode_group(GREEDY, KEY),
        lambda data: assert_same_group(decode_group(data, KEY), GREEDY),
    ),
    "episodes.v2": (
        encode_group(EPISODES, KEY),
        lambda data: assert_same_group(decode_group(data, KEY), EPISODES),
    ),
    "dead_group.v2": (encode_group(DEAD), lambda data: assert_same_group(decode_group(data), DEAD)),
    "update_order.v2": (
        MESSAGES.encode(ORDER, KEY),
        lambda data: _assert_equal(MESSAGES.decode(data, KEY), ORDER),
    ),
}


def _assert_equal(left, right):
    assert left == right


@pytest.mark.parametrize("name", FRAMES)
def test_frozen_frames_are_still_read_and_written(name):
    """If this fails, old and new processes cannot talk: add a field with a default, or raise WIRE_VERSION."""
    encoded, check = FRAMES[name]
    frozen = bytes.fromhex((GOLDEN / f"{name}.hex").read_text())
    check(frozen)
    assert encoded == frozen


@pytest.mark.parametrize("rows", [524_288, 33_000_000])
def test_an_order_says_of_each_row_whether_an_epoch_skips_it(rows):
    order = dataclasses.replace(ORDER, skipped={"0:4": b"\x55" * (rows // 8)})
    assert MESSAGES.decode(MESSAGES.encode(order, KEY), KEY) == order


@pytest.mark.parametrize("key", [b"", b"another run's key"])
def test_a_frame_made_with_another_key_is_refused(key):
    with pytest.raises(WireError, match="checksum"):
        decode_group(encode_group(GROUP, KEY), key)


def test_without_a_key_all_but_the_checksum_is_verified():
    frame = encode_group(GROUP, KEY)
    assert_same_group(decode_group(frame, key=None), GROUP)
    for bad in (b"", frame[:-1], frame.replace(b"stop", b"\xff" * 4)):
        with pytest.raises(WireError):
            decode_group(bad, key=None)


def test_every_single_flipped_bit_is_noticed():
    frame = bytearray(encode_group(DEAD, KEY))
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode_group(bytes(frame), KEY)
        frame[bit // 8] ^= 1 << bit % 8
    decode_group(bytes(frame), KEY)


def test_another_wire_version_is_named():
    frame = bytearray(encode_group(DEAD))
    struct.pack_into("<H", frame, 8, 9)
    with pytest.raises(
        WireVersionError,
        match=rf"version 9.*asyncrl {re.escape(__version__)} reads 2; .*same asyncrl release",
    ):
        decode_group(bytes(frame))


def test_a_message_is_no_group():
    with pytest.raises(WireError, match="kind 2 where kind 1"):
        decode_group(MESSAGES.encode(Leave(generator_id="a", incarnation="b")))


MESSAGE = Limits(kind=2, meta_bytes=0, body_bytes=0, items=0, text_bytes=0)


def sealed(meta, body=b"", limits=GROUP_LIMITS, key=b""):
    """A frame with a valid checksum around anything."""
    packed = meta if isinstance(meta, bytes) else msgpack.packb(meta)
    fields = codec._FIELDS.pack(codec.MAGIC, codec.WIRE_VERSION, limits.kind, len(packed), len(body))
    digest = hashlib.blake2b(key=key, digest_size=16)
    for part in (fields, body, packed):
        digest.update(part)
    return fields + digest.digest() + body + packed


@given(st.binary(max_size=200))
def test_garbage_only_ever_gives_wire_errors(data):
    for attempt in (data, codec.MAGIC + data, sealed(data), encode_group(DEAD)[:HEADER_BYTES] + data):
        with pytest.raises(WireError):
            decode_group(attempt)
    with pytest.raises(WireError):
        MESSAGES.decode(sealed(data, limits=MESSAGE))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.data())
def test_lies_in_a_sealed_group_only_ever_give_wire_errors(data):
    """Somebody with the key, and a bug: any meta entry, table entry or tensor byte may be wrong."""
    frame = encode_group(data.draw(st.sampled_from([GREEDY, EPISODES])))
    body_bytes = codec._FIELDS.unpack_from(frame)[4]
    body, meta = (
        bytearray(frame[HEADER_BYTES : HEADER_BYTES + body_bytes]),
        msgpack.unpackb(frame[HEADER_BYTES + body_bytes :]),
    )
    target = data.draw(st.sampled_from([*meta, "table", "body", "cut"]))
    if target == "table":
        row = data.draw(st.integers(0, len(meta["arrays"]) - 1))
        column = data.draw(st.integers(0, 2))
        value = data.draw(
            plain | st.sampled_from(["int64", "uint8", "float32", "spans", 0, 1, 2**62, -1, True, [], {}])
        )
        meta["arrays"][row][column] = value
    elif target == "body":
        for _ in range(data.draw(st.integers(1, 5))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    elif target == "cut":
        del body[data.draw(st.integers(0, len(body) - 1)) :]
    else:
        meta[target] = data.draw(plain)
    try:
        group = decode_group(sealed(meta, bytes(body)))
    except WireError:
        return
    assert group.greedy_reward is None or np.isfinite(group.greedy_reward)
    for rollout in group.rollouts:
        assert len(rollout.response_ids) == len(rollout.versions) == len(rollout.behaviour_logprobs)
        assert np.isfinite(rollout.behaviour_logprobs).all()
    assert 0 <= group.episodes <= len(group.rollouts)


@pytest.mark.parametrize(
    "meta",
    [
        b"\xdd\xff\xff\xff\xff",  # a list of 4 billion, in 5 bytes
        b"\xc6\xff\xff\xff\xff",  # binary of 4 GiB
        b"\x90" * 60_000,
        b"\x91" * 60_000,
        b"\x81\xa1a" * 20_000,
        msgpack.packb(list(range(257))),
        msgpack.packb({"a": "x" * 5000}),
        msgpack.packb({"a": b"binary"}),
        msgpack.packb({"a": msgpack.ExtType(1, b"x")}),
        msgpack.packb({1: 2}),
        msgpack.packb({}) + b"more",
    ],
)
def test_meta_beyond_the_limits_is_refused_without_memory_for_it(meta):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WireError):
        decode_group(sealed(meta))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "KiB"


@pytest.mark.parametrize(
    ("table", "body_bytes"),
    [
        ([["a", "uint8", 1]], 3),
        ([["a", "uint8", 1], ["b", "float32", 1]], 5),
        ([["a", "uint8", 1], ["a", "uint8", 1]], 2),
        ([["a", "uint8", 4], ["b", "uint8", -1]], 3),
        ([["a", "uint8", True]], 1),
        ([["a", "uint8", 2**62]], 1),
        ([["a", "uint8", 2**32, 2**32]], 0),
        ([["a", "uint8", 0, 2**31, 2**31, 2**31]], 0),
        ([["a", "uint8", 1, 1, 1, 1, 1]], 1),
        ([["a", "uint8", -1, -1]], 1),
        ([["a", "uint8", 2, 2]], 3),
        ([["a", "object", 1]], 8),
        ([["a", ["uint8"], 1]], 1),
        ([["a", "uint8"]], 1),
        ({}, 0),
        (None, 0),
    ],
)
def test_a_table_of_tensors_that_does_not_fit_the_body_is_refused(table, body_bytes):
    decode_frame(GROUP_LIMITS, sealed({"arrays": [["a", "uint8", body_bytes]]}, bytes(body_bytes)))
    with pytest.raises(WireError):
        decode_frame(GROUP_LIMITS, sealed({"arrays": table}, bytes(body_bytes)))


def test_a_header_that_promises_too_much_is_refused_by_its_numbers():
    header = codec._FIELDS.pack(codec.MAGIC, codec.WIRE_VERSION, 1, 1 << 20, 1 << 60) + bytes(16)
    with pytest.raises(WireError, match="at most"):
        decode_group(header)


@pytest.mark.parametrize("field", ["behaviour_logprobs", "reward", "reward_parts"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_where_they_are_made(field, bad):
    rollout = GROUP.rollouts[0]
    values = {
        "behaviour_logprobs": np.full(20, bad, dtype=np.float32),
        "reward": bad,
        "reward_parts": {"exact": bad},
    }
    broken = dataclasses.replace(GROUP, rollouts=(dataclasses.replace(rollout, **{field: values[field]}),))
    with pytest.raises(WireError, match="finite"):
        encode_group(broken)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_greedy_reward_that_is_not_finite_is_refused_on_both_sides(bad):
    with pytest.raises(WireError, match="greedy_reward"):
        encode_group(dataclasses.replace(GROUP, greedy_reward=bad))
    meta, arrays = decode_frame(GROUP_LIMITS, encode_group(GREEDY))
    with pytest.raises(WireError, match="greedy_reward"):
        decode_group(encode_frame(GROUP_LIMITS, {**meta, "greedy_reward": bad}, arrays))


EPISODE_LIES = {
    r"\[0 1 0 2\] of 4 rollouts do not count up": {"episode_of": [0, 1, 0, 2]},
    r"\[1 1 1 2\] of 4 rollouts do not count up": {"episode_of": [1, 1, 1, 2]},
    r"\[0 0 2 3\] of 4 rollouts do not count up": {"episode_of": [0, 0, 2, 3]},
    "episode_of has 3 rollouts instead of 4": {"episode_of": [0, 0, 1]},
    "one entry for each of 2 episodes": {"episode_of": [0, 0, 1, 1]},
    "a turn ends behind the 20 tokens": {"turn_ends": [4, 21, 20, 1, 2, 20]},
    r"turns end at \[4 4\]": {"turn_ends": [4, 4, 20, 1, 2, 20]},
    r"turns end at \[0 4\]": {"turn_ends": [0, 4, 20, 1, 2, 20]},
    r"turns end at \[9 4\]": {"turn_ends": [9, 4, 20, 1, 2, 20]},
    "turn_ends has 5 turns instead of 6": {"turn_ends": [4, 9, 20, 1, 2]},
    "turn_states has 5 turns instead of 6": {"turn_states": [1, 2, 3, 4, 5]},
    "negative count in turns": {"turns": [-2, 1, 3, 0]},
    "turn_rewards that are not finite": {"turn_rewards": [0, 1, np.nan, 0, 0, 0]},
    "episode_metrics that are not finite": {"episode_metrics": [[0, 1], [np.inf, 0], [0, 0]]},
    "episode_metrics of float32 with 1 axes": {"episode_metrics": [0, 1, 2]},
    "contradict each other: zip": {"episode_metrics": [[0], [1], [2]]},
}


@pytest.mark.parametrize("reason", EPISODE_LIES)
def test_episodes_that_contradict_themselves_are_refused(reason):
    meta, arrays = decode_frame(GROUP_LIMITS, encode_group(EPISODES))
    lies = {name: np.array(column, dtype=arrays[name].dtype) for name, column in EPISODE_LIES[reason].items()}
    with pytest.raises(WireError, match=reason):
        decode_group(encode_frame(GROUP_LIMITS, meta, {**arrays, **lies}))


@pytest.mark.parametrize("gone", ["turns", "turn_ends", "episode_metrics", "rewards"])
def test_a_column_that_another_needs_is_not_left_out(gone):
    meta, arrays = decode_frame(GROUP_LIMITS, encode_group(EPISODES))
    rest = {name: column for name, column in arrays.items() if name != gone}
    with pytest.raises(WireError, match="the group"):
        decode_group(encode_frame(GROUP_LIMITS, meta, rest))
    with pytest.raises(WireError, match="a tensor 'more'; allowed are"):
        decode_group(encode_frame(GROUP_LIMITS, meta, {**arrays, "more": rest["finish"]}))


def test_turns_without_rewards_or_states_have_zeros_beside_turns_with_them():
    """An environment may reward some episodes only; a state of 0 is no state."""
    first, *others = EPISODES.rollouts
    bare = dataclasses.replace(first, turns=Turns(ends=first.turns.ends))
    single = dataclasses.replace(others[0], turns=None)
    group = dataclasses.replace(EPISODES, rollouts=(bare, single, *others[1:]))
    read, alone, *_ = decode_group(encode_group(group)).rollouts
    assert read.turns.rewards.tolist() == read.turns.states.tolist() == [0, 0] and alone.turns is None
    group = dataclasses.replace(EPISODES, rollouts=(bare,), episode_of=None, episode_metrics={})
    assert_same_group(decode_group(encode_group(group)), group)


def test_the_largest_group_of_long_episodes_fits_a_frame():
    """16 episodes of 128k tokens in 50 turns, an update in each turn; a prompt of 8k in each."""
    turns, tokens = 50, 1 << 17
    rollout = Rollout(
        prompt_ids=np.zeros(1 << 13, np.int32),
        response_ids=np.zeros(tokens, np.int32),
        action_mask=np.ones(tokens, np.bool_),
        behaviour_logprobs=np.zeros(tokens, np.float32),
        version_spans=(*(VersionSpan(v, 2) for v in range(turns)), VersionSpan(turns, tokens - 2 * turns)),
        finish_reason="turns",
        turns=Turns(
            ends=np.arange(1, turns + 1, dtype=np.int32),
            rewards=np.zeros(turns, np.float32),
            states=np.zeros(turns, np.uint64),
        ),
    )
    group = Group(ticket_id=1, rollouts=(rollout,) * 16, generator_id="g", finished_version=turns)
    frame = encode_group(group)
    assert len(frame) < 45e6 < GROUP_LIMITS.body_bytes
    assert decode_group(frame).rollouts[15].turns.ends[-1] == turns


def test_a_frame_that_no_peer_would_take_is_not_sent():
    with pytest.raises(WireError, match="at most"):
        encode_frame(
            Limits(kind=1, meta_bytes=100, body_bytes=3, items=9, text_bytes=9),
            {},
            {"a": np.zeros(1, np.float32)},
        )
    with pytest.raises(WireError, match="dtype"):
        encode_frame(GROUP_LIMITS, {}, {"a": np.zeros(1, np.complex64)})
    with pytest.raises(WireError, match="1 to 4 axes"):
        encode_frame(GROUP_LIMITS, {}, {"a": np.zeros([1] * 5, np.uint8)})
    with pytest.raises(WireError):
        encode_group(dataclasses.replace(DEAD, generator_id="g" * 5000))


@pytest.mark.parametrize(
    ("size", "prompt_tokens", "response_tokens"), [(1, 1, 1), (16, 7, 3), (8, 512, 4000)]
)
def test_no_group_is_larger_than_the_config_reckons(size, prompt_tokens, response_tokens):
    """With ten policy versions in each response, ten parts of the reward, and long names."""
    spans = [response_tokens // 10] * 9 if response_tokens > 10 else []
    rollout = Rollout(
        prompt_ids=np.zeros(prompt_tokens, np.int32),
        response_ids=np.zeros(response_tokens, np.int32),
        action_mask=np.ones(response_tokens, np.bool_),
        behaviour_logprobs=np.zeros(response_tokens, np.float32),
        version_spans=tuple(VersionSpan(v, n) for v, n in enumerate([*spans, response_tokens - sum(spans)])),
        finish_reason="length",
        reward_parts={f"{'part' * 10}_{i}": 0.5 for i in range(10)},
        answer="\U0001f600" * ANSWER_CHARACTERS,
    )
    group = Group(
        ticket_id=1 << 40,
        rollouts=(rollout,) * size,
        generator_id="g" * 200,
        finished_version=9,
        greedy_reward=0.5,
    )
    tokens_bytes = PROMPT_TOKEN_BYTES * prompt_tokens + RESPONSE_TOKEN_BYTES * response_tokens
    assert len(encode_group(group)) <= GROUP_BYTES + size * (ROLLOUT_BYTES + tokens_bytes)


def test_answers_that_lie_about_their_length_are_refused():
    rollouts = GROUP.rollouts
    with pytest.raises(WireError, match="an answer of 1025 bytes; at most 1024"):
        encode_group(
            dataclasses.replace(GROUP, rollouts=(dataclasses.replace(rollouts[0], answer="4" * 1025),))
        )
    meta, arrays = decode_frame(GROUP_LIMITS, encode_group(GROUP))
    lies = {
        "contradict": {"answer_bytes": arrays["answer_bytes"] + 1},
        "contradict each other: 'utf-8'": {"answers": np.full_like(arrays["answers"], 0xFF)},
        "negative count in answer_bytes": {"answer_bytes": arrays["answer_bytes"] - 2},
        "contradict each other: answers has 2 answer_bytes instead of 6442450941": {
            "answer_bytes": np.full_like(arrays["answer_bytes"], 2**31 - 1)
        },
        "an answer of 1025 bytes": {
            "answer_bytes": np.array([-1, 0, 1025], np.int32),
            "answers": np.zeros(1025, np.uint8),
        },
    }
    for reason, lie in lies.items():
        with pytest.raises(WireError, match=reason):
            decode_group(encode_frame(GROUP_LIMITS, meta, {**arrays, **lie}))


@pytest.mark.parametrize(
    "group",
    [
        Group.dead(1, "no such item: \ud83d", generator_id="g", version=0),
        Group.dead(2**70, "fails", generator_id="g", version=0),
        dataclasses.replace(group_of(np.random.default_rng(0)), missing={"\udc80": 1}),
    ],
)
def test_what_no_frame_can_hold_is_a_wire_error(group):
    with pytest.raises(WireError, match="cannot be packed"):
        encode_group(group)


def test_a_long_reason_is_cut():
    decoded = decode_group(encode_group(Group.dead(1, "é" * 100_000, generator_id="g", version=0)))
    assert decoded.dead_reason == "é" * REASON_CHARACTERS


@given(
    st.sampled_from(list(codec.DTYPES.values())).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_side=0, max_dims=codec.MOST_AXES))
    )
)
def test_a_tensor_of_any_allowed_type_and_shape_survives_the_wire(array):
    _, arrays = decode_frame(GROUP_LIMITS, encode_frame(GROUP_LIMITS, {}, {"a": array}))
    assert arrays["a"].dtype == array.dtype and arrays["a"].shape == array.shape
    assert arrays["a"].tobytes() == array.tobytes()


def test_tensors_are_aligned_views_of_the_frame():
    sent = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.arange(2, dtype=np.float64),
        "c": np.arange(5, dtype=np.int32),
    }
    meta, arrays = decode_frame(GROUP_LIMITS, encode_frame(GROUP_LIMITS, {"x": 1}, sent))
    assert meta == {"x": 1}
    for name, array in sent.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].flags.aligned
        assert not arrays[name].flags.owndata
        assert not arrays[name].flags.writeable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Everything:
    number: int
    real: float
    flag: bool
    text: str
    maybe: str | None
    data: bytes
    many: tuple[float, ...]
    rows: list[list[int]]
    table: Mapping[str, int]
    anything: dict[str, Any]
    inner: Inner
    inners: tuple[Inner, ...] = ()


EVERYTHING = MessageCodec((Everything, Inner))
inners = st.builds(Inner, number=st.integers(-5, 5))
anything = plain.filter(lambda value: not re.search(r"\b(nan|inf)\b", repr(value)))


@given(
    st.builds(
        Everything,
        number=st.integers(-(2**53), 2**53),
        real=finite,
        flag=st.booleans(),
        text=names,
        maybe=st.none() | names,
        data=st.binary(max_size=9),
        many=st.lists(finite).map(tuple),
        rows=st.lists(st.lists(st.integers(0, 9))),
        table=st.dictionaries(names, st.integers(0, 9)),
        anything=st.dictionaries(names, anything, max_size=4),
        inner=inners,
        inners=st.lists(inners).map(tuple),
    )
)
def test_messages_survive_the_wire(message):
    assert EVERYTHING.decode(EVERYTHING.encode(message, KEY), KEY) == message


GOOD = {
    "number": 1,
    "real": 1.0,
    "flag": True,
    "text": "",
    "maybe": None,
    "data": b"",
    "many": [],
    "rows": [],
    "table": {},
}
GOOD |= {"anything": {}, "inner": {"type": "Inner", "fields": {"number": 1}}}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["real", "many", "anything"])
def test_a_number_that_is_not_finite_is_neither_sent_nor_heard(place, value):
    wrong = {"real": value, "many": [1.0, value], "anything": {"deep": [{"x": value}]}}[place]
    with pytest.raises(WireError, match="finite"):
        EVERYTHING.decode(sealed_message(GOOD | {place: wrong}))
    good = EVERYTHING.decode(sealed_message(GOOD))
    with pytest.raises(WireError, match="finite"):
        EVERYTHING.encode(dataclasses.replace(good, **{place: tuple(wrong) if place == "many" else wrong}))


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**64 - 1])
def test_an_integer_is_bounded(value):
    with pytest.raises(WireError, match=r"number is -?\d+; an integer of at most"):
        EVERYTHING.decode(sealed_message(GOOD | {"number": value}))


def sealed_message(fields, name="Everything"):
    return sealed({"message": {"type": name, "fields": fields}, "arrays": []}, limits=MESSAGE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", True),
        ("number", 1.0),
        ("number", None),
        ("real", "1.0"),
        ("real", True),
        ("flag", 1),
        ("text", b"x"),
        ("maybe", 3),
        ("data", "x"),
        ("many", [1.0, "x"]),
        ("many", 1.0),
        ("rows", [[1], 2]),
        ("table", {"a": 1.5}),
        ("table", []),
        ("anything", []),
        ("inner", {"type": "Everything", "fields": {}}),
        ("inner", {"number": 1}),
        ("inner", {"type": "Inner", "fields": {"number": "1"}}),
        ("more", 1),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(field, value):
    EVERYTHING.decode(sealed_message(GOOD))
    with pytest.raises(WireError, match=r"Everything|Inner"):
        EVERYTHING.decode(sealed_message({**GOOD, field: value}))


def test_a_missing_field_needs_a_default():
    assert EVERYTHING.decode(sealed_message(GOOD)).inners == ()
    with pytest.raises(WireError, match="text"):
        EVERYTHING.decode(sealed_message({name: value for name, value in GOOD.items() if name != "text"}))


def test_unknown_types_are_neither_sent_nor_read():
    with pytest.raises(WireError, match="Inner cannot be sent"):
        MESSAGES.encode(Inner(number=1))
    with pytest.raises(WireError, match="known messages"):
        MESSAGES.decode(EVERYTHING.encode(Inner(number=1)))
    with pytest.raises(WireError, match="number"):
        EVERYTHING.encode(Inner(number="one"))


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [20, 300, 500])
def test_deep_nesting_is_refused_in_both_directions(depth):
    with pytest.raises(WireError):
        EVERYTHING.decode(sealed_message({**GOOD, "anything": {"a": nested(depth)}}))
    with pytest.raises(WireError):
        MESSAGES.encode(dataclasses.replace(ORDER, details={"a": nested(depth)}))


@given(
    st.fixed_dictionaries(
        {
            "message": st.fixed_dictionaries(
                {"type": st.sampled_from(["Hello", "UpdateOrder", 3]), "fields": plain}
            )
            | plain,
            "arrays": st.just([]) | plain,
        }
    )
)
def test_any_sealed_message_is_a_message_or_a_wire_error(meta):
    try:
        packed = sealed(meta, limits=MESSAGE)
    except ValueError:
        return
    with pytest.raises(WireError):
        MESSAGES.decode(packed)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("behaviour_logprobs", {0: np.nan}),
        ("rewards", {0: np.inf}),
        ("action_mask", {0: 2}),
        ("span_tokens", {0: 24, 1: -4}),
        ("prompt_tokens", {0: 11, 1: -1}),
    ],
)
def test_a_sealed_group_with_impossible_numbers_is_refused(column, values):
    meta, arrays = decode_frame(GROUP_LIMITS, encode_group(GROUP))
    arrays = {name: array.copy() for name, array in arrays.items()}
    # A truth value is a byte, which another program may set to 2.
    target = arrays[column].view(np.uint8) if column == "action_mask" else arrays[column]
    for index, value in values.items():
        target[index] = value
    with pytest.raises(WireError):
        decode_group(encode_frame(GROUP_LIMITS, meta, arrays))


@pytest.mark.parametrize(
    ("name", "value"),
    [("ticket_id", True), ("generator_id", 3), ("sampling_s", "1"), ("dead_reason", 0), ("times", [1.0])],
)
def test_a_sealed_group_with_a_value_of_another_type_is_refused(name, value):
    meta, arrays = decode_frame(GROUP_LIMITS, encode_group(GROUP))
    with pytest.raises(WireError, match=name):
        decode_group(encode_frame(GROUP_LIMITS, {**meta, name: value}, arrays))


def test_extension_types_are_refused():
    with pytest.raises(WireError):
        decode_frame(GROUP_LIMITS, sealed({"arrays": [], "a": msgpack.ExtType(1, b"x")}))


def rollout_of(spans):
    tokens = len(spans)
    return Rollout(
        prompt_ids=np.zeros(0, np.int32),
        response_ids=np.zeros(tokens, np.int32),
        action_mask=np.ones(tokens, np.bool_),
        behaviour_logprobs=np.zeros(tokens, np.float32),
        version_spans=spans,
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    ("rollouts", "spans", "fits"),
    [(MAX_ROLLOUTS, 1, True), (MAX_ROLLOUTS + 1, 0, False), (2, MAX_SPANS // 2 + 1, False)],
)
def test_what_is_small_on_the_wire_and_large_in_memory_is_bounded_by_number_on_both_sides(
    monkeypatch, rollouts, spans, fits
):
    one = rollout_of(tuple(VersionSpan(version, 1) for version in range(spans)))
    group = Group(ticket_id=1, rollouts=(one,) * rollouts, generator_id="g", finished_version=0)
    if fits:
        assert len(decode_group(encode_group(group)).rollouts) == rollouts
        return
    with pytest.raises(
        WireError, match=f"{rollouts} rollouts with {rollouts * spans} version spans; at most"
    ):
        encode_group(group)
    with monkeypatch.context() as lenient:
        lenient.setattr(schema, "_check_counts", lambda arrays: None)
        frame = encode_group(group)
    with pytest.raises(WireError, match="at most"):
        decode_group(frame)


def test_the_config_allows_no_group_that_the_wire_refuses():
    assert BatchConfig.model_json_schema()["properties"]["group_size"]["maximum"] == MAX_ROLLOUTS


@pytest.mark.parametrize("empty", [[], {}])
def test_many_small_containers_in_the_meta_are_refused_together(empty):
    """Each list is within its own limit."""
    with pytest.raises(WireError, match="too many entries"):
        decode_frame(GROUP_LIMITS, sealed({"arrays": [[empty] * 200] * 50}))
