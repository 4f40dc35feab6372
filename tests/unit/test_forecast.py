"""`asyncrl plan` against numbers worked out by hand, against real parameters, and against a real frame."""

import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoConfig

from asyncrl.cli.screens import plan_table
from asyncrl.columns import TEACHER
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.hosting import machine
from asyncrl.hosting.machine import Machine, read_model
from asyncrl.hosting.memory_use import ModelShape
from asyncrl.hosting.placement import placement_of
from asyncrl.preflight import fit
from asyncrl.preflight.forecast import Forecast, forecast, frame_bytes
from asyncrl.preflight.memory_forecast import checkpoint_bytes
from asyncrl.rewards.forms import ANSWER_CHARACTERS
from asyncrl.trainer.kept import counted
from asyncrl.types import Group, Rollout, Turns, VersionSpan
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout
from asyncrl.wire.group_frames import encode_group

ROOT = Path(__file__).parents[2]
MODELS = ROOT.parent / "shared" / "models"
GIB = 1 << 30
STORIES = ModelShape(
    parameters=17_182_368,
    layers=6,
    hidden=288,
    intermediate=768,
    query=576,
    kv=576,
    vocabulary=32000,
    tables=32000 * 288,
)
QWEN = ModelShape(
    parameters=494_032_768, layers=24, hidden=896, intermediate=4864, query=896, kv=128, vocabulary=151936
)
CPU = Machine(memory_bytes=24 * GIB, gpu_bytes=())


def planned(
    config: Config, shape: ModelShape = STORIES, machine: Machine = CPU, rows: Sequence[int] | None = (1000,)
) -> Forecast:
    return forecast(config, shape, machine, rows=rows)


def config_of(**sections: dict) -> Config:
    values = {
        "run": {"name": "a"}, "model": {"path": "m", "dtype": "float32"}, "data": {"train": "t"},
        "reward": {"functions": [{"function": "exact_match"}]},
    }  # fmt: skip
    return Config.model_validate(
        values | {name: values.get(name, {}) | section for name, section in sections.items()}
    )


def real_parameters(directory: Path) -> int:
    """From the header of the weights."""
    with (directory / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


@pytest.mark.parametrize("name", ["stories15M-hd96", "stories260K-hd32"])
def test_parameters_are_those_of_the_real_weights(name):
    if not (MODELS / name).exists():
        pytest.skip(f"needs {MODELS / name}")
    shape = read_model(config_of(model={"path": str(MODELS / name)}).model)[1]
    assert shape.parameters == real_parameters(MODELS / name)


def test_a_known_model_by_hand():
    if not (MODELS / "stories15M-hd96").exists():
        pytest.skip("needs stories15M")
    attention = 4 * 288 * (6 * 96)
    layer = attention + 3 * 288 * 768 + 2 * 288
    assert STORIES.parameters == 32000 * 288 + 6 * layer + 288  # embedding (tied), layers, last norm
    assert read_model(config_of(model={"path": str(MODELS / "stories15M-hd96")}).model)[1] == STORIES


def test_the_arithmetic_of_a_batch():
    plan = planned(
        config_of(
            batch={"groups": 32, "group_size": 8, "minibatches": 4, "epochs": 2},
            sampling={"max_prompt_tokens": 100, "max_response_tokens": 300},
            staleness={"max_lag": 3},
            learner={"steps": 50, "ranks": 2, "tokens_per_microbatch": 4000},
            generator={"count": 3, "max_running": 100},
            checkpoint={"every": 10, "keep": 2},
            data={"eval": "e"},
            eval={"every": 20},
        ),
        rows=[640],
    )
    expected = {
        "sequences": 256, "tokens, at most": 102_400, "optimizer steps": 8,
        "micro-batches per rank": 4,  # 25,600 tokens of an optimizer step over 2 ranks x 4,000
        "open groups, at most": 128, "window": 38, "oldest group, in steps": 3 + 2,  # 37 others: two steps
        "groups being sampled": 36,  # 3 x (100 // 8)
        "sequences in all": 12_800, "steps per epoch": 20, "epochs": 2.5,
        "evaluations": 4,  # versions 0, 20, 40, 50
    }  # fmt: skip
    assert {name: plan[name] for name in expected} == expected
    assert plan["store, at most"] == (128 + 2 * 10 * 32) * plan["a group, at most"]


def test_formulas_are_those_of_the_rules():
    """Of shards, of a run that ends before its second checkpoint, and of episodes with several sequences."""
    plan = planned(
        config_of(
            batch={"groups": 32, "group_size": 2},
            staleness={"max_lag": 3, "window_groups": 36},
            store={"shards": 4},
            checkpoint={"every": 50, "keep": 2},
            learner={"steps": 60},
            environment={"command": ["agent"], "max_turns": 3},
        )
    )
    assert plan["oldest group, in steps"] == 3 + 1 and plan["longest episode, in steps"] == 1
    assert plan["sequences"] == 32 * 2 * 3 and plan["sequences in all"] == 60 * plan["sequences"]
    assert plan["store, at most"] == (4 + 60) * 32 * plan["a group, at most"]
    lag, window = next(line.formed for line in plan.lines if "oldest" in line.name).split(" + ")
    assert (lag, window) == ("max_lag", "ceil((window - 4) / groups)")


def test_each_source_has_epochs_of_its_own():
    train = [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl"}]
    config = config_of(batch={"groups": 32, "group_size": 8}, data={"train": train}, learner={"steps": 50})
    plan = planned(config, rows=[600, 40])
    expected = {
        "prompts": 640, "steps per epoch of a": 25, "epochs of a": 2, "steps per epoch of b": 5,
        "epochs of b": 10,
    }  # fmt: skip
    assert {name: plan[name] for name in expected} == expected


@pytest.mark.parametrize("environment", [{"uses": "play.py:Play"}, {"command": ["python", "agent.py"]}])
def test_episodes_have_a_least_duty_and_a_longest_duration(environment):
    """L >= E / (d B G) - 1 and W >= B k + 1, with E slots, episodes of duty d and of k steps."""
    settings = {
        "batch": {"groups": 4, "group_size": 8},
        "staleness": {"max_lag": 3, "window_groups": 11},
        "generator": {"count": 2, "max_running": 32},
    }
    plain, plan = (planned(config_of(**settings, **more)) for more in ({}, {"environment": environment}))
    duty, steps = plan["least duty of episodes"], plan["longest episode, in steps"]
    slots, groups, size, lag, window = 2 * 32, 4, 8, 3, 11
    assert (duty, steps) == (0.5, 2.5)
    assert lag == slots / (duty * groups * size) - 1 and window == groups * steps + 1
    assert not any("episode" in line.name for line in plain.lines)
    assert not any("the learner waits for an episode" in warning for warning in plan.warnings)
    narrow = settings | {"staleness": {"max_lag": 3, "window_groups": 4}}
    warnings = planned(config_of(**narrow, environment=environment)).warnings
    assert any("an episode that lasts longer than 0.75 steps" in warning for warning in warnings)


def test_a_group_of_greedy_baselines_takes_one_sequence_more():
    plan = planned(
        config_of(
            algorithm={"advantage": "remax"},
            batch={"group_size": 1},
            generator={"count": 1, "max_running": 10},
        )
    )
    assert plan["groups being sampled"] == 5


def test_a_group_that_is_larger_than_the_engine_is_sampled_alone():
    plan = planned(config_of(batch={"group_size": 16}, generator={"count": 2, "max_running": 8}))
    assert plan["groups being sampled"] == 2


def test_memory_of_float32_on_a_cpu_by_hand():
    config = config_of(
        learner={"tokens_per_microbatch": 1000, "logprob_chunk_tokens": 100},
        generator={"count": 2, "kv_cache_gib": 0.5, "max_running": 8},
        sampling={"max_prompt_tokens": 100, "max_response_tokens": 100},
    )
    plan, n = planned(config), STORIES.parameters
    assert plan["weights"] == plan["learner weights"] == plan["gradients"] == 4 * n
    assert plan["optimizer"] == 8 * n
    norm = 3 * 4 * 288  # in float32: input, normalised input, output
    kept = 6 * (2 * norm + 4 * (5 * 576 + 4 * 768) + 64) + norm
    assert plan["activations"] == 1000 * kept + 100 * 32000 * 3 * 4
    assert plan["output layer"] == 4 * 32000 * 288  # it is tied, but there are more activations than 8 of it
    assert plan["one rank"] == 16 * n + plan["activations"] + plan["output layer"]
    assert plan["KV of a sequence"] == 2 * 6 * 576 * 4 * 200
    assert plan["full sequences in KV"] == GIB // 2 // (2 * 6 * 576 * 4 * 200)
    libraries = int(0.8 * GIB) + 2 * int(1.6 * GIB)
    assert (
        plan["host memory"]
        == libraries + 3 * 4 * n + plan["one rank"] + 2 * (4 * n + GIB // 2) + plan["store, at most"]
    )
    assert plan["checkpoint"] == 16 * n and plan["disk"] == 48 * n
    assert not plan.warnings


def test_ranks_that_divide_sequences_divide_activations_and_micro_batches():
    learner = {"ranks": 4, "tokens_per_microbatch": 6400, "logprob_chunk_tokens": 1}
    batch = {"groups": 25, "group_size": 2}  # of 1,024 tokens
    whole, divided = (
        planned(config_of(batch=batch, learner=learner | {"sequence_parallel": ranks})) for ranks in (1, 2)
    )
    logits = 32000 * 3 * 4
    assert whole["activations"] - logits == 2 * (divided["activations"] - logits)
    assert [plan["micro-batches per rank"] for plan in (whole, divided)] == [2, 4]
    assert whole["optimizer"] == divided["optimizer"]


def test_the_page_has_the_activations_of_long_contexts():
    architecture = AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256
    )
    llama = counted(LLAMA_8B, architecture, ModelConfig(path="m"), True)
    learner = {"ranks": 8, "tokens_per_microbatch": 65536, "gradient_checkpointing": True}
    gigabytes = [
        planned(
            config_of(model={"dtype": "bfloat16"}, learner=learner | {"sequence_parallel": ranks}), llama
        )["activations"] / 1e9
        for ranks in (1, 2, 4, 8)
    ]  # fmt: skip
    page = " ".join((ROOT / "docs" / "gpu.md").read_text().split())
    said = "{:.1f} GB of activations for P = 1, {:.1f} for 2, {:.1f} for 4 and {:.1f} for 8"
    assert said.format(*gigabytes) in page


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 2.0, 6.0, 3.0), (1, 2.0, 6.0, 3.0), (2, 2.0, 3.0, 3.0), (3, 0.5, 1.5, 3.0)],
)
def test_bytes_per_parameter_of_bfloat16_on_four_ranks(stage, weights, gradients, optimizer):
    """Weights 2; gradients 4 (shared out from stage 2) and 2; master and moments 12 (from stage 1, which
    stands for 0)."""
    plan = planned(
        config_of(model={"dtype": "bfloat16"}, learner={"ranks": 4, "zero_stage": stage}),
        replace(STORIES, parameters=4000),
    )
    per_parameter = [plan[name] / 4000 for name in ("learner weights", "gradients", "optimizer")]
    assert per_parameter == [weights, gradients, optimizer]


@pytest.mark.parametrize("critics", [0, 1])
def test_an_offloaded_optimizer_moves_from_the_gpus_to_the_host(critics):
    model, advantage = {"dtype": "bfloat16"}, {"advantage": "gae" if critics else "grpo"}
    kept, offloaded = (
        planned(
            config_of(
                model=model,
                algorithm=advantage,
                learner={"ranks": 2, "zero_stage": 3, "offload_optimizer": on},
            ),
            STORIES,
            GPU,
        )
        for on in (False, True)
    )
    numbers = STORIES.parameters * (1 + critics)
    assert 2 * (kept["one rank"] - offloaded["one rank"]) == 16 * numbers
    # DeepSpeed keeps float32 gradients on the host twice.
    assert offloaded["host memory"] - kept["host memory"] == 20 * numbers


def test_reference_and_critic_are_counted_where_there_are_any():
    n = STORIES.parameters
    base = planned(config_of())
    reference = planned(config_of(algorithm={"kl": {"coefficient": 0.1}}))
    critic = planned(config_of(algorithm={"advantage": "gae"}))
    assert reference["one rank"] - base["one rank"] == 4 * n
    moving = planned(config_of(algorithm={"kl": {"coefficient": 0.1, "reference_decay": 0.9}}))
    assert reference["checkpoint"] == base["checkpoint"] == moving["checkpoint"] - 4 * n
    taught = forecast(
        config_of(algorithm={"advantage": "distill", "reference": {"path": "t"}}),
        STORIES,
        CPU,
        rows=None,
        teacher=replace(STORIES, parameters=5 * n),
    )
    assert taught["reference"] == 4 * 5 * n == taught["one rank"] - base["one rank"]
    scored = planned(config_of(algorithm={"advantage": "distill", "reference": {"path": "t", "scorers": 1}}))
    assert scored["one rank"] == base["one rank"], (
        "a teacher in processes of its own is none of the learner's"
    )
    assert critic["one rank"] - base["one rank"] == 12 * n and critic["checkpoint"] == 28 * n


def test_checkpointing_keeps_one_layer_and_the_inputs_of_all():
    config = config_of(learner={"tokens_per_microbatch": 1000, "gradient_checkpointing": True, "logprob_chunk_tokens": 100},
                       sampling={"max_prompt_tokens": 9, "max_response_tokens": 9})  # fmt: skip
    norm = 3 * 4 * 288
    kept = 2 * norm + 4 * (5 * 576 + 4 * 768) + 64 + norm + 6 * 4 * 288
    assert planned(config)["activations"] == 1000 * kept + 100 * 32000 * 12


def test_selective_checkpointing_drops_the_four_states_of_each_mlp_but_one():
    sections = {"tokens_per_microbatch": 1000, "logprob_chunk_tokens": 100}
    fits = {"max_prompt_tokens": 9, "max_response_tokens": 9}
    whole, selective = (
        planned(config_of(learner=sections | more, sampling=fits))["activations"]
        for more in ({}, {"gradient_checkpointing": "selective"})
    )
    assert whole - selective == 1000 * (STORIES.layers - 1) * 4 * STORIES.intermediate * 4


def test_a_group_in_the_store_is_as_large_as_a_real_one():
    config = config_of(sampling={"max_prompt_tokens": 20, "max_response_tokens": 30}, batch={"group_size": 3})
    rollout = Rollout(
        prompt_ids=np.arange(20, dtype=np.int32),
        response_ids=np.arange(30, dtype=np.int32),
        action_mask=np.ones(30, np.bool_),
        behaviour_logprobs=np.full(30, -1.5, np.float32),
        version_spans=(VersionSpan(4, 11), VersionSpan(5, 19)),
        finish_reason="stop",
        reward=0.5,
        reward_parts={"exact_match": 0.5},
        answer="4" * ANSWER_CHARACTERS,
    )
    group = Group(ticket_id=12345, rollouts=(rollout,) * 3, generator_id="g12", finished_version=5)
    assert abs(frame_bytes(config) - len(encode_group(group, b"key"))) <= 16
    taught = replace(rollout, recorded={TEACHER: np.zeros(30, np.float32)})
    algorithm = {"reference": {"path": "large", "scorers": 1}, "kl": {"coefficient": 0.1}}
    config = config.model_copy(update={"algorithm": config_of(algorithm=algorithm).algorithm})
    encoded = encode_group(replace(group, rollouts=(taught,) * 3), b"key")
    assert abs(frame_bytes(config) - len(encoded)) <= 16


def test_a_group_of_episodes_is_as_large_as_a_real_one_and_rewritten_turns_are_sequences():
    sections = {
        "sampling": {"max_prompt_tokens": 20, "max_response_tokens": 30},
        "batch": {"group_size": 3, "groups": 4},
        "environment": {"uses": "e.py:E", "max_turns": 5},
    }
    config = config_of(**sections)
    turns = Turns(
        ends=np.array([4, 9, 12, 20, 30], np.int32),
        rewards=np.ones(5, np.float32),
        states=np.arange(5, dtype=np.uint64),
    )
    rollout = Rollout(
        prompt_ids=np.arange(20, dtype=np.int32),
        response_ids=np.arange(30, dtype=np.int32),
        action_mask=np.arange(30) % 9 > 1,
        behaviour_logprobs=np.full(30, -1.5, np.float32),
        version_spans=(VersionSpan(4, 11), VersionSpan(5, 19)),
        finish_reason="stop",
        reward_parts={"exact_match": 0.5, "environment": 1.0},
        answer="4" * ANSWER_CHARACTERS,
        turns=turns,
    )
    group = Group(ticket_id=12345, rollouts=(rollout,) * 3, generator_id="g12", finished_version=5)
    assert abs(frame_bytes(config) - len(encode_group(group, b"key"))) <= 16
    branching = config_of(**sections | {"environment": {**sections["environment"], "history": "template"}})
    assert frame_bytes(branching) > 3 * frame_bytes(config)
    assert planned(branching)["sequences"] == 5 * planned(config)["sequences"] == 60


def test_a_checkpoint_on_disk():
    """The quick start's, measured: 595,328 parameters in float32 made 9,613,524 bytes."""
    shape, model = replace(STORIES, parameters=595_328), config_of().model
    size = checkpoint_bytes(shape, model, LearnerConfig(), critic=None)
    assert size == pytest.approx(9_613_524, rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "stage", "per_parameter"),
    [
        ("float32", 0, 16),
        ("float32", 1, 20),
        ("float32", 2, 20),
        ("float32", 3, 16),
        ("bfloat16", 0, 16),
        ("bfloat16", 3, 14),
    ],
)
def test_zero_writes_a_master_copy_and_in_stage_3_no_other_weights(dtype, stage, per_parameter):
    """Measured with a Llama of 787,584 parameters, of which 1 % more was written."""
    model, learner = ModelConfig(path="m", dtype=dtype), LearnerConfig(zero_stage=stage)
    assert checkpoint_bytes(STORIES, model, learner, critic=None) == per_parameter * STORIES.parameters


GPU = Machine(memory_bytes=200 * GIB, gpu_bytes=(80 * GIB,) * 8)


def test_gpus_are_those_that_the_run_would_use(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(Path("configs/gsm8k-qwen2.5-0.5b-8gpu.yaml"))
    plan = planned(config, QWEN, GPU)
    ranks, allowed = config.learner.ranks, int(0.85 * 80 * GIB)
    others = plan["one rank"] - plan["published versions"]
    expected = [plan["one rank"], *[others] * (ranks - 1), *[allowed] * (8 - ranks)]
    assert [plan[f"GPU {i}"] for i in range(8)] == expected
    assert plan["published versions"] == 2 * plan["weights"]
    sampler = config.generator.max_running * QWEN.vocabulary * 3 * 4
    assert plan["KV cache"] == allowed - 2 * QWEN.parameters - 2 * GIB - sampler
    assert plan["KV of a sequence"] == 2 * 24 * 128 * 2 * config.sampling.max_tokens
    assert not [warning for warning in plan.warnings if "GPU" in warning or "memory" in warning]


def test_one_gpu_for_all_is_added_up(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(Path("configs/gsm8k-qwen2.5-0.5b-1gpu.yaml"))
    one = replace(GPU, gpu_bytes=(80 * GIB,))
    plan = planned(config, QWEN, one)
    share, spare = config.generator.gpu_memory_utilization or 0.4, int(0.03 * 80 * GIB)
    assert plan["GPU 0"] == plan["one rank"] + int(share * 80 * GIB) + spare
    (misfit,) = planned(config, QWEN, replace(GPU, gpu_bytes=(12 * GIB,))).misfits
    assert misfit.startswith("GPU 0: ") and "lower learner.tokens_per_microbatch" in misfit


def test_a_scorer_without_room_is_a_misfit_whose_cure_is_named():
    """8 GPUs: an 8B policy fits on 6 ranks, but not next to the scorer, which takes the first GPU by default."""
    asks = {"function": "model_score", "params": {"scorer": "rm"}}

    def judged(**scorer):
        sections = {"reward": {"functions": [asks]}, "scorers": {"rm": {"model": "m", **scorer}}}
        learner = {"ranks": 6, "zero_stage": 3, "gradient_checkpointing": True}
        return config_of(model={"dtype": "bfloat16"}, learner=learner, **sections)

    plan = planned(judged(gpus=[7]), LLAMA_8B, GPU)
    assert not plan.misfits and plan["GPU 7"] == int(0.85 * 80 * GIB)
    (misfit,) = planned(judged(), LLAMA_8B, GPU).misfits
    assert misfit.startswith("GPU 0: ") and "scorers 32.0 GiB" in misfit, misfit
    assert "give rm.0 a GPU of its own (`gpus`)" in misfit


@pytest.mark.parametrize(
    ("sections", "machine", "said"),
    [
        ({"generator": {"kv_cache_gib": 0.01}}, CPU, "holds no sequence of full length"),
        ({"generator": {"kv_cache_gib": 0.1}, "batch": {"group_size": 8}}, CPU, "fewer than a group of 8"),
        ({"generator": {"count": 12}}, CPU, "host memory: "),
        (
            {"store": {"max_gib": 9999}, "checkpoint": {"every": 100_000}, "learner": {"steps": 100_000}},
            CPU,
            "or (the store) checkpoint.every",
        ),
        ({"generator": {"count": 8, "max_running": 256}, "staleness": {"max_lag": 0}}, CPU, "some wait"),
        ({"model": {"dtype": "bfloat16"}}, replace(CPU, gpu_bytes=(GIB,)), "GPU 0: "),
    ],
)
def test_what_cannot_go_well_is_told(sections, machine, said):
    calm = {"generator": {"count": 1, "max_running": 64}}
    chosen = {name: calm.get(name, {}) | sections.get(name, {}) for name in {*calm, *sections}}
    warnings = planned(config_of(**chosen), machine=machine).warnings
    assert [warning for warning in warnings if said in warning], warnings
    assert all(" lower " in warning or " raise " in warning for warning in warnings)


@pytest.mark.parametrize(("machine", "transport"), [(CPU, "auto"), (GPU, "nccl")])
def test_every_number_says_how_it_is_formed_and_the_table_fits(machine, transport):
    weights = {"transport": transport}
    plan = planned(config_of(data={"eval": "e"}, learner={"ranks": 2}, weights=weights), machine=machine)
    assert all(line.formed and line.shown for line in plan.lines)
    assert len({line.name for line in plan.lines}) == len(plan.lines)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan_table(plan))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text


def test_a_cache_that_the_user_has_set_is_added_to_what_the_engine_needs():
    config = config_of(model={"dtype": "bfloat16"}, generator={"count": 1, "kv_cache_gib": 75.0})
    one = replace(GPU, gpu_bytes=(80 * GIB,))
    plan, plain = planned(config, machine=one), planned(config_of(model={"dtype": "bfloat16"}), machine=one)
    assert plan["KV cache"] == 75 * GIB
    assert plan["GPU 0"] - plain["GPU 0"] == 75 * GIB - plain["KV cache"]
    assert plan.misfits and not plain.misfits


@pytest.mark.parametrize("machine", [replace(CPU, memory_bytes=GIB), replace(GPU, gpu_bytes=(80 * GIB,))])
def test_transformers_holds_one_group_and_is_advised_no_settings_of_vllm(machine):
    config = config_of(generator={"engine": "transformers", "count": 1}, batch={"group_size": 8})
    plan = planned(config, machine=machine)
    assert plan["KV cache"] == 8 * plan["KV of a sequence"] and plan["full sequences in KV"] == 8
    evaluated = {"data": {"eval": [{"path": "e", "samples": 64}]}, "eval": {"temperature": 1.0}}
    config = config_of(generator={"engine": "transformers", "count": 1}, batch={"group_size": 8}, **evaluated)
    assert planned(config, machine=machine)["full sequences in KV"] == 64, "a prompt of a set is one request"
    said = " ".join([*plan.warnings, *(line.formed for line in plan.lines)])
    assert "host memory: " in said or machine.gpu_bytes
    assert not [word for word in ("vLLM", "kv_cache_gib", "gpu_memory_utilization") if word in said]


def test_a_learner_alone_is_judged_without_generators():
    config = config_of(model={"dtype": "bfloat16"}, generator={"count": 6})
    machine = replace(GPU, gpu_bytes=(10 * GIB,))
    learner_only = placement_of(config, len(machine.gpu_bytes), generators=0)
    alone = forecast(config, STORIES, machine, rows=None, placement=learner_only)
    assert not alone.misfits and alone["GPU 0"] == alone["one rank"]
    assert alone["groups being sampled"] == 6 * (256 // 8)


NO_LIMIT = str((1 << 63) - 4096)


@pytest.mark.parametrize(
    ("groups", "files", "total_gib", "free_gib"),
    [
        ("0::/", {"memory.max": f"{8 * GIB}"}, 8, 5.5),
        ("0::/", {"memory.max": "max"}, 24, 20),
        ("0::/job", {"job/memory.max": "max", "memory.max": f"{4 * GIB}"}, 4, 1.5),
        ("0::/", {"memory.max": f"{3 * GIB}", "memory.current": f"{9 * GIB}"}, 3, 1 / GIB),
        ("3:memory:/docker/1f", {"memory/memory.limit_in_bytes": f"{8 * GIB}"}, 8, 5.5),
        ("3:memory:/", {"memory/memory.limit_in_bytes": NO_LIMIT}, 24, 20),
        ("0::/", {}, 24, 20),
    ],
)
def test_a_container_has_the_memory_that_its_limit_leaves(
    groups, files, total_gib, free_gib, monkeypatch, tmp_path
):
    numbers = {"inactive_file": GIB, "active_file": GIB // 2}
    for name in files:
        limit, used = (tmp_path / name), name.replace("max", "current").replace("limit", "usage")
        older = {f"total_{key}": value for key, value in numbers.items()} | {"total_cache": 2 * GIB}
        stat = older | dict.fromkeys(numbers, 0) if "limit" in name else numbers
        limit.parent.mkdir(parents=True, exist_ok=True)
        limit.with_name("memory.stat").write_text("".join(f"{key} {stat[key]}\n" for key in stat))
        (tmp_path / used).write_text(f"{4 * GIB}\n")
    memory = f"MemTotal: {24 << 20} kB\nMemAvailable: {20 << 20} kB\nHugePages_Total: 0"
    for name, text in ({"own": groups, "meminfo": memory} | files).items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    found = machine.this_machine("cpu")
    assert (found.total_bytes, found.memory_bytes) == (total_gib * GIB, free_gib * GIB)
    plan = forecast(config_of(), STORIES, found, rows=None)
    assert free_gib >= 1 or any("host memory" in one for one in plan.warnings)


def test_up_refuses_a_gpu_that_is_too_small(monkeypatch):
    config = config_of(model={"dtype": "bfloat16"})
    monkeypatch.setattr(fit, "is_installed", lambda: True)
    monkeypatch.setattr(fit, "read_trained_shape", lambda model, learner: QWEN)
    for size_gib, has_room in ((80, True), (24, False)):
        machine = replace(GPU, gpu_bytes=(size_gib * GIB,))
        monkeypatch.setattr(fit, "this_machine", lambda device, machine=machine: machine)
        if has_room:
            fit.require_fit(config)
        else:
            with pytest.raises(ConfigError, match=r"GPU 0: .* set learner.gradient_checkpointing: true"):
                fit.require_fit(config)
    taught = config_of(
        model={"dtype": "bfloat16"}, algorithm={"advantage": "distill", "reference": {"path": "t"}}
    )
    monkeypatch.setattr(fit, "read_model", lambda model: (None, LLAMA_8B))
    monkeypatch.setattr(fit, "this_machine", lambda device: replace(GPU, gpu_bytes=(80 * GIB,)))
    fit.require_room(taught.model_copy(update={"model": ModelConfig(path="hub/name")}), 1)
    with pytest.raises(ConfigError, match=r"GPU 0: .*reference 15\.0 GiB"):
        fit.require_fit(taught)
    monkeypatch.setattr(fit, "this_machine", lambda device: CPU)
    monkeypatch.setattr(
        fit, "read_trained_shape", lambda model, learner: pytest.fail("no model is read without a GPU")
    )
    fit.require_fit(config)


LLAMA_8B = ModelShape(
    parameters=8_030_261_248,
    layers=32,
    hidden=4096,
    intermediate=14336,
    query=4096,
    kv=1024,
    vocabulary=128256,
)


QWEN_14B = ModelShape(
    parameters=14_770_033_664,
    layers=48,
    hidden=5120,
    intermediate=13824,
    query=5120,
    kv=1024,
    vocabulary=152064,
)


def test_a_full_gpu_is_told_with_what_fills_it_and_with_settings_of_its_own():
    learner = {"ranks": 6, "zero_stage": 3, "gradient_checkpointing": True, "tokens_per_microbatch": 8192}
    sections = {"model": {"dtype": "bfloat16"}, "learner": learner}
    plan = planned(config_of(**sections), QWEN_14B, GPU)
    (misfit,) = plan.misfits
    assert re.match(
        r"GPU 0: .* GiB of 80.0 GiB .*: published versions \(on this GPU only\) 55.0 GiB, ", misfit
    )
    assert "generator." not in misfit and "learner.zero_stage" not in misfit
    sizes = [float(size) for size in re.findall(r" (\d+\.?\d*) GiB[,;]", misfit)]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) > 2
    assert plan["GPU 0"] - plan["GPU 1"] == 4 * QWEN_14B.parameters

    stages = {"learner": {"ranks": 6, "zero_stage": 1, "offload_optimizer": False}}
    (misfit,) = planned(config_of(**sections | stages), QWEN_14B, GPU).misfits
    assert "raise learner.zero_stage" in misfit

    for kind, cures in (("adamw_8bit", ["zero_stage"]), ("muon", [])):
        learner = stages["learner"] | {"optimizer": {"kind": kind}}
        (misfit,) = planned(config_of(**sections | {"learner": learner}), QWEN_14B, GPU).misfits
        assert re.findall(r"learner\.(zero_stage|offload_optimizer)", misfit) == cures, "only what is allowed"

    small = replace(GPU, gpu_bytes=(60 * GIB,))
    (misfit,) = planned(config_of(**sections | {"learner": {}}), QWEN, small).misfits
    assert "activations" in misfit and "published" not in misfit, "only what is large"
    assert "lower generator.gpu_memory_utilization" in misfit and "kv_cache_gib" not in misfit
    assert "learner.sequence_parallel" not in misfit, "one rank cannot divide a sequence"

    cache = {"generator": {"count": 1, "kv_cache_gib": 79.0}}
    apart = replace(GPU, gpu_bytes=(80 * GIB,) * 2)
    (misfit,) = planned(config_of(model={"dtype": "bfloat16"}, **cache), machine=apart).misfits
    assert misfit.startswith("GPU 1: ") and "learner." not in misfit
    assert misfit.index("lower generator.gpu_memory_utilization") < misfit.index("generator.kv_cache_gib")


def test_a_rank_of_8b_under_zero_3_by_hand():
    learner = {"ranks": 6, "zero_stage": 3, "gradient_checkpointing": True, "tokens_per_microbatch": 16384}
    plan = planned(config_of(model={"dtype": "bfloat16"}, learner=learner), LLAMA_8B, GPU)
    n = LLAMA_8B.parameters
    sharded = (2 + 6 + 12) * n / 6  # weights, gradients, optimizer
    norm = 4096 * (4 + 2 * 2)
    layer = 2 * norm + 2 * (3 * 4096 + 2 * 1024 + 4 * 14336) + 64
    activations = 16384 * (32 * 2 * 4096 + layer + norm) + 1024 * 128256 * 3 * 4
    buffers = 2 * (500_000_000 + 1_000_000_000)  # a bucket of gradients, gathered weights
    head = (4 + 2) * 128256 * 4096 - 2 * n / 6  # in place of the gradients of one backward pass
    published = 2 * 2 * n
    assert plan["buffers"] == buffers and plan["activations"] == activations
    assert plan["output layer"] == pytest.approx(head, abs=1)
    assert plan["one rank"] == pytest.approx(sharded + activations + head + buffers + published + GIB, abs=10)
    assert plan["GPU 1"] == plan["one rank"] - published


@pytest.mark.parametrize(
    ("dtype", "stage", "ranks", "per_parameter"),
    [("bfloat16", 2, 2, 2), ("float32", 1, 2, 4), ("float32", 2, 1, 4), ("float32", 3, 2, 8), ("bfloat16", 3, 2, 4), ("float32", 3, 1, 4)],
)  # fmt: skip
def test_buckets_of_a_model_that_is_smaller_than_one(dtype, stage, ranks, per_parameter):
    plan = planned(config_of(model={"dtype": dtype}, learner={"ranks": ranks, "zero_stage": stage}))
    assert plan["buffers"] == per_parameter * STORIES.parameters


def test_a_bucket_that_is_made_after_the_backward_pass_takes_the_place_of_activations():
    few = {"tokens_per_microbatch": 20, "logprob_chunk_tokens": 1}
    fits = {"max_prompt_tokens": 9, "max_response_tokens": 9}
    plan = planned(config_of(model={"dtype": "bfloat16"}, learner=few, sampling=fits))
    assert plan["buffers"] + plan["activations"] == 2 * STORIES.parameters
    assert planned(config_of(model={"dtype": "bfloat16"}))["buffers"] == 0


@pytest.mark.parametrize(("bucket_mib", "made_mib"), [(64, 64), (1, 16), (47, 32)])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_nccl_has_a_process_on_the_first_rank_s_gpu_and_one_on_a_generator_s(
    bucket_mib, made_mib, tensor_parallel
):
    settings = {
        "model": {"dtype": "bfloat16"},
        "generator": {"count": 3, "tensor_parallel": tensor_parallel},
        "learner": {"ranks": 2},
    }
    plain = planned(config_of(**settings), machine=GPU)
    plan = planned(
        config_of(**settings, weights={"transport": "nccl", "bucket_mib": bucket_mib}), machine=GPU
    )
    sends = GIB + (410 << 20)
    receives = sends + 2 * (made_mib << 20)
    assert plan["process that sends"] == sends and plan["process that receives"] == receives
    more = [plan[f"GPU {gpu}"] - plain[f"GPU {gpu}"] for gpu in range(8)]
    assert more == [sends, 0, receives, 0, 0, 0, 0, 0]
    assert "process that sends" not in {line.name for line in plain.lines}


def test_versions_in_memory_of_the_host_take_none_of_a_gpu():
    plain, plan = (
        planned(config_of(model={"dtype": "bfloat16"}, weights={"slots": slots}), machine=GPU)
        for slots in ("auto", "host")
    )
    assert plain["published versions"] == 4 * STORIES.parameters and plan["published versions"] == 0
    saved = [plain[f"GPU {gpu}"] - plan[f"GPU {gpu}"] for gpu in range(8)]
    assert saved == [4 * STORIES.parameters, *[0] * 7]


def test_a_host_of_generators_alone_has_the_process_that_receives():
    config = config_of(weights={"transport": "nccl"}, control={"bind": "tcp://10.0.0.1:5555"})
    there = placement_of(config, 8, generators=2, has_learner=False)
    plan = forecast(config, STORIES, GPU, rows=None, placement=there)
    assert plan["GPU 0"] - plan["GPU 1"] == plan["process that receives"]
    on_cpus = planned(config)
    assert not any(line.name.startswith("process that") for line in on_cpus.lines)


def test_the_buckets_of_the_forecast_are_those_that_are_made():
    specs = [TensorSpec(name="a", dtype="uint8", shape=(100 << 20,))]
    for mib in (1, 15, 16, 31, 32, 47, 64):
        made = max(end - begin for _, begin, end in Layout.plan(specs, mib << 20).pieces())
        plan = planned(config_of(weights={"transport": "nccl", "bucket_mib": mib}), machine=GPU)
        assert plan["process that receives"] - plan["process that sends"] == 2 * made
