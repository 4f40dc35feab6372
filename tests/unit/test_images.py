"""Images of rows: read, rendered, and compared by both sides; the model's own processor is the oracle."""

import errno
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, Idefics3ForConditionalGeneration

from asyncrl.buffer.judge import make_judge, reason_to_reject
from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.config.schema import Config
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.data import images
from asyncrl.data.image_processor import DIGESTS, LearnerImages
from asyncrl.data.images import MOST_BYTES
from asyncrl.data.prompts import PromptSource
from asyncrl.errors import ConfigError, DataError, RowsChanged
from asyncrl.hosting.machine import read_model
from asyncrl.hosting.memory_use import Rank, published_bytes
from asyncrl.preflight.memory_forecast import checkpoint_bytes
from asyncrl.preflight.validate import validated_config
from asyncrl.trainer.loading import export_model
from asyncrl.types import Group, Rollout, VersionSpan
from asyncrl.wire.group_frames import decode_group, encode_group
from tests.support.models import tiny_qwen2
from tests.support.task_config import config_of
from tests.support.vlm_models import IMAGE_TOKENS, picture_bytes, tiny_idefics3

PARTS = [{"type": "text", "text": "look "}, {"type": "image"}, {"type": "text", "text": "what?"}]
ROWS: list[dict[str, Any]] = [
    {"question": "what is it?", "images": ["a.png"]},
    {"question": "which of both?", "images": ["a.png", {"bytes": None, "path": "b.png"}]},
    {"question": "no image", "images": []},
    {"question": [{"role": "user", "content": PARTS}], "images": ["b.png"]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_idefics3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    for name, shade in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.png").write_bytes(picture_bytes(shade))
    return write(tmp_path, ROWS)


def write(directory: Path, rows: list[dict[str, Any]]) -> Path:
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def config(task: Path, path: Path, /, **sections: Any) -> Config:
    data = {
        "train": str(task / "train.jsonl"),
        "prompt_field": "question",
        "images_key": "images",
        "shuffle": False,
    }
    return config_of(**{"model": {"path": str(path), "chat_template": True}, "data": data} | sections)


def path_of(image: Any) -> str:
    return str(image["path"] if isinstance(image, dict) else image)


def source(config: Config) -> PromptSource:
    return PromptSource(config.data, config.model, config.sampling, seed=0)


def test_a_prompt_is_what_the_models_processor_makes_of_the_row(task: Path, model: Path) -> None:
    prompts = source(config(task, model))
    processor = AutoProcessor.from_pretrained(model)
    texts = [
        "user:<image>what is it?<end_of_utterance>assistant:",
        "user:<image><image>which of both?<end_of_utterance>assistant:",
        "user:no image<end_of_utterance>assistant:",
        "user:look <image>what?<end_of_utterance>assistant:",
    ]
    for index, (text, names) in enumerate(zip(texts, (["a"], ["a", "b"], [], ["b"]), strict=True)):
        prompt = prompts.prompt(index + 1)
        assert prompt.text == text
        if not names:
            assert prompt.images is None
            continue
        pictures = [Image.open(task / f"{name}.png") for name in names]
        expected = processor(text=[text], images=[pictures], return_tensors="np")
        assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
        assert prompt.images is not None
        seen = prompt.images()
        assert prompt.token_ids.count(processor.image_token_id) == IMAGE_TOKENS * len(names)
        assert seen.short_ids.count(processor.image_token_id) == len(names)
        for name, tensor in seen.inputs(2).items():
            for copy in tensor.numpy():
                np.testing.assert_array_equal(copy, expected[name][0])


@pytest.mark.parametrize("place", ["train.parquet", "."])
def test_images_in_rows_of_the_library_datasets_are_those_of_files(
    task: Path, model: Path, tmp_path_factory: pytest.TempPathFactory, place: str
) -> None:
    """The parquet file that `datasets` writes, and a directory that it loads, whose images it would decode."""
    column = datasets.List(datasets.Image())
    rows = [
        {
            **row,
            "images": [{"path": None, "bytes": (task / path_of(one)).read_bytes()} for one in row["images"]],
        }
        for row in ROWS[:3]
    ]
    features = datasets.Features({"question": datasets.Value("string"), "images": column})
    directory = tmp_path_factory.mktemp("hub")
    datasets.Dataset.from_list(rows, features=features).to_parquet(directory / "train.parquet")
    data = config(task, model).data.model_dump() | {"train": str(directory / place)}
    expected, found = source(config(task, model)), source(config(task, model, data=data))
    for ticket in (1, 2, 3):
        ours, theirs = found.prompt(ticket), expected.prompt(ticket)
        assert ours.token_ids == theirs.token_ids
        if theirs.images is not None and ours.images is not None:
            np.testing.assert_array_equal(ours.images().digests, theirs.images().digests)
        assert (ours.images is None) == (theirs.images is None)


def test_a_system_message_stands_before_the_images(task: Path, model: Path) -> None:
    data = config(task, model).data.model_copy(update={"system": "be short"})
    prompts = PromptSource(data, config(task, model).model, config(task, model).sampling, seed=0)
    assert prompts.prompt(1).text.startswith("system:be short<end_of_utterance>user:<image>what")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_an_error_that_passes_is_met_again_and_one_that_stays_names_the_row(
    task: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    monkeypatch.setattr(images, "PAUSES_S", (0.0, 0.0))
    opened, failures = Path.open, [2]

    def failing(path: Path, *given: Any, **more: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise OSError(number, "gone for now")
        return opened(path, *given, **more)

    monkeypatch.setattr(Path, "open", failing)
    read = partial(images.image_bytes, {"images": ["a.png"]}, "images", "row 7", task)
    assert read() == (picture_bytes(1),)
    tried = [record.message for record in caplog.records if "tried again" in record.message]
    assert len(tried) == 2 and all("row 7" in one and "gone for now" in one for one in tried)
    failures[0] = 3
    with pytest.raises(DataError, match=r"row 7: image .*a.png cannot be read \(gone for now\)"):
        read()
    assert failures == [0]
    failures[0], number = 1, errno.EACCES
    with pytest.raises(DataError, match="gone for now"):
        read()


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"question": "x", "images": ["none.png"]}, "none.png cannot be read"),
        (
            {"question": "x", "images": ["/nowhere/a.png"]},
            "image /nowhere/a.png cannot be read (No such file",
        ),
        ({"question": "x", "images": ["."]}, "cannot be read (it is a directory); give a file"),
        ({"question": "x", "images": ["/dev/zero"]}, "cannot be read (it is no regular file); give a file"),
        (
            {"question": "x", "images": ["empty.png"]},
            "empty.png cannot be read (it has 0 bytes); give a file",
        ),
        ({"question": "x", "images": ["train.jsonl"]}, "not one that PIL can read"),
        ({"question": "x", "images": [7]}, "holds a int"),
        (
            {"question": "x", "images": [{"bytes": "iVBORw0KGgo=", "path": None}]},
            "holds a dict of bytes, path",
        ),
        ({"question": "x", "images": ["huge.png"]}, "huge.png has 33,554,433 bytes; allowed are 33,554,432"),
        ({"question": "x", "images": ["wide.png"]}, "has 8,192 x 4,097 pixels; allowed are 33,554,432"),
        (
            {"question": [{"role": "user", "content": PARTS}], "images": ["a.png"] * 2},
            "found 2 images in the row, and 1",
        ),
        (
            {"question": [{"role": "user", "content": PARTS}], "images": []},
            "found 0 images in the row, and 1",
        ),
        ({"question": "x"}, "lack column `images`"),
    ],
)
def test_a_row_whose_images_cannot_be_used_is_named(
    task: Path, model: Path, row: dict[str, Any], found: str
) -> None:
    write(task, [ROWS[0], row])
    (task / "empty.png").touch()
    (task / "huge.png").write_bytes(bytes(MOST_BYTES + 1))
    Image.new("1", (8192, 4097)).save(task / "wide.png")
    text = config(task, model).model_dump_json()
    (task / "run.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        validated_config(task / "run.json")
    assert found in str(refused.value) and "train.jsonl:2" in str(refused.value)


def test_a_literal_placeholder_in_a_text_is_named(task: Path, model: Path) -> None:
    write(task, [{"question": "what is <image>?", "images": ["a.png"]}])
    with pytest.raises(DataError, match=r"train\.jsonl:1: the model's processor refuses the row"):
        source(config(task, model))


def test_a_text_model_is_refused(task: Path, tmp_path: Path) -> None:
    text_model = tiny_qwen2(tmp_path / "text")
    with pytest.raises(DataError, match=r"the architecture is qwen2; those with images are idefics3"):
        LearnerImages(config(task, text_model))


def test_an_adapter_of_a_model_with_a_vision_part_is_refused(task: Path, model: Path) -> None:
    sections = {"model": {"path": str(model), "chat_template": True, "lora": {"rank": 8}}}
    (task / "run.json").write_text(config(task, model, **sections).model_dump_json())
    with pytest.raises(ConfigError, match=r"model\.lora.* has a vision part"):
        validated_config(task / "run.json")


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"environment": {"uses": "game.py:Game"}}, "environment.uses"),
        ({"learner": {"sequence_parallel": 2, "ranks": 2}}, "learner.sequence_parallel"),
        ({"model": {"path": "x"}}, "model.chat_template"),
    ],
)
def test_what_cannot_go_with_images_is_refused(
    task: Path, model: Path, sections: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=rf"data.images_key is set, but {key} is"):
        config(task, model, **sections)


def group(prompts: PromptSource, ticket: int) -> Group:
    """As a generator hands it over."""
    prompt = prompts.prompt(ticket)
    ids = np.array([20, 21], dtype=np.int32)
    rollout = Rollout(
        prompt_ids=np.array(prompt.token_ids, dtype=np.int32),
        response_ids=ids,
        action_mask=np.ones(2, dtype=np.bool_),
        behaviour_logprobs=np.zeros(2, dtype=np.float32),
        version_spans=(VersionSpan(0, 2),),
        finish_reason="stop",
    )
    recorded = {DIGESTS: prompt.images().digests} if prompt.images else {}
    made = Group(
        ticket_id=ticket, rollouts=(rollout,), generator_id="g0", finished_version=0, recorded=recorded
    )
    return decode_group(encode_group(made))


def test_both_sides_read_the_same_images(task: Path, model: Path) -> None:
    config_ = config(task, model)
    prompts, learner = source(config_), LearnerImages(config_)
    read = [learner.of(group(prompts, ticket)) for ticket in range(1, 9)]
    a, b = ((task / f"{name}.png").read_bytes() for name in "ab")
    assert read == [(a,), (a, b), (), (b,)] * 2
    assert all(learner.fault(group(prompts, ticket)) is None for ticket in range(1, 5))


def test_a_pack_has_the_pixels_of_each_image_in_the_order_of_its_placeholders(
    task: Path, model: Path
) -> None:
    """Also of an image that comes twice, as in the rollouts of a group."""
    learner = LearnerImages(config(task, model))
    a, b = ((task / f"{name}.png").read_bytes() for name in "ab")
    (alone_a, alone_b) = (learner.inputs([image])["pixel_values"][0] for image in (a, b))
    assert not torch.equal(alone_a, alone_b)
    found = learner.inputs([b, a, a, b])["pixel_values"][0]
    assert torch.equal(found, torch.cat([alone_b, alone_a, alone_a, alone_b]))


@pytest.mark.parametrize("image", ["a.png", "b.png"])
def test_one_question_of_two_images_is_held_out(
    task: Path, model: Path, image: str, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"question": "what is it?", "images": [image]}
    (task / "test.jsonl").write_text(json.dumps(row))
    data = config(task, model).data.model_dump() | {"eval": str(task / "test.jsonl")}
    source(config(task, model, data=data))
    assert ("also occur in data.train" in caplog.text) == (image == "a.png")


@pytest.mark.parametrize("change", ["another picture", "gone", "another row", "no digest"])
def test_a_group_with_other_images_is_named_and_not_trained(task: Path, model: Path, change: str) -> None:
    config_ = config(task, model)
    prompts, learner = source(config_), LearnerImages(config_)
    made = group(prompts, 2)
    match change:
        case "another picture":
            (task / "b.png").write_bytes(picture_bytes(3))
        case "gone":
            (task / "b.png").unlink()
        case "another row":
            made = replace(made, ticket_id=1)
        case "no digest":
            made = replace(made, recorded={})
    fault = learner.fault(made)
    assert fault is not None and fault.startswith("image_changed: ") and "train.jsonl:" in fault
    with pytest.raises(DataError):
        learner.of(made)


def test_a_learner_whose_rows_have_another_date_ends_to_read_them_again(task: Path, model: Path) -> None:
    """Of each group it would say that it cannot be judged, until too many are rejected."""
    config_ = config(task, model)
    prompts, learner = source(config_), LearnerImages(config_)
    made, judge = group(prompts, 1), make_judge((), drop_older_than=None, fault=learner.fault)
    os.utime(task / "train.jsonl", ns=(1, 1))
    with pytest.raises(RowsChanged, match=r"train\.jsonl changed while a process reads rows"):
        reason_to_reject(made, 0, judge=judge, known_kinds=())


def test_a_sampled_placeholder_is_not_trained(task: Path, model: Path) -> None:
    config_ = config(task, model)
    prompts, learner = source(config_), LearnerImages(config_)
    made = group(prompts, 1)
    token = AutoProcessor.from_pretrained(model).image_token_id
    rollout = replace(made.rollouts[0], response_ids=np.array([20, token], dtype=np.int32))
    fault = learner.fault(replace(made, rollouts=(rollout,)))
    assert fault is not None and fault.startswith("image_token_sampled: ")


def test_the_blank_image_is_a_picture_of_the_processor(task: Path, model: Path) -> None:
    learner = LearnerImages(config(task, model))
    assert Image.open(BytesIO(learner.blank)).mode == "RGB"
    assert (learner.blank_ids == AutoProcessor.from_pretrained(model).image_token_id).sum() == IMAGE_TOKENS


@pytest.mark.parametrize("missing", ["files", "library"])
def test_training_on_text_needs_no_processor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ImportError("torchvision")

    base = Path(shutil.copytree(model, tmp_path / "base"))
    if missing == "library":
        monkeypatch.setattr(AutoProcessor, "from_pretrained", absent)
    else:
        for file in base.glob("*processor*"):
            file.unlink()
    loaded = Idefics3ForConditionalGeneration.from_pretrained(base)
    export_model(loaded, ModelConfig(path=str(base)), loaded.state_dict(), tmp_path / "hf")
    before, after = (AutoTokenizer.from_pretrained(place) for place in (model, tmp_path / "hf"))
    assert after.get_vocab() == before.get_vocab()


def test_the_vision_part_has_weights_only(model: Path) -> None:
    _, shape = read_model(ModelConfig(path=str(model)))
    loaded = Idefics3ForConditionalGeneration.from_pretrained(model)
    parts = [loaded.model.vision_model, loaded.model.connector]
    assert shape.frozen == sum(one.numel() for part in parts for one in part.parameters()) > 0
    assert shape.parameters == sum(one.numel() for one in loaded.parameters())
    settings = ModelConfig(path=str(model), dtype="float32")
    rank, trained = Rank(shape, settings, LearnerConfig(zero_stage=0)), shape.parameters - shape.frozen
    assert (rank.weights, rank.of_one_pass, rank.accumulated(from_stage=2)) == (
        4 * shape.parameters,
        0,
        4 * trained,
    )
    assert rank.optimizer(OptimizerConfig()) == 8 * trained
    assert published_bytes(shape, settings) == 4 * trained
    assert (
        checkpoint_bytes(shape, settings, LearnerConfig(), critic=None) == 12 * trained + 4 * shape.parameters
    )


@pytest.mark.parametrize("error", [RuntimeError, IndexError, NotImplementedError])
def test_any_error_of_a_decoder_names_the_row(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    monkeypatch.setattr(Image.Image, "convert", lambda *_: (_ for _ in ()).throw(error("damaged")))
    with pytest.raises(DataError, match=r"row 3: an image of .* not one that PIL can read \(damaged\)"):
        images.picture_of(picture_bytes(0), "row 3")
