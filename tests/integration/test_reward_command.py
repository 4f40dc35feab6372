"""`asyncrl reward test` on reward functions that are right, and on some that fail in every way there is."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from asyncrl.config.data_section import CurriculumConfig
from asyncrl.config.load import load_config
from asyncrl.data.dataset import load_rows
from asyncrl.data.prompts import PromptSource
from asyncrl.data.sample_plan import SamplePlan
from asyncrl.errors import DataError
from asyncrl.preflight import reward_trial
from asyncrl.preflight.reward_trial import WRONG, generic_cases, sample_cases
from asyncrl.rewards import opened
from tests.support.command import ASYNCRL
from tests.support.models import tiny_qwen2
from tests.support.waiting import HANG

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CODE = """
def right(prompt, response, answer, **row):
    return float(response.strip() == answer)
def raises(prompt, response, answer):
    return float(int(response) == int(answer))
def hangs(prompt, response):
    if response == "":
        HANG
    return 0.5
def always_hangs(prompt, response):
    HANG
    return 0.5
def nan(prompt, response, answer):
    return float("nan") if response.startswith("no ") else 1.0
def constant(prompt, response, **row):
    print("looking at", len(response), "characters")
    return 1.0
def trl(completions, answer, **kwargs):
    return [float(text == right) for text, right in zip(completions, answer)]
def longest(completions, **kwargs):
    return [float(len(text) == max(map(len, completions))) for text in completions]
def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "pred": solution_str[:2]}
def many(prompts, responses, batch=64):
    return [1.0 for _ in responses]
def chance(prompt, response):
    import random
    return random.random()
def small(completions, ground_truth, **kwargs):
    return [float(len(text)) if int(truth) < 4 else None for text, truth in zip(completions, ground_truth)]
def large(prompt, response, ground_truth):
    return 1.0 if int(ground_truth) > 8 else None
def forgets(prompt, response):
    return None
def dies(prompt, response):
    import os
    os._exit(3) if response == "0" else None
    return 1.0
""".replace("HANG", HANG)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tiny_qwen2(tmp_path / "model")
    (tmp_path / "rewards.py").write_text(CODE)
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "ground_truth": str(2 * n)} for n in range(1, 9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    values = {
        "run": {"name": "scored", "root": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "test.jsonl")},
        "reward": {
            "functions": [{"function": f"{tmp_path}/rewards.py:right", "weight": 2.0}],
            "timeout_s": 20,
        },
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def reward_test(config: Path, *arguments: str) -> tuple[int, str]:
    command = [*ASYNCRL, "reward", "test", str(config), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=os.environ | {"COLUMNS": "200"}
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_a_good_reward_tells_references_from_wrong_answers(config):
    status, said = reward_test(config, "--n", "4")
    assert status == 0, said
    assert f"{4 + 4 * len(WRONG)} responses: 4 reference, {4 * len(WRONG)} wrong on purpose" in said
    rows = [line.split() for line in said.splitlines() if "reference" in line or "wrong" in line][1:]
    assert rows[0][:6] == ["right", "2", "reference", "1", "1", "1"] and rows[0][-1] == "0"
    assert rows[1][:4] == ["wrong", "0", "0", "0"]


def test_whatever_fails_is_counted_with_its_message(config):
    names = ["right", "raises", "hangs", "nan", "dies", "always_hangs"]
    functions = ", ".join(f"{{function: {config.parent}/rewards.py:{name}}}" for name in names)
    status, said = reward_test(config, f"reward.functions=[{functions}]", "reward.timeout_s=1", "--n", "1")
    assert status == 1
    for expected in (
        "x on wrong: reward part `raises` raised ValueError: invalid literal for int()",
        "1 x on wrong: reward part `hangs` took longer than 1 s and was killed",
        "1 x on wrong: reward part `nan` returned nan; a reward must be finite",
        "1 x on wrong: reward part `dies`: the worker process died (exit status 3)",
        "always_hangs: 5 more responses were not tried after 3 time-outs",
        "nan gives every response 1: from equal rewards nothing is learned",
    ):
        assert expected in said, said
    rows = [line.split() for line in said.splitlines() if len(line.split()) == 9 and line.split()[0] in names]
    failed = {row[0]: row[-1] for row in rows}
    assert (
        failed["right"] == "0"
        and failed["hangs"] == failed["nan"] == failed["dies"] == "1"
        and failed["always_hangs"] == "3"
    )


def test_a_constant_reward_is_doubted_and_what_a_function_prints_is_shown(config):
    functions = ", ".join(
        f"{{function: {config.parent}/rewards.py:{name}}}" for name in ("constant", "trl", "verl")
    )
    status, said = reward_test(config, f"reward.functions=[{functions}]", "--n", "1")
    assert status == 0, said
    assert (
        "constant gives every response 1: from equal rewards" in said
        and "constant printed: " in said
        and "looking at 0 characters" in said
    )
    assert "trl gives" not in said and "verl gives" not in said
    # None where the response is empty.
    assert f"verl finds an answer in {len(WRONG)} of {1 + len(WRONG)} responses, like `" in said
    assert "trl finds" not in said and "constant finds" not in said


def test_a_reward_by_chance_is_found_by_a_second_call(config):
    functions = ", ".join(f"{{function: {config.parent}/rewards.py:{name}}}" for name in ("chance", "right"))
    status, said = reward_test(config, f"reward.functions=[{functions}]", "--n", "1")
    assert status == 0 and "chance scores one response differently when it is called again (0." in said
    assert "right scores" not in said


def test_a_chat_template_that_refuses_a_role_is_a_mistake_of_the_user_for_every_command(config):
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    says = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (config.parent / "model" / "chat_template.jinja").write_text(refuses + says)
    overrides = ["model.chat_template=true", "data.system=Be brief.", "generator.engine=transformers"]
    for command in (["validate"], ["reward", "test"], ["play"], ["up", "--config"]):
        done = subprocess.run(
            [*ASYNCRL, *command, str(config), *overrides],
            capture_output=True, text=True, timeout=200, check=False, env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == 2 and "Traceback" not in said, (command, said)
        assert "train.jsonl:1: the chat template refuses the messages (TemplateError: no system mes" in said
        assert "leave out data.system and put its text into the first user message" in said, (command, said)


def test_functions_may_abstain_but_not_all_of_them(config):
    name = f"{config.parent}/rewards.py"
    functions = f"reward.functions=[{{function: {name}:small}}, {{function: {name}:large}}]"
    status, said = reward_test(config, functions, "data.shuffle=false", "--n", "8")
    each = 1 + len(WRONG)
    assert (
        f"small abstains for {7 * each} responses" in said and f"large abstains for {4 * each} resp" in said
    )
    # Rows with the answers 4, 6 and 8 belong to neither.
    assert f"{3 * each} responses without a score: every reward function returned None" in said
    assert status == 1
    (config.parent / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "ground_truth": "2"}\n')
    assert reward_test(config, functions)[0] == 0
    status, said = reward_test(config, f"reward.functions=[{{function: {name}:forgets}}]")
    assert status == 1 and f"{each} responses without a score" in said


def test_samples_come_from_a_file_or_from_a_run_with_the_row_of_their_ticket(config, monkeypatch):
    loaded, home = load_config(config), config.parent
    file = home / "mine.jsonl"
    file.write_text(
        '{"prompt": "a", "response": "4", "answer": "4"}\n{"prompt": "a", "response": "5", "answer": "4"}\n'
    )
    status, said = reward_test(config, "--samples", str(file))
    assert status == 0 and "2 responses: 2 sample" in said and " 0.5 " in said
    rows, plan = load_rows(loaded.data.train[0].path), SamplePlan(8, seed=0, shuffle=True)
    run = home / "runs" / "scored"
    run.mkdir(parents=True)
    records = [
        {"ticket_id": ticket, "kind": "train", "prompt": "p", "response": "r"} for ticket in (1, 11, 30)
    ]
    held_out = {"ticket_id": 5, "kind": "eval", "prompt_number": 2}
    records.append(held_out | {"prompt": "p", "response": "r", "finish_reason": "length"})
    (run / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    cases = list(sample_cases(loaded, run, 8))
    assert [case.given.row for case in cases[:3]] == [rows[plan.row(ticket)] for ticket in (1, 11, 30)]
    assert {case.given.response_tokens for case in cases} == {2}, "one, and the token at its end"
    records[0]["versions"] = [[0, 3], [1, 4]]
    (run / "samples.jsonl").write_text(json.dumps(records[0]) + "\n")
    assert [case.given.response_tokens for case in sample_cases(loaded, run, 8)] == [7]
    (run / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert cases[3].given.row == load_rows(loaded.data.eval[0].path)[1] and cases[3].given.truncated
    assert len(list(sample_cases(loaded, run, 2))) == 2
    skipping = loaded.data.model_copy(update={"curriculum": CurriculumConfig(floor=0.1)})
    with pytest.raises(DataError, match="which row a sample was made from; give --samples a file"):
        list(sample_cases(loaded.model_copy(update={"data": skipping}), run, 4))

    class Appends(reward_trial._PromptFinder):
        def __init__(self, config):
            super().__init__(config)
            self.append()

        def append(self):
            with (run / "samples.jsonl").open("a") as file:
                file.write(json.dumps(records[0]) + "\n")

        def prompt(self, record):
            self.append()
            return super().prompt(record)

    monkeypatch.setattr(reward_trial, "_PromptFinder", Appends)
    assert len(list(sample_cases(loaded, run, 8))) == 5, "a run may go on"


def test_the_time_of_a_function_is_without_its_wait_for_other_responses(config, monkeypatch):
    monkeypatch.setattr(opened, "WAIT_S", 0.5)
    cases = [*generic_cases(load_config(config), 1)][:1]
    loaded = load_config(config, [f"reward.functions.0.function={config.parent}/rewards.py:many"])
    (function,) = loaded.reward.functions
    tried = asyncio.run(reward_trial._try_part(loaded, function, cases, config.parent))
    assert tried.scores == {"reference": [1.0]} and tried.seconds[0] < 0.5


def test_a_function_that_compares_responses_gets_all_of_a_prompt(config):
    cases = [*generic_cases(load_config(config), 2)]
    loaded = load_config(config, [f"reward.functions.0.function={config.parent}/rewards.py:longest"])
    (function,) = loaded.reward.functions
    tried = asyncio.run(reward_trial._try_part(loaded, function, cases, config.parent))
    best = [float(text == max(WRONG, key=len)) for text in WRONG]
    assert tried.scores == {"reference": [0.0] * 2, "wrong": best * 2} and len(tried.seconds) == 2
    assert not tried.failures and not tried.unequal


def test_prompts_are_those_that_the_run_trains_on_first(config):
    loaded = load_config(config)
    rows, plan = load_rows(loaded.data.train[0].path), SamplePlan(8, seed=0, shuffle=True)
    cases = [case for case in generic_cases(loaded, 3) if case.kind == "reference"]
    assert [case.given.response for case in cases] == [
        rows[plan.row(ticket)]["answer"] for ticket in (1, 2, 3)
    ]
    assert len([case for case in generic_cases(loaded, 99) if case.kind == "reference"]) == 8


def test_functions_of_a_task_are_tried_on_its_own_prompts_only(config):
    home = config.parent
    for name, answer in (("few", "few"), ("held", "held")):
        (home / f"{name}-rows.jsonl").write_text(
            json.dumps({"prompt": f"{name}=", "solution": answer}) + "\n"
        )
    code = (
        "def {0}(prompt, response, solution):\n    assert prompt == '{0}='\n    return response == solution\n"
    )
    (home / "own.py").write_text(code.format("few") + code.format("held"))
    sources = [
        {"path": str(home / "train.jsonl"), "weight": 99},
        {"path": str(home / "few-rows.jsonl"), "reward": [f"{home}/own.py:few"]},
    ]
    held_out = [{"path": str(home / "held-rows.jsonl"), "reward": [f"{home}/own.py:held"]}]
    status, said = reward_test(
        config, f"data.train={json.dumps(sources)}", f"data.eval={json.dumps(held_out)}"
    )
    assert status == 0, said
    cases = list(generic_cases(load_config(config, [f"data.train={json.dumps(sources)}"]), 3))
    assert {(case.task, case.given.prompt == "few=") for case in cases} == {(0, False), (1, True)}
    assert all(name in said for name in ("right", "few", "held"))


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_the_same_texts_without_torch(chat, config):
    model = config.parent / "model"
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}={% endfor %}")
    # The longest prompt has 6 tokens, and 7 with the template.
    overrides = [f"model.chat_template={chat}".lower(), "data.shuffle=true"]
    loaded = load_config(config, overrides)
    source = PromptSource(loaded.data, loaded.model, loaded.sampling, seed=0)
    expected = [source.prompt(ticket).text for ticket in range(1, 9)]
    cases = [case.given for case in generic_cases(loaded, 8) if case.kind == "reference"]
    assert [case.prompt for case in cases] == expected

    words = ["asyncrl", "reward", "test", str(config), *overrides]
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print({'torch', 'transformers'} & {*sys.modules}, file=sys.stderr))\n"
        f"sys.argv = {words}\nfrom asyncrl.cli.main import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    imported = "{'transformers'}" if chat else "set()"
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (0, [imported]), done.stderr
    assert "3 of 3 prompts in data.eval also occur in data.train" in done.stderr


def test_a_prompt_that_is_too_long_is_named(config):
    with (config.parent / "test.jsonl").open("a") as file:
        file.write('{"prompt": "1234567+1=", "answer": "2", "ground_truth": "2"}\n')
    status, said = reward_test(config)
    assert status == 2 and "test.jsonl:4: 10 tokens" in said and "raise it to 10" in said


def test_a_file_without_responses_is_refused(config):
    (config.parent / "mine.jsonl").write_text('{"prompt": "a"}\n')
    status, said = reward_test(config, "--samples", str(config.parent / "mine.jsonl"))
    assert status == 2 and "no text in column `response`" in said
