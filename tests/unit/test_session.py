"""Sessions over real chat templates: no drift, each turn trained once, what was sampled stays as it is."""

import os
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from asyncrl.errors import DriftError, RenderError
from asyncrl.launch import players
from asyncrl.session.base import Request
from asyncrl.session.chat_messages import key_after
from asyncrl.session.chat_template import TemplateRenderer
from asyncrl.session.delta import closer, delta, rewritten
from asyncrl.session.tree import Session
from asyncrl.types import VersionSpan
from tests.support.chat_templates import STOPS, WITHOUT_TOOLS, renderer_of, tokenizer_of
from tests.support.letters import Letters
from tests.support.random_agent import TOOL, Agent, Call
from tests.support.talks import rollout_of, user
from tests.support.task_config import config_of

CONVERSATIONS = int(os.environ.get("ASYNCRL_CONVERSATIONS", "1800"))
"""Over all templates; the nightly job plays 10,000."""


def agent_of(name: str, seed: int, *, history: str = "exact") -> Agent:
    renderer = renderer_of(name)
    tokenizer = renderer._tokenizer
    specials = {tokenizer.convert_tokens_to_ids(text) for text in renderer.special_texts}
    return Agent(
        renderer=renderer,
        vocabulary=[one for one in range(len(tokenizer)) if one not in specials],
        draw=random.Random(f"{name}{seed}"),
        session=Session(renderer, history=history),
        with_tools=name not in WITHOUT_TOOLS,
    )


def place_of(call: Call, rollouts) -> list[tuple[int, int]]:
    """Where the answer's log-probabilities stand: the rollout, and the offset in its response."""
    wanted = call.rollout.behaviour_logprobs
    return [
        (index, start)
        for index, rollout in enumerate(rollouts)
        for start in np.flatnonzero(rollout.behaviour_logprobs == wanted[0])
        if np.array_equal(rollout.behaviour_logprobs[start : start + len(wanted)], wanted)
    ]


def check(agent: Agent) -> None:
    """Compare the sequences with the agent's book."""
    rollouts = agent.session.rollouts()
    ends: list[set[int]] = [set() for _ in rollouts]
    for call in agent.calls:
        ((index, start),) = place_of(call, rollouts)  # trained once
        rollout, end = rollouts[index], start + len(call.rollout.response_ids)
        before = (*rollout.prompt_ids.tolist(), *rollout.response_ids[:start].tolist())
        assert before == call.request.prompt_ids  # what the engine was asked
        assert np.array_equal(rollout.response_ids[start:end], call.rollout.response_ids)
        assert np.array_equal(rollout.versions[start:end], call.rollout.versions)
        assert rollout.action_mask[start:end].all()
        ends[index].add(end)
    for rollout, found in zip(rollouts, ends, strict=True):
        assert [*found] == [] or sorted(found) == (
            rollout.turns.ends.tolist() if rollout.turns else [len(rollout.response_ids)]
        )
        assert not rollout.behaviour_logprobs[~rollout.action_mask].any()
        assert rollout.action_mask[-1]
    trained = sum(int(rollout.action_mask.sum()) for rollout in rollouts)
    assert trained == sum(len(call.rollout.response_ids) for call in agent.calls)


def plain_words(message) -> str:
    """The text of a message up to its number, without special tokens."""
    return re.match(r".*?n\d+", message["content"])[0]


def check_tree(agent: Agent) -> None:
    """Each call continues the one that the agent meant, with the new messages' text behind it, once."""
    for call in agent.calls:
        request = call.request
        if request.rule == "rendered":
            assert request.parent is None
        else:
            assert request.parent is (call.before.turn if call.before else None)
        whole, new = agent.renderer.decode(request.prompt_ids), agent.renderer.decode(request.delta_ids)
        for words in (plain_words(message) for message in call.new):
            assert whole.count(words) == new.count(words) == 1


@pytest.mark.parametrize("name", STOPS)
def test_no_drift_over_random_conversations(name):
    for seed in range(-(-CONVERSATIONS // len(STOPS))):
        agent = agent_of(name, seed)
        agent.play(agent.draw.randint(2, 7))
        check(agent)
        check_tree(agent)
        assert name == "gptoss" or not agent.session.counts["rendered"]


@pytest.mark.parametrize("name", STOPS)
def test_with_history_template_the_policy_reads_what_the_template_writes(name):
    for seed in range(10):
        agent = agent_of(name, seed, history="template")
        agent.play(6)
        check(agent)
        for call in agent.calls:
            text = agent.renderer.render(call.request.said.messages, call.tools, generation=True)
            assert agent.renderer.decode(call.request.prompt_ids) == text


REWRITING = {
    "gemma4_v5": 1, "glm4moe": 1, "gptoss": 2, "nemotron_3_super": 1, "phi3": 3, "qwen3": 3, "qwen3_5_think": 2,
}  # fmt: skip
"""Templates that rewrite history, and the number of kinds of answers behind which they do."""


@pytest.mark.parametrize("name", STOPS)
def test_a_template_that_rewrites_history_is_known_at_the_start(name, caplog):
    renderer = renderer_of(name)
    assert len(rewritten(renderer)) == REWRITING.get(name, 0)
    config = config_of(environment={"uses": "game.py:Game", "history": "template"})
    prompts = SimpleNamespace(tokenizer=renderer._tokenizer, renderer=renderer)
    players.Players.of(config, Path()).sampler(None, prompts, "g0")
    assert ("environment.history is template" in caplog.text) == (name in REWRITING)


def said(session: Session, renderer, messages, answer: str, *, tools=(), train=True, stop: str = "", **more):
    """Let the policy answer with this text, and add question and answer to `messages`."""
    request = session.request(messages, tools=tools)
    ids = [*renderer.encode(answer), *renderer.encode(stop or renderer.decode([min(renderer.stop_ids)]))]
    message = {"role": "assistant", "content": answer, **more}
    turn = session.record(request, rollout_of(request.prompt_ids, ids), message, train=train)
    messages.append(message)
    return turn


@pytest.mark.parametrize("name", sorted(set(STOPS) - {"glm4moe", "gptoss"}))
def test_with_the_templates_own_tokens_a_stable_turn_is_what_the_template_renders(name):
    """The policy samples what the template would write; rule `stable` then gives the template's prompt."""
    renderer, tools = renderer_of(name), () if name in WITHOUT_TOOLS else (TOOL,)
    session, messages, stable = Session(renderer), [user("one two")], 0
    for question in ("three", "four", "five"):
        request = session.request(messages, tools=tools)
        answer = {"role": "assistant", "content": f"answer to {question}"}
        before, whole = (
            renderer.decode(request.prompt_ids),
            renderer.render([*messages, answer], tools, generation=False),
        )
        if request.rule in ("roots", "stable"):
            assert before == renderer.render(messages, tools, generation=True)
            stable += request.rule == "stable"
        if not whole.startswith(before):
            return  # the template gives the history another text than the opening that it gave the policy
        ids = renderer.encode(whole[len(before) :])
        last = max(index for index, one in enumerate(ids) if one in renderer.stop_ids)
        session.record(request, rollout_of(request.prompt_ids, ids[: last + 1]), answer)
        messages += [answer, user(question)]
    assert stable or name in ("gemma4_v5", "phi3", "qwen3", "qwen3_5_think")


def delta_text(name: str, stop: str, *, call: bool = False, cut_off: bool = False) -> str:
    """What the session puts behind an answer that ended with `stop`."""
    renderer, tools = renderer_of(name), (TOOL,) if call else ()
    session, messages = Session(renderer), [user("q")]
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    more = {"tool_calls": calls} if call else {}
    said(session, renderer, messages, "fine", tools=tools, stop="x" if cut_off else stop, **more)
    new = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "3"} if call else user("r")
    request = session.request([*messages, new], tools=tools)
    assert request.parent is session.turns[0]
    return renderer.decode(request.delta_ids)


def test_the_delta_begins_behind_the_stop_token():
    assert delta_text("qwen2_5", "<|im_end|>") == "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"


def test_another_stop_token_stands_in_the_place_of_the_templates():
    assert delta_text("qwen2_5", "<|endoftext|>") == delta_text("qwen2_5", "<|im_end|>")


def test_a_cut_off_answer_gets_the_templates_stop_token():
    assert delta_text("qwen2_5", "", cut_off=True) == "<|im_end|>" + delta_text("qwen2_5", "<|im_end|>")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_a_base_model_that_stops_elsewhere_gets_the_templates_end_of_an_answer(name, caplog):
    """Its only stop token is that of its texts; the template ends turns with another one, and the log says so."""
    tokenizer = tokenizer_of(name)
    (end,) = tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    tokenizer.eos_token = "<|endoftext|>"
    base, chat = TemplateRenderer(tokenizer, [end]), renderer_of(name)
    assert base.stop_ids == {end} and closer(base) == closer(chat) == "<|im_end|>"
    history, new = (user("hi"), {"role": "assistant", "content": "fine"}), (user("go on"),)
    (last,) = chat.encode("e")
    (ours,) = chat.encode("<|im_end|>")
    cut = delta(chat, history, new, (), last)
    assert delta(base, history, new, (), last) == cut and cut[1].startswith("<|im_end|>\n<|im_start|>user")
    stopped = delta(chat, history, new, (), ours)
    assert delta(base, history, new, (), end) == stopped and stopped[1].startswith("\n<|im_start|>user")
    config = config_of(environment={"uses": "game.py:Game"})
    for renderer, is_named in ((chat, False), (base, True)):
        prompts = SimpleNamespace(tokenizer=tokenizer, renderer=renderer)
        players.Players.of(config, Path()).sampler(None, prompts, "g0")
        assert ("closes an answer with <|im_end|>, and the model does not stop" in caplog.text) == is_named


@pytest.mark.parametrize("name", sorted(STOPS))
def test_the_end_of_an_answer_is_one_of_the_models_stop_tokens(name):
    """GLM's answers end where the next message begins."""
    assert closer(renderer_of(name)) in (STOPS[name] if name != "glm4moe" else ("",))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": 2.0}, {"a": 2}, True),
        ({"a": [1e3, -0.0]}, '{"a": [1000, 0]}', True),
        ({"a": 2.5}, {"a": 2}, False),
        ({"a": True}, {"a": 1}, False),
        ({"a": "2.0"}, {"a": "2"}, False),
        ({"a": 1e400}, {"a": float("inf")}, True),
    ],
)
def test_numbers_of_a_call_are_compared_as_numbers(one, other, same):
    """Agents in JavaScript send 2 for 2.0."""

    def key(arguments):
        call = {"function": {"name": "add", "arguments": arguments}}
        return key_after(b"", {"role": "assistant", "content": "", "tool_calls": [call]})

    assert (key(one) == key(other)) == same


def test_a_stop_token_that_opens_the_next_message_is_not_repeated_nor_lost():
    behind = "\nr<|assistant|>"
    assert delta_text("glm4moe", "<|user|>") == behind
    assert delta_text("glm4moe", "<|endoftext|>") == delta_text("glm4moe", "", cut_off=True)
    assert delta_text("glm4moe", "<|endoftext|>") == "<|user|>" + behind
    results = delta_text("gemma4_v5", "<|tool_response>", call=True)
    assert results.startswith("response:add")
    assert delta_text("gemma4_v5", "<turn|>", call=True) == "<|tool_response>" + results


def test_a_branch_trains_shared_turns_in_the_first_sequence_only():
    renderer = renderer_of("qwen2_5")
    session, messages = Session(renderer), [user("q")]
    first = said(session, renderer, messages, "one")
    left, right = [*messages, user("left")], [*messages, user("right")]
    second = said(session, renderer, left, "two")
    third = said(session, renderer, right, "three")
    first.reward, third.reward, second.state = 0.5, 2.0, 2**64 - 1
    one, other = session.rollouts()
    assert session.counts["branches"] == 1
    lengths = [len(turn.sampled_ids) for turn in (first, second, third)]
    assert [int(rollout.action_mask.sum()) for rollout in (one, other)] == [
        lengths[0] + lengths[1],
        lengths[2],
    ]
    assert one.turns.ends.tolist() == [lengths[0], len(one.response_ids)]
    assert one.turns.rewards.tolist() == [0.5, 0.0]
    assert one.turns.states.tolist() == [0, 2**64 - 1]
    assert other.turns.ends.tolist() == [len(other.response_ids)]
    assert other.turns.rewards.tolist() == [2.0]
    assert other.turns.states is None
    shared = lengths[0]
    assert other.response_ids[:shared].tolist() == one.response_ids[:shared].tolist()


def test_sub_agents_that_take_turns_with_the_agent_keep_the_order_of_time():
    renderer = renderer_of("qwen2_5")
    session, agent, helper = Session(renderer), [user("agent")], [user("helper")]
    for messages in (agent, helper, agent, helper):
        said(session, renderer, messages, "fine")
        messages.append(user("more"))
    one, other = session.rollouts()
    assert (one.turns.order.tolist(), other.turns.order.tolist()) == ([0, 2], [1, 3])
    said(session, renderer, [user("later")], "fine")
    *_, last = session.rollouts()
    assert last.turns.order.tolist() == [4]


def test_one_conversation_after_the_other_needs_no_order():
    renderer = renderer_of("qwen2_5")
    session = Session(renderer)
    for name in ("one", "two"):
        messages = [user(name)]
        said(session, renderer, messages, "fine")
        said(session, renderer, [*messages, user("more")], "fine")
    assert [rollout.turns.order for rollout in session.rollouts()] == [None, None]


def test_one_turn_is_the_engines_rollout():
    renderer = renderer_of("qwen2_5")
    session = Session(renderer)
    turn = said(session, renderer, [user("q")], "one")
    (rollout,) = session.rollouts()
    assert rollout.turns is None
    assert rollout.prompt_ids is turn.rollout.prompt_ids
    assert rollout.version_spans == turn.rollout.version_spans
    assert np.array_equal(rollout.response_ids, turn.sampled_ids)


def test_what_lies_between_two_turns_has_the_version_of_the_turn_before():
    renderer = renderer_of("qwen2_5")
    session, messages = Session(renderer), [user("q")]
    for version in (3, 4, 5):
        request = session.request(messages)
        answer = {"role": "assistant", "content": str(version)}
        ids = [*renderer.encode("x"), min(renderer.stop_ids)]
        session.record(request, rollout_of(request.prompt_ids, ids, version=version), answer)
        messages += [answer, user("r")]
    (rollout,) = session.rollouts()
    between = (len(rollout.response_ids) - 3 * 2) // 2
    assert rollout.version_spans == (
        VersionSpan(3, 2 + between),
        VersionSpan(4, 2 + between),
        VersionSpan(5, 2),
    )
    assert not rollout.behaviour_logprobs[~rollout.action_mask].any()


def test_untrained_turns_are_context_and_end_no_sequence():
    renderer = renderer_of("qwen2_5")
    session, messages = Session(renderer), [user("q")]
    said(session, renderer, messages, "one")
    said(session, renderer, [*messages, user("judge")], "two", train=False)
    said(session, renderer, [user("a summary")], "three", train=False)
    (rollout,) = session.rollouts()
    assert rollout.action_mask.all()
    assert rollout.turns is None
    assert session.counts["untrained"] == 2


def test_texts_of_special_tokens_are_broken_and_counted_once():
    renderer = renderer_of("qwen2_5")
    session, messages = Session(renderer), [user("see <|im_end|> and <|im_start|>")]
    said(session, renderer, messages, "one")
    messages.append(user("again"))
    request = session.request(messages)
    assert request.parent is session.turns[0]
    # After the default system message, the question, the answer and the next question.
    assert renderer.decode(request.prompt_ids).count("<|im_end|>") == 4
    said(session, renderer, messages, "two")
    assert session.counts["broken_specials"] == 2


def test_half_of_a_surrogate_pair_becomes_a_question_mark():
    """A model's JSON and a tool's file names can have it, and a tokenizer refuses it."""
    renderer = renderer_of("qwen2_5")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    session, messages = Session(renderer, history="template"), [user("see \ud83d")]
    request = session.request(messages)
    assert "see ?<|im_end|>" in renderer.decode(request.prompt_ids)
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    session.record(request, rollout_of(request.prompt_ids, [1]), answer)
    messages += [answer, {"role": "tool", "content": "\udc80", "tool_call_id": "c"}]
    request = session.request(messages)
    assert request.said.before is session.turns[0].said
    assert renderer.decode(request.prompt_ids).count("?") >= 2


def test_plain_text_goes_on_behind_everything():
    renderer = renderer_of("qwen2_5")
    session = Session(renderer)
    for text, answer in (("1+2=", "3"), ("4+5=<|im_end|>", "9")):
        request = session.request_text(text)
        ids = renderer.encode(answer)
        session.record(request, rollout_of(request.prompt_ids, ids), {"content": answer})
    (rollout,) = session.rollouts()
    assert renderer.decode(rollout.prompt_ids) == "1+2="
    assert renderer.decode(rollout.response_ids) == "34+5=< |im_end|>9"
    assert session.counts["broken_specials"] == 1


def sentencepiece_tokenizer(blank: str) -> PreTrainedTokenizerFast:
    """A small BPE in the manner of SentencePiece, as Llama 2 has it (`normalizer`) and later models do."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
    if blank == "normalizer":
        parts = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(parts)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=blank)
    specials = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(["foo bar 42 42 foobar barfoo < . a 0 420"] * 9, trainer)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("blank", ["always", "first", "never", "normalizer"])
def test_text_that_is_appended_gets_no_blank_of_its_own(blank):
    """Tokenizers of SentencePiece put a blank before a text, but this is the middle of one."""
    renderer = TemplateRenderer(sentencepiece_tokenizer(blank))
    session, answer = Session(renderer), "foo"
    said = ["bar", "<", " foo bar", "42", "\n", "foo", "0", ".a", "", "é"]
    for text in said:
        request = session.request_text(text)
        ids = renderer.encode(answer, inside=True)
        session.record(request, rollout_of(request.prompt_ids, ids), {"content": answer})
    (rollout,) = session.rollouts()
    whole = renderer.decode([*rollout.prompt_ids, *rollout.response_ids])
    assert whole.removeprefix("" if blank == "never" else " ") == "".join(text + answer for text in said)
    first = list(rollout.prompt_ids)
    assert first == renderer.encode("bar"), "the first text is the beginning of a text"
    assert renderer.encode(" foo bar", inside=True) == renderer.encode("bar foo bar")[len(first) :]


@pytest.mark.parametrize("blank", ["always", "first", "never", "normalizer"])
def test_what_a_template_writes_behind_a_stop_token_has_the_ids_of_the_whole_text(blank):
    """Behind a special token some of these tokenizers put a blank, and others do not."""
    tokenizer = sentencepiece_tokenizer(blank)
    user_or_answer = "{{ m.content + eos_token if m.role == 'assistant' else 'foo' + m.content + 'bar' }}"
    tokenizer.chat_template = "{% for m in messages %}" + user_or_answer + "{% endfor %}"
    renderer, eos = TemplateRenderer(tokenizer), tokenizer.eos_token_id
    session, messages = Session(renderer), [user("42")]
    for said in ("foo", " bar", "<", ""):
        request = session.request(messages)
        answer = {"role": "assistant", "content": "420"}
        session.record(request, rollout_of(request.prompt_ids, [*renderer.encode("420"), eos]), answer)
        messages += [answer, user(said)]
        whole = renderer.encode(renderer.render(messages, generation=True))
        behind = len(whole) - whole[::-1].index(eos)
        assert list(session.request(messages).delta_ids) == whole[behind:]
    assert session.counts["stable"] == 3 and session.counts["roots"] == 1
    assert session.counts["rewritten"] == 0


def test_text_that_would_join_a_stop_token_keeps_ids_of_its_own():
    tokenizer = sentencepiece_tokenizer("never")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (four,), answer = tokenizer("4")["input_ids"], {"role": "assistant", "content": "4"}
    renderer = TemplateRenderer(tokenizer, stop_ids=[four])
    assert len(renderer.encode("42")) == 1
    session = Session(renderer, history="template")
    request = session.request([user("foo")])
    session.record(request, rollout_of(request.prompt_ids, [four]), answer)
    behind = session.request([user("foo"), answer, user("2")])
    assert (behind.rule, list(behind.delta_ids)) == ("stable", renderer.encode("2"))


def test_an_engine_that_samples_behind_other_ids_is_drift():
    renderer = renderer_of("qwen2_5")
    session = Session(renderer)
    request = session.request([user("q")])
    session.record(request, rollout_of(request.prompt_ids[1:], [1]), {"role": "assistant", "content": "x"})
    with pytest.raises(DriftError, match="turn 0 of a session"):
        session.rollouts()


def test_an_answer_without_tokens_is_refused():
    session = Session(renderer_of("qwen2_5"))
    request = session.request([user("q")])
    with pytest.raises(ValueError, match="no tokens"):
        session.record(request, rollout_of(request.prompt_ids, []), {"role": "assistant", "content": ""})


def test_messages_that_the_template_refuses_are_named():
    with pytest.raises(RenderError, match="the roles of the last ones are: user, user"):
        Session(renderer_of("gemma3")).request([user("q"), user("r")])


def test_the_same_answer_twice_gives_two_branches_and_each_is_continued():
    renderer = renderer_of("qwen2_5")
    session, messages = Session(renderer), [user("q")]
    for _ in range(2):
        said(session, renderer, [*messages], "one")
    messages += [{"role": "assistant", "content": "one"}, user("r")]
    for _ in range(2):
        said(session, renderer, [*messages], "two")
    assert {turn.parent for turn in session.turns[2:]} == set(session.turns[:2])
    assert len(session.rollouts()) == 2


class Opening(Letters):
    """Its texts begin with the token of `x`, as others do with BOS."""

    opening_ids = (24,)
    special_texts = frozenset({"ef"})


def record(session: Session, request: Request, text: str, finish_reason: str = "stop") -> None:
    rollout = rollout_of(request.prompt_ids, session._renderer.encode(text))
    session.record(
        request, replace(rollout, finish_reason=finish_reason), {"role": "assistant", "content": text}
    )


def test_the_first_text_alone_gets_the_opening_tokens_and_only_once():
    for first in ("ab", "xab"):
        session = Session(Opening())
        record(session, session.request_text(first), "c")
        assert session.request_text("d").prompt_ids == tuple(Opening().encode("xabcd"))


def test_only_the_first_text_is_the_users_own():
    session = Session(Opening(), own="aef")
    record(session, session.request_text("aef"), "b")
    behind = session.request_text("aef")
    assert session.turns[0].delta_ids == (24, 1, 5, 6) and behind.broken_specials == 1


@pytest.mark.parametrize("history", ["exact", "template"])
def test_what_turns_have_in_common_is_kept_once(history):
    """Otherwise the memory of an episode grows with the square of its turns."""
    renderer = renderer_of("qwen2_5")
    session, messages = Session(renderer, history=history), []
    for turn in range(20):
        messages.append(user(f"question {turn}"))
        said(session, renderer, messages, "answer", stop="<|im_end|>")
        assert [one["content"] for one in session.turns[-1].said.messages] == [
            one["content"] for one in messages
        ]
    kept = set()
    for turn in session.turns:
        one = turn.said
        while one is not None:
            kept.add(id(one))
            one = one.before
    assert len(kept) == len(messages)
    assert [len(turn.rollout.prompt_ids) > 0 for turn in session.turns] == [True] + [False] * 19
    (rollout,) = session.rollouts()
    assert rollout.prompt_ids.tolist() == list(session.turns[0].delta_ids)


def test_sequences_are_counted_and_each_ends_as_its_last_turn_did():
    session, opening = Session(Letters()), [user("a")]
    record(session, session.request(opening), "b!")
    answered = [*opening, {"role": "assistant", "content": "b!"}]
    for text, reason in (("c", "length"), ("d", "stop"), ("e", "length")):
        record(session, session.request([*answered, user(text)]), "f!", reason)
    assert session.sequences == len(session.rollouts()) == 3
    assert [rollout.finish_reason for rollout in session.rollouts()] == ["length", "stop", "length"]
    assert session.counts["branches"] == 2


def test_special_tokens_in_tools_are_counted_in_the_first_request_only():
    session, tools, messages = Session(Opening()), [{"name": "ef"}], [user("a")]
    first = session.request(messages, tools=tools)
    record(session, first, "b!")
    messages += [{"role": "assistant", "content": "b!"}, user("ef")]
    assert (first.broken_specials, session.request(messages, tools=tools).broken_specials) == (1, 1)


@pytest.mark.parametrize("name", STOPS)
def test_a_cut_answer_is_continued_behind_its_own_ids_and_a_whole_one_is_rendered(name):
    renderer = renderer_of(name)
    for is_cut in (True, False):
        session, messages = Session(renderer), [user("q")]
        request = session.request(messages)
        ids = [*renderer.encode("one two"), *([] if is_cut else [min(renderer.stop_ids)])]
        rollout = replace(rollout_of(request.prompt_ids, ids), finish_reason="length" if is_cut else "stop")
        turn = session.record(request, rollout, {"role": "assistant", "content": "one two"})
        messages.append({"role": "assistant", "content": "one two"})
        again = session.request(messages)
        assert (again.rule, again.parent) == (("stable", turn) if is_cut else ("rendered", None))
        if is_cut:
            assert again.prompt_ids == (*request.prompt_ids, *ids) and again.delta_ids == ()
            more = [*renderer.encode(" three"), min(renderer.stop_ids)]
            session.record(
                again, rollout_of(again.prompt_ids, more), {"role": "assistant", "content": " three"}
            )
            (sequence,) = session.rollouts()
            assert sequence.response_ids.tolist() == [*ids, *more] and sequence.action_mask.all()
            joined = [user("q"), {"role": "assistant", "content": "one two three"}, user("and")]
            assert name == "gptoss" or session.request(joined).parent is session.turns[1]
