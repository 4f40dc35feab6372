"""Stages as TRL trains them: each learns, an interrupted one ends with the same weights, nothing is half made."""

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from asyncrl.commands.down import processes_of
from asyncrl.config.load import load
from asyncrl.errors import CheckpointsRefused, ConfigError, RunError
from asyncrl.hosting import progress
from asyncrl.results.export import export_model
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from asyncrl.stages.record import refuse_changed_stage
from asyncrl.stages.rows import fixed_values
from asyncrl.stages.settings import StageConfig
from tests.support.command import ASYNCRL
from tests.support.model_faults import change
from tests.support.models import tiny_of
from tests.support.stages import begun, tiny_stage, write_rows
from tests.support.waiting import wait_until
from tests.support.whole_run import tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def trained(path: Path, *, leads: bool = True) -> RunDirectory:
    """Train in this process, as `stages.process` does, from the newest checkpoint."""
    from asyncrl.stages.with_trl import train

    config, directory = begun(path)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        train(config, directory, leads=leads)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return directory


def checkpoints_of(directory: RunDirectory):
    from asyncrl.stages import with_trl

    return with_trl.checkpoints_of(directory)


def record(directory: RunDirectory) -> dict:
    return json.loads(directory.stage.read_text())


def files_of(directory: RunDirectory) -> set[str]:
    return {path.name for path in directory.model.iterdir()}


@pytest.mark.parametrize(
    ("stage", "measure", "least_gain"),
    [
        ("rm", "accuracy", 0.2),
        ("dpo", "rewards/margins", 0.1),
        ("kto", "rewards/margins", 0.02),
        ("distil", "loss", -0.01),
    ],
)
def test_each_stage_improves_its_measure_on_held_out_rows(tmp_path, stage, measure, least_gain):
    improves(tmp_path, stage, measure, least_gain)


def test_a_stage_learns_given_answers_and_leaves_no_pickle(tmp_path):
    improves(tmp_path, "sft", "loss", -1.0)


def test_a_model_whose_generation_config_transformers_would_not_write_is_trained(tmp_path):
    config = tiny_stage(tmp_path, "sft", trl={"max_steps": 2})
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    written = json.loads((trained(config).model / "generation_config.json").read_text())
    assert (written["temperature"], written["do_sample"]) == (0.6, True)


def test_a_stage_in_bfloat16_leaves_the_biases_of_routers_as_they_are(tmp_path):
    tiny_of(tmp_path / "model", "glm4_moe")
    made = trained(tiny_stage(tmp_path, "sft", model={"dtype": "bfloat16"}, trl={"max_steps": 1})).model
    first, last = (load_file(path / "model.safetensors") for path in (tmp_path / "model", made))
    biases = [name for name in first if "e_score_correction_bias" in name]
    assert biases and all(torch.equal(last.pop(name), first[name]) for name in biases)
    assert {one.dtype for one in last.values()} == {torch.bfloat16}


def test_a_config_of_a_model_that_transformers_refuses_needs_no_restart(tmp_path):
    """Its classes of configs raise no ValueError."""
    config = tiny_stage(tmp_path, "sft")
    change(tmp_path / "model", "config.json", layer_types=["full_attention"])
    with pytest.raises(ConfigError, match=r"(?s)stage sft: TRL refuses this: .*layer_types"):
        trained(config)


def test_each_conversation_is_rendered_with_its_own_tools_and_calls(tmp_path):
    from asyncrl.stages.with_trl import trainer_of

    template = "{{ messages | tojson }} {{ tools | tojson }} {{ thinks | default('-') }}{{ eos_token }}"
    path = tiny_stage(tmp_path, "sft", data={"eval": None}, trl={"max_length": None})
    (tmp_path / "model/chat_template.jinja").write_text(template)
    calls = [[{"function": {"name": "f", "arguments": {name: 1}}}] for name in "ab"]
    rows = [
        {"messages": [{"role": "user", "content": "x"}]},
        {
            "messages": [{"role": "assistant", "tool_calls": calls[0]}],
            "tools": [{"properties": {"a": {"type": "integer"}}}],
            "chat_template_kwargs": {"thinks": False},
        },
        {
            "messages": [{"role": "assistant", "tool_calls": calls[1]}],
            "tools": [{"properties": {"b": {"type": "string"}}}],
        },
    ]
    write_rows(tmp_path / "sft.jsonl", rows)
    trainer = trainer_of(*begun(path), transformers.TrainerCallback())
    render = trainer.processing_class.apply_chat_template
    assert [row["input_ids"] for row in trainer.train_dataset] == [
        render(
            row["messages"], tools=row.get("tools"), return_dict=False, **row.get("chat_template_kwargs", {})
        )
        for row in rows
    ]


@pytest.mark.parametrize("behind", ["{{ '\\n' }}", "\n{{ eos_token }}"])
def test_a_score_is_trained_at_the_stop_token_that_ends_an_answer(tmp_path, behind):
    """Templates write the line's end before the next turn, and some another stop token, behind the last one."""
    from asyncrl.stages.with_trl import trainer_of

    path = tiny_stage(tmp_path, "rm", trl={"max_length": None})
    turns = "{% for one in messages %}{{ one.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "model/chat_template.jinja").write_text(turns + behind)
    tokenizer = tmp_path / "model/tokenizer.json"
    tokenizer.write_text(
        tokenizer.read_text().replace('"?"', '"\u010a"')
    )  # how bytes are written: a line's end
    asked = [{"role": "user", "content": "12+"}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("1\n", "2"))
    for file in ("rm.jsonl", "rm-eval.jsonl"):
        write_rows(tmp_path / file, [{"prompt": asked, "chosen": chosen, "rejected": rejected}])
    trainer = trainer_of(*begun(path), transformers.TrainerCallback())
    ids = trainer.processing_class.convert_tokens_to_ids
    for rows in (trainer.train_dataset, trainer.eval_dataset):
        assert rows[0]["chosen_ids"] == ids([*"12+", "<eos>", "1", "\u010a", "<eos>"])
        assert rows[0]["rejected_ids"] == ids([*"12+", "<eos>", "2", "<eos>"])


def improves(tmp_path: Path, stage: str, measure: str, least_gain: float) -> None:
    directory = trained(tiny_stage(tmp_path, stage))
    found = record(directory)
    before, after = found["before"].get(measure, 0.0), found["after"][measure]
    gain = after - before
    assert gain <= least_gain if least_gain < 0 else gain >= least_gain, (before, after)
    assert found["finished"] and found["steps"] == found["trl"]["max_steps"]
    assert "model.safetensors" in files_of(directory) and "tokenizer.json" in files_of(directory)
    assert not [name for name in files_of(directory) if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    rows = [json.loads(line) for line in (directory.metrics / "learner.jsonl").read_text().splitlines()]
    assert any("train/loss" in row and row["time/step"] > 0 for row in rows)
    assert "| held out | before | after |" in (directory.model / "README.md").read_text()


@pytest.mark.parametrize("stage", ["sft", "dpo", "rm"])
def test_a_stage_trains_an_adapter_and_the_next_one_goes_on_with_it(tmp_path, stage):
    lora = {"rank": 8, "targets": ["q_proj", "v_proj"]}
    first = trained(tiny_stage(tmp_path, stage, name="first", model={"lora": lora}))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files_of(first)
    assert "model.safetensors" not in files_of(first)
    assert ModelCard.load(first.model / "README.md").data.library_name == "peft"
    assert export_model(first, tmp_path / "merged", merge=True) == first.model
    card = ModelCard.load(tmp_path / "merged/README.md").data
    assert card.library_name == "transformers" and card.tags == ["asyncrl", "trl", stage]
    if stage == "rm":
        scores_are_those_of_the_adapter(tmp_path, first)
        return
    base, merged = (
        AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "model", tmp_path / "merged")
    )
    tokens = torch.arange(2, 30)[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, first.model)(tokens).logits
        assert torch.allclose(merged(tokens).logits, expected, atol=1e-5)
    again = {"lora": {**lora, "start": str(first.model)}}
    second = trained(tiny_stage(tmp_path, stage, name="second", model=again, trl={"max_steps": 4}))
    old, new = (load_file(one.model / "adapter_model.safetensors") for one in (first, second))
    assert old.keys() == new.keys()
    assert any(bool((old[name] != new[name]).any()) for name in old)
    if stage == "sft":
        assert record(second)["before"]["loss"] == pytest.approx(record(first)["after"]["loss"], rel=1e-4)


@pytest.mark.parametrize("stage", ["sft", "distil"])
def test_an_adapter_is_trained_on_with_the_tokenizer_of_the_bases_revision(tmp_path, monkeypatch, stage):
    from asyncrl.stages.with_trl import trainer_of

    start, revisions = tmp_path / "adapter", []
    model = {"revision": "abc", "lora": {"rank": 8, "targets": ["q_proj"], "start": str(start)}}
    path = tiny_stage(tmp_path, stage, model=model)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    get_peft_model(base, LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj"])).save_pretrained(start)
    load = transformers.AutoProcessor.from_pretrained

    def noted(*given, **more):
        revisions.append(more.get("revision"))
        return load(*given, **more)

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", noted)
    trainer = trainer_of(*begun(path), transformers.TrainerCallback())
    assert revisions == ["abc"]
    tokenizer = trainer.processing_class
    assert stage == "sft" or (tokenizer.padding_side, tokenizer.truncation_side) == ("left", "left")


def scores_are_those_of_the_adapter(directory: Path, stage: RunDirectory) -> None:
    of_scores = AutoModelForSequenceClassification.from_pretrained
    base, merged = of_scores(directory / "model", num_labels=1), of_scores(directory / "merged")
    base.config.pad_token_id = merged.config.pad_token_id
    tokens = torch.arange(2, 30).reshape(2, 14)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, stage.model)(tokens).logits
        assert expected.shape == (2, 1) and torch.allclose(merged(tokens).logits, expected, atol=1e-5)


def test_a_stage_that_dies_between_checkpoints_ends_with_the_weights_of_one_that_does_not(
    tmp_path, monkeypatch
):
    from asyncrl.stages.follow import Follow

    settings = {"trl": {"max_steps": 12, "save_steps": 4}, "model": {"lora": {"rank": 8}}}
    whole = trained(tiny_stage(tmp_path, "sft", name="whole", **settings))
    killed = tiny_stage(tmp_path, "sft", name="killed", **settings)
    on_step_end = Follow.on_step_end

    def die(self, args, state, control, **more):
        if state.global_step == 6:
            raise KeyboardInterrupt
        on_step_end(self, args, state, control, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Follow, "on_step_end", die)
        trained(killed)
    directory = begun(killed)[1]
    assert not directory.model.exists() and not record(directory)["finished"]
    # What was being written when the process ended.
    torn = directory.trl_checkpoints / "checkpoint-6"
    torn.mkdir()
    (torn / "trainer_state.json").write_text("{")
    assert checkpoints_of(directory).choose() == directory.trl_checkpoints / "checkpoint-4"
    assert not torn.exists()
    assert trained(killed).path == directory.path
    assert are_same(whole, directory, "adapter_model.safetensors")


def test_a_stage_that_is_asked_to_stop_in_an_evaluation_ends_with_its_last_step_saved(tmp_path, monkeypatch):
    from asyncrl.stages.follow import Follow

    evaluates = {"eval_strategy": "steps", "eval_steps": 4}
    path = tiny_stage(tmp_path, "sft", trl={"max_steps": 4, "save_steps": 1000, **evaluates})
    on_prediction_step = Follow.on_prediction_step

    def asked(self, args, state, control, **more):
        if state.global_step == 4:
            self._stop.set()
        on_prediction_step(self, args, state, control, **more)

    directory = begun(path)[1]
    # First it is in the evaluation of that step, and then in that after training.
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(Follow, "on_prediction_step", asked)
            trained(path)
        assert directory.saved_steps().keys() == {4} and not record(directory)["finished"]
        status = json.loads(directory.status.read_text())
        assert (status["state"], status["message"]) == ("stopped", "asked to stop")
    assert record(trained(path))["steps"] == 4


@pytest.mark.parametrize("limit", [1, 2])
def test_a_stage_that_dies_before_a_checkpoint_is_signed_goes_on_from_the_one_before(
    tmp_path, monkeypatch, limit
):
    path = tiny_stage(tmp_path, "sft", trl={"max_steps": 6, "save_steps": 2, "save_total_limit": limit})
    seal = CheckpointStore.seal

    def die(self, step):
        if step == 4:
            raise KeyboardInterrupt
        seal(self, step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CheckpointStore, "seal", die)
        trained(path)
    directory = begun(path)[1]
    assert (directory.trl_checkpoints / "checkpoint-4").exists() and directory.saved_steps().keys() == {2}
    # The removal of an older one may be interrupted, too.
    shutil.copytree(directory.trl_checkpoints / "checkpoint-2", directory.trl_checkpoints / "checkpoint-1")
    (directory.trl_checkpoints / "checkpoint-1" / "optimizer.pt").unlink()
    assert checkpoints_of(directory).choose() == directory.trl_checkpoints / "checkpoint-2"
    trained(path)
    steps = [json.loads(line)["step"] for line in directory.starts.read_text().splitlines()]
    assert steps == [0, 2] and directory.saved_steps().keys() == {4, 6} - ({4} if limit == 1 else set())


def test_a_stage_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path):
    directory = trained(tiny_stage(tmp_path, "sft", trl={"max_steps": 2, "save_steps": 2}))
    shutil.rmtree(directory.trl_checkpoints / "checkpoint-2")
    with pytest.raises(CheckpointsRefused, match="checkpoint-2: it was saved here, and is gone"):
        checkpoints_of(directory).choose()


@pytest.mark.parametrize("when", ["steps", "epoch", "best"])
def test_a_save_may_be_slow_whatever_made_it_due(tmp_path, monkeypatch, when):
    found, save = [], transformers.Trainer.save_model
    monkeypatch.setattr(
        transformers.Trainer,
        "save_model",
        lambda *given, **more: (found.append(progress._own.doing), save(*given, **more)),
    )
    more = (
        {"eval_strategy": "epoch", "metric_for_best_model": "loss"} if when == "best" else {"save_steps": 8}
    )
    directory = trained(tiny_stage(tmp_path, "sft", trl={"max_steps": 10, "save_strategy": when, **more}))
    assert found == [(progress.Pace.SLOW, b"checkpoint")] * len(directory.saved_steps()) != []


def test_a_rank_that_has_trained_does_not_count_as_hung_while_rank_0_writes_the_model(tmp_path):
    directory = trained(tiny_stage(tmp_path, "sft", trl={"max_steps": 1}), leads=False)
    assert progress._own.doing == (progress.Pace.OVER, b"end") and not directory.model.exists()


def are_same(one: RunDirectory, other: RunDirectory, name: str) -> bool:
    first, second = (load_file(run.model / name) for run in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_a_stage_whose_process_is_killed_in_training_ends_with_the_weights_of_one_that_is_not(tmp_path):
    settings = {"trl": {"max_steps": 40, "save_steps": 10}, "data": {"eval": None}}
    whole, killed = (tiny_stage(tmp_path, "sft", name=name, **settings) for name in ("whole", "killed"))
    done = asyncrl("stage", "--plain", str(whole))
    assert done.returncode == 0, done.stderr
    directory = RunDirectory(load(StageConfig, killed).run.directory)
    with (tmp_path / "said").open("w") as said:
        up = subprocess.Popen([*ASYNCRL, "stage", "--plain", str(killed)], stdout=said, stderr=said)
    try:
        wait_until(lambda: up.poll() is not None or directory.saved_steps(), 300.0)
        os.kill(directory.children()["stage"], signal.SIGKILL)
        assert up.wait(300.0) == 0, (tmp_path / "said").read_text()
    finally:
        up.kill()
        for process in processes_of(directory.path):
            process.kill()
    first, second = (json.loads(line)["step"] for line in directory.starts.read_text().splitlines())
    assert first == 0 and 0 < second < 40
    assert are_same(RunDirectory(whole.parent / "runs" / "whole"), directory, "model.safetensors")


def test_a_checkpoint_that_was_altered_is_not_loaded(tmp_path):
    directory = trained(tiny_stage(tmp_path, "sft", trl={"max_steps": 4, "save_steps": 2}))
    altered = directory.trl_checkpoints / "checkpoint-4" / "optimizer.pt"
    altered.write_bytes(altered.read_bytes() + b"x")
    assert checkpoints_of(directory).choose() == directory.trl_checkpoints / "checkpoint-2"


@pytest.mark.parametrize("where", ["checkpoint", "export"])
def test_a_full_disk_is_named_and_leaves_no_half_model(tmp_path, monkeypatch, where):
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    settings = {"max_steps": 4, "save_steps": 2, "lr_scheduler_type": "constant"}
    path = tiny_stage(tmp_path, "sft", trl=settings)
    with monkeypatch.context() as patch:
        if where == "export":
            patch.setattr("asyncrl.stages.with_trl.stage_card", full)
        else:
            patch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(
            RunError, match=r"cannot be written: .*No space left.*(free some space|make room)"
        ):
            trained(path)
    directory = begun(path)[1]
    assert not directory.model.exists() and not record(directory)["finished"]
    assert json.loads(directory.status.read_text())["state"] == "failed"
    assert trained(path).model.exists()
    made, last = (
        load_file(place / "model.safetensors")
        for place in (directory.model, directory.trl_checkpoints / "checkpoint-4")
    )
    assert record(directory)["steps"] == 4, "an epoch has 8"
    assert all(torch.equal(made[name], last[name]) for name in made)


def test_a_model_that_the_hub_does_not_give_is_a_mistake_of_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"cannot load model\.path \(nowhere/no-model\)") as raised:
        trained(tiny_stage(tmp_path, "sft", model={"path": "nowhere/no-model"}))
    assert "run.root" not in str(raised.value)


def asyncrl(*words: str, **more) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*ASYNCRL, *words], capture_output=True, text=True, timeout=400, check=False, **more
    )


def test_two_ranks_train_one_model_and_a_stage_that_is_asked_to_stop_saves_and_goes_on(tmp_path):
    path = tiny_stage(tmp_path, "sft", trl={"max_steps": 200, "save_steps": 1000}, ranks=2)
    directory = RunDirectory(load(StageConfig, path).run.directory)
    up = subprocess.Popen(
        [*ASYNCRL, "stage", "--plain", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    drained = threading.Thread(target=lambda: said.append(up.communicate()[0]))
    said: list[str] = []
    drained.start()
    try:
        wait_until(
            lambda: (
                up.poll() is not None
                or (
                    (directory.metrics / "learner.jsonl").exists()
                    and "train/loss" in (directory.metrics / "learner.jsonl").read_text()
                )
            ),
            300.0,
            lambda: str(said),
        )
        assert up.poll() is None, said
        up.send_signal(signal.SIGTERM)
        drained.join(300.0)
        assert up.returncode == 143, said
    finally:
        up.kill()
        for process in processes_of(directory.path):
            process.kill()
    (step,) = directory.saved_steps()
    assert 0 < step < 200
    assert f"step {step} is saved" in said[0] and f"`asyncrl stage {directory.config}` goes on" in said[0]
    done = asyncrl("stage", "--plain", str(directory.config))
    assert done.returncode == 0, done.stderr
    found = record(directory)
    assert found["steps"] == 200 and found["after"]["loss"] < found["before"]["loss"] - 1
    # What was trained from two halves of each batch is in the report, the export and the status.
    assert asyncrl("report", str(directory.path)).returncode == 0
    assert asyncrl("export", str(directory.path), "--to", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out" / "README.md").read_text() == (directory.model / "README.md").read_text()
    assert json.loads(asyncrl("status", str(directory.path), "--json").stdout)["state"] == "finished"


def test_a_pipeline_goes_on_with_the_first_part_that_is_not_finished_up_to_a_run(tmp_path):
    few = {"trl": {"max_steps": 4}}
    trained(tiny_stage(tmp_path, "sft", **few))
    tiny_stage(tmp_path, "rm", **few)
    tiny_stage(tmp_path, "dpo", model={"path": "overridden"}, **few)
    with tiny_run(tmp_path) as task:
        path = tmp_path / "pipeline.yaml"
        path.write_text("pipeline: [sft.yaml, rm.yaml, dpo.yaml, run.yaml]\n")
        # A run cannot begin where a stage is, which the last part finds.
        text = task.read_text()
        task.write_text(text.replace("name: whole", "name: whole\n  environment: [{}]"))
        refused = asyncrl("pipeline", "--plain", str(path))
        assert refused.returncode == 2 and "run.environment" in refused.stderr
        task.write_text(text)
        done = asyncrl("pipeline", "--plain", str(path), cwd=tmp_path)
        sft = RunDirectory(tmp_path / "runs" / "sft")
        assert record(sft)["digest"] == record(RunDirectory(tmp_path / "runs" / "rm"))["begins_with"]
        sft.stage.write_text(sft.stage.read_text().replace(record(sft)["digest"], "0" * 16))
        redone = asyncrl("pipeline", "--plain", str(path), cwd=tmp_path)
        assert redone.returncode == 2 and f"remove {tmp_path}/runs/rm, and the same" in redone.stderr
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if " of 4: " in line] == [
        f"{number} of 4: {tmp_path / name}"
        for number, name in enumerate(("sft.yaml", "rm.yaml", "dpo.yaml", "run.yaml"), start=1)
    ]
    assert f"{tmp_path}/runs/sft is finished" in done.stdout
    for name in ("rm", "dpo"):
        found = record(RunDirectory(tmp_path / "runs" / name))
        assert found["finished"] and found["fixed"]["model.path"] == f"{tmp_path}/runs/sft/hf"
    run = tmp_path / "runs" / "whole"
    assert f"path: {tmp_path}/runs/dpo/hf" in (run / "config.yaml").read_text()
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_what_a_stage_was_begun_with_does_not_change(tmp_path):
    path = tiny_stage(tmp_path, "sft")
    config, directory = begun(path)
    refuse_changed_stage(config, directory, fixed_values(config))
    changed = load(StageConfig, path, ["trl.learning_rate=1", "ranks=2", "telemetry.tensorboard=true"])
    with pytest.raises(ConfigError) as raised:
        refuse_changed_stage(changed, directory, fixed_values(changed) | {"data.train": "3 rows"})
    for said in (
        "trl: found a section",
        "ranks: found 2; allowed is 1",
        "data.train: found '3 rows'; allowed is '64 rows with digest",
    ):
        assert said in str(raised.value)
    assert "telemetry" not in str(raised.value)
