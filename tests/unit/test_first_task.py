"""`asyncrl init` writes tasks that are right as they are, and writes over nothing."""

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
import yaml

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.preflight.validate import validated_config
from asyncrl.quickstart.first_task import OWN, ROWS, Answers, write_task
from asyncrl.rewards.builtin import BUILTINS
from asyncrl.rewards.forms import load_function
from tests.support.command import ASYNCRL
from tests.support.model_files import model_files

# A response to the first row with the highest score, which is 0 where there are only penalties.
RIGHT = {
    OWN: ("12 + 34 is 46", 1),
    "arithmetic": ("46", 1),
    "boxed": (r"It is \boxed{46}.", 1),
    "choice": ("(B)", 1),
    "code": ("```python\ndef f(x):\n    return 12 * x + 34\n```", 1),
    "exact_match": ("46", 1),
    "format": ("<think>carry</think><answer>46</answer>", 1),
    "gsm8k": ("12 + 34 = 46\n#### 46", 1),
    "json_schema": ('{"sum": 46}', 1),
    "length": ("Once upon a time.", 0),
    "math": (r"\boxed{46}", 1),
    "regex": ("46", 1),
    "repetition": ("a goose met a fox", 0),
    "words_used": ("The goose ate the fox.", 1),
}


def test_every_built_in_reward_can_be_chosen():
    assert ROWS.keys() == BUILTINS.keys() | {OWN} == RIGHT.keys()


@pytest.mark.parametrize("reward", ROWS)
def test_what_is_written_is_valid_and_its_rows_can_be_scored(reward, tmp_path):
    model = model_files(tmp_path / "model", num_attention_heads=4, max_position_embeddings=1024)
    directory = tmp_path / "a task"
    written = write_task(directory, Answers(model=str(model), reward=reward, longest=32))

    config = validated_config(written[0])

    (one,) = config.reward.functions
    function = BUILTINS.get(one.function) or load_function(one.function)
    rows = [json.loads(line) for name in ("train", "test") for line in (directory / f"{name}.jsonl").open()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 8
    response, score = RIGHT[reward]
    given = {"response_tokens": 5} if reward == "length" else {}
    found = [function(response=response, **row, **one.params, **given) for row in rows]
    scores = [one[0] if isinstance(one, tuple) else one for one in found]
    assert scores[0] == score
    # An answer to one sum is wrong for the others.
    if {"answer", "tests", "schema"} & rows[0].keys() and reward != "choice":
        assert not any(scores[1:])


def test_rows_of_the_user_take_the_place_of_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    written = write_task(Path(), Answers(rows="rows.jsonl", reward="math", device="gpu"))
    assert written == [Path("task.yaml")]
    values = yaml.safe_load(written[0].read_text())
    assert (values["data"], values["learner"]["device"]) == ({"train": "rows.jsonl"}, "cuda")
    assert "dtype" not in values["model"]


@pytest.mark.parametrize("name", ["09", "1e5", "yes"])
def test_a_directory_may_have_any_name(name, tmp_path):
    [config, *_] = write_task(tmp_path / name, Answers())
    assert load_config(config).run.name == name


def test_a_directory_that_no_own_reward_can_name_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(
        ConfigError, match=r"a:b has a `:`, which divides FILE:FUNCTION in reward\.functions; give"
    ):
        write_task(tmp_path / "a:b", Answers())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["task.yaml", "train.jsonl", "task.py"])
def test_nothing_is_written_over(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"found {tmp_path / name}, and writes over no file"):
        write_task(tmp_path, Answers())
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"


def test_without_a_terminal_the_defaults_are_taken(tmp_path):
    def typed():
        command = [*ASYNCRL, "init", "mine"]
        return subprocess.run(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )

    done = typed()
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("mine/task.yaml: fine\n")
    again = typed()
    assert again.returncode == 2 and "found mine/task.yaml, and writes over no file" in again.stderr


def test_on_a_terminal_five_questions_are_asked_until_the_answers_are_allowed(tmp_path):
    ours, theirs = pty.openpty()
    os.write(ours, b"org/model\n\nmaths\nmath\nmany\n64\ncpu\n")
    command = [*ASYNCRL, "init", "mine"]
    done = subprocess.run(command, cwd=tmp_path, stdin=theirs, capture_output=True, text=True, check=False)
    for end in (ours, theirs):
        os.close(end)
    assert done.returncode == 0, done.stderr
    assert "found maths; allowed is own, arithmetic" in done.stdout + done.stderr
    assert "found many; allowed is a whole number from 1 on" in done.stdout + done.stderr
    values = yaml.safe_load((tmp_path / "mine" / "task.yaml").read_text())
    assert values["model"] == {"path": "org/model", "chat_template": True, "dtype": "float32"}
    assert values["reward"]["functions"] == [{"function": "math"}]
    assert (values["sampling"]["max_response_tokens"], values["learner"]["device"]) == (64, "cpu")
