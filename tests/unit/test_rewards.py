"""The built-in rewards on right, wrong, tricky answers; loading and calling functions; what a number is."""

import asyncio
import inspect
import json
import math
import random
import re
import struct
from datetime import date
from decimal import Decimal
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import RewardError
from asyncrl.hosting.workers import pack
from asyncrl.rewards import builtin
from asyncrl.rewards.builtin import words_used
from asyncrl.rewards.forms import (
    ANSWER_CHARACTERS,
    bind,
    checked_answer,
    checked_reward,
    form_of,
    load_function,
)
from asyncrl.rewards.reward_process import _packed
from asyncrl.rewards.worker import serve


def arithmetic(prompt, response, answer):
    return builtin.arithmetic(prompt, response, answer)[0]


def gsm8k(prompt, response, answer):
    return builtin.gsm8k(prompt, response, answer)[0]


def exact_match(prompt, response, answer):
    return builtin.exact_match(prompt, response, answer)[0]


def judge(function, prompt, response, columns):
    """Reward and answer of one response."""
    [pair] = bind(function)([prompt], [response], [columns])
    return pair


def reward(function, *call):
    """What is trained on; the answer is left out."""
    return judge(function, *call)[0]


SHARED = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("46", 1),
        (" 46\n", 1),
        ("46+", 1),
        ("is 46 or 47", 1),
        ("46.0", 1),
        ("465", 0),
        ("4 6", 0),
        ("-46", 0),
        ("\u221246", 0),
        ("", 0),
        ("none", 0),
    ],
)
def test_arithmetic_judges_the_first_number(response, expected):
    assert arithmetic("12+34=", response, "46") == expected
    assert arithmetic("12+34=", response, 46) == expected


@given(
    st.integers(-(10**9), 10**9), st.sampled_from(["", "so ", "= "]), st.sampled_from(["", ".", " 17", ", 3"])
)
def test_arithmetic_finds_any_integer_it_is_given(value, before, after):
    assert arithmetic("", f"{before}{value}{after}", value) == 1
    assert arithmetic("", f"{before}{value + 1}{after}", value) == 0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("... so 40 + 32 = 72\n#### 72", 1),
        ("#### 72.00", 1),
        ("####72", 1),
        ("first #### 71, no: #### 72", 1),
        ("the total is $72.", 1),
        ("5 days at 14.4 make 72", 1),
        ("#### 72 and 3 more", 1),
        ("72 of 100", 0),
        ("#### 7.2", 0),
        ("#### -72", 0),
        ("#### none, rather 72", 1),
        ("#### Conclusion\n3 and 69 make 72", 1),
        ("#### Step 1\n3 and 69\n#### Conclusion\nmake 72", 1),
        ("#### 72\n\n#### Check\nThat took 2 steps.", 1),
        ("#### 4 was wrong, so\n#### **72**", 1),
        ("#### Answer: 72 apples in 2 bags", 1),
        ("it is 72 ####", 1),
        ("no number", 0),
        ("", 0),
    ],
)
def test_gsm8k_takes_the_final_answer(response, expected):
    assert gsm8k("q", response, "48+24=<<48+24=72>>72\n#### 72") == expected


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("1,234", "1234"),
        ("1234", "1,234"),
        ("$1,234,567.50", "1234567.5"),
        ("-3", "-3"),
        ("\u22123", "-3"),
        ("-3", "\u22123"),
        (".5", "0.5"),
        ("+7", "7"),
        ("10 - 3", "3"),
        ("10-3", "3"),
        ("007", "7"),
    ],
)
def test_gsm8k_reads_numbers_as_people_write_them(response, answer):
    assert gsm8k("q", response, f"#### {answer}") == 1


def test_gsm8k_refuses_a_row_without_an_answer():
    with pytest.raises(ValueError, match="no `#### number`"):
        gsm8k("q", "72", "seventy-two")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real GSM8K in ../shared/data")
def test_gsm8k_gives_1_to_every_reference_solution_and_0_to_its_neighbour():
    rows = [json.loads(line) for line in (SHARED / "gsm8k" / "train.jsonl").open()]
    assert len(rows) > 7000
    for row in rows:
        assert gsm8k(row["question"], row["answer"], row["answer"]) == 1, row
        last = row["answer"].rsplit("#### ", 1)[1].replace(",", "")
        assert gsm8k(row["question"], f"so the answer is {float(last):,.2f}", row["answer"]) == 1, row
        assert gsm8k(row["question"], f"#### {float(last) + 1}", row["answer"]) == 0, row


def words_by_hand(response, words):
    """Splits at everything that is no letter: no regular expression with the word in it."""
    tokens = set(re.split("[^a-z]+", response.lower()))
    return sum(bool({word, word + "s", word + "es"} & tokens) for word in words) / len(words)


@given(
    st.lists(st.sampled_from(["pen", "pens", "boxes", "box", "penny", "crab"]), max_size=6),
    st.sampled_from([" ", ", ", ".\n", " The "]),
)
def test_words_used_agrees_with_splitting_by_hand(used, between):
    response = between.join(used).capitalize()
    assert words_used("", response, ["pen", "box"]) == words_by_hand(response, ["pen", "box"])


def test_words_used_quotes_the_word_and_refuses_a_row_without_words():
    assert words_used("", "abc", ["a.c"]) == 0
    assert words_used("", "C++ (or .NET) for $5", ["C++", ".NET", "$5"]) == 1
    assert words_used("", "AC++ x.NETs $55", ["C++", "$5"]) == 0
    for words in ([], "pen"):
        with pytest.raises(ValueError, match="`words` must be a list"):
            words_used("", "pen", words)


def test_exact_match_ignores_outer_white_space_only():
    assert [exact_match("", response, "a b") for response in ("a b", " a b\n", "a  b", "A b", "")] == [
        1,
        1,
        0,
        0,
        0,
    ]
    assert exact_match("", "7", 7) == 1


@pytest.mark.parametrize(
    "value",
    ["1", float("nan"), float("inf"), -float("inf"), [1.0], np.ones(2), np.float32("nan"), 10**400],
)
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(RewardError, match="returned"):
        checked_reward(value)


@pytest.mark.parametrize(
    "value",
    [
        *(1, -0.5, True, False, np.float32(0.5), np.int64(3), np.bool_(True), torch.tensor([0.5])),
        *(Fraction(1, 4), Decimal("0.25")),
    ],
)
def test_real_numbers_of_any_type_are_rewards(value):
    assert checked_reward(value) == float(value)


def test_a_function_gets_the_columns_it_names():
    row = {"answer": "4", "words": ["a"], "level": 3}

    async def takes_all(prompt, response, **columns):
        return len(columns)

    def with_default(prompt, response, *, level, other=2):
        return level + other

    assert reward(takes_all, "p", "r", row) == 3
    assert reward(with_default, "p", "r", row) == 5
    assert reward(lambda prompt, response: len(prompt) + len(response), "p", "rr", row) == 3
    with pytest.raises(RewardError, match=r"\['answer'\].*\['level'\]"):
        reward(exact_match, "p", "r", {"level": 3})


def test_calls_share_a_loop_in_which_connections_of_a_kept_client_stay_open():
    loops = []

    async def asks(prompt, response):
        loops.append(asyncio.get_running_loop())
        return 1.0

    assert [reward(asks, "p", "r", {}) for _ in range(2)] == [1.0, 1.0]
    assert loops[0] is loops[1] and not loops[0].is_closed()


@pytest.mark.parametrize(
    ("function", "response", "reference", "answer"),
    [
        ("arithmetic", "it is 1,234.50 or 7", "1234.5", "1234.5"),
        ("arithmetic", "-0.0", "0", "0"),
        ("arithmetic", "100", "7", "100"),
        ("arithmetic", "none", "7", ""),
        ("gsm8k", "7 #### $1,000", "#### 1000", "1000"),
        ("gsm8k", "#### 1000.000", "#### 1000", "1000"),
        ("gsm8k", "007", "#### 7", "7"),
        ("gsm8k", "nothing", "#### 7", ""),
        ("exact_match", " four \n", "4", "four"),
        ("words_used", "a pen", "", None),
    ],
)
def test_built_in_rewards_write_equal_answers_in_one_way(function, response, reference, answer):
    assert judge(load_function(function), "q", response, {"answer": reference, "words": ["pen"]})[1] == answer


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.integers(0, 4))
def test_equal_numbers_are_equal_answers(value, zeros):
    plain, padded = (
        builtin.gsm8k("q", f"#### {text}", "#### 1")[1] for text in (f"{value:f}", f"{value:f}{'0' * zeros}")
    )
    assert plain == padded and Fraction(plain) == Fraction(value)


def test_an_answer_may_stand_beside_the_reward():
    def judged(prompt, response):
        return float(response == "4"), response or None

    assert judge(judged, "p", "4", {}) == (1.0, "4")
    assert judge(judged, "p", "", {}) == (0.0, "")
    assert judge(lambda prompt, response: 1.0, "p", "r", {}) == (1.0, None)
    assert judge(
        lambda data_source, solution_str, ground_truth: {"score": 1.0, "pred": 4},
        "p",
        "r",
        {"ground_truth": 4},
    ) == (1, "4")
    assert judge(
        compute_score, "", "4", {"data_source": "sums", "extra_info": {"split": "train"}, "ground_truth": "4"}
    ) == (1.0, None)
    with pytest.raises(RewardError, match="a reward is one finite number"):
        judge(lambda prompt, response: (1.0, "4", "more"), "p", "r", {})


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        *((4, "4"), (" 4 ", "4"), ("  ", ""), (None, ""), ("\ud800", "?"), (0.5, "0.5")),
        *((np.int64(4), "4"), (np.float32(0.5), "0.5"), (Fraction(1, 4), "1/4"), (Decimal("0.25"), "0.25")),
    ],
)
def test_an_answer_is_a_short_text(answer, text):
    assert checked_answer(answer) == text


def test_long_answers_stay_different_and_short():
    long = ["x" * 10_000, "x" * 9_999 + "y", "x" * (ANSWER_CHARACTERS + 1)]
    assert len({checked_answer(text) for text in long}) == 3
    assert {len(checked_answer(text)) for text in [*long, "x" * ANSWER_CHARACTERS]} == {ANSWER_CHARACTERS}
    assert checked_answer(long[0]) == checked_answer(f" {long[0]}\n")


@pytest.mark.parametrize("answer", [True, np.bool_(True), [4], object(), b"4", {"a": 1}])
def test_what_is_no_answer_is_refused(answer):
    with pytest.raises(RewardError, match=r"as the answer; an answer is a text, a number, or None"):
        checked_answer(answer)


# What a function of TRL's documentation looks like, and one of verl's.


def trl_reward(completions, **kwargs):
    return [float(len(set(completion.split()))) for completion in completions]


def trl_correctness(prompts, completions, answer, truncated, **kwargs):
    assert len(prompts) == len(completions) == len(answer)
    return [
        1.0 if right in text and not cut else 0.0
        for text, right, cut in zip(completions, answer, truncated, strict=True)
    ]


def trl_chat(completions, **kwargs):
    return [
        1.0 if completion[0]["content"] == "4" and completion[0]["role"] == "assistant" else 0.0
        for completion in completions
    ]


async def trl_async(prompts, completions, **kwargs):
    return [float(prompt[0]["content"] == "2+2?") for prompt in prompts]


def trl_shortest(completions, answer, **kwargs):
    """As rewards of length do that compare the completions of one prompt."""
    return (float(len(one) == min(map(len, completions))) for one in completions)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"split": "train"}
    return {"score": 1.0 if solution_str.strip() == ground_truth else 0.0, "acc": True}


def verl_plain(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return float(solution_str == ground_truth)


def test_functions_of_trl_see_all_completions_of_a_group():
    rows = [{"answer": "4", "truncated": cut} for cut in (False, True, False)]
    texts = ["4", "4", "5 or so"]
    assert bind(trl_shortest)(["2+2="] * 3, texts, rows) == [(1.0, None), (1.0, None), (0.0, None)]
    assert bind(trl_correctness)(["2+2="] * 3, texts, rows) == [(1.0, None), (0.0, None), (0.0, None)]
    chat = [{"role": "user", "content": "2+2?"}]
    assert bind(trl_chat)([chat] * 3, texts, rows) == [(1.0, None), (1.0, None), (0.0, None)]


def test_functions_of_trl_may_be_called_with_lists_of_one():
    row = {"answer": "4", "truncated": False}
    assert reward(trl_reward, "2+2=", "4 and 4", row) == 2
    assert (
        reward(trl_correctness, "2+2=", "it is 4", row) == 1
        and reward(trl_correctness, "2+2=", "5", row) == 0
    )
    assert reward(trl_correctness, "2+2=", "4", row | {"truncated": True}) == 0
    chat = [{"role": "user", "content": "2+2?"}]
    assert reward(trl_chat, chat, "4", {}) == 1 and reward(trl_chat, chat, "5", {}) == 0
    assert reward(trl_async, chat, "5", {}) == 1
    with pytest.raises(RewardError, match=r"wants column\(s\) \['answer'\]"):
        reward(trl_correctness, "2+2=", "5", {"truncated": False})


def test_columns_of_the_row_may_be_called_as_those_of_an_episode():
    ranked = bind(lambda prompt, responses, messages, turns: [float(said in messages) for said in responses])
    row = {"messages": "ba", "turns": 1, "result": {}}
    assert ranked(["p"] * 2, ["ba", "x"], [row] * 2) == [(1.0, None), (0.0, None)]
    assert ranked(["p"] * 2, ["ba", "b"], [row] * 2, row.keys()) == [(1.0, None), (0.0, None)]


def test_functions_of_verl_find_the_reference_where_verls_data_have_it():
    row = {"data_source": "sums", "extra_info": {"split": "train"}}
    for reference in ({"ground_truth": "4"}, {"reward_model": {"style": "rule", "ground_truth": "4"}}):
        assert (
            reward(compute_score, "2+2=", "4", row | reference) == 1
            and reward(compute_score, "2+2=", "5", row | reference) == 0
        )
    assert reward(verl_plain, "2+2=", "4", {"ground_truth": "4"}) == 1
    with pytest.raises(RewardError, match=r"wants column\(s\) \['ground_truth'\]"):
        reward(compute_score, "2+2=", "5", row)
    with pytest.raises(RewardError, match=r"returned \{'acc': 1\} without `score`"):
        reward(lambda solution_str, **more: {"acc": 1}, "2+2=", "5", row)


@pytest.mark.parametrize(
    "function",
    [
        lambda prompt, response: None,
        lambda prompt, response: (None, "4"),
        lambda completions, **kwargs: [None],
        lambda solution_str, **kwargs: None,
        lambda solution_str, **kwargs: {"score": None, "pred": "4"},
    ],
)
def test_a_function_of_any_form_abstains_with_none(function):
    value, answer = judge(function, "p", "r", {})
    assert math.isnan(value) and answer is None


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda prompt, response, raw_response: float(raw_response == "<t>r"), 1.0),
        (lambda prompt, response, **columns: float("raw_response" in columns), 1.0),
        (lambda prompt, response, answer: 2.0, 2.0),
        (lambda completions, raw_response, **kwargs: [float(raw_response == ["<t>r"])], 1.0),
        (lambda solution_str, raw_response: float(raw_response == "<t>r"), 1.0),
    ],
)
def test_a_function_of_any_form_may_ask_for_the_special_tokens(function, expected):
    form = form_of(list(inspect.signature(function).parameters.values()))
    assert not form.lacking({"answer": "4"}), "raw_response is not a column of the data"
    assert reward(function, "p", "r", {"answer": "4", "raw_response": "<t>r"}) == expected


@pytest.mark.parametrize("returned", [1.0, [], [1.0, 2.0], {1.0}, "1", None])
def test_what_is_no_list_of_one_number_is_refused(returned):
    with pytest.raises(RewardError, match=r"returned .*for 1 responses; .* list of as many numbers"):
        reward(lambda completions, **kwargs: returned, "p", "r", {})


def test_prompt_and_response_in_the_wrong_order_are_refused_by_name():
    with pytest.raises(
        RewardError, match=r"takes \(response, prompt\), but is called with \(prompt, response\): .*swap"
    ):
        bind(lambda response, prompt, answer: 1.0)
    with pytest.raises(
        RewardError, match=r"takes \(response\); allowed is \(prompt, response, \*\*columns\) -> float, or"
    ):
        bind(lambda response: 1.0)


def test_a_column_called_like_an_argument_is_none():
    row = {"prompt": "of the row", "response": "reference", "answer": "4"}
    assert (
        reward(
            lambda prompt, response, **columns: float(prompt == "p" and columns == {"answer": "4"}),
            "p",
            "r",
            row,
        )
        == 1
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda question, response, **more: more == {"answer": "4"},
        lambda question, *rest, **more: more == {"answer": "4"},
        lambda question, responses, **more: [more == {"answer": "4"}],
        lambda question, response, /, **more: more["question"] == "of the row",
    ],
)
def test_a_column_may_have_the_name_of_the_parameter_for_the_prompt(function):
    assert reward(function, "p", "4", {"question": "of the row", "answer": "4"}) == 1


def test_a_param_of_the_name_of_the_prompts_parameter_is_refused():
    with pytest.raises(RewardError, match="takes no params question; allowed are answer"):
        bind(lambda question, response, answer, **more: 1.0, {"question": "why?"})


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda solution_str, data_source, **more: data_source == "x", "data_source"),
        (lambda solution_str, ground_truth, **more: ground_truth == "x", "ground_truth"),
        (lambda solution_str, **more: more["extra_info"] == "x", "extra_info"),
        (lambda completions, prompts, **more: [prompts == "x"], "prompts"),
    ],
)
def test_a_param_takes_the_place_of_an_argument_that_its_form_gives(function, name):
    assert bind(function, {name: "x"})(["p"], ["4"], [{"ground_truth": "4"}]) == [(1.0, None)]


def test_functions_are_loaded_from_files_and_modules(tmp_path):
    (tmp_path / "helper_of_my_reward.py").write_text("FACTOR = 2\n")
    (tmp_path / "my_reward.py").write_text(
        "from helper_of_my_reward import FACTOR\ndef length(prompt, response):\n    return FACTOR * "
        "len(response)\n"
    )
    assert load_function(f"{tmp_path}/my_reward.py:length")("", "abc") == 6
    assert load_function("asyncrl.rewards.builtin:gsm8k") is builtin.gsm8k
    assert load_function("words_used") is words_used


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gms8k", "no built-in .*gsm8k"),
        ("nowhere.py:f", "does not exist"),
        ("no_such_module_here:f", "no_such_module_here.*must be installed"),
        ("asyncrl.rewards.builtin:gms8k", "has no function `gms8k`.*gsm8k"),
        ("asyncrl.rewards.builtin:BUILTINS", "has no function `BUILTINS`"),
    ],
)
def test_a_function_that_cannot_be_loaded_says_why(name, message):
    with pytest.raises(RewardError, match=message):
        load_function(name)


def frames_of(stream: bytes) -> list[dict]:
    frames, rest = [], memoryview(stream)
    while rest:
        (length,) = struct.unpack("<I", rest[:4])
        frames.append(msgpack.unpackb(rest[4 : 4 + length]))
        rest = rest[4 + length :]
    return frames


def test_the_worker_answers_a_call_of_each_part_and_goes_on_after_an_error():
    calls = [
        {"functions": [["a", "arithmetic", {}], ["e", "exact_match", {}]]},
        *(
            {"part": part, "prompts": [""], "responses": [said], "columns": [{"answer": answer}], "apart": []}
            for part, said, answer in (("a", "4", "4"), ("a", "4", "four"), ("e", "5", "4"))
        ),
    ]
    replies = BytesIO()
    serve(BytesIO(b"".join(map(pack, calls))), replies)
    frames = frames_of(replies.getvalue())
    error = frames.pop(4)
    assert re.match(
        r"raised ValueError: column `answer` holds no number: 'four' \(.*builtin.py:\d+\)", error["error"]
    )
    assert frames == [
        {"ready": True, "raw": [], "chat": [], "most": {"a": 1, "e": 1}},
        *({"started": True}, {"values": [1.0], "answers": ["4"]}),
        *({"started": True}, {"started": True}),
        {"values": [0.0], "answers": ["5"]},
    ]


def test_whole_numbers_come_to_a_function_as_they_are_and_dates_as_text(tmp_path):
    file = tmp_path / "same.py"
    file.write_text(
        "def same(prompt, response, answer, *, seed):\n"
        "    return answer == [2**70, -(2**64), 7, '2026-01-02'] and seed == 2**65\n"
    )
    call = {"part": "a", "prompts": [""], "responses": [""], "apart": []}
    columns = [{"answer": [2**70, -(2**64), 7, date(2026, 1, 2)]}]
    sent = ({"functions": [["a", f"{file}:same", {"seed": 2**65}]]}, call | {"columns": columns})
    replies = BytesIO()
    serve(BytesIO(b"".join(map(_packed, sent))), replies)
    assert frames_of(replies.getvalue())[-1]["values"] == [1.0]


def test_a_function_that_cannot_be_loaded_is_the_workers_only_reply():
    replies = BytesIO()
    serve(BytesIO(pack({"functions": [["x", "nothing", {}]]})), replies)
    [frame] = frames_of(replies.getvalue())
    assert frame["error"].startswith(
        "reward part `x` cannot be loaded: reward function `nothing` is no built-in"
    )


def test_numbers_in_long_random_text_are_found_in_linear_time():
    text = "".join(random.Random(0).choices("0123456789,.$-# ", k=200_000))
    assert gsm8k("", text, "#### 1") in (0.0, 1.0)
