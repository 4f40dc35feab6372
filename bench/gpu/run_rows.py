"""Rows that make a task and run it: the whole loop, and a generator that is killed."""

import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import RunError
from asyncrl.hosting.processes import bound_to_us, module_argv, stop_processes
from asyncrl.run.directory import RunDirectory
from bench.gpu.figures import Figure, Place, judged, noted

STEPS = 20
WARM_STEPS = 2  # not counted
RUN = "loop"
# An update may pause an engine for a tenth of a second (`allowed_time`), and a step takes 1.5 s or more.
MOST_STALLED = 0.08
MOST_BACK_S = 180.0  # as an engine's start
POLL_S = 0.2
# Sizes of the task; a GPU has 0.5B parameters to work on, the rehearsal 0.1M.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "batch": {"groups": 32, "group_size": 8},
        "sampling": {"max_prompt_tokens": 32, "max_response_tokens": 256},
        "learner": {"device": "auto", "tokens_per_microbatch": 8192, "logprob_chunk_tokens": 512},
        "generator": {"gpu_memory_utilization": 0.3},
    },
    "cpu": {
        "batch": {"groups": 4, "group_size": 4},
        "sampling": {"max_prompt_tokens": 32, "max_response_tokens": 16},
        "learner": {"device": "cpu", "threads": 1, "tokens_per_microbatch": 1024},
        "generator": {"count": 1, "threads": 1, "max_running": 16, "kv_cache_gib": 0.25},
    },
}
CHARACTERS = "0123456789+="
PAD, EOS = 0, 1
MODEL_SIZES: dict[str, dict[str, Any]] = {
    # Qwen2.5-0.5B
    "cuda": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    # Two heads of 32: the smallest that vLLM takes on CPUs.
    "cpu": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
REWARD = "def odd_characters(prompt, response, **row):\n    return sum(map(ord, response)) % 7 / 7\n"


def task(place: Place) -> Iterator[Figure]:
    """Make the task of the rows behind: a model unless one is given, prompts, a reward, a config."""
    started_s = time.perf_counter()
    if Path(place.model).parent == place.directory:
        make_model(Path(place.model), place.device)
        yield noted("making a model of random weights", time.perf_counter() - started_s, "s")
    prompts = [{"prompt": f"{a}+{b}="} for a in range(10, 100) for b in range(10, 20)]
    train = place.directory / "train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (place.directory / "reward.py").write_text(REWARD)
    sizes = SIZES[place.device]
    values = sizes | {
        "run": {"name": RUN, "root": str(place.directory)},
        "model": {"path": place.model, "dtype": "bfloat16"},
        "data": {"train": str(train)},
        "reward": {"functions": [{"function": f"{place.directory}/reward.py:odd_characters"}]},
        "learner": sizes["learner"] | {"steps": 100_000, "optimizer": {"lr": 1e-6}},
        "staleness": {"max_lag": 2},
        "checkpoint": {"every": 200},
    }
    (place.directory / "task.yaml").write_text(yaml.safe_dump(values))
    yield noted("prompts", float(len(prompts)))


def make_model(directory: Path, device: str) -> Path:
    """Save a Qwen2 of random weights in bfloat16, so that nothing is downloaded; `device` is "cuda" or "cpu".

    Its vocabulary has every character that a prompt here uses; the other tokens are words of their own.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    sizes = MODEL_SIZES[device]
    known = ["<pad>", "<eos>", *CHARACTERS]
    known += (f" word{index}" for index in range(len(known), sizes["vocab_size"]))
    words = models.WordLevel({token: index for index, token in enumerate(known)}, unk_token="<pad>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen2Config(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=EOS
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def loop(place: Place) -> Iterator[Figure]:
    """Run the task for some steps; then kill a generator."""
    run = RunDirectory(place.directory / RUN)
    command = module_argv("asyncrl.cli.main", "up", "--plain")
    # So that it fits next to a generator on a GPU of 24 GB; the row `learner` measures without it.
    command += ["--config", str(place.directory / "task.yaml"), "learner.gradient_checkpointing=true"]
    process = subprocess.Popen(bound_to_us(command))
    try:
        started_s = time.perf_counter()
        _wait(process, lambda: len(_steps(run)) >= WARM_STEPS)
        yield noted("start", time.perf_counter() - started_s, "s", note=f"to the end of step {WARM_STEPS}")
        # Shares of time are differences of two heartbeats, and all steps may lie between two.
        _wait(
            process,
            lambda: len(_steps(run)) >= WARM_STEPS + STEPS and min(map(len, _beats(run)), default=0) > 1,
        )
        yield from _pace(place, run)
        yield _killed(place, process, run)
    finally:
        stop_processes([process], grace_s=30.0)


def _pace(place: Place, run: RunDirectory) -> Iterator[Figure]:
    steps = _steps(run)[WARM_STEPS : WARM_STEPS + STEPS]
    step_s = statistics.median(row["time/step"] for row in steps)
    yield noted("speed", 1 / step_s, "steps/s", note=f"{STEPS} steps, median {step_s:.3g} s")
    yield noted("learner waits for groups", statistics.mean(row["idle/learner"] for row in steps), "share")
    refused = steps[-1].get("weights/updates_failed", 0.0)
    yield judged("updates that failed", refused, at_most=0)
    alive_s, idle_s, stalled_s, paused_s = (
        sum(rows[-1][name] - rows[0][name] for rows in _beats(run))
        for name in ("alive_s", "idle_s", "stalled_s", "paused_s")
    )
    yield noted("generators without a request", idle_s / alive_s, "share")
    yield noted("generators without new weights", stalled_s / alive_s, "share")
    yield place.speed("generators paused for weights", paused_s / alive_s, "share", at_most=MOST_STALLED)


def _killed(place: Place, process: "subprocess.Popen[bytes]", run: RunDirectory) -> Figure:
    """Kill the first generator, and measure until the run has it back with the newest weights."""
    children = json.loads(run.processes.read_text())["children"]
    name = min(child for child in children if child.startswith("g"))
    file = run.metrics / f"{name}.jsonl"
    before, version = len(_rows(file)), _steps(run)[-1]["step"]
    os.kill(children[name], signal.SIGKILL)
    started_s = time.perf_counter()

    def is_back() -> bool:
        return any(row.get("version", -1) >= version and row["groups"] > 0 for row in _rows(file)[before:])

    _wait(process, is_back)
    seconds = time.perf_counter() - started_s
    return place.speed("kill -9 of a generator, back after", seconds, "s", at_most=MOST_BACK_S)


def _wait(process: "subprocess.Popen[bytes]", condition: Callable[[], bool]) -> None:
    """Wait without a bound of its own: the row has one. Raises RunError if the run ends."""
    while not condition():
        if (status := process.poll()) is not None:
            raise RunError(f"asyncrl up ended with status {status}; this row's log says why")
        time.sleep(POLL_S)


def _steps(run: RunDirectory) -> list[dict[str, Any]]:
    return [row for row in _rows(run.metrics / "learner.jsonl") if "time/step" in row]


def _beats(run: RunDirectory) -> list[list[dict[str, Any]]]:
    """The heartbeats of each generator."""
    return [_rows(file) for file in sorted(run.metrics.glob("g*.jsonl"))]


def _rows(file: Path) -> list[dict[str, Any]]:
    """All whole lines."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
