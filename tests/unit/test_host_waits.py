"""How often the host waits for the device in a step: not per micro-batch, sequence, layer or metric."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrl.algo.aggregation import Counts
from asyncrl.batch.packing import microbatch
from asyncrl.batch.resolve import make_objective
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.sections import LearnerConfig, LoraConfig, ModelConfig
from asyncrl.trainer.base import LossFunction, MicroBatch, Trainer
from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer
from asyncrl.trainer.device import choose_device
from tests.support.dispatches import Dispatches, samples_of

CPU = torch.device("cpu")
# The algorithm, and the waits of a micro-batch: none, because the metrics of a step are read at its end.
ALGORITHMS: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({}, 0),
    "behaviour": ({"proximal": "behaviour", "correction": "none"}, 0),
    "rejections": ({"rejections": ["mask", "veto"]}, 0),
    "kl and entropy": ({"kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.1}}, 0),
    "the whole step": ({"correction": "m2po"}, 0),
    "sequences": ({"policy_loss": "gspo", "aggregation": "seq-mean-token-mean"}, 0),
    # It draws from the tokens above a bound, and counts them first.
    "covariance": ({"policy_loss": "clip_cov"}, 1),
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    """Of all weights, or with the parameter of a test, an adapter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes, **heads)).save_pretrained(path)
    learner = LearnerConfig(device="cpu", threads=1)
    device = choose_device(learner, local_rank=0, auto="cpu")
    lora = LoraConfig(**request.param) if hasattr(request, "param") else None
    model = ModelConfig(path=str(path), dtype="float32", lora=lora)
    with closing(
        DeepSpeedTrainer(model, learner, temperature=1.0, optimizer_steps=1, device=device)
    ) as opened:
        yield opened


def batch_of(sequences: int) -> MicroBatch:
    """A micro-batch with a reference."""
    batch = microbatch(samples_of(*[3] * sequences), CPU)
    zeros_T = torch.zeros_like(batch.tokens.advantages_T)
    return replace(batch, tokens=replace(batch.tokens, reference_logprobs_T=zeros_T))


def loss_of(algorithm: dict[str, Any]) -> LossFunction:
    objective = make_objective(AlgorithmConfig.model_validate(algorithm), max_response_tokens=8)
    return objective.loss(Counts(tokens=30, sequences=10), kl_coefficient=0.1, entropy_coefficient=0.1)


def each(count: Callable[[int], int]) -> int:
    """What a further micro-batch adds."""
    return count(3) - count(2)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_micro_batch_waits_for_nothing_that_its_algorithm_need_not_count(
    trainer: Trainer, name: str
) -> None:
    algorithm, expected = ALGORITHMS[name]

    def waits(sequences: int) -> Callable[[int], int]:
        def of(microbatches: int) -> int:
            with Dispatches() as found:
                trainer.step([batch_of(sequences)] * microbatches, loss_of(algorithm))
            return found.waits

        return of

    assert each(waits(2)) == each(waits(40)) == expected


def test_a_measured_micro_batch_waits_for_nothing(trainer: Trainer) -> None:
    with Dispatches() as found:
        trainer.measure([batch_of(3)] * 4, ["logprobs_T", "sum_squared_probs_T"])
    assert found.waits == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_objective_dispatches_as_much_for_many_sequences_as_for_few(name: str) -> None:
    loss = loss_of(ALGORITHMS[name][0])

    def dispatches(sequences: int) -> int:
        batch = batch_of(sequences)
        columns_RT = torch.full((2, len(batch.target_T)), -1.0, requires_grad=True)
        with Dispatches() as found:
            loss(batch, columns_RT[0], columns_RT[1]).loss.backward()
        return found.count

    assert dispatches(2) == dispatches(40) < 500


@pytest.mark.parametrize("trainer", [{"rank": 8}], indirect=True)
def test_each_tensor_of_an_exported_adapter_is_copied_once(trainer: Trainer) -> None:
    with Dispatches() as found:
        export = trainer.export()
    copied = export.args[-1]  # type: ignore[attr-defined]
    assert found.count == len(copied) > 0
