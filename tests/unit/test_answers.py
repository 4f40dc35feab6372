"""Answers: text, reasoning and calls, from the tokenizer's response template or from vLLM's parsers."""

import numpy as np
import pytest

from asyncrl.engine.answers import AnswerReader, _arguments, _opener
from asyncrl.environments.base import ToolCall
from asyncrl.errors import ConfigError
from asyncrl.session.chat_messages import calls_of
from asyncrl.session.chat_template import TemplateRenderer
from asyncrl.types import Rollout, VersionSpan
from tests.support.chat_templates import STOPS, WITHOUT_TOOLS, renderer_of, tokenizer_of
from tests.support.random_agent import TOOL

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def reader_of(source: str) -> tuple[AnswerReader, TemplateRenderer]:
    tokenizer = tokenizer_of("qwen3")
    if source == "template":
        tokenizer.response_template = RESPONSE_TEMPLATE
    renderer = TemplateRenderer(tokenizer, tokenizer.convert_tokens_to_ids(list(STOPS["qwen3"])))
    return AnswerReader(tokenizer, renderer, "hermes" if source == "vllm" else None), renderer


def read(source: str, text: str, *, tools=(TOOL,), finish_reason: str = "stop", reader=None, opening=""):
    reader, renderer = reader or reader_of(source)
    prompt = renderer.render([{"role": "user", "content": "q"}], tools, generation=True)
    prompt_ids = renderer.encode(prompt + opening)
    ids = renderer.encode(text)
    rollout = Rollout(
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        response_ids=np.array(ids, dtype=np.int32),
        action_mask=np.ones(len(ids), dtype=np.bool_),
        behaviour_logprobs=np.zeros(len(ids), dtype=np.float32),
        version_spans=(VersionSpan(0, len(ids)),),
        finish_reason=finish_reason,
    )
    return reader.read(prompt_ids, rollout, tools)


@pytest.fixture(scope="module", params=["template", "vllm"])
def source(request):
    return request.param


def test_calls_and_text(source):
    answer = read(source, f"I add.{CALL}{CALL.replace('1', '7')}<|im_end|>")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 7, "b": 2}),
    ]
    assert answer.text.strip() == "I add."
    assert len({call.id for call in answer.tool_calls}) == 2
    assert all(call.id.isalnum() and len(call.id) == 9 for call in answer.tool_calls)


def test_many_calls_have_ids_of_their_own_which_every_template_takes(source):
    answer = read(source, f"{CALL * 120}<|im_end|>")
    assert len({call.id for call in answer.tool_calls}) == 120
    assert {len(call.id) for call in answer.tool_calls} == {9}
    assert all(call.id.isalnum() for call in answer.tool_calls)


def test_reasoning_is_taken_out_by_a_template_that_knows_it():
    answer = read("template", f"<think>\nhm\n</think>\n\nyes{CALL}<|im_end|>")
    assert (answer.reasoning.strip(), answer.text.strip()) == ("hm", "yes")
    assert len(answer.tool_calls) == 1


THOUGHT = f"I could write {CALL} but no"


@pytest.mark.parametrize(
    ("opening", "text", "expected"),
    [
        ("", f"<think>{THOUGHT}</think>No.<|im_end|>", (THOUGHT, "No.", 0)),
        ("", f"<think>{THOUGHT}</think>Yes.{CALL}<|im_end|>", (THOUGHT, "Yes.", 1)),
        ("", f"<think>{THOUGHT}", (THOUGHT, "", 0)),
        ("<think>\n", f"{THOUGHT}</think>No.<|im_end|>", (THOUGHT, "No.", 0)),
        ("<think>\n", THOUGHT, (THOUGHT, "", 0)),
        ("<think>\n\n</think>\n\n", f"Yes.{CALL}<|im_end|>", ("", "Yes.", 1)),
        ("", f"{THOUGHT}</think>No.", (THOUGHT, "No.", 0)),
        ("", "No.<|im_end|>", ("", "No.", 0)),
    ],
)
@pytest.mark.parametrize("tools", [(TOOL,), ()])
def test_a_call_that_the_model_only_thinks_about_is_not_made(opening, text, expected, tools):
    _, renderer = reader_of("none")
    reader = AnswerReader(tokenizer_of("qwen3"), renderer, "hermes", "qwen3")
    answer = read("vllm", text, reader=(reader, renderer), opening=opening, tools=tools)
    reasoning, said, calls = expected
    said += CALL * (calls and not tools)
    assert (answer.reasoning, answer.text.strip(), len(answer.tool_calls)) == (
        reasoning,
        said,
        calls * len(tools),
    )


def test_an_unknown_parser_of_reasoning_is_refused_with_the_names_of_all():
    with pytest.raises(ConfigError, match=r"model\.reasoning_parser: vLLM has no parser `qwen`; .*\bqwen3\b"):
        AnswerReader(tokenizer_of("qwen3"), renderer_of("qwen3"), "hermes", "qwen")
    with pytest.raises(ConfigError, match=r"model\.reasoning_parser: deepseek_r1 cannot be used"):
        AnswerReader(tokenizer_of("qwen3"), renderer_of("qwen3"), "hermes", "deepseek_r1")


@pytest.mark.parametrize(
    ("key", "parsers"),
    [("tool_parser", ("openai", None)), ("reasoning_parser", ("hermes", "openai_gptoss"))],
)
def test_a_parser_that_would_fail_at_each_answer_is_refused_by_name(key, parsers):
    name = parsers[-1] or parsers[0]
    with pytest.raises(ConfigError, match=rf"model\.{key}: {name} cannot be used on text .* another parser"):
        AnswerReader(tokenizer_of("qwen3"), renderer_of("qwen3"), *parsers)


@pytest.mark.parametrize(
    "text",
    ["<tool_call>\n{broken</tool_call>", '<tool_call>\n{"name": "add", "argu'],
    ids=["not JSON", "cut off"],
)
def test_what_cannot_be_parsed_stays_in_the_text_and_is_counted(source, text):
    reader = reader_of(source)
    answer = read(source, f"so {text}", reader=reader, finish_reason="length")
    assert (answer.text, answer.tool_calls, answer.finish_reason) == (f"so {text}", (), "length")
    assert answer.is_unparsed
    assert not read(source, "plain text<|im_end|>", reader=reader).is_unparsed
    assert not read(source, f"{CALL}<|im_end|>", reader=reader).is_unparsed


@pytest.mark.parametrize("call", ['["add"]', '"add"', "7"])
def test_a_call_that_is_no_object_stays_in_the_text_of_a_template_that_makes_none_of_it(call):
    tokenizer = tokenizer_of("qwen3")
    fields = RESPONSE_TEMPLATE["fields"]
    plain = {key: one for key, one in fields["tool_calls"].items() if key != "transform"}
    tokenizer.response_template = RESPONSE_TEMPLATE | {"fields": fields | {"tool_calls": plain}}
    renderer = TemplateRenderer(tokenizer, tokenizer.convert_tokens_to_ids(list(STOPS["qwen3"])))
    reader = AnswerReader(tokenizer, renderer), renderer
    assert [one.name for one in read("template", f"{CALL}<|im_end|>", reader=reader).tool_calls] == ["add"]
    text = f"so <tool_call>{call}</tool_call>"
    answer = read("template", text, reader=reader)
    assert (answer.text, answer.tool_calls, answer.is_unparsed) == (text, (), True)


def test_without_tools_the_text_is_what_was_sampled_without_special_tokens():
    answer = read("none", "one <|im_start|>two<|im_end|>", tools=())
    assert answer.text == "one two"
    assert answer.message == {"role": "assistant", "content": "one two"}


def test_a_call_that_the_answer_may_not_have_is_text(source):
    answer = read(source, f"I add.{CALL}<|im_end|>", tools=())
    assert (answer.text, answer.tool_calls, answer.is_unparsed) == (f"I add.{CALL}", (), False)


def test_tools_without_a_parser_are_refused():
    reader, _ = reader_of("none")
    with pytest.raises(ConfigError, match=r"model\.tool_parser: there are tools"):
        reader.require_tools([TOOL])
    with pytest.raises(ConfigError, match="name one of vLLM's tool parsers"):
        read("none", "x")


@pytest.mark.parametrize("name", sorted(STOPS))
def test_tools_that_a_template_would_hide_from_the_model_are_refused(name):
    renderer = renderer_of(name)
    reader = AnswerReader(tokenizer_of("qwen3"), renderer, "hermes")
    if name not in WITHOUT_TOOLS | {"deepseekv3"}:  # which shows calls, but no tools
        reader.require_tools([TOOL])
        return
    with pytest.raises(ConfigError, match=r"model\.path: the chat template does not show the tools add to"):
        reader.require_tools([TOOL])


def test_an_unknown_parser_is_refused_with_the_names_of_all():
    with pytest.raises(ConfigError, match=r"vLLM has no parser `hermas`; it has .*\bhermes\b"):
        AnswerReader(tokenizer_of("qwen3"), renderer_of("qwen3"), "hermas")


@pytest.mark.parametrize("name", sorted(STOPS))
def test_the_opening_of_a_call_is_found_in_what_the_template_writes(name):
    opener = _opener(renderer_of(name))
    known = {
        "llama3_1": '{"name":',
        "gptoss": "to=functions.",
        "qwen3": "<tool_call>",
        "glm4moe": "<tool_call>",
    }
    assert opener == known.get(name, opener)
    # Muse opens every answer with its recipient, so that its calls begin like text.
    assert bool(opener) == (name not in WITHOUT_TOOLS | {"muse_glimmer"})


def test_a_call_is_a_message_that_the_session_finds_again():
    answer = read("template", f"{CALL}<|im_end|>")
    call = ToolCall(id=answer.tool_calls[0].id, name="add", arguments={"a": 1, "b": 2})
    assert answer.message["tool_calls"] == [call.content]


@pytest.mark.parametrize(
    "arguments", ['{"a": ' + "[" * 100_000, '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"]
)
def test_arguments_without_end_stay_text(arguments):
    assert _arguments(arguments) == arguments
    call = {"function": {"name": "add", "arguments": arguments}}
    assert calls_of({"role": "assistant", "tool_calls": [call]}) == [("add", arguments)]


@pytest.mark.parametrize("written", ['{"a": NaN}', '{"a": [1e999]}', {"a": -float("inf")}])
def test_arguments_with_a_number_that_json_has_not_stay_text(written):
    """Strict clients refuse the whole answer."""
    arguments = _arguments(written)
    assert arguments == (written if isinstance(written, str) else '{"a": -Infinity}')
