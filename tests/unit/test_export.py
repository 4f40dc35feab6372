"""The model card describes the exported weights, nothing that came later, and nothing that is private."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.config.sections import LoraConfig, ModelConfig
from asyncrl.errors import DataError, RunError
from asyncrl.lora import SETTINGS, peft_config
from asyncrl.results.archive import read_archive
from asyncrl.results.export import CARD, export_model, model_card, serve_command
from asyncrl.run.directory import RunDirectory
from asyncrl.run.starts import read_starts, record_start
from tests.support.models import peft_adapter
from tests.support.stages import begun, tiny_stage

CONFIG = {
    "run": {"name": "sums", "root": "/home/somebody/secret"},
    "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct", "chat_template": True},
    "data": {"train": "openai/gsm8k:main", "prompt_field": "question"},
    "reward": {"functions": [{"function": "task.py:ok", "weight": 1.0}]},
    "store": {"url": "rediss://internal.example:6379"},
    "algorithm": {"advantage": {"name": "rloo"}},
}


def run_with(directory: Path, config: dict) -> RunDirectory:
    (directory / "metrics").mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [
        {"step": step, "time": 100.0 + step, "reward/mean": step / 100, "tokens": 1000.0}
        for step in range(1, 61)
    ]
    rows += [{"step": step, "time": 1.0, "eval/accuracy": 0.25 + step / 200} for step in (0, 50, 60)]
    rows[-2] |= {"eval/se/accuracy": 0.0144, "eval/prompts": 1319}
    (directory / "metrics" / "learner.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record_start(directory / "starts.jsonl", 0, None)
    return RunDirectory(directory)


def card_of(directory: RunDirectory, step: int = 50, **options: bool) -> str:
    return model_card(
        read_archive(directory), step, served="vllm serve sums", **{"has_template": True} | options
    )


def test_figures_are_those_of_the_checkpoint_not_of_the_end_of_the_run(tmp_path: Path) -> None:
    card = card_of(run_with(tmp_path, CONFIG))
    assert (
        "| eval/accuracy | 0.25 (step 0) | 0.5 ± 0.014 (n 1,319, step 50) |" in card
        and "| reward/mean | 0.01 (step 1) | 0.5 (step 50) |" in card
    )
    assert "trained tokens: 50,000" in card and "step 60" not in card and "0.55" not in card


def test_the_card_says_how_the_run_sampled_and_with_what_optimizer(tmp_path: Path) -> None:
    chosen = {"sampling": {"temperature": 0.5, "top_k": 20}, "learner": {"optimizer": {"kind": "muon"}}}
    data = {"data": {"train": "openai/gsm8k@abc123"}, "staleness": {"max_lag": 2}}
    card = card_of(run_with(tmp_path, CONFIG | chosen | data))
    assert "off-policy: sampling ran at most `2` steps ahead\n" in card, "a token may be older than that"
    assert "sampled at temperature `0.5`\n" in card and "optimizer: `muon`, learning rate" in card
    assert yaml.safe_load(card.split("---\n")[1])["datasets"] == ["openai/gsm8k"]


def test_each_life_of_a_generator_counts_from_0(tmp_path: Path) -> None:
    run, counts = run_with(tmp_path, CONFIG), [(10.0, 100.0), (20.0, 300.0), (10.0, 400.0), (5.0, 400.0)]
    rows = [
        {"step": None, "time": 1.0, "alive_s": alive_s, "sampled_tokens": count} for alive_s, count in counts
    ]
    (run.metrics / "g0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_archive(run).counted("sampled_tokens") == 300 + 400 + 400


def test_the_hub_can_read_its_front_matter(tmp_path: Path) -> None:
    _, front, _ = card_of(run_with(tmp_path / "hub", CONFIG)).split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["asyncrl", "reinforcement-learning", "rloo"],
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct", "datasets": ["openai/gsm8k"],
    }  # fmt: skip
    for name, train, datasets in (
        ("local", "data/train.jsonl", None),
        ("packed", "data/train.csv.gz", None),
        ("pattern", "data/part-*", None),
        ("mixed", [{"path": "data/rows.csv"}, {"path": "a/b:main"}, {"path": "c/d"}], ["a/b", "c/d"]),
    ):
        local = CONFIG | {"model": {"path": "/data/model"}, "data": {"train": train}}
        _, front, text = card_of(run_with(tmp_path / name, local)).split("---\n", 2)
        assert name != "mixed" or "on `data/rows.csv`, `a/b:main`, `c/d`.\n" in text
        assert "base_model" not in (found := yaml.safe_load(front)) and found.get("datasets") == datasets


def test_the_card_of_an_adapter_names_its_base_as_peft_and_the_hub_read_it(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for number, (path, base) in enumerate(
        (("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"), ("gpt2", "gpt2"), (str(tmp_path / "here"), None))
    ):
        run = run_with(tmp_path / str(number), CONFIG | {"model": {"path": path, "lora": {}}})
        data = ModelCard(card_of(run, is_adapter=True)).data
        assert (data.library_name, data.base_model) == ("peft", base) and "lora" in data.tags
        assert data.get("base_model_relation") == (base and "adapter")
        merged = ModelCard(card_of(run)).data
        assert (merged.library_name, merged.base_model) == ("transformers", base)
        assert merged.get("base_model_relation") is None and "lora" not in merged.tags


def test_a_directory_of_this_machine_is_no_base_on_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "base").mkdir(parents=True)
    run = run_with(tmp_path / "run", CONFIG | {"model": {"path": "models/base"}})
    assert ModelCard(card_of(run)).data.base_model is None


def test_it_says_how_to_serve_and_with_what_it_was_made(tmp_path: Path) -> None:
    directory = run_with(tmp_path, CONFIG)
    card = card_of(directory)
    assert "    vllm serve sums\n" in card and "use `/v1/chat/completions`" in card
    versions = read_starts(directory.starts)[0].versions
    assert all(f"{name} {version}" in card for name, version in versions.items())
    assert "secret" not in card and "internal.example" not in card and "`task.py:ok, weight 1.0`" in card
    plain = run_with(tmp_path / "plain", CONFIG | {"model": {"path": "a/b"}})
    assert "although the tokenizer has a chat template" in card_of(plain)
    assert "there is no chat template" in card_of(plain, has_template=False)


@pytest.mark.parametrize(("revision", "served"), [("abc", "base --revision abc"), (None, "base")])
def test_the_base_of_an_adapter_is_served_in_its_revision(tmp_path, revision, served) -> None:
    settings = peft_config(LoraConfig(), ModelConfig(path="base", revision=revision), [])
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    assert serve_command(tmp_path, "mine").startswith(f"vllm serve {served} --enable-lora")


def test_what_stands_in_a_config_does_not_become_markdown(tmp_path: Path) -> None:
    hostile = "x` <script>\n# Heading\n```\x1b[31m"
    card = card_of(run_with(tmp_path, CONFIG | {"data": {"train": hostile}}))
    outside = card.split("## Config")[0]
    assert "\n# Heading" not in outside and "x` <script>" not in outside and "\x1b" not in card
    assert card.count("```") == 2


def test_a_run_that_never_started_has_a_card(tmp_path: Path) -> None:
    directory = run_with(tmp_path, {"run": {"name": "x"}})
    directory.starts.unlink()
    (directory.metrics / "learner.jsonl").unlink()
    card = card_of(directory)
    assert "no step was logged" in card and "software: not recorded" in card


def test_a_stage_is_merged_though_transformers_would_not_write_its_generation_config(tmp_path, monkeypatch):
    options = {"lora": {"rank": 8}, "trust_remote_code": True}
    _, directory = begun(tiny_stage(tmp_path, "sft", model=options))
    base = tmp_path / "model"
    peft_adapter(base, directory.model)
    (directory.model / CARD).touch()
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    asked = []

    def load(source: Path, **given: bool) -> object:
        asked.append((source, given))
        return PreTrainedTokenizerFast.from_pretrained(base)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    export_model(directory, tmp_path / "whole", merge=True)
    assert asked == [(directory.model, {"trust_remote_code": True})]
    settings = json.loads((tmp_path / "whole" / "generation_config.json").read_text())
    assert (settings["temperature"], settings["do_sample"]) == (0.6, True)


def test_a_stage_whose_base_is_gone_is_not_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    _, directory = begun(tiny_stage(tmp_path, "sft", model={"lora": {"rank": 8}}))
    peft_adapter(tmp_path / "model", directory.model)
    (directory.model / CARD).touch()
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(
        DataError, match=rf"model\.path {tmp_path / 'model'}: its config\.json cannot be read"
    ):
        export_model(directory, tmp_path / "whole", merge=True)


def test_an_export_never_overwrites(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="exists"):
        export_model(RunDirectory(tmp_path), tmp_path)
