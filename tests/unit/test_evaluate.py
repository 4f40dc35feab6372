"""`asyncrl eval`: a prompt that fails costs its own score, and an engine that fails ends the command."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, EngineError, ResultError, RunError
from asyncrl.results import evaluate
from asyncrl.types import Group, Prompt, Rollout, VersionSpan
from tests.support.characters import character_tokenizer
from tests.support.task_config import README, config_of
from tests.support.waiting import turns

ANSWER = Rollout(
    prompt_ids=np.array([1], dtype=np.int32),
    response_ids=np.array([2], dtype=np.int32),
    action_mask=np.array([True]),
    behaviour_logprobs=np.array([-1.0], dtype=np.float32),
    version_spans=(VersionSpan(0, 1),),
    finish_reason="stop",
    reward=0.25,
)


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """Evaluate three prompts, of which some raise: metrics of the command."""

    def run(
        *errors: Exception | list[Exception] | None, held: int = 256, **sections: object
    ) -> dict[str, float]:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(
            "".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(len(errors)))
        )
        train = tmp_path / "train.jsonl"
        train.write_text(json.dumps({"prompt": "9+9="}) + "\n")
        model = character_tokenizer(tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "vocab_size": 64}')
        own = {
            "model": {"path": model},
            "data": {"train": str(train), "eval": str(rows)},
            "eval": {"samples": 2, "temperature": 1.0},
            "generator": {"max_running": held},
        }
        config = config_of(**own | sections)

        playing = 0

        async def group(prompt: Prompt, number: int, *_: object) -> Group:
            nonlocal playing
            playing += 1
            await turns(1)
            slots = held if config.environment.is_used else 4 * held
            assert playing <= max(1, slots // 2), "episodes have seconds to end in: none waits for the engine"
            playing -= 1
            if isinstance(error := errors[number - 1], list):
                error = error.pop(0) if error else None
            if error is not None:
                raise error
            return Group(ticket_id=number, rollouts=(ANSWER,) * 2, generator_id="eval", finished_version=0)

        @asynccontextmanager
        async def sampler_of(*_: object) -> AsyncIterator[Any]:
            yield SimpleNamespace(group=group)

        monkeypatch.setattr(evaluate, "sampler_of", sampler_of)
        return asyncio.run(evaluate._evaluate(config))

    return run


def test_prompts_that_fail_are_counted_and_in_no_mean(evaluated, caplog):
    metrics = evaluated(ResultError("no reward"), None, ValueError("odd row"))
    assert metrics["eval/prompts"] == 1 and metrics["eval/dead_groups"] == 2
    assert metrics["eval/reward_mean"] == 0.25
    [message] = [entry.message for entry in caplog.records]
    assert "2 of 3 held-out prompts failed" in message and "no reward" in message


def test_a_set_without_any_score_is_refused_with_the_first_reason(evaluated):
    with pytest.raises(
        RunError, match=r"data\.eval: each of 2 prompts failed, the first with: ValueError: odd"
    ):
        evaluated(ValueError("odd row"), ResultError("no reward"))


def test_a_prompt_has_as_many_attempts_as_in_a_run(evaluated):
    metrics = evaluated(*([ResultError("a service is down")] * failures for failures in (2, 3)))
    assert metrics["eval/prompts"] == 1 and metrics["eval/dead_groups"] == 1


def test_a_set_without_any_score_costs_no_other_set_its_scores(evaluated, tmp_path, caplog):
    rows = str(tmp_path / "rows.jsonl")
    sets = [{"path": rows, "name": "first", "limit": 1}, {"path": rows, "name": "both"}]
    data = {"train": str(tmp_path / "train.jsonl"), "eval": sets}
    metrics = evaluated(ResultError("no sandbox"), None, data=data)
    assert metrics["eval/first/prompts"] == 0 and metrics["eval/both/reward_mean"] == 0.25
    assert "data.eval first: 1 of 1 held-out prompts failed" in caplog.text and "no sandbox" in caplog.text


@pytest.mark.parametrize("environment", [{}, {"uses": "game.py:Guess"}])
@pytest.mark.parametrize("held", [1, 4, 6])
def test_no_more_episodes_are_under_way_than_there_are_slots(evaluated, held, environment):
    assert evaluated(*[None] * 9, held=held, environment=environment)["eval/prompts"] == 9


@pytest.mark.parametrize(("given", "is_run"), [("runs/a", True), ("a", True), ("other/model", False)])
def test_a_run_is_measured_by_another_config_too(tmp_path, monkeypatch, given, is_run):
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text("run: {name: a}\n")
    Path("task.yaml").write_text(json.dumps(README | {"data": {"train": "t.jsonl", "eval": "e.jsonl"}}))
    monkeypatch.setattr(evaluate, "saved_export", lambda run, best: run.path / "hf")
    monkeypatch.setattr(evaluate, "ask", lambda module, path, overrides, *only: {"asked": overrides})
    model = "runs/a/hf" if is_run else given
    asked = evaluate.evaluate_model(given, Path("task.yaml"), [])["asked"]
    assert asked == ["model.revision=null", f"model.path={model}", "model.lora=null"]


def test_an_engine_that_fails_ends_the_command(evaluated):
    with pytest.raises(EngineError, match="the engine is dead"):
        evaluated(None, EngineError("the engine is dead"))


def adapter(tmp_path: Path, **settings: object) -> str:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_model.safetensors").touch()
    saved = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "base_model_name_or_path": "base", **settings}
    (directory / "adapter_config.json").write_text(json.dumps(saved))
    return str(directory)


@pytest.fixture
def config_for(tmp_path, monkeypatch):
    """The config with which the engine's process evaluates a model by a file."""

    def of(model: str, text: str) -> Config:
        file, rows = tmp_path / "run.yaml", tmp_path / "rows.jsonl"
        rows.write_text('{"prompt": "1+1="}\n')
        data = (
            f"data: {{train: {rows}, eval: {rows}}}\nrun: {{name: r}}\nreward: {{functions: [exact_match]}}\n"
        )
        file.write_text(data + text)
        asked = []
        monkeypatch.setattr(
            evaluate, "ask", lambda module, path, overrides: asked.append(load_config(path, overrides))
        )
        evaluate.evaluate_model(model, file, [])
        return asked[0]

    return of


@pytest.mark.parametrize("name", ["007", "1.5", "run 1: best/hf", "null"])
def test_a_model_has_the_name_that_was_given(config_for, name):
    assert config_for(name, "model: {path: base}\n").model.path == name


def test_a_whole_model_is_measured_without_the_adapter_of_the_config(config_for):
    config = config_for("merged", "model: {path: base, lora: {rank: 8, start: sft}}\n")
    assert config.model.path == "merged" and config.model.lora is None


@pytest.mark.parametrize(("name", "revision"), [("base", "abc"), ("other", None)])
def test_the_revision_of_the_config_is_one_of_its_own_model(config_for, name, revision):
    assert config_for(name, "model: {path: base, revision: abc}\n").model.revision == revision


def test_an_adapter_is_measured_by_a_config_with_a_teacher_that_is_the_base(config_for, tmp_path):
    teacher = "algorithm: {advantage: distill, reference: {template: '{answer}{prompt}'}}\n"
    model = adapter(tmp_path)
    config = config_for(model, f"model: {{path: base, lora: {{rank: 16}}}}\n{teacher}")
    assert str(config.model.lora.start) == model


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora_alpha": 16}, "lora.alpha"),
        ({"r": 8}, "lora.rank"),
        ({"base_model_name_or_path": "other"}, "adapter of other"),
    ],
)
def test_an_adapter_that_the_config_would_use_otherwise_is_refused(config_for, tmp_path, settings, said):
    config = config_for(adapter(tmp_path, **settings), "model: {path: base, lora: {}}\n")
    with pytest.raises(ConfigError, match=said):
        asyncio.run(evaluate._evaluate(config))
