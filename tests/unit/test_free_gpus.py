"""An engine next to a run: it takes the GPUs with the most free memory, and no more of them than is free."""

import asyncio
import os
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from asyncrl.config.load import load_config
from asyncrl.engine.vllm.args import engine_args
from asyncrl.errors import DataError
from asyncrl.hosting.gpus import VARIABLE, visible_devices
from asyncrl.hosting.machine import Machine, read_model
from asyncrl.hosting.memory_use import generator_kv_bytes
from asyncrl.results import engine_process
from asyncrl.results.engine_process import room_on_gpus
from tests.support.gpu_tools import ROWS, tool
from tests.support.whole_run import tiny_run

TOTAL_MIB = 81559
FULL_SECOND = Machine(memory_bytes=0, gpu_bytes=(TOTAL_MIB << 20,) * 2, others_bytes=(0, TOTAL_MIB << 20))


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Call it with overrides and what is used of GPU 0 and 1, in MiB."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def make(*overrides, used=(4, 61234)):
        rows = ROWS.replace("61234", str(used[1])).replace("81559, 4,", f"81559, {used[0]},", 1)
        tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{rows}END")
        return load_config(path, ["learner.device=auto", "generator.kv_cache_gib=null", *overrides])

    with tiny_run(tmp_path, "vllm") as path:
        yield make


@pytest.mark.parametrize(
    ("used", "gpu", "share"),
    [
        ((4, 61234), 0, 0.85),
        ((61234, 4), 1, 0.85),
        ((4, 4), 0, 0.85),
        ((61234, 70000), 0, 0.97 - 61234 / TOTAL_MIB),
    ],
)
def test_the_engine_takes_what_is_free_of_the_emptiest_gpu(config, used, gpu, share):
    made = config(used=used)
    gpus, generator = room_on_gpus(made)
    assert gpus == [gpu]
    assert generator.gpu_memory_utilization == pytest.approx(share)
    allowed_bytes = int(generator.gpu_memory_utilization * (TOTAL_MIB << 20))
    kv_bytes = generator_kv_bytes(
        read_model(made.model)[1], made.model, generator, allowed_bytes=allowed_bytes
    )
    assert generator.kv_cache_gib * 2**30 == pytest.approx(kv_bytes)
    arguments = engine_args(made.model, generator, made.sampling, made.weights, device="cuda")
    assert arguments["gpu_memory_utilization"] == generator.gpu_memory_utilization
    assert arguments["kv_cache_memory_bytes"] == pytest.approx(kv_bytes, abs=1)


def test_two_gpus_hold_what_the_fuller_one_has_free(config):
    gpus, generator = room_on_gpus(config("generator.tensor_parallel=2"))
    assert gpus == [0, 1]
    assert generator.gpu_memory_utilization == pytest.approx(0.97 - 61234 / TOTAL_MIB)


def test_the_config_sets_upper_limits(config):
    _, generator = room_on_gpus(config("generator.gpu_memory_utilization=0.5", "generator.kv_cache_gib=2"))
    assert (generator.gpu_memory_utilization, generator.kv_cache_gib) == (0.5, 2)
    _, generator = room_on_gpus(config("generator.gpu_memory_utilization=0.5", used=(61234, 61234)))
    assert generator.gpu_memory_utilization == pytest.approx(0.97 - 61234 / TOTAL_MIB)


def test_scorers_get_their_gpus_of_all_and_load_before_the_engine_looks_for_room(config, monkeypatch):
    made, seen = config(used=(70000, 4)), []

    @contextmanager
    def started_scorers(config):
        seen.append(("scorers", os.environ[VARIABLE], visible_devices((1,))))
        monkeypatch.setattr(engine_process, "this_machine", lambda device: FULL_SECOND)
        yield Path()

    async def open_engine(*given, **more):
        seen.append(("engine", os.environ[VARIABLE]))
        return mock.AsyncMock()

    monkeypatch.setattr(engine_process, "started_scorers", started_scorers)
    monkeypatch.setattr(engine_process, "open_engine", open_engine)
    players = mock.Mock(start=mock.AsyncMock(), close=mock.AsyncMock())
    monkeypatch.setattr(engine_process.Players, "of", lambda *_: players)

    async def sample():
        async with engine_process.sampler_of(made, mock.Mock(), "eval", ()):
            pass

    asyncio.run(sample())
    assert seen == [("scorers", "0,1", "1"), ("engine", "0")], "the scorer has filled GPU 1"


def test_a_cpu_has_no_shares(config):
    made = config("learner.device=cpu")
    assert room_on_gpus(made) == ([], made.generator)


def test_a_context_of_cuda_fits_beside_the_share_of_a_small_gpu(config, monkeypatch):
    made = config(used=(1024, 1024))
    machine = Machine(memory_bytes=0, gpu_bytes=(12 << 30,), others_bytes=(1 << 30,))
    monkeypatch.setattr(engine_process, "this_machine", lambda device: machine)
    _, generator = room_on_gpus(made)
    assert generator.gpu_memory_utilization == pytest.approx(10 / 12)


def test_the_least_is_the_kv_cache_of_one_sequence(config):
    made = config("generator.gpu_memory_utilization=0.0005")
    made = made.model_copy(
        update={"sampling": made.sampling.model_copy(update={"max_response_tokens": 10**8})}
    )
    with pytest.raises(DataError, match="with the KV cache of one sequence"):
        room_on_gpus(made)


def test_an_instance_of_mig_is_not_chosen(config, monkeypatch):
    made = config()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    with pytest.raises(DataError, match="2 instances of MIG are visible"):
        room_on_gpus(made)


def test_too_little_is_refused_before_anything_is_loaded(config):
    with pytest.raises(DataError, match=r"the engine needs .* of GPU 1 may be used; end other programs"):
        room_on_gpus(config(used=(80000, 79000)))
    with pytest.raises(DataError, match=r"sees 2 GPUs; add generator\.tensor_parallel=2"):
        room_on_gpus(config("generator.tensor_parallel=4"))
