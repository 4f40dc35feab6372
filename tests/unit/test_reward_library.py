"""The rewards that other trainers also ship, against references, their own formulas, and hostile texts."""

import json
import math
import re
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import RewardError
from asyncrl.rewards import builtin, worker
from asyncrl.rewards.builtin import boxed, choice, code, json_schema, length, maths, pattern, repetition, tags
from asyncrl.rewards.forms import bind, load_function

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
WAYS = (r"So we get $\boxed{%s}$.", "The final answer is $%s$. I hope it is correct.", "Therefore:\n\\[%s\\]")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the data in ../shared/data")
def test_math_gives_1_to_references_in_three_ways_and_0_to_their_neighbours(monkeypatch):
    from math_verify import parse, verify

    # Its limit is by the clock; other work on the machine ends no comparison here.
    alarm = signal.alarm
    monkeypatch.setattr(signal, "alarm", lambda seconds: alarm(20 * seconds))
    monkeypatch.setattr(builtin, "_DECISION_S", 100.0)
    rows = [json.loads(line)["answer"] for line in (SHARED / "math500" / "math500.jsonl").open()]
    for answer, other in zip(rows, rows[1:] + rows[:1], strict=True):
        for way in WAYS:
            assert maths("", way % answer, answer)[0] == 1, (way, answer)
        wrong = rf"\boxed{{{other}}}"
        assert maths("", wrong, answer)[0] == verify(parse(rf"\boxed{{{answer}}}"), parse(wrong)), answer
    for line in (SHARED / "gsm8k" / "test.jsonl").open().readlines()[:200]:
        answer = json.loads(line)["answer"]
        number = answer.rpartition("#### ")[2]
        assert maths("", rf"\boxed{{{number}}}", answer)[0] == 1
        assert maths("", f"so it is {number}.", answer)[0] == 1
        assert maths("", rf"\boxed{{{float(number.replace(',', '')) + 1}}}", answer)[0] == 0


@pytest.mark.parametrize(
    "equal",
    [
        (r"\frac{1}{2}", "0.5", r"\dfrac12", "1/2", r"\frac{2}{4}"),
        ("1000", "1,000", "1000.0"),
        ("-3", "-3.0"),
    ],
)
def test_equal_numbers_are_one_answer_for_votes(equal):
    found = [maths("", rf"\boxed{{{text}}}", equal[0]) for text in equal]
    assert {score for score, _ in found} == {1.0} and len({answer for _, answer in found}) == 1, found


@pytest.mark.parametrize(("own_s", "is_failure"), [(0.3, True), (4.9, False)])
@pytest.mark.parametrize("is_read", [True, False])
def test_math_that_a_busy_machine_did_not_finish_is_a_failure_and_no_0(
    monkeypatch, own_s, is_failure, is_read
):
    clock = SimpleNamespace(monotonic=iter([0.0, 5.1]).__next__, process_time=iter([0.0, own_s]).__next__)
    monkeypatch.setattr(builtin, "time", clock)
    monkeypatch.setattr("math_verify.verify", lambda *given, **options: False)  # as after its time-out
    if not is_read:
        monkeypatch.setattr("math_verify.parse", lambda *given, **options: [])
    refused = nullcontext() if is_read else pytest.raises(ValueError, match="no mathematical answer")
    with pytest.raises(TimeoutError, match=r"0\.3 s of 5 s") if is_failure else refused:
        assert maths("", r"$\pi$", r"\pi")[0] == 0


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("<think>It is 5.</think><answer>12</answer>", "5", 0),
        ("<think>It is 5.</think><answer>12</answer>", "12", 1),
        ("<answer>-3</answer>", "-3", 1),
        ("<answer>1</answer> no, <answer>\n$2$\n</answer> of 9 </answer>", "2", 1),
        ("It is 5, or <answer>", "5", 1),
    ],
)
def test_math_reads_the_last_answer_element_alone(response, answer, score):
    assert maths("", response, answer)[0] == score


def test_math_says_0_to_nothing_and_refuses_a_row_without_an_answer():
    assert maths("", "I do not know", "3") == (0.0, None)
    with pytest.raises(ValueError, match="no mathematical answer"):
        maths("", "3", "")


@pytest.mark.parametrize(
    ("response", "score", "found"),
    [
        (r"\boxed{a {b} c} then \boxed{x}", 0, "x"),
        (r"\boxed{ a  {b} c }", 1, "a  {b} c"),
        (r"\boxed{a {b} c", 0, None),
        ("a {b} c", 0, None),
    ],
)
def test_boxed_takes_the_last_whole_box(response, score, found):
    assert boxed("", response, "a {b} c") == (score, found)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        (r"A is wrong. \boxed{B}", "B"),
        (r"\boxed{\text{(C)}}", "C"),
        ("The answer is (B), not (C).", "B"),
        ("Answer: **D**", "D"),
        ("First I thought answer A. The answer is B.", "B"),
        ("I choose (A) over (B)", "B"),
        ("B", "B"),
        ("It must be C.", "C"),
        ("<think>(A) is wrong, so B.</think><answer>B</answer>", "B"),
        ("A dog", None),
        ("Answer: I think it is B", "B"),
        ("The answer I choose is (B), and I'm sure", "B"),
        ("Answer: I\u2019d say B.", "B"),
        ("The answer is I because H is wrong. B", "I"),
        ("The answer is I.", "I"),
        ("", None),
    ],
)
def test_choice_finds_the_letter(response, letter):
    assert choice("", response, "B") == (float(letter == "B"), letter)
    assert choice("", response, "(b)") == (float(letter == "B"), letter)


def test_choice_reads_much_white_space_in_linear_time():
    started_s = time.process_time()
    assert choice("", "answer" + "\n" * 40_000 + ":" + "\n" * 40_000 + "x", "B") == (0.0, None)
    assert choice("", "answer" + "\n" * 40_000 + "B" + " x", "B") == (1.0, "B")
    assert time.process_time() - started_s < 5, "quadratic time takes half a minute, linear time none"


def test_choice_refuses_a_row_without_a_letter():
    with pytest.raises(ValueError, match="no letter from A to J"):
        choice("", "B", "2")


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ('{"n": 3}', 1),
        ('Here:\n```json\n{"n": 3}\n```\nDone.', 1),
        ('It asks for ```json ... ``` tags.\n```json title="a"\n{"n": 3}\n```\nDone.', 1),
        ('{"n": 2}', 0),
        ('{"n": 3} and more', 0),
        ("[" * 100_000, 0),
        ('{"n": 3, "m": NaN}', 0),
        ('{"n": 3, "m": -Infinity}', 0),
        ("", 0),
    ],
)
def test_json_schema_wants_json_that_satisfies_it(response, score):
    assert json_schema("", response, SCHEMA) == json_schema("", response, json.dumps(SCHEMA)) == score


def test_json_that_cannot_be_checked_is_wrong_and_a_broken_reference_is_the_schemas_fault():
    tree = {"items": {"$ref": "#"}}
    assert json_schema("", "[[]]", tree) == 1 and json_schema("", "[" * 900 + "]" * 900, tree) == 0
    assert json_schema("", "1e400", {"multipleOf": 2}) == 0
    with pytest.raises(Exception, match="nowhere"):
        json_schema("", "{}", {"$ref": "#/nowhere"})


def test_a_wrong_schema_is_refused():
    with pytest.raises(ValueError, match="`schema` is no JSON schema"):
        json_schema("", "{}", {"type": "objekt"})


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1),
        ("<think>a</think><answer>4</answer> and more", 0),
        ("<answer>4</answer><think>a</think>", 0),
        ("<think><think>a</think></think><answer>4</answer>", 0),
        ("<think>a<answer>4</answer>", 0),
    ],
)
def test_format_wants_each_element_once_in_order(response, score):
    assert tags("", response) == score
    assert pattern("", response, r"<think>(?:(?!</?think>).)*</think>\s*<answer>.*</answer>") == score


def test_length_falls_along_half_a_cosine():
    assert [length("", "", tokens, 100) for tokens in (0, 100, 150, 200, 999)] == pytest.approx(
        [0, 0, -0.5, -1, -1]
    )
    assert length("", "", 110, 100, most=120) == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="0 < target < most"):
        length("", "", 1, 100, most=100)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 4))
def test_repetition_counts_runs_that_were_there_before(words, n):
    runs = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    again = sum(run in runs[:at] for at, run in enumerate(runs))
    assert repetition("", " ".join(words), n) == pytest.approx(-again / len(runs) if runs else 0)


def test_a_run_of_no_words_is_refused():
    with pytest.raises(ValueError, match="n >= 1 is needed"):
        repetition("", "a b c", 0)


def test_parameters_come_before_columns_and_unknown_ones_are_refused():
    call = bind(load_function("length"), {"target": 100})
    assert call([""], ["r"], [{"response_tokens": 150, "target": 5}])[0][0] == pytest.approx(-0.5)
    takes_all = bind(lambda prompt, response, goal, **others: goal + 10 * len(others), {"goal": 1})
    assert takes_all([""], ["r"], [{"goal": 2, "more": 3}]) == [(11, None)]
    for params in ({"goal": 1}, {"response_tokens": 1}):
        with pytest.raises(RewardError, match=r"takes no params .*; allowed are most, target"):
            bind(load_function("length"), params)


def test_the_page_has_each_function():
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {*builtin.BUILTINS}


FOUND = "```{}\nprogram\n```\nIt prints\n```{}\n42\n```\n"


@pytest.mark.parametrize(
    ("interpreter", "language"),
    [
        ("python", "python"),
        ("python3", "python"),
        ("/usr/bin/python3.12", "Py"),
        ("sh", "bash"),
        ("bash", "sh"),
        ("/usr/bin/node", "javascript"),
        ("lua5.4", "lua"),
    ],
)
def test_the_program_is_the_last_block_of_its_language_and_not_the_output_behind_it(
    monkeypatch, interpreter, language
):
    def passes(program, test, by):
        return (program, by) == ("program\n", interpreter)

    monkeypatch.setattr(builtin, "_passes", passes)
    for behind in ("", "text"):
        response = FOUND.format(language, behind)
        assert code("", f"```{language}\ndraft\n```\n{response}", [{}], interpreter=interpreter) == 1
    for said in (f'{language} title="a"', f"{language} ", "{python}", ""):
        for thought in ("", f"It asks for ```{language} ... ``` tags.\n", "Use ```a``` or ```b``` here.\n"):
            response = thought + FOUND.format(said, "text output")
            assert code("", response, [{}], interpreter=interpreter) == 1
    assert code("", "```text\n4\n```\n```c\nprogram\n```", [{}], interpreter=interpreter) == 1


def test_code_without_share_stops_at_the_first_test_that_fails(monkeypatch):
    ran = []
    monkeypatch.setattr(builtin, "_passes", lambda program, test, by: ran.append(test) or test != 2)
    assert code("", "", [1, 2, 3]) == 0 and ran == [1, 2]
    assert code("", "", [1, 2, 3], share=True) == pytest.approx(2 / 3) and ran == [1, 2, 1, 2, 3]


def test_an_interpreter_that_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RewardError, match="`code` needs the interpreter `ruby`, which is no program on PATH"):
        worker._load("code", {"interpreter": "ruby"})
    assert load_function("code") is code


@pytest.mark.parametrize("function", [boxed, maths, builtin.exact_match])
def test_null_is_no_answer(function):
    with pytest.raises(ValueError, match="column `answer` is null"):
        function("", r"\boxed{None}", None)
    for answer in (True, ["7"], {"a": 7}, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"column `answer` is a {type(answer).__name__}, .*data.map"):
            function("", f"\\boxed{{{answer}}}", answer)


@pytest.mark.parametrize(
    ("answer", "text"), [(46.0, "46"), (46, "46"), (-0.0, "0"), (0.5, "0.5"), ("7", "7")]
)
def test_a_number_is_the_answer_that_people_write(answer, text):
    assert builtin.exact_match("", text, answer) == boxed("", f"\\boxed{{{text}}}", answer) == (1, text)


def test_a_test_without_input_reads_nothing_and_one_without_output_is_refused(monkeypatch):
    monkeypatch.setattr(
        builtin, "_result", lambda program, stdin, by: SimpleNamespace(status="ok", stdout=f"[{stdin}]")
    )
    assert code("", "", [{"input": None, "output": "[]"}]) == 1
    with pytest.raises(ValueError, match=r"`input` and `output`, found .*None"):
        code("", "", [{"input": "", "output": None}])
    assert code("", "", [{"input": "7", "output": [7]}, {"input": 46.0, "output": "[46.0]"}]) == 1


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(builtin, "find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"`math` needs the package math_verify.*asyncrl\[rewards\]"):
        load_function("math")
    assert load_function("choice") is choice
