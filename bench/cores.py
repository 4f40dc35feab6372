"""What a training step takes on cores that others use too, by how its threads wait and how it frees memory.

`spinning` is libgomp's default. Threads that are `blocking` leave the core to others while they wait. A
process that is `keeping` also keeps freed memory, as those of a run on CPUs do (hosting/environment.py). Each
step is forward and backward of a random Llama with 15 M parameters on 8 sequences of 64 tokens, with as many
threads as cores, alone and beside one process that keeps a core busy. The ways are measured in turn.

    python -m bench.cores [--steps 5] [--rounds 3] [--json bench/results/cores.json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from asyncrl.hosting.environment import ON_CPU, SHARED_CORES
from asyncrl.hosting.processes import module_argv
from bench.environment import describe

WAYS = {"spinning": {}, "blocking": SHARED_CORES, "keeping": ON_CPU}
SIZES = {
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "vocab_size": 32000,
    "max_position_embeddings": 64,
}


def work(steps: int) -> None:
    """Say `ready`, wait for a line, and print wall and processor seconds per step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model, ids = LlamaForCausalLM(LlamaConfig(**SIZES)), torch.randint(3, 1000, (8, 64))
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
    print("ready", flush=True)
    sys.stdin.readline()
    wall_s, processor_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        model(ids, labels=ids).loss.backward()
        model.zero_grad()
    took = (time.perf_counter() - wall_s, time.process_time() - processor_s)
    print(json.dumps([one / steps for one in took]), flush=True)


def measure(way: dict[str, str], steps: int, others: int) -> tuple[float, float]:
    """Return wall and processor seconds of a step beside `others` busy processes."""
    plain = {name: value for name, value in os.environ.items() if name not in ON_CPU}
    environment = plain | {"OMP_NUM_THREADS": str(os.cpu_count())} | way
    command = module_argv("bench.cores", "--work", "--steps", str(steps))
    pipe = subprocess.PIPE
    busy = []
    environment |= {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as worker:
        try:
            assert worker.stdout is not None
            next(line for line in worker.stdout if line == "ready\n")
            busy += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
            wall_s, processor_s = json.loads(worker.communicate("go\n")[0])
        finally:
            worker.kill()
            for one in busy:
                one.kill()
                one.wait()
    return wall_s, processor_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.steps)
    rows = []
    for others in (0, 1):
        found = {name: [] for name in WAYS}
        for _ in range(options.rounds):
            for name, way in WAYS.items():
                found[name].append(measure(way, options.steps, others))
        wall, processor = (
            {name: statistics.median(one[part] for one in some) for name, some in found.items()}
            for part in (0, 1)
        )
        rows.append({"busy_processes": others, "wall_s": wall, "processor_s": processor})
        times, processor_s = (
            ", ".join(f"{seconds:.2f} s {name}" for name, seconds in part.items())
            for part in (wall, processor)
        )
        ratio = wall["spinning"] / wall["keeping"]
        print(f"beside {others} busy: {times}, ratio {ratio:.2f}; processor {processor_s}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({**describe("asyncrl"), "rows": rows}, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
