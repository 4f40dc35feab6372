"""The words task by asyncrl and by TRL's GRPOTrainer, in turn: what score, after how many seconds.

Both have the same model, rows, reward, batch, lengths, optimizer, learning rate and clipping, and the machine
for themselves; `--show` prints both configurations. Neither evaluates while it trains. "In all" is from the
command until the trained weights are on the disk and the process has ended, "training" the sum of the steps.
Trained policies then tell stories to the same held-out prompts, by transformers' own sampling.

TRL trains `--steps`. asyncrl trains longer and keeps weights on the way; its seconds at a step are those of
the whole run without those of the later steps and of the checkpoints at other steps. Its rows end with the
first step whose score is that of TRL, less one standard error, or higher; the ratios are those of the seconds
until then.

    python examples/stories.py build/stories15m
    python -m bench.peers [KEY=VALUE ...] [--seeds 0 1 2] [--steps 20] [--show] [--json FILE]

It needs asyncrl[stages], which brings TRL. TRL samples by transformers, as it does by default.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.hosting.processes import module_argv
from bench.environment import describe

CONFIG = Path("configs/stories15m-words-cpu.yaml")
GROUPS, SIZE, TOKENS = 8, 8, 40
LR, BETAS, CLIP = 4e-5, (0.9, 0.95), 0.2
PIECE = 16  # sequences that TRL trains at once: of 8, 16 and 64 the fastest
ROWS, SAMPLES = 120, 4


LONGER, EVERY = 1.6, 2  # asyncrl trains 1.6 times as many steps, and keeps the weights of every second one


class Ran(NamedTuple):
    """A run up to a step: seconds from the command to its end, seconds of all steps, and the weights."""

    step: int
    in_all_s: float
    training_s: float
    weights: Path


def ours(task: Path, seed: int, steps: int, at: Path, further: Sequence[str] = ()) -> list[str]:
    """Return the command of asyncrl. What it does not name is as in `CONFIG` and by default."""
    steps = round(steps * LONGER / EVERY) * EVERY
    values = {
        "run.root": at,
        "run.name": f"asyncrl-{seed}",
        "run.seed": seed,
        "model.path": task / "model",
        "data.train": task / "train.jsonl",
        "data.eval": "null",
        "batch.groups": GROUPS,
        "batch.group_size": SIZE,
        "sampling.max_response_tokens": TOKENS,
        "algorithm.kl.coefficient": 0,
        "learner.steps": steps,
        "learner.optimizer.lr": LR,
        "learner.optimizer.warmup_steps": 0,
        "checkpoint.every": EVERY,
        "checkpoint.keep": steps // EVERY,
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    return module_argv("asyncrl.cli.main", "up", "--plain", "--config", str(CONFIG), *overrides, *further)


def theirs(seed: int, steps: int, at: Path) -> dict[str, Any]:
    """Return the settings of TRL's GRPOTrainer that are not its defaults."""
    return {
        "output_dir": str(at / f"trl-{seed}"),
        "seed": seed,
        "max_steps": steps,
        "per_device_train_batch_size": PIECE,
        "gradient_accumulation_steps": GROUPS * SIZE // PIECE,
        "num_generations": SIZE,
        "max_completion_length": TOKENS,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "epsilon": CLIP,
        "beta": 0.0,
        "loss_type": "dapo",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
    }


def train_by_trl(task: Path, settings: dict[str, Any]) -> None:
    """Train in this process, and write the weights and the seconds of training."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from asyncrl.rewards.builtin import words_used

    def reward(
        prompts: list[str], completions: list[str], words: list[list[str]], **_: object
    ) -> list[float]:
        return [words_used(*row) for row in zip(prompts, completions, words, strict=True)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task / "model", dtype="float32"),
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=load_dataset("json", data_files=str(task / "train.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(task / "model", padding_side="left", pad_token="</s>"),
    )
    took_s = trainer.train().metrics["train_runtime"]
    at = Path(settings["output_dir"])
    trainer.save_model(str(at / "model"))
    (at / "seconds.json").write_text(json.dumps(took_s))


def run(name: str, task: Path, seed: int, steps: int, at: Path, further: Sequence[str] = ()) -> list[Ran]:
    """Run one of the two to its end; return what it was at each step whose weights it has kept."""
    at = at.resolve()
    if name == "asyncrl":
        command, directory = ours(task, seed, steps, at, further), at / f"asyncrl-{seed}"
    else:
        settings = theirs(seed, steps, at)
        command, directory = module_argv("bench.peers", "--by-trl", json.dumps(settings)), at / f"trl-{seed}"
        command += ["--task", str(task)]
    begun_s = time.monotonic()
    with (at / f"{name}-{seed}.out").open("wb") as out:
        environment = os.environ | {"PYTHONPATH": os.getcwd()}
        subprocess.run(command, env=environment, stdout=out, stderr=out, timeout=3600, check=True)
    in_all_s = time.monotonic() - begun_s
    if name == "trl":
        took_s = json.loads((directory / "seconds.json").read_text())
        return [Ran(steps, in_all_s, took_s, directory / "model")]
    lines = (directory / "metrics" / "learner.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    steps_s = [row["time/step"] for row in metrics if "time/step" in row]
    saved_s = {row["step"]: row["time/checkpoint"] for row in metrics if "time/checkpoint" in row}
    return [
        Ran(
            step,
            in_all_s - sum(steps_s[step:]) - sum(saved_s.values()) + saved_s[step],
            sum(steps_s[:step]),
            directory / "checkpoints" / f"step-{step:06}" / "hf",
        )
        for step in range(EVERY, len(steps_s) + 1, EVERY)
    ]


def score(weights: Path, task: Path) -> tuple[float, float]:
    """Return the mean share of words used on held-out prompts, and its standard error over prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from asyncrl.rewards.builtin import words_used

    lines = (task / "test.jsonl").read_text().splitlines()[:ROWS]
    rows = [json.loads(line) for line in lines]
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(task / "model", padding_side="left", pad_token="</s>")
    torch.manual_seed(0)
    asked = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "num_return_sequences": SAMPLES}
    told = model.generate(**asked, **options)[:, asked.input_ids.shape[1] :]
    texts = iter(tokenizer.batch_decode(told, skip_special_tokens=True))
    means = [
        statistics.mean(words_used(row["prompt"], next(texts), row["words"]) for _ in range(SAMPLES))
        for row in rows
    ]
    return statistics.mean(means), statistics.stdev(means) / len(means) ** 0.5


def judged(name: str, seed: int, ran: Ran, task: Path) -> dict[str, Any]:
    """Score a policy, and print its row of the table."""
    mean, error = score(ran.weights, task)
    row = {
        "by": name,
        "seed": seed,
        "step": ran.step,
        "score": round(mean, 3),
        "score_error": round(error, 3),
        "training_s": round(ran.training_s, 1),
        "in_all_s": round(ran.in_all_s, 1),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("further", nargs="*", metavar="KEY=VALUE", help="further settings of asyncrl")
    parser.add_argument("--task", type=Path, default=Path("build/stories15m"), help="model and rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--show", action="store_true", help="print both configurations, and train nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--by-trl", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.by_trl:
        return train_by_trl(options.task, options.by_trl)
    if options.show:
        at = Path("OUT")
        print(
            " ".join(ours(options.task, 0, options.steps, at, options.further)[1:]),
            json.dumps(theirs(0, options.steps, at), indent=2),
            sep="\n",
        )
        return None
    rows = list[dict[str, Any]]()
    ratios = dict[int, dict[str, float]]()
    with tempfile.TemporaryDirectory() as directory:
        for seed in options.seeds:
            [peer] = run("trl", options.task, seed, options.steps, Path(directory))
            rows.append(judged("trl", seed, peer, options.task))
            wanted = rows[-1]["score"] - rows[-1]["score_error"]
            for ran in run("asyncrl", options.task, seed, options.steps, Path(directory), options.further):
                if ran.step < options.steps / LONGER:
                    continue
                rows.append(judged("asyncrl", seed, ran, options.task))
                if rows[-1]["score"] >= wanted:
                    ratios[seed] = {
                        "training_s": round(ran.training_s / peer.training_s, 2),
                        "in_all_s": round(ran.in_all_s / peer.in_all_s, 2),
                    }
                    break
    print(f"asyncrl / TRL, to TRL's score, by seed: {ratios}", file=sys.stderr)
    if options.json:
        result = {**describe("asyncrl", "trl", "transformers", "torch"), "rows": rows, "ratios": ratios}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
