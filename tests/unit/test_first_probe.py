"""A learner that does not compute what transformers computes trains nothing, and every rank says so."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from asyncrl.errors import ConfigError, DataError
from asyncrl.launch import first_probe, training
from asyncrl.launch.first_probe import certified_probe, require_right_code
from asyncrl.run.directory import RunDirectory
from asyncrl.trainer.collectives import Rendezvous
from tests.support.models import tiny_qwen2
from tests.support.task_config import config_of


@dataclass
class Learner:
    """Its log-probabilities depend on the token, and with `leak` on what is packed before the sequence."""

    leak: float = 0.0
    error: float = 0.0
    other_share: str = ""
    lengths: list[list[int]] = field(default_factory=list)

    def score(self, sequences: Any) -> list[list[float]]:
        self.lengths.append([len(ids) for ids in sequences])
        return [
            [-token / 10 - self.leak * (number > 0) - self.error for token in ids[1:]]
            for number, ids in enumerate(sequences)
        ]

    def score_plainly(self, sequences: Any) -> list[list[float]]:
        return [[-token / 10 for token in ids[1:][-64:]] for ids in sequences]

    def gather(self, value: bytes) -> list[bytes]:
        return [value, self.other_share.encode()]


def certify(learner: Learner, path: Path, window: int | None = None, **sizes: Any) -> Any:
    sizes |= {"sliding_window": window, "use_sliding_window": True} if window else {}
    model = {"path": str(tiny_qwen2(path, **sizes)), "dtype": "float32"}
    config = config_of(model=model, sampling={"max_prompt_tokens": 100, "max_response_tokens": 100})
    return certified_probe(config, learner)  # type: ignore[arg-type]


def test_engines_score_several_sequences_and_the_learner_the_same_packed(tmp_path: Path) -> None:
    learner = Learner(leak=0.01)
    probe, logprobs = certify(learner, tmp_path)
    assert [len(ids) for ids in probe] == [10, 16, 32]
    leaks = [0.0] * 9 + [0.01] * 46
    tokens = [token for ids in probe for token in ids[1:]]
    assert logprobs == [-token / 10 - leak for token, leak in zip(tokens, leaks, strict=True)]
    assert learner.lengths == [[10, 16, 32], [10], [16], [32], [10, 16, 32]]


def test_one_sequence_is_longer_than_a_sliding_window(tmp_path: Path) -> None:
    learner = Learner()
    certify(learner, tmp_path, window=100)
    assert learner.lengths[0] == [10, 16, 32, 132]


@pytest.mark.parametrize("before", [200, 199])
def test_positions_that_depend_on_the_longest_sequence_of_a_pack_are_refused(before, tmp_path) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": before, **factors}
    if before == 200:
        certify(Learner(), tmp_path, rope_parameters=rope)
    else:
        with pytest.raises(ConfigError, match="longrope and sequences of up to 200 tokens; above 199"):
            certify(Learner(), tmp_path, rope_parameters=rope)


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        (Learner(leak=0.2), r"share 0 .* by 0\.1\d* nats .* leaks into the next"),
        (Learner(error=0.2), r"share 0 .* by 0\.2 nats .* each alone"),
        (Learner(other_share="broken"), "share 1 of the learner: broken"),
    ],
)
def test_a_difference_ends_the_run(learner: Learner, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        certify(learner, tmp_path)


def test_the_code_of_a_model_is_judged_once_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_weights(*_: Any) -> None:
        raise DataError("weights are read")

    monkeypatch.setattr(training, "trainer_of", read_weights)
    model = AutoConfig.for_model("mistral", sliding_window=16)  # refused, as test_models.py shows
    monkeypatch.setattr(first_probe, "read_model", lambda config: (model,))
    directory = RunDirectory(tmp_path / "run")
    directory.make()
    unused: Any = None
    data: Any = SimpleNamespace(row=int)
    start = (config_of(), directory, unused, unused, data, Rendezvous(), torch.device("cpu"), (), unused)
    with pytest.raises(ConfigError, match="sliding_window 16 on 50 tokens"):
        training.train(*start)
    directory.saved_mark.touch()
    with pytest.raises(DataError, match="weights are read"):
        training.train(*start)


def test_a_teacher_with_other_tokens_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    student, teacher = tiny_qwen2(tmp_path / "student"), tiny_qwen2(tmp_path / "teacher", num_hidden_layers=3)
    config = config_of(
        model={"path": str(student)}, algorithm={"advantage": "distill", "reference": {"path": str(teacher)}}
    )
    require_right_code(config)
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace('"7":', '"8_":'))
    with pytest.raises(ConfigError, match=r"algorithm.reference.path: the tokenizer of .*teacher has"):
        require_right_code(config)
