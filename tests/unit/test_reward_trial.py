"""What `asyncrl reward test` tries, and what it says of the scores."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.cli.screens import show_trial
from asyncrl.config.reward_section import RewardFunctionConfig
from asyncrl.errors import DataError
from asyncrl.preflight import reward_trial
from asyncrl.preflight.reward_trial import Case, Trial, Tried, generic_cases, sample_cases
from asyncrl.rewards.base import RewardInput
from asyncrl.rewards.forms import EPISODE_COLUMNS, bind
from asyncrl.types import Prompt
from tests.support.characters import character_tokenizer
from tests.support.talks import user
from tests.support.task_config import config_of

MISSING = "The data has no reference answer"


@pytest.mark.parametrize(
    ("kinds", "scored", "is_said"),
    [
        (["wrong", "wrong"], "wrong", True),
        (["sample", "sample"], "sample", False),
        (["reference", "wrong", "wrong"], "wrong", False),
    ],
    ids=["none", "samples", "abstained on it"],
)
def test_references_are_missing_only_from_data_that_was_looked_at(kinds, scored, is_said, capsys):
    given = RewardInput(prompt="1+1=", response="2", row={})
    part = Tried(RewardFunctionConfig(function="exact_match"), scores={scored: [0.0, 0.0]}, seconds=[0.1])
    show_trial(Trial([Case(kind, given) for kind in kinds], [part], 0))
    said = " ".join(capsys.readouterr().out.split())
    assert "gives every response 0" in said and (MISSING in said) == is_said


def test_samples_of_a_path_without_files_are_refused_and_a_run_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"--samples: found no runs/frist \(did you mean `runs/first`\?\); give a"
    ):
        list(sample_cases(config_of(), Path("runs/frist"), 8))
    monkeypatch.setattr(reward_trial, "_PromptFinder", lambda config: pytest.fail("it is a run"))
    with pytest.raises(pytest.fail.Exception, match="it is a run"):
        list(sample_cases(config_of(), Path("first"), 8))


@pytest.mark.parametrize(("name", "number"), [("", 3), ("hard", 3), ("other", 1), ("hard", 0)])
def test_a_held_out_sample_is_scored_with_its_own_row_or_not_at_all(name, number):
    rows = {"": list("abc"), "hard": list("de")}
    finder = object.__new__(reward_trial._PromptFinder)
    finder._eval, finder._has_curriculum, finder.source = rows, False, None
    record = {"kind": "eval", "ticket_id": 1, "eval_set": name, "prompt_number": number}
    if name == "":
        assert finder.prompt(record) == finder.prompt(record | {"kind": "dropped"}) == "c"
    else:
        with pytest.raises(
            DataError, match=f"held-out prompt {number} in the set `{name}`.*; give data.eval"
        ):
            finder.prompt(record)


class Source:
    """The prompts of a run, which has one."""

    tokenizer = staticmethod(lambda text, add_special_tokens: {"input_ids": [*text]})

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = lambda ticket: prompt

    def __len__(self):
        return 1


@pytest.mark.parametrize("plays", [True, False])
def test_samples_are_the_newest_responses_of_a_run_and_the_last_answers_of_its_episodes(
    plays, tmp_path, monkeypatch
):
    prompt = Prompt(token_ids=(1,), text="1+1=", row={"answer": "2"})
    finder = SimpleNamespace(source=Source(prompt), prompt=lambda record: prompt)
    monkeypatch.setattr(reward_trial, "_PromptFinder", lambda config: finder)
    said = "[model] 3\n[environment] no\n[model] 2"
    texts = ["0", said, "1"]
    records = [{"prompt": "1+1=", "response": text, "versions": [[0, 9]]} for text in texts]
    records += [{"kind": "dropped", "prompt": "", "response": "", "versions": []}] * 2
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = config_of(environment={"uses": "asyncrl.quickstart.games:Guess"} if plays else {})
    cases = list(sample_cases(config, tmp_path, 2))
    assert [case.given.response for case in cases] == ["2" if plays else said, "1"]
    assert not plays or cases[0].given.columns["messages"][-1]["content"] == "2"


def test_a_chat_prompt_of_a_file_is_what_the_template_writes_as_in_a_run(tmp_path):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    model = character_tokenizer(tmp_path / "model", template=template)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": [user("1+1=")], "response": "2", "finish_reason": None})
        + "\n"
        + json.dumps({"prompt": "[user]1+1=>", "response": "2", "finish_reason": "length"})
    )
    for chat_template, shown in ((True, "[user]1+1=>"), (False, str([user("1+1=")]))):
        config = config_of(model={"path": str(model), "chat_template": chat_template})
        first, second = (case.given for case in sample_cases(config, tmp_path / "rows.jsonl", 2))
        assert (first.prompt, first.chat, first.truncated) == (shown, [user("1+1=")], False)
        assert (second.prompt, second.chat, second.truncated) == ("[user]1+1=>", None, True)


@pytest.mark.parametrize("reference", [2, 2.0])
def test_the_reference_of_a_row_may_be_where_verl_has_it(monkeypatch, reference):
    row = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": reference}}
    prompt = Prompt(text="1+1=", token_ids=[1], row=row)
    monkeypatch.setattr(reward_trial, "_prompts", lambda config: Source(prompt))
    first, *others = generic_cases(config_of(), 1)
    assert (first.kind, first.given.response) == ("reference", "2") and {one.kind for one in others} == {
        "wrong"
    }


def test_a_reward_model_is_tried_on_the_end_of_a_long_prompt_as_in_a_run(monkeypatch):
    class Letters:
        eos_token_id = None

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [*text]}

    monkeypatch.setattr(reward_trial, "load_tokenizer", lambda model: Letters())
    config = config_of(sampling={"max_prompt_tokens": 3, "max_response_tokens": 2})
    case = Case("wrong", RewardInput(prompt="abcdef", response="xyz", row={}))
    (cut,) = reward_trial._with_ids(config, [case])
    assert cut.given.token_ids == [*"def", *"xy"]


@pytest.mark.parametrize("plays", [True, False])
def test_responses_have_the_columns_of_an_episode_if_something_is_played(plays, monkeypatch):
    prompt = Prompt(token_ids=(1,), text="1+1=", row={"answer": "2"})
    monkeypatch.setattr(reward_trial, "_prompts", lambda config: Source(prompt))
    config = config_of(environment={"uses": "asyncrl.quickstart.games:Guess"} if plays else {})
    bound = bind(lambda prompt, response, messages, turns, result: len(messages) + turns + result["reward"])
    for case in generic_cases(config, 1):
        given = case.given
        assert set(given.columns) == {"answer", *(EPISODE_COLUMNS if plays else ())}
        if plays:
            assert given.columns["messages"][-1]["content"] == given.response
            assert bound([given.prompt], [given.response], [given.columns])[0][0] == 3.0
