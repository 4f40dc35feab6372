"""The words task by asyncrl and by TRL's GRPOTrainer, in turn: what score, after how many seconds.

Both have the same model, rows, reward, batch, lengths, optimizer, learning rate and clipping, and the machine
for themselves; `--show` prints both configurations. Neither evaluates while it trains. "In all" is from the
command until the trained weights are on the disk and the process has ended, "training" the sum of the steps.
When all have been trained, the policies tell stories to the same held-out prompts, by transformers' own
sampling.

Both keep their weights on the way. The seconds at a step are those of the whole run without those of the
later steps, and of keeping weights at other steps. What a step teaches differs more between seeds than
between the two, so score and seconds at a step are means over the seeds. Between kept weights they are taken
to grow evenly: this says when each has reached a level, and how the ratio differs between draws of the seeds.

    python examples/stories.py build/stories15m
    python -m bench.peers [KEY=VALUE ...] [--seeds 0 1 2 3 4 5 6] [--steps 32] [--show] [--json FILE]

It needs asyncrl[stages], which brings TRL. TRL samples by transformers, as it does by default.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.hosting.processes import module_argv
from bench.environment import describe

CONFIG = Path("configs/stories15m-words-cpu.yaml")
GROUPS, SIZE, TOKENS = 8, 8, 40
LR, BETAS, CLIP = 4e-5, (0.9, 0.95), 0.2
PIECE = 16  # sequences that TRL trains at once: of 8, 16 and 64 the fastest
ROWS, SAMPLES = 120, 4
EVERY = 4  # steps between weights that are kept
LEVELS = (0.6, 0.65, 0.7, 0.75, 0.8)
DRAWS = 4000  # of as many seeds as there are, with repetition


class Ran(NamedTuple):
    """A run up to a step: seconds from the command to its end, seconds of all steps, and the weights."""

    step: int
    in_all_s: float
    training_s: float
    weights: Path


def ours(task: Path, seed: int, steps: int, at: Path, further: Sequence[str] = ()) -> list[str]:
    """Return the command of asyncrl. What it does not name is as in `CONFIG` and by default."""
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
        "checkpoint.keep": steps,
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
        "save_steps": EVERY,
        "save_only_model": True,
        "report_to": "none",
        "logging_steps": 1,
    }


def train_by_trl(task: Path, settings: dict[str, Any]) -> None:
    """Train in this process, and write the weights and the seconds of training."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
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
    seconds: dict[str, list[float]] = {"steps": [], "saved": []}

    class Clock(TrainerCallback):
        """What is between the ends of two steps is either a step or the keeping of weights."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.since_s = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._add("steps")

        def on_save(self, *_: Any, **__: Any) -> None:
            self._add("saved")

        def _add(self, name: str) -> None:
            now_s = time.monotonic()
            seconds[name].append(now_s - self.since_s)
            self.since_s = now_s

    trainer.add_callback(Clock)
    trainer.train()
    (Path(settings["output_dir"]) / "seconds.json").write_text(json.dumps(seconds))


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
    if name == "asyncrl":
        lines = (directory / "metrics" / "learner.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        steps_s = [row["time/step"] for row in metrics if "time/step" in row]
        saved_s = [row["time/checkpoint"] for row in metrics if "time/checkpoint" in row]
        kept = "checkpoints/step-{:06}/hf"
    else:
        seconds = json.loads((directory / "seconds.json").read_text())
        steps_s, saved_s, kept = seconds["steps"], seconds["saved"], "checkpoint-{}"
    without_saves_s = in_all_s - sum(saved_s)
    return [
        Ran(
            step,
            without_saves_s - sum(steps_s[step:]) + own_s,
            sum(steps_s[:step]),
            directory / kept.format(step),
        )
        for step, own_s in zip(range(EVERY, steps + 1, EVERY), saved_s, strict=True)
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


def judged(trained: Mapping[tuple[str, int], Sequence[Ran]], task: Path) -> Iterator[dict[str, Any]]:
    """Score the policies step by step, until the mean of each of the two has reached the last level."""
    for ran in zip(*trained.values(), strict=True):
        scores = defaultdict[str, list[float]](list)
        for (name, seed), one in zip(trained, ran, strict=True):
            mean, error = score(one.weights, task)
            scores[name].append(mean)
            row = {
                "by": name,
                "seed": seed,
                "step": one.step,
                "score": round(mean, 3),
                "score_error": round(error, 3),
                "training_s": round(one.training_s, 1),
                "in_all_s": round(one.in_all_s, 1),
            }
            print(json.dumps(row), flush=True)
            yield row
        if all(statistics.mean(found) >= LEVELS[-1] for found in scores.values()):
            return


def seconds_until(level: float, rows: Sequence[dict[str, Any]]) -> float | None:
    """Return when the mean of some runs, whose scores are `rows`, has first reached a level."""
    score_before, seconds_before = 0.0, 0.0
    for step in sorted({row["step"] for row in rows}):
        of_step = [row for row in rows if row["step"] == step]
        score, seconds = (statistics.mean(row[name] for row in of_step) for name in ("score", "in_all_s"))
        if score >= level:
            share = (level - score_before) / (score - score_before) if score_before else 1.0
            return seconds_before + share * (seconds - seconds_before)
        score_before, seconds_before = score, seconds
    return None


def reached(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each level that both reach, their seconds until then, and the ratio with its 95 % range."""
    by_run = defaultdict[tuple[str, int], list[dict[str, Any]]](list)
    for row in rows:
        by_run[row["by"], row["seed"]].append(row)

    def seconds(name: str, seeds: Sequence[int], level: float) -> float | None:
        return seconds_until(level, [row for seed in seeds for row in by_run[name, seed]])

    seeds, draw, found = sorted({row["seed"] for row in rows}), random.Random(0), list[dict[str, Any]]()
    for level in LEVELS:
        trl, asyncrl = (seconds(name, seeds, level) for name in ("trl", "asyncrl"))
        if trl is None or asyncrl is None:
            continue
        drawn = (draw.choices(seeds, k=len(seeds)) for _ in range(DRAWS))
        both = ([seconds(name, some, level) for name in ("trl", "asyncrl")] for some in drawn)
        ratios = sorted(ours / theirs for theirs, ours in both if theirs and ours)
        row = {"level": level, "trl": round(trl, 1), "asyncrl": round(asyncrl, 1)}
        ends = [round(ratios[round(share * (len(ratios) - 1))], 2) for share in (0.025, 0.975)]
        found.append({**row, "asyncrl / trl": round(asyncrl / trl, 2), "95 %": ends})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("further", nargs="*", metavar="KEY=VALUE", help="further settings of asyncrl")
    parser.add_argument("--task", type=Path, default=Path("build/stories15m"), help="model and rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(7)])
    parser.add_argument("--steps", type=int, default=32)
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
    with tempfile.TemporaryDirectory() as directory:
        trained = {
            (name, seed): run(name, options.task, seed, options.steps, Path(directory), further)
            for seed in options.seeds
            for name, further in (("trl", ()), ("asyncrl", options.further))
        }
        rows = list(judged(trained, options.task))
    levels = reached(rows)
    print(*(json.dumps(level) for level in levels), sep="\n")
    if options.json:
        result = {**describe("asyncrl", "trl", "transformers", "torch"), "rows": rows, "levels": levels}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
