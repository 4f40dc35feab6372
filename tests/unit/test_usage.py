"""What the learner's ranks compute and use, as counted by a real trainer, and as metrics."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.batch.packing import TrainSample, microbatch
from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.sections import LearnerConfig, ModelConfig, WeightsConfig
from asyncrl.hosting.machine import read_model
from asyncrl.hosting.memory_use import ModelShape, Rank, weights_bytes
from asyncrl.report.step_metrics import usage_metrics
from asyncrl.trainer.base import LossSums, Usage
from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer
from asyncrl.trainer.device import choose_device
from asyncrl.trainer.meter import Meter, forward_flops, step_flops
from tests.support.steps import rollout, step

SHAPE = ModelShape(
    parameters=494_032_768, layers=24, hidden=896, intermediate=4864, query=896, kv=128, vocabulary=151936
)
CPU = torch.device("cpu")
GIB = 1 << 30


def sample(prompt: int, response: int) -> TrainSample:
    return TrainSample(
        prompt_ids=np.ones(prompt, dtype=np.int32),
        response_ids=np.full(response, 2, dtype=np.int32),
        keep=np.ones(response, dtype=np.bool_),
        behaviour_logprobs=np.zeros(response, dtype=np.float32),
        advantages=np.ones(response, dtype=np.float32),
        lag=np.zeros(response, dtype=np.int64),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[ModelConfig]:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads)).save_pretrained(path)
    yield ModelConfig(path=str(path), dtype="float32")


def test_a_trainer_counts_each_pass_of_each_model(model):
    learner = LearnerConfig(device="cpu", threads=1, tokens_per_microbatch=64)
    trainer = DeepSpeedTrainer(
        model,
        learner,
        temperature=1.0,
        optimizer_steps=1,
        device=choose_device(learner, local_rank=0, auto="cpu"),
        reference=model,
        critic=CriticConfig(),
    )
    shape, packed = read_model(model)[1], microbatch([sample(3, 4), sample(5, 6)], CPU)
    lengths, actions = [7, 11], 10

    def loss(batch, *columns_T) -> LossSums:
        return LossSums(loss=sum(column_T.sum() for column_T in columns_T))

    with closing(trainer):
        assert trainer.usage() == [Usage(flops=0)]
        trainer.measure([packed], ["logprobs_T", "sum_squared_probs_T"])
        assert trainer.usage()[0].flops == forward_flops(shape, lengths, actions)
        trainer.measure([packed], ["logprobs_T", "reference_logprobs_T", "values_T"])
        of_three = 2 * forward_flops(shape, lengths, actions) + forward_flops(shape, lengths, 0)
        assert trainer.usage()[0].flops == of_three
        trainer.step([packed, packed], loss)
        trainer.critic_step([packed], loss)
        trained = 2 * step_flops(shape, lengths, actions) + step_flops(shape, lengths, 0)
        assert trainer.usage() == [Usage(flops=trained)]
        empty = microbatch([], CPU)  # runs one token, which is no work of the model
        trainer.measure([empty], ["logprobs_T"])
        assert trainer.usage() == [Usage(flops=0)]


def test_a_gpu_has_a_peak_and_memory(monkeypatch):
    used = {"max_memory_allocated": 30 * GIB, "max_memory_reserved": 33 * GIB}
    for name, size_bytes in used.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size_bytes=size_bytes: size_bytes)
    forgotten = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    gpu = torch.device("cuda", 0)

    def read(dtype: str) -> Usage:
        return Meter(SHAPE, device=gpu, dtype=dtype, planned_bytes=40 * GIB).read()

    memory = {"allocated_bytes": 30 * GIB, "reserved_bytes": 33 * GIB, "planned_bytes": 40 * GIB}
    assert read("bfloat16") == Usage(flops=0, peak_flops_per_s=362e12, memory=memory)
    assert read("float32").peak_flops_per_s is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert read("bfloat16").peak_flops_per_s is None and len(forgotten) == 3


def test_work_of_an_unknown_architecture_is_not_guessed():
    meter = Meter(replace(SHAPE, parameters=10**9), device=CPU, dtype="float32", planned_bytes=0)
    meter.forward(microbatch([sample(3, 4)], CPU))
    assert meter.read() == Usage(flops=None)


def test_what_is_planned_for_torch_is_the_plan_without_cuda_and_slots_of_other_ranks():
    config, weights = ModelConfig(path="m", dtype="bfloat16"), WeightsConfig(slots="gpu", transport="nccl")
    rank, others = (
        Rank(SHAPE, config, LearnerConfig(ranks=2, zero_stage=1)),
        {"reference": SHAPE, "critic": None},
    )
    on_gpu = {part.name: part.size_bytes for part in rank.gpu_parts(weights)}
    slots = on_gpu.pop("published versions")
    assert slots == 2 * weights_bytes(SHAPE, config) and [*on_gpu] == ["CUDA", "process that sends"]
    first, second = (rank.torch_bytes(number, **others, slots=2) for number in (0, 1))
    assert first - slots == second == sum(part.size_bytes for part in rank.parts(**others))


def test_metrics_are_of_all_ranks_and_of_the_time_in_which_they_worked():
    done = replace(step(rollout(a=1.0)), seconds={"wait_groups": 6.0, "train": 3.0, "publish": 1.0})
    memory = {"allocated_bytes": 3, "reserved_bytes": 4, "planned_bytes": 5}
    ranks = [
        Usage(flops=int(4e15), peak_flops_per_s=1e15, memory=memory),
        Usage(flops=0, peak_flops_per_s=1e15),
    ]
    assert usage_metrics(done, ranks) == {
        "perf/learner_tflops_per_s": 1000.0,
        "perf/mfu": 0.5,
        "memory/allocated_bytes/rank0": 3.0,
        "memory/reserved_bytes/rank0": 4.0,
        "memory/planned_bytes/rank0": 5.0,
    }
    unknown_gpu = [ranks[0], replace(ranks[1], peak_flops_per_s=None)]
    assert "perf/mfu" not in usage_metrics(done, unknown_gpu)
    assert usage_metrics(done, [replace(ranks[1], flops=None)]) == {}
    assert usage_metrics(done, []) == {}
