"""The engine's processes are spawned where a fork is not sound, and nothing uses CUDA before them."""

import json
import os
import subprocess
import sys

import pytest
import torch

from asyncrl.config.load import load_config
from asyncrl.config.sections import GeneratorConfig
from asyncrl.engine.vllm.args import set_environment
from asyncrl.hosting.environment import child_environment
from asyncrl.hosting.gpus import resolve_device
from tests.support.gpu_tools import ROWS, tool
from tests.support.whole_run import tiny_run

pytestmark = pytest.mark.integration

# Every way of torch to the CUDA runtime, replaced by one that notes who asks. `is_available` and `device_count`
# do no harm while the variable makes torch ask NVML.
RECORDER = """
import json, multiprocessing.context, os, sys, traceback
import torch
asked = []
def recorded(name, harmless, answer):
    def ask(*arguments, **options):
        if not (harmless and os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1"):
            asked.append([name, "vllm" in sys.modules, traceback.format_stack()[-3:-1]])
        return answer
    return ask
torch.cuda.is_available = recorded("is_available", True, False)
torch.cuda.device_count = recorded("device_count", True, 0)
if hasattr(torch._C, "_cuda_getDeviceCount"):  # torch takes the name for a sign that it is built for CUDA
    torch._C._cuda_getDeviceCount = recorded("_cuda_getDeviceCount", False, 0)
torch.cuda._lazy_init = recorded("_lazy_init", False, None)
multiprocessing.context.ForkProcess.start = recorded("ForkProcess.start", False, None)
"""
GENERATOR = """
import asyncio
from pathlib import Path
from types import SimpleNamespace
from asyncrl.config.load import load_config
from asyncrl.engine.vllm import engine
from asyncrl.launch import generator_process
from asyncrl.run.directory import RunDirectory
class Reached(Exception):
    pass
async def start(*parts, device):
    raise Reached
engine.VLLMEngine.start = start
config = Path(sys.argv[1])
hello = SimpleNamespace(generator_id="g0")
try:
    loaded = load_config(config)
    generator = generator_process.allotted(loaded, 0.4, is_shared=True)
    assert generator.kv_cache_gib, "the model's shape was read"
    loaded = loaded.model_copy(update={"generator": generator})
    asyncio.run(
        generator_process._generate(loaded, hello, None, None, RunDirectory(config.parent), config.parent, None)
    )
except Reached:
    asked_first = [*asked]
print(json.dumps(asked_first))
"""


def output_of(script: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *(["-c", script] if "\n" in script else [script]), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_generator_before_its_engine_neither_asks_cuda_nor_forks(tmp_path, monkeypatch):
    """On a GPU that it shares with the learner, where it also computes the size of its KV cache."""
    tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{ROWS}END")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with tiny_run(tmp_path, "vllm") as config:
        environment = child_environment(load_config(config), tmp_path, threads=1, gpus=[0])
        said = output_of(RECORDER + GENERATOR, str(config), environment=environment)
    assert json.loads(said) == []


@pytest.mark.parametrize(
    ("visible", "built_for", "learner", "expected"),
    [
        ("0", "13.0", "auto", "cuda"),
        ("0", "13.0", "cuda", "cuda"),
        ("0", "13.0", "cpu", "cpu"),
        ("0", None, "auto", "cpu"),
        ("", "13.0", "auto", "cpu"),
    ],
)
def test_the_device_is_known_without_asking_cuda(
    monkeypatch, tmp_path, visible, built_for, learner, expected
):
    def refuse() -> bool:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with tiny_run(tmp_path, "vllm") as path:
        config = load_config(path, [f"learner.device={learner}"])
    assert resolve_device(config) == expected


STARTED = """
import os, threading
from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.engine.vllm.args import engine_args, fork_core
def found(device="cpu", threads=1, **settings):
    generator = GeneratorConfig(threads=threads, **settings)
    given = engine_args(ModelConfig(path="m"), generator, SamplingConfig(), WeightsConfig(), device=device)
    fork_core(given.get("distributed_executor_backend"))
    return os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
alone = [found(), found("cuda"), found(tensor_parallel=2), found(threads=None)]
end = threading.Event()
threading.Thread(target=end.wait, name="asyncio-waitpid-0").start()
alone.append(found())
threading.Thread(target=end.wait, name="holds a lock").start()
alone.append(found())
end.set()
import torch
torch.set_num_threads(2)
torch.ones(600, 600) @ torch.ones(600, 600)
while threading.active_count() > 1:
    pass
alone.append(found())
print(*alone)
"""


def test_the_core_is_forked_only_without_workers_and_beside_no_thread_that_may_hold_a_lock():
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}  # as a generator's
    assert output_of(STARTED, environment=environment).split() == [
        "fork",
        "spawn",
        "spawn",
        "spawn",
        "fork",
        "spawn",
        "spawn",
    ]


# As vLLM's tensor-parallel workers exchange the handle of their message queue: a pickled dataclass. The guard
# against pickles belongs to the generator's own process, which stands for the worker that sends here.
WORKERS = """
import multiprocessing, os, sys
from dataclasses import dataclass
@dataclass
class Handle:
    name: str
def work(rank, directory):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    values = [Handle("queue") if rank == 0 else None]
    dist.broadcast_object_list(values, src=0)
    open(f"{directory}/{rank}", "w").write(values[0].name)
    dist.barrier()
    dist.destroy_process_group()  # Gloo's threads abort a process that ends under them
if __name__ == "__main__":
    from asyncrl.config.sections import GeneratorConfig, WeightsConfig
    from asyncrl.engine.vllm.args import set_environment
    from asyncrl.unpickling import refuse_pickles_from_wires
    refuse_pickles_from_wires()
    set_environment(GeneratorConfig(), device="cuda")
    context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
    other = context.Process(target=work, args=(1, sys.argv[1]))
    other.start()
    work(0, sys.argv[1])
    other.join(200)
    print(other.exitcode)
"""


def test_tensor_parallel_workers_can_exchange_their_own_handles(tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(WORKERS)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    assert output_of(str(script), str(tmp_path), environment=environment) == "0"
    assert (tmp_path / "1").read_text() == "queue"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engine_processes_are_spawned_on_every_device_whatever_the_user_has_set(monkeypatch, device):
    monkeypatch.setattr(os, "environ", {"VLLM_WORKER_MULTIPROC_METHOD": "fork"})
    set_environment(GeneratorConfig(), device=device)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
