"""The config and the rows of a stage: every mistake is named with its place before TRL is imported."""

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl.cli.app import run
from asyncrl.config.load import load
from asyncrl.config.named_files import misused_stage
from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, DataError
from asyncrl.run.directory import RunDirectory, first_weights
from asyncrl.run.starts import record_start
from asyncrl.stages.follow import Follow
from asyncrl.stages.pipeline import planned
from asyncrl.stages.record import begin_stage, refuse_changed_stage, write_stage
from asyncrl.stages.rows import COLUMNS, fixed_values, for_trl, read_rows
from asyncrl.stages.settings import StageConfig, validated_stage
from asyncrl.stages.trl_settings import OURS, TRAINERS, fields_of, refused
from tests.support.pages import ROOT, files
from tests.support.stages import rows_of, tiny_stage, write_rows

RUN = (
    "run: {name: task}\nmodel: {path: m}\ndata: {train: t}\nreward: {functions: [{function: exact_match}]}\n"
)


def line_of(path, text):
    return next(n for n, line in enumerate(path.read_text().splitlines(), start=1) if text in line)


@pytest.mark.parametrize("stage", TRAINERS)
def test_a_right_config_of_each_stage_loads_and_loads_again_as_it_is_written(tmp_path, stage):
    path = tiny_stage(tmp_path, stage)
    config = validated_stage(path)
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load(StageConfig, again) == config
    train, held_out = read_rows(config)
    assert len(train) == 64 and len(held_out) == 16
    assert for_trl(train, stage)[0].keys() == set(COLUMNS[stage][0]), "a column of another use is left out"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "trl.learning_rat=1",
            "trl.learning_rat: is no field of TRL's SFTConfig; did you mean `learning_rate`?",
        ),
        ("trl.beta=0.1", "trl.beta: is no field of TRL's SFTConfig"),
        ("trl.output_dir=x", "trl.output_dir: is refused: set run.root and run.name"),
        ("trl.report_to=wandb", "trl.report_to: is refused: set telemetry"),
        ("trl.seed=1", "trl.seed: is refused: set run.seed"),
        ("trl.deepspeed=x.json", "trl.deepspeed: is refused: each rank holds the whole model"),
        ("trl.sync_ref_model=true", "trl.sync_ref_model: is refused: TRL saves no moved reference"),
        ("trl.hub_model_id=x", "trl.hub_model_id: is refused: nothing is uploaded"),
        ("trl.learning_rate=fast", "trl.learning_rate: is 'fast'; TRL's SFTConfig allows float"),
        ("trl.max_steps=true", "trl.max_steps: is true; TRL's SFTConfig allows int"),
        ("stage=ppo", "one of sft, rm, dpo, kto, distil"),
        ("teacher={path: x}", "teacher: is given, but stage is sft"),
        ("stage=distil", "teacher is missing, and distil needs one"),
        ("teacher={template: x}", "teacher.template: is for `asyncrl up`"),
        ("teacher={scorers: 1}", "teacher.scorers: is for `asyncrl up`"),
        ("teacher={gpus: [0]}", "teacher.gpus: is for `asyncrl up`"),
        ("model.chat_template=true", "model.chat_template: is for `asyncrl up`"),
        ("model.lora={sync: merged}", "model.lora.sync: is for `asyncrl up`"),
        ("model.lora={load_in_4bit: true}", "model.lora.load_in_4bit: is for `asyncrl up`"),
        (
            "model.lora={start: nowhere}",
            "model.lora.start: nowhere/adapter_config.json",
        ),
        ("learning_rate=1", "did you mean `trl.learning_rate`?"),
        ("data.train=no.jsonl", "data.train: found no no.jsonl"),
        ("model.path=./nowhere", "model.path: found no ./nowhere"),
        ("batch.groups=4", "batch"),
    ],
)
def test_each_mistake_is_named_with_its_key_and_the_way_out(tmp_path, override, said):
    with pytest.raises(ConfigError) as raised:
        validated_stage(tiny_stage(tmp_path, "sft"), [override])
    assert said in str(raised.value)


def test_only_the_path_of_a_teacher_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"stage: teacher\.path is missing, and distil needs one"):
        validated_stage(tiny_stage(tmp_path, "sft"), ["stage=distil", "teacher={revision: x}"])


def test_a_mistake_in_the_file_has_its_line(tmp_path):
    path = tiny_stage(tmp_path, "sft", trl={"packin": True})
    with pytest.raises(ConfigError, match=rf"{path}:{line_of(path, 'packin')}  trl.packin: .*`packing`"):
        validated_stage(path)


def test_an_adapter_of_another_base_is_refused(tmp_path):
    (tmp_path / "adapter").mkdir()
    found = {"base_model_name_or_path": "other", "r": 16, "lora_alpha": 32}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(found))
    (tmp_path / "adapter/adapter_model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"model.lora.start: .* is an adapter of other, but model.path is "):
        validated_stage(tiny_stage(tmp_path, "sft"), [f"model.lora={{start: {tmp_path}/adapter}}"])


def test_the_config_of_a_moved_stage_does_not_begin_another_one(tmp_path):
    config = load(StageConfig, tiny_stage(tmp_path, "sft"))
    directory = RunDirectory(config.run.directory)
    directory.create(fresh=False)
    directory.config.write_text(dump_config(config))
    assert validated_stage(directory.config).run.name == "sft"
    moved = directory.path.rename(tmp_path / "sft") / "config.yaml"
    with pytest.raises(ConfigError, match=rf"run.root: found the config .* in {tmp_path}/sft.*set run.root="):
        validated_stage(moved)
    assert validated_stage(moved, [f"run.root={tmp_path}"]).run.root == tmp_path


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    path = tiny_stage(tmp_path, "distil")
    file = tmp_path / "teacher/tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"ä"'))
    with pytest.raises(ConfigError, match=r"teacher.path: .*whose vocabulary is not that of"):
        validated_stage(path)


def broken(stage, change):
    rows = rows_of(stage, 10, 6)
    change(rows)
    return rows


@pytest.mark.parametrize(
    ("stage", "change", "place", "said"),
    [
        ("sft", lambda rows: [row.pop("completion") for row in rows], 1, "found the columns note, prompt; stage sft needs"),
        ("dpo", lambda rows: [row.pop("chosen") for row in rows], 1, "needs prompt, chosen, rejected or chosen, rejected"),
        ("kto", lambda rows: rows[3].update(label="yes"), 4, "column `label` holds 'yes'; allowed is true and false"),
        ("kto", lambda rows: [row.update(label=True) for row in rows], 0, "every label is true; KTO needs good and bad"),
        ("rm", lambda rows: rows[2].update(rejected=rows[2]["chosen"]), 3, "chosen and rejected are the same"),
        ("dpo", lambda rows: rows[4].pop("rejected"), 5, "column `rejected` holds nothing; allowed is text"),
        ("sft", lambda rows: rows[1].update(completion=7), 2, "column `completion` holds 7; allowed is text"),
        ("distil", lambda rows: rows[5].update(prompt=[{"role": "user"}]), 6, "allowed is text, as in the first column of the first"),
        ("dpo", lambda rows: rows[0].update(chosen=[{"role": "user"}]), 1, "column `chosen` holds [{'role': 'user'}]; allowed is text"),
        ("distil", lambda rows: rows[2].update(tools=[{}]), 3, "column `tools` holds [{}]; allowed is nothing"),
        ("distil", lambda rows: rows[2].update(chat_template_kwargs={"a": 1}), 3, "`chat_template_kwargs` holds a section"),
        ("rm", lambda rows: rows[1].update(margin="0.5"), 2, "column `margin` holds '0.5'; allowed is a number"),
        ("sft", lambda rows: rows[0].update(prompt=[{"role": "user", "content": "x"}]), 1, "has no chat template"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_the_stage_are_named_with_file_and_line(tmp_path, stage, change, place, said):
    path = tiny_stage(tmp_path, stage)
    source = write_rows(tmp_path / f"{stage}.jsonl", broken(stage, change))
    with pytest.raises(DataError) as raised:
        read_rows(load(StageConfig, path))
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"{source}:{place}: " if place else f"{source}: ")


def test_pairs_may_have_margins(tmp_path):
    path = tiny_stage(tmp_path, "rm")
    rows = rows_of("rm", 10, 4)
    for row, margin in zip(rows, (1, 0.5, None), strict=False):
        row["margin"] = margin
    write_rows(tmp_path / "rm.jsonl", rows)
    found = for_trl(read_rows(load(StageConfig, path))[0], "rm")
    assert [row["margin"] for row in found[:4]] == [1, 0.5, 0.0, 0.0]


def test_conversations_fit_a_model_with_a_chat_template(tmp_path):
    path = tiny_stage(tmp_path, "sft")
    (tmp_path / "model/chat_template.jinja").write_text("{{ messages }}")
    chat = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 2
    write_rows(tmp_path / "sft.jsonl", chat)
    assert for_trl(read_rows(load(StageConfig, path))[0], "sft") == chat
    chat[1] = chat[1] | {
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"thinks": False},
        "margin": 1,
    }
    write_rows(tmp_path / "sft.jsonl", chat)
    first, second = for_trl(read_rows(load(StageConfig, path))[0], "sft")
    assert second == chat[1], "also columns that the first row lacks"
    assert first == chat[0] | {"tools": None, "chat_template_kwargs": {}, "margin": 0.0}


def test_the_directory_of_a_stage_is_no_model_and_the_message_says_what_is(tmp_path):
    run = tmp_path / "runs" / "sft"
    run.mkdir(parents=True)
    assert misused_stage(run / "hf") == "", "not of a stage"
    (run / "config.yaml").write_text(yaml.safe_dump({"run": {"name": "sft"}, "stage": "sft"}))
    for path in (run, run / "hf"):
        assert "is not finished" in misused_stage(path)
        assert f"`asyncrl stage {run}/config.yaml` goes on" in misused_stage(path)
        with pytest.raises(ConfigError, match=r"model.path: found .* of a stage that is not finished"):
            validated_stage(tiny_stage(tmp_path, "dpo"), [f"model.path={path}"])
    (run / "hf").mkdir()
    assert misused_stage(run / "hf") == ""
    assert misused_stage(run).endswith(f"its model is {run / 'hf'}")
    (run / "hf/adapter_config.json").write_text("{}")
    assert f"model.lora.start: {run / 'hf'}" in misused_stage(run / "hf")
    assert f"`asyncrl export {run} --merge --to DIRECTORY`" in misused_stage(run)


def test_what_trl_lacks_is_known_without_importing_it():
    code = "import sys, asyncrl.stages.trl_settings as t; assert len(t.fields_of('sft')) > 100"
    check = f"{code}; sys.exit(any(name in sys.modules for name in ('torch', 'trl', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("stage", TRAINERS)
def test_the_fields_that_are_read_from_trls_source_are_those_of_its_class(stage):
    import dataclasses

    import trl

    fields = dataclasses.fields(getattr(trl, f"{TRAINERS[stage][1]}Config"))
    assert set(fields_of(stage)) == {field.name for field in fields if not field.name.startswith("_")}
    assert refused("vllm_mode") and refused("hub_token") and not refused("max_steps")
    assert "output_dir" in OURS


def pipeline_of(tmp_path, *names):
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump({"pipeline": list(names)}))
    return path


def test_each_part_of_a_pipeline_begins_with_the_policy_before_it(tmp_path):
    for stage in ("sft", "rm", "dpo"):
        tiny_stage(tmp_path, stage)
    text = (tmp_path / "dpo.yaml").read_text()
    (tmp_path / "dpo.yaml").write_text(text.replace(f"path: {tmp_path}/model", "chat_template: false"))
    (tmp_path / "task.yaml").write_text(RUN)
    links = planned(pipeline_of(tmp_path, "sft.yaml", "rm.yaml", "dpo.yaml", "task.yaml"))
    made = [[f"model.path={tmp_path}/runs/{name}/hf", "model.revision=null"] for name in ("sft", "dpo")]
    assert [link.overrides for link in links] == [[], made[0], made[0], made[1]]
    assert [link.is_stage for link in links] == [True, True, True, False]


def test_an_adapter_is_trained_on_by_all_that_follow(tmp_path):
    tiny_stage(tmp_path, "sft", model={"lora": {"rank": 8, "alpha": 4}, "revision": "abc"})
    tiny_stage(tmp_path, "dpo", model={"path": "elsewhere", "revision": "other"})
    (tmp_path / "task.yaml").write_text(RUN)
    _, *others = planned(pipeline_of(tmp_path, "sft.yaml", "dpo.yaml", "task.yaml"))
    for link, name in zip(others, ("sft", "dpo"), strict=True):
        model = load(StageConfig if link.is_stage else Config, link.file, link.overrides).model
        assert (model.path, model.revision) == (f"{tmp_path}/model", "abc")
        assert (model.lora.rank, model.lora.alpha, str(model.lora.start)) == (
            8,
            4,
            f"{tmp_path}/runs/{name}/hf",
        )


@pytest.mark.parametrize("adapter", [False, True])
def test_a_stage_refuses_to_go_on_once_the_stage_before_it_was_made_again(tmp_path, adapter):
    lora = {"rank": 8} if adapter else None
    tiny_stage(tmp_path, "sft", model={"lora": lora})
    tiny_stage(tmp_path, "dpo")
    before = RunDirectory(tmp_path / "runs" / "sft")
    _, link = planned(pipeline_of(tmp_path, "sft.yaml", "dpo.yaml"))
    config = load(StageConfig, link.file, link.overrides)
    directory, fixed = RunDirectory(config.run.directory), fixed_values(config)
    for made in (before, directory):
        made.path.mkdir(parents=True)
    write_stage(before, digest="aaaa")
    begin_stage(config, directory, fixed)
    refuse_changed_stage(config, directory, fixed)
    write_stage(before, digest="bbbb")
    with pytest.raises(ConfigError, match=rf"sft/hf: .*digest bbbb.*\(aaaa\); remove {directory.path}, and"):
        refuse_changed_stage(config, directory, fixed)


def test_an_adapter_refuses_to_go_on_once_the_base_below_it_was_made_again(tmp_path):
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage.json").write_text(json.dumps({"digest": name}))
    config = load(
        StageConfig,
        tiny_stage(tmp_path, "dpo"),
        [f"model.path={tmp_path}/base/hf", f"model.lora={{start: {tmp_path}/adapter/hf}}"],
    )
    directory = RunDirectory(config.run.directory)
    directory.path.mkdir(parents=True)
    begin_stage(config, directory, fixed_values(config))
    refuse_changed_stage(config, directory, fixed_values(config))
    (tmp_path / "base/stage.json").write_text(json.dumps({"digest": "other"}))
    said = r"base/hf and .*adapter/hf: .*digest other adapter\).*\(base adapter\); remove"
    with pytest.raises(ConfigError, match=said):
        refuse_changed_stage(config, directory, fixed_values(config))


def test_the_last_run_of_a_pipeline_knows_its_first_weights_by_their_digest_and_not_by_their_time(tmp_path):
    """What they may become once they are known: test_resume.py."""
    tiny_stage(tmp_path, "sft")
    (tmp_path / "task.yaml").write_text(RUN.replace("name: task", f"name: task, root: {tmp_path}/runs"))
    before, directory = RunDirectory(tmp_path / "runs" / "sft"), RunDirectory(tmp_path / "runs" / "task")
    directory.path.mkdir(parents=True)
    record_start(directory.starts, 0, None)
    before.model.mkdir(parents=True)  # as in a copy, whose files are newer than the start
    write_stage(before, digest="aaaa")
    *_, link = planned(pipeline_of(tmp_path, "sft.yaml", "task.yaml"))
    assert first_weights(load(Config, link.file, link.overrides).model) == (str(before.model), "aaaa")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), r"pipeline.yaml:1  pipeline: .*at least 1"),
        (
            ("sft.yaml", "nine.yaml"),
            r"pipeline.yaml:3  pipeline.1: found no .*nine.yaml; give the configs relative",
        ),
        (("task.yaml", "sft.yaml"), r"task.yaml is no stage; only the last"),
        (
            ("lora.yaml", "rm.yaml"),
            r"rm.yaml\n.*model.lora.start: .*pipeline: drop model.lora of the stage before",
        ),
        (("sft.yaml", "sft.yaml"), r"two parts have the run directory .*runs/sft; set run.name"),
        (("sft.yaml", "bad.yaml"), r"bad.yaml:\d+  trl.packin: .*did you mean `packing`"),
    ],
)
def test_mistakes_anywhere_in_a_pipeline_are_named_before_anything_trains(tmp_path, names, said):
    tiny_stage(tmp_path, "sft")
    tiny_stage(tmp_path, "sft", name="lora", model={"lora": {}})
    tiny_stage(tmp_path, "rm")
    tiny_stage(tmp_path, "dpo", name="bad", trl={"packin": 1})
    text = (tmp_path / "bad.yaml").read_text()
    (tmp_path / "bad.yaml").write_text(text.replace("stage: dpo", "stage: sft"))
    (tmp_path / "task.yaml").write_text(RUN)
    with pytest.raises(ConfigError, match=said):
        planned(pipeline_of(tmp_path, *names))


def test_the_configs_of_the_page_and_the_example_are_right(tmp_path):
    blocks = files(ROOT / "docs" / "stages.md")
    assert blocks.keys() == {"sft.yaml", "rm.yaml", "dpo.yaml", "distil.yaml", "pipeline.yaml"}
    for name, content in (blocks | {"task.yaml": RUN}).items():
        (tmp_path / name).write_text(content)
    first, second, last = planned(tmp_path / "pipeline.yaml")
    assert second.overrides == ["model.path=runs/words-sft/hf", "model.revision=null"] and not last.is_stage
    assert first.file.name == "sft.yaml"
    for path in [*tmp_path.glob("[!pt]*.yaml"), *(ROOT / "configs" / "stages").glob("*.yaml")]:
        assert load(StageConfig, path).trl, path


def test_the_example_makes_rows_of_the_best_samples_of_a_run(tmp_path):
    samples = [
        {"kind": kind, "prompt": f"p{number}", "response": f"r{reward}", "reward": reward}
        for number in range(20)
        for kind, reward in (("train", 0.5), ("train", 1.0), ("eval", 2.0), ("dropped", None), ("train", 0.0))
    ]
    write_rows(tmp_path / "samples.jsonl", samples)
    script = ROOT / "examples" / "best_samples.py"
    subprocess.run([sys.executable, script, tmp_path, tmp_path], check=True, timeout=60)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("best", "best-eval")
    }
    assert {name: len(found) for name, found in rows.items()} == {"best": 18, "best-eval": 2}
    assert all(row["completion"] == "r1.0" for found in rows.values() for row in found)
    assert not {row["prompt"] for row in rows["best"]} & {row["prompt"] for row in rows["best-eval"]}


def test_commands_for_a_run_name_the_one_for_a_stage_and_validate_takes_both(tmp_path, capsys):
    path = tiny_stage(tmp_path, "sft")
    with pytest.raises(ConfigError, match=r"is the config of a stage; `asyncrl stage .*sft.yaml` trains it"):
        run(["up", str(path)])
    assert run(["validate", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"{path}: fine\n")
    write_rows(tmp_path / "sft.jsonl", rows_of("dpo", 1, 2))
    with pytest.raises(DataError, match=r"stage sft needs prompt, completion or messages or text"):
        run(["validate", str(path)])


def test_what_trl_logs_and_is_no_number_ends_no_training():
    logged = []
    trackers = SimpleNamespace(log=lambda found, *, step: logged.append((found, step)))
    follow = SimpleNamespace(_logged=(0, 0.0), _trackers=trackers)
    said = {"loss": 0.5, "eval_note": "a text", "train_runtime": 3.0}
    Follow.on_log(follow, None, SimpleNamespace(global_step=1), None, said)
    ((found, step),) = logged
    assert step == 1 and found.keys() == {"train/loss", "eval/note", "time/step"}


def test_a_stage_that_goes_on_keeps_the_curve_up_to_its_checkpoint(tmp_path):
    config = load(StageConfig, tiny_stage(tmp_path, "sft", telemetry={"tensorboard": True}))
    directory = RunDirectory(tmp_path / "run")
    directory.create(fresh=False)
    directory.draw_secret()
    for steps in ((1, 2, 3, 4), (4, 5)):
        with Follow(config, directory, None, threading.Event(), leads=True) as follow:
            for step in steps:
                follow.on_log(None, SimpleNamespace(global_step=step), None, {"loss": 1.0})
        sealed = directory.trl_checkpoints / "checkpoint-3" / "MANIFEST.json"
        sealed.parent.mkdir(parents=True, exist_ok=True)
        sealed.touch()
    events = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
