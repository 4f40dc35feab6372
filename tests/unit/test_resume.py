"""Before a run is resumed, every key is judged, forbidden changes are refused at once, no work is wasted."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from asyncrl import api
from asyncrl.buffer.ledger import Ledger
from asyncrl.cli.foreground import run_here
from asyncrl.config.base import OTHER_RUN, REFUSED
from asyncrl.config.load import load_config
from asyncrl.config.outline import bound
from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config
from asyncrl.data.data_files import DataFiles
from asyncrl.errors import CheckpointError, ConfigError, RunError
from asyncrl.preflight.validate import validated_config
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from asyncrl.run.lock import RunLock
from asyncrl.run.saved import LearnerState, go_back, nothing_left, read_saved, refuse_changes
from asyncrl.telemetry.status import StatusSnapshot, write_status
from tests.support.fake_trainer import FakeTrainer, save_whole
from tests.support.models import tiny_qwen2

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def path(tmp_path, monkeypatch, model):
    """A config of a run in this directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    values = {
        "run": {"name": "first"},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl"},
        "reward": {"functions": [{"function": "exact_match"}]},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
        "learner": {"steps": 12, "device": "cpu"},
    }
    found = tmp_path / "run.yaml"
    found.write_text(yaml.safe_dump(values))
    return found


def trained(config: Config, step: int) -> RunDirectory:
    """What a run leaves that has made so many steps."""
    directory = RunDirectory(config.run.directory)
    directory.create(fresh=False)
    directory.draw_secret()
    directory.config.write_text(dump_config(config))
    state = LearnerState(version=step, ledger=Ledger().to_dict())
    state = replace(state, fixed=state.begun(config, rows=DataFiles(config).train).fixed)
    store = CheckpointStore(directory.checkpoints, directory.checkpoint_key(), 2)
    save_whole(store, step, FakeTrainer("weights"), state.to_dict())
    return directory


def everything_in(directory: RunDirectory) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}


def test_the_reference_names_the_keys_that_must_not_change_with_their_reasons():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| (.*) \| ({OTHER_RUN}|{REFUSED}) \| (.*) \|$", page, re.MULTILINE)
    named = {key: (kind, why) for keys, kind, why in rows for key in re.findall(r"`([^`]+)`", keys)}
    of_sources = {key for key in named if key.startswith("data.train.")}
    kept = {key: tuple(reason) for key, reason in bound(Config).items()}
    assert {key: reason for key, reason in named.items() if key not in of_sources} == kept
    assert of_sources == {f"data.train.{key}" for key in ("path", "system", "weight", "limit")}


CHANGES = {
    "run.seed": ["run.seed=1"],
    "model.path": ["model.path=other"],
    "model.revision": ["model.revision=abc"],
    "model.dtype": ["model.dtype=bfloat16"],
    "model.chat_template": ["model.chat_template=true"],
    "model.lora.rank": ["model.lora.rank=8"],
    "model.lora.alpha": ["model.lora.alpha=16"],
    "model.lora.targets": ["model.lora.targets=[q_proj]"],
    "model.lora.start": ["model.lora.start=adapter"],
    "model.lora.load_in_4bit": ["model.lora.load_in_4bit=true", "generator.engine=transformers"],
    "model.router_replay": ["model.router_replay=true", "generator.engine=transformers"],
    "sampling.top_k": ["sampling.top_k=50"],
    "data.train": ["data.train=other.jsonl"],
    "data.prompt_field": ["data.prompt_field=answer"],
    "data.last_answer": ["data.last_answer=continue"],
    "data.template": ["data.template='{prompt}'"],
    "data.system": ["data.system=think", "model.chat_template=true"],
    "data.split": ["data.split=test"],
    "data.shuffle": ["data.shuffle=false"],
    "data.long_prompts": ["data.long_prompts=drop"],
    "data.images_key": ["data.images_key=images", "model.chat_template=true"],
    "data.curriculum.floor": ["data.curriculum.floor=0.1"],
    "algorithm.advantage": ["algorithm.advantage=gae"],
    "algorithm.reference.path": ["algorithm.advantage=distill", "algorithm.reference.path=teacher"],
    "algorithm.reference.revision": [
        "algorithm.advantage=distill",
        "algorithm.reference={path: teacher, revision: abc}",
    ],
    "algorithm.reference.template": [
        "algorithm.advantage=distill",
        "algorithm.reference={template: '{prompt}{answer}', scorers: 1}",
    ],
    "learner.ranks": ["learner.ranks=2"],
    "learner.zero_stage": ["learner.zero_stage=2"],
    "learner.offload_optimizer": [
        "learner.offload_optimizer=true",
        "learner.zero_stage=3",
        "learner.device=auto",
    ],
    "learner.optimizer.kind": ["learner.optimizer.kind=muon"],
    "critic.optimizer.kind": ["algorithm.advantage=gae", "critic.optimizer.kind=muon"],
    "store.shards": ["store.shards=4"],
}


def test_each_key_that_has_to_stay_is_refused_with_what_to_do_and_nothing_is_written(path):
    # There is one backend.
    assert CHANGES.keys() | {"run.name", "learner.backend"} == bound(Config).keys()
    directory = trained(load_config(path), 5)
    before = everything_in(directory)
    Path("other.jsonl").write_text('{"prompt": "1+1=", "answer": "3"}\n')
    for key, overrides in CHANGES.items():
        config = load_config(path, overrides)
        with pytest.raises(
            ConfigError, match=rf"{key}: found .*; allowed is .*begun: .*; set it back, or begin another run"
        ):
            run_here(config, fresh=False, generators=True, plain=True)
        with pytest.raises(ConfigError, match=f"  {key}: "):
            refuse_changes(config, directory, read_saved(directory), DataFiles(config))
    assert everything_in(directory) == before
    config = load_config(path, ["algorithm.advantage=rloo"])
    refuse_changes(config, directory, read_saved(directory), DataFiles(config))


def test_a_checkpoint_of_a_release_without_a_key_can_be_resumed(path):
    config = load_config(path)
    saved = read_saved(trained(config, 5))
    del saved.state["fixed"]["data.curriculum.floor"]
    refuse_changes(config, RunDirectory(config.run.directory), saved, DataFiles(config))


def test_validate_tells_all_of_them_at_once_where_they_were_written(path):
    trained(load_config(path), 5)
    overrides = ["run.seed=1", "learner.ranks=2", "batch.groups=64"]
    with pytest.raises(ConfigError) as caught:
        validated_config(path, overrides, resumes=True)
    text = str(caught.value)
    assert (
        text.startswith("2 problems in ") and "override `run.seed=1`  run.seed: found 1; allowed is 0" in text
    )
    assert "model.path=runs/first/checkpoints/step-000005/hf" in text
    validated_config(path, overrides)
    validated_config(path, ["batch.groups=64", "sampling.temperature=0.5", "eval.every=3"], resumes=True)


def test_before_the_first_checkpoint_everything_may_change(path):
    directory = RunDirectory(load_config(path).run.directory)
    directory.create(fresh=False)
    directory.draw_secret()
    validated_config(path, ["run.seed=1"], resumes=True)


def test_one_file_under_two_spellings_is_the_same(path, tmp_path):
    trained(load_config(path), 5)
    (tmp_path / "link.jsonl").symlink_to("train.jsonl")
    validated_config(path, [f"model.path={tmp_path}/model", "data.train=./link.jsonl"], resumes=True)


def test_other_rows_under_the_same_name_are_another_run(path, tmp_path, monkeypatch):
    train, first = (
        tmp_path / "train.jsonl",
        [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}],
    )

    def write(rows):
        train.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(first)
    directory = trained(load_config(path), 5)
    for rows in (
        [*first, {"prompt": "2+2=", "answer": "4"}],
        first[::-1],
        first[:1],
        [first[0], {**first[1], "answer": "4"}],
    ):
        write(rows)
        with pytest.raises(ConfigError) as caught:
            validated_config(path, resumes=True)
        found = rf"found '{len(rows)} rows with digest \w{{16}}'; allowed is '2 rows with digest \w{{16}}', with which this run"
        assert re.search(found, str(caught.value)) and "none may be appended" in str(caught.value)
        with pytest.raises(ConfigError, match=found):
            run_here(load_config(path), fresh=False, generators=True, plain=True)
    monkeypatch.setattr(
        "asyncrl.commands.up.opened_store", lambda *_: (_ for _ in ()).throw(RunError("it begins again"))
    )
    with pytest.raises(RunError, match="it begins again"):
        run_here(load_config(path), fresh=True, generators=True, plain=True)
    write(first)
    directory = trained(load_config(path), 5)
    (tmp_path / "moved.json").write_text(json.dumps(first, indent=4))  # the same rows, wherever they are
    train.unlink()
    validated_config(path, ["data.train=moved.json"], resumes=True)
    with pytest.raises(ConfigError) as caught:
        validated_config(path, ["run.seed=1"], resumes=True)
    assert str(caught.value).startswith("2 problems") and "run.seed: found 1" in str(caught.value)
    with pytest.raises(ConfigError, match=r"data.train: dataset train.jsonl does not exist"):
        refuse_changes(load_config(path), directory, read_saved(directory), DataFiles(load_config(path)))


def test_shares_limits_and_system_messages_of_sources_stay_too(path, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "b.jsonl").read_bytes())
    trained(load_config(path, ["data.train=[{path: a.jsonl, weight: 7}, {path: b.jsonl, weight: 3}]"]), 5)
    same = "data.train=[{path: a.jsonl, weight: 0.7, limit: 9}, {path: moved.jsonl, weight: 0.3, name: x}]"
    validated_config(path, [same], resumes=True)
    for train, shown in (
        ("{path: a.jsonl, weight: 6}", "2/3 of 3 "),
        ("{path: a.jsonl, weight: 7, limit: 2}", "7/10 of 2"),
    ):
        found = rf"data.train: found 'sources with digest \w+: {shown}.*; allowed is '.*: 7/10 of 3"
        with pytest.raises(ConfigError, match=found):
            validated_config(path, [f"data.train=[{train}, {{path: b.jsonl, weight: 3}}]"], resumes=True)


def test_the_newest_state_is_read_once(path, monkeypatch):
    config, reads = load_config(path), []
    trained(config, 5)
    read = CheckpointStore.newest_state
    monkeypatch.setattr(CheckpointStore, "newest_state", lambda self: reads.append(self) or read(self))
    monkeypatch.setattr(
        "asyncrl.commands.up.opened_store", lambda *_: (_ for _ in ()).throw(RunError("it begins"))
    )
    with pytest.raises(RunError, match="it begins"):
        run_here(config, fresh=False, generators=True, plain=True)
    assert len(reads) == 1


def test_a_state_that_was_altered_is_not_believed(path):
    config = load_config(path)
    directory = trained(config, 5)
    trained(config, 6)
    state = directory.checkpoints / "step-000006" / "state.json"
    state.write_text(state.read_text().replace('"run.seed": 0', '"run.seed": 9'))
    refuse_changes(config, directory, read_saved(directory), DataFiles(config))


def test_a_run_goes_back_to_a_kept_step_and_no_other(path):
    config = load_config(path)
    for step in (5, 7, 9):
        directory = trained(config, step)
    with pytest.raises(RunError, match=r"no checkpoint of step 6; it has 7, 9 \("):
        go_back(directory, 6)
    assert read_saved(directory).state["version"] == 9
    with RunLock(directory.supervisor_lock), pytest.raises(RunError, match="stop that process first"):
        go_back(directory, 7)
    (data := directory.store / "appendonlydir").mkdir(parents=True)
    (data / "of-step-9").touch()
    go_back(directory, 7)
    assert not data.exists(), "the store would go through each id since step 7"
    assert read_saved(directory).state["version"] == 7
    assert (directory.checkpoints / "NEWEST").read_text() == "7\n"
    assert (directory.checkpoints / "rejected-step-000009").is_dir(), "nothing is deleted"
    trained(config, 8)
    damaged = directory.checkpoints / "step-000007" / "state.json"
    damaged.write_text("{}")
    with pytest.raises(CheckpointError, match=r"state.json is not what was written"):
        go_back(directory, 7)
    assert read_saved(directory).state["version"] == 8


@pytest.mark.parametrize(("steps", "starts"), [(20, True), (12, False), (5, False)])
def test_a_run_with_nothing_left_to_do_says_so_and_starts_nothing(path, capsys, monkeypatch, steps, starts):
    config = load_config(path, [f"learner.steps={steps}"])
    directory = trained(config, 12)
    before = everything_in(directory)

    class StartedError(Exception): ...

    monkeypatch.setattr("asyncrl.commands.up.claimed", lambda *_, **__: (_ for _ in ()).throw(StartedError))
    if starts:
        with pytest.raises(StartedError):
            run_here(config, fresh=False, generators=True, plain=True)
        return
    assert run_here(config, fresh=False, generators=True, plain=True) == 0
    assert f"has trained 12 steps, and learner.steps is {steps}: nothing is left" in capsys.readouterr().out
    assert everything_in(directory) == before
    with pytest.raises(StartedError):
        run_here(config, fresh=True, generators=True, plain=True)


def test_python_is_told_that_nothing_is_left_to_do(path, monkeypatch):
    trained(load_config(path), 12)
    monkeypatch.setattr(api, "_Process", lambda *_: pytest.fail("it starts"))
    for fresh in (False, True):
        with warnings.catch_warnings(record=True) as said, pytest.raises(pytest.fail.Exception):
            warnings.simplefilter("always")
            api.train(path, "learner.steps=5", fresh=fresh)
        assert sum("learner.steps is 5: nothing is left" in str(one.message) for one in said) == 1 - fresh


def test_the_last_weights_are_evaluated_before_a_run_counts_as_done(path, monkeypatch):
    config = load_config(path, ["data.eval=train.jsonl"])
    directory = trained(config, 12)
    assert nothing_left(config, directory, read_saved(directory)) == ""
    for state, expected in (("stopped", False), ("finished", True)):
        write_status(
            directory.status,
            StatusSnapshot(
                run="first",
                state=state,
                step=12,
                total_steps=12,
                version=12,
                started_at=1,
                updated_at=2,
                pid=1,
            ),
        )
        assert bool(nothing_left(config, directory, read_saved(directory))) is expected


def test_the_config_of_a_moved_run_does_not_begin_another_one(path, tmp_path):
    directory = trained(load_config(path), 5)
    (tmp_path / "archive").mkdir()
    directory.path.rename(tmp_path / "archive" / "first")
    moved = Path("archive/first/config.yaml")
    with pytest.raises(
        ConfigError,
        match=rf"run.root: found the config of the run in {tmp_path}/archive/first.*set run.root=",
    ):
        validated_config(moved, resumes=True)
    assert not directory.path.exists()
    assert validated_config(moved, ["run.root=archive"], resumes=True).run.directory == Path("archive/first")
    assert validated_config(moved, ["run.name=second"], resumes=True).run.name == "second"
    Path("archive/first").rename("archive/best")
    with pytest.raises(
        ConfigError, match=r"give the directory its name back \(.*/archive/first\) and set run.root="
    ):
        validated_config(Path("archive/best/config.yaml"), resumes=True)
    with pytest.raises(ConfigError, match=r"run.name: found 'best'; allowed is 'first'"):
        validated_config(
            Path("archive/best/config.yaml"), ["run.root=archive", "run.name=best"], resumes=True
        )


def test_what_a_checkpoint_holds_of_the_config_survives_its_json(path):
    config = load_config(path)
    values = config.fixed_values(rows=DataFiles(config).train)
    assert json.loads(json.dumps(values)) == values and values.keys() == {*bound(Config)}


@pytest.mark.parametrize("digests", [("aa", "bb"), ("aa", None)])
def test_a_stage_that_was_trained_again_is_another_base(path, tmp_path, digests):
    """The weights that are trained are in the checkpoint; those of an adapter's base, and of a reference, are not."""
    config = load_config(path)
    record, sound = tmp_path / "stage.json", json.dumps({"digest": digests[0]})
    record.write_text(sound)
    directory = trained(config, 3)
    refuse_changes(config, directory, read_saved(directory), DataFiles(config))
    record.write_text(json.dumps({"digest": digests[1]}))
    with pytest.raises(ConfigError, match=r"model\.path: the stage there was trained again"):
        refuse_changes(config, directory, read_saved(directory), DataFiles(config))
