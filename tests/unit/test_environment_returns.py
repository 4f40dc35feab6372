"""What user code may return, and what a message about the rest says; frames that arrive in pieces."""

import asyncio
import datetime
import json
import math
import socket

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.environments.base import Answer, ToolCall
from asyncrl.environments.json_frames import LENGTH, MAX_MESSAGE_BYTES, packed, take_frames
from asyncrl.environments.loops import Conversation, play_text
from asyncrl.environments.player import ENDS, REWARDS, Player
from asyncrl.environments.returned import Step, read_reset, read_step
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.preflight.environment_trial import try_environment
from tests.support.talks import ScriptedTalk

MESSAGES = [{"role": "user", "content": "higher"}]


def through_json(value):
    """What the generator gets of a returned value."""
    return json.loads(packed({"value": value, "tuple": isinstance(value, tuple)})[LENGTH.size :])


@pytest.mark.parametrize(
    ("returned", "step"),
    [
        (("higher", 0.5, False), Step("higher", 0.5, False)),
        (("", 1, True), Step("", 1.0, True)),
        ((None, None, True), Step(None, None, True)),
        ((MESSAGES, 0, False), Step(MESSAGES, 0.0, False)),
        (("higher", 0.5, False, False, {"odd": 1}), Step("higher", 0.5, False)),
        (("won", 1.0, True, False, {}), Step("won", 1.0, True)),
        (("out of time", 0.0, False, True, {}), Step("out of time", 0.0, True, True)),
        (("both", 0.0, True, True, {}), Step("both", 0.0, True)),
        (
            {"observations": MESSAGES, "reward": 0.5, "done": False, "metadata": {}},
            Step(MESSAGES, 0.5, False),
        ),
        ({"environment_feedback": "higher", "rewards": 1.0, "done": True}, Step("higher", 1.0, True)),
    ],
)
def test_a_step_has_the_forms_of_the_field(returned, step):
    assert read_step(through_json(returned)) == step


@pytest.mark.parametrize(
    "returned",
    [
        None, "higher", ("higher", 0.5), ("higher", 0.5, 1), ("higher", "0.5", True), ("higher", True, True),
        ("higher", math.nan, False), ("higher", math.inf, False), ("higher", 10**400, False), (3, 0.0, False),
        ([{"content": "no role"}], 0.0, False), ([{"role": "user", "content": 3}], 0.0, False),
        ({"a": "state"}, 0.0, False), {"observations": [], "reward": 1.0},
    ],
)  # fmt: skip
def test_another_step_is_a_fault_and_never_a_score(returned):
    with pytest.raises(EnvironmentFault, match="step") as caught:
        read_step(through_json(returned))
    assert caught.value.reason == "returned"


@pytest.mark.parametrize(
    ("returned", "first"), [("go", "go"), (("go", {"seed": 1}), "go"), (None, None), (MESSAGES, MESSAGES)]
)
def test_a_reset_returns_an_observation_alone_or_with_its_info(returned, first):
    assert read_reset(through_json(returned))[0] == first


def state(returned, read=lambda reply: read_step(reply).state):
    return read(through_json(returned))


def first_state(returned):
    return state(returned, lambda reply: read_reset(reply)[1])


def test_a_turn_begins_in_the_state_that_user_code_names_and_else_in_the_observation():
    """Episodes that saw the same are compared, in whatever form they saw it."""
    low = state(("low", 0.0, False))
    assert low == state({"observations": "low", "reward": 1.0, "done": True}) == first_state("low")
    assert low == state(("low", 1.0, True, False, {})) == state(("low", 0, False, False, {"state": None}))
    assert first_state(("low", {"seed": 1})) == low
    named = [
        state(("low", 0.0, False, False, {"state": [3, 7]})),
        state(("high", 1.0, True, False, {"state": [3, 7], "other": 1})),
        state({"observations": "x", "reward": 1.0, "done": True, "state": [3, 7]}),
        first_state(("go", {"state": [3, 7]})),
    ]
    assert len(set(named)) == 1
    info = {"x": 1, "y": 2}
    boards = [state(("", 0.0, False, False, {"state": one})) for one in (info, dict(reversed(info.items())))]
    assert boards[0] == boards[1], "the order of a dict is not a part of the state"
    others = [state((text, 0.0, False)) for text in ("low ", "high", "", None, MESSAGES, "[3, 7]")]
    others += [state(("low", 0.0, False, False, {"state": one})) for one in ("low", 0, False, "", [7, 3])]
    assert len({low, named[0], boards[0], *others}) == len(others) + 3
    assert all(0 < one < 2**64 for one in (low, *named, *others))


@pytest.mark.parametrize("returned", [3, ("go", "now"), ("go", {}, 1), {"role": "user", "content": "go"}])
def test_another_reset_is_a_fault(returned):
    with pytest.raises(EnvironmentFault, match="reset"):
        read_reset(through_json(returned))


@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers())), st.integers(1, 9)
)
def test_frames_that_arrive_in_pieces_come_out_whole_and_in_order(sent, piece):
    stream, arrived, found = b"".join(map(packed, sent)), bytearray(), []
    for start in range(0, len(stream), piece):
        arrived += stream[start : start + piece]
        found += take_frames(arrived)
    assert found == sent and not arrived


@pytest.mark.parametrize(
    "garbage",
    [LENGTH.pack(MAX_MESSAGE_BYTES + 1), LENGTH.pack(3) + b"[1]", LENGTH.pack(3) + b"\xff{}", b"print"],
)
def test_bytes_that_are_no_frame_are_refused(garbage):
    with pytest.raises(ValueError):
        take_frames(bytearray(garbage))


@pytest.mark.parametrize("value", [object(), {1, 2}, "x" * (MAX_MESSAGE_BYTES + 1)])
def test_what_json_has_not_is_refused_before_it_is_sent(value):
    with pytest.raises((TypeError, ValueError), match=r"returned|found"):
        packed({"value": value})


def test_numbers_of_numpy_are_numbers():
    assert read_step(through_json(("", np.float32(0.5), np.bool_(True)))) == Step("", 0.5, True)


class Series:
    """A value of pandas with an index that its list has not."""

    to_dict = dict
    tolist = list

    def __str__(self):
        return "x  1"


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (np.int64(5), "5"), (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"), (torch.tensor([0.5]), "[0.5]"),
        ({"price": np.float32(1.5), "ok": np.bool_(True), "é": None}, '{"price": 1.5, "ok": true, "é": null}'),
        (datetime.date(2026, 1, 2), '"2026-01-02"'), (np.datetime64("2026-01-02", "ns"), '"2026-01-02T00:00:00.000000000"'),
        (Series(), '"x  1"'), ({np.int64(5): 2}, "{np.int64(5): 2}"),
        (np.longdouble(1.5), "1.5"), ("text", "text"),
    ],
)  # fmt: skip
def test_what_a_tool_returns_is_shown_as_json_or_as_its_own_text(returned, shown):
    ours, theirs = socket.socketpair()

    def count():
        return returned

    with ours, theirs:
        ours.sendall(packed({"do": "call", "name": "count", "arguments": {}}))
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            Player(theirs, [count], is_tools=True).serve()
        [reply] = take_frames(bytearray(ours.recv(1 << 16)))
    assert reply.get("value", reply) == shown


async def spoken(opening, *observations, limit=100):
    """What the model is shown at last."""
    talk = ScriptedTalk(["first", "second", "third"])
    conversation = Conversation(talk, opening, limit)
    for observation in observations:
        conversation.observe(observation)
        await conversation.answer()
    return talk.shown, conversation.counts


@pytest.mark.parametrize(
    ("opening", "observations", "shown"),
    [
        ("2+2=", (None, " so"), ["2+2=", " so"]),
        ("", (":", ">"), [":", ">"]),
        ([], ("go",), [[{"role": "user", "content": "go"}]]),
        ([{"role": "user", "content": "play"}], ("go",), [[{"role": "user", "content": "play\n\ngo"}]]),
        ([{"role": "system", "content": "play"}], ("go",), [[{"role": "system", "content": "play"}, {"role": "user", "content": "go"}]]),
        ([{"role": "user", "content": "play"}], (None, MESSAGES), [
            [{"role": "user", "content": "play"}],
            [{"role": "user", "content": "play"}, {"role": "assistant", "content": "first"}, MESSAGES[0]],
        ]),
    ],
)  # fmt: skip
def test_an_observation_is_text_behind_text_or_a_message(opening, observations, shown):
    assert asyncio.run(spoken(opening, *observations))[0] == shown


@given(st.integers(0, 300))
def test_a_long_observation_is_cut_where_the_model_can_see_it(length):
    [shown], counts = asyncio.run(spoken("", "x" * length))
    mark = f"\n[cut: {length - 100} of {length} characters]" if length > 100 else ""
    assert shown == "x" * min(length, 100) + mark and counts["observations/cut"] == (length > 100)


def test_messages_for_a_model_without_a_chat_template_are_a_fault():
    with pytest.raises(EnvironmentFault, match="no chat template"):
        asyncio.run(spoken("", MESSAGES))


def test_a_conversation_that_shows_nothing_is_a_fault():
    with pytest.raises(EnvironmentFault, match="no prompt"):
        asyncio.run(spoken([], None))


def test_the_message_of_an_answer_has_what_a_chat_template_takes():
    call = ToolCall(id="c1", name="add", arguments={"a": 1})
    assert Answer(text="so", tool_calls=(call,), reasoning="hm").message == {
        "role": "assistant", "content": "so", "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "answered", "finish_reason"),
    [
        (["", 1.0, True], "stop", "stop"),
        (["", 1.0, True, False, {}], "stop", "stop"),
        (["", 1.0, False, True, {}], "stop", "turns"),
        (["", 1.0, True], "length", "length"),
    ],
)
def test_an_episode_that_environment_or_answer_cut_off_is_truncated(value, answered, finish_reason):
    replies = {"reset": {"value": ":"}, "step": {"value": value}}
    talk = ScriptedTalk([Answer(text="go", finish_reason=answered)])

    async def ask(request):
        return replies[request["do"]]

    outcome = asyncio.run(play_text(Conversation(talk, "", 100), ask, {}, rewards=False))
    assert (outcome.finish_reason, outcome.reward) == (finish_reason, 1.0)


def test_a_property_that_lacks_an_attribute_is_a_fault_and_no_absent_reward():
    class Typo:
        def __getattr__(self, name):
            if name == "done":
                return True
            raise AttributeError(name)

        @property
        def reward(self):
            return self._scor

    ours, theirs = socket.socketpair()
    with ours, theirs:
        player = Player(ours, [Typo], is_tools=False)
        player._instance = Typo()
        with pytest.raises(AttributeError):
            player._ask(REWARDS)
        assert player._ask(ENDS) is True and player._ask(("absent",)) is None


def test_each_turn_has_the_state_before_it_and_the_reward_after_it():
    steps = iter([("low", None, False), ("high", 0.5, False), ("low", None, False), ("won", 1.0, True)])
    talk = ScriptedTalk(["go"] * 4)

    async def ask(request):
        return through_json("start" if request["do"] == "reset" else next(steps))

    outcome = asyncio.run(play_text(Conversation(talk, "", 100), ask, {}, rewards=False))
    states = [first_state(seen) for seen in ("start", "low", "high", "low")]
    assert talk.rewards == list(zip([None, 0.5, None, 1.0], states, strict=True)) and outcome.reward == 1.5


def test_the_prompt_of_a_row_is_not_changed():
    row = [{"role": "user", "content": "play"}]
    asyncio.run(spoken(row, "go", "on"))
    assert row == [{"role": "user", "content": "play"}]


def test_a_file_that_is_not_utf8_is_named_before_its_environment_starts(tmp_path):
    (tmp_path / "game.py").write_bytes(b'def tool() -> str:\n    return "\xe9"\n')
    with pytest.raises(ConfigError, match=r"game\.py: .*name a Python file"):
        try_environment(str(tmp_path / "game.py"), {}, row={}, prompt="", answers=())
