"""What stages and objectives do to storytellers on held-out prompts, and what tiny models learn, over seeds.

    python -m bench.stages [--only sft dpo pipeline distill rm experts images ...] [--seeds 0 1 2]

The rows of the stages are the base's own stories, eight for each prompt. After training, a policy tells four
stories to each of 24 prompts whose words no training row has. A second call goes on with what build/stages
has. The p-value is one-sided: the share of random signs of the prompts' differences whose mean is as large.
Differences are means over stories and seeds, from the policy that training began with.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import asyncrl  # noqa: F401 - before transformers: it hides builds that transformers cannot import

# isort: split
import numpy as np
import torch
import transformers
import yaml

from asyncrl.rewards.builtin import words_used
from bench.stage_rewards import stops
from tests.support.models import tiny_moe
from tests.support.vlm_models import picture, tiny_idefics3

AT, STORIES = Path("build/stages"), Path("build/stories15m")
STUDENT, PROMPTS, ROWS = AT / "student", 24, 200
CURVES = (
    "eval/reward_mean", "reward/mean", "reference/nll", "reference/k3", "preference/chosen_logprob",
    "preference/rejected_logprob", "train/loss", "train/logps/chosen", "train/logps/rejected",
    "weights/probe_max", "weights/probe_limit",
)  # fmt: skip
Row = dict[str, Any]


class Task(NamedTuple):
    """A model, the rows that it answers with so many tokens, and what an answer is worth."""

    base: Path
    rows: str
    tokens: int
    reward: str
    score: Callable[..., float] | None = None


FUNCTIONS = Path("bench/stage_rewards.py").resolve()
WORDS = Task(STORIES / "model", f"{STORIES}/", 24, "words_used", words_used)
STOPS = Task(Path("build/stories260k/model"), f"{STORIES}/", 48, f"{FUNCTIONS}:stops", stops)
EXPERTS = Task(AT / "experts", f"{AT}/experts-", 8, f"{FUNCTIONS}:letter")
IMAGES = Task(AT / "images", f"{AT}/images-", 8, f"{FUNCTIONS}:letter")
TASKS = {"online-dpo": WORDS, "online-kto": WORDS, "experts": EXPERTS, "images": IMAGES}  # others: STOPS


@torch.no_grad()
def tell(
    task: Task, policy: Path, rows: Sequence[Row], count: int, seed: int
) -> tuple[list[list[str]], float, float]:
    """Return `count` stories of each row, and per token their NLL under the base and KL(policy, base)."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = [load(path, dtype=torch.float32).eval() for path in (policy, task.base)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(task.base, padding_side="left", pad_token="</s>")
    torch.manual_seed(seed)
    texts, nll, kl, tokens = list[str](), 0.0, 0.0, 0
    prompts = [row["prompt"] for row in rows for _ in range(count)]
    for first in range(0, len(prompts), 64):
        asked = tokenizer(prompts[first : first + 64], return_tensors="pt", padding=True)
        start = asked.input_ids.shape[1]
        ids = models[0].generate(**asked, do_sample=True, top_k=0, max_new_tokens=task.tokens)
        # Without its prompt a story would lose the blank before its first word.
        whole = tokenizer.batch_decode(ids, skip_special_tokens=True)
        texts += [text[len(prompts[first + at]) :] for at, text in enumerate(whole)]
        ends = torch.isin(ids[:, start:], torch.tensor([1, 2])).long()
        told = ends.cumsum(1) - ends == 0  # up to and with the end of the story
        mask = torch.cat([asked.attention_mask, told.long()], dim=1)
        places = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        own, base = (model(ids, **places).logits[:, start - 1 : -1].log_softmax(-1) for model in models)
        nll -= float((base.gather(2, ids[:, start:, None])[..., 0] * told).sum())
        kl += float(((own.exp() * (own - base)).sum(-1) * told).sum())
        tokens += int(told.sum())
    return [texts[at : at + count] for at in range(0, len(texts), count)], nll / tokens, kl / tokens


def measured(task: Task, policy: Path, seed: int) -> Row:
    """Return the mean score of each held-out prompt, and the NLL and KL of all its stories."""
    if task.score is None:
        return {}
    rows = read(STORIES / "test.jsonl")[:PROMPTS]
    stories, nll, kl = tell(task, policy, rows, 4, seed)
    scores = [
        statistics.mean(task.score(response=story, **row) for story in some)
        for row, some in zip(rows, stories, strict=True)
    ]
    return {"score": scores, "nll": nll, "kl": kl}


def make_rows() -> None:
    """Write the best of eight stories, and the best with the worst, of prompts to train on and of others."""
    for name, count in (("train", ROWS), ("test", 2 * PROMPTS)):
        rows = read(STORIES / f"{name}.jsonl")[:count]
        best, pairs = [], []
        for row, stories in zip(rows, tell(STOPS, STOPS.base, rows, 8, 0)[0], strict=True):
            scored = sorted((stops("", story), story) for story in stories if story)
            if scored[0][0] < scored[-1][0]:
                best.append({"prompt": row["prompt"], "completion": scored[-1][1]})
                pairs.append({"prompt": row["prompt"], "chosen": scored[-1][1], "rejected": scored[0][1]})
        for kind, found in (("best", best), ("pairs", pairs)):
            (AT / f"{kind}-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def make_student() -> None:
    """Write a copy of the base with noise on every matrix except the embedding and the output layer."""
    torch.manual_seed(0)
    student = transformers.AutoModelForCausalLM.from_pretrained(STOPS.base, dtype=torch.float32)
    with torch.no_grad():
        for name, matrix in student.named_parameters():
            if "_proj" in name:  # numbers that are 0 widen the heads and stay 0
                matrix += 0.2 * matrix.std() * torch.randn_like(matrix) * (matrix != 0)
    transformers.AutoTokenizer.from_pretrained(STOPS.base).save_pretrained(STUDENT)
    student.save_pretrained(STUDENT)


def make_tiny() -> None:
    """Write models of random weights, and rows whose answer is the prompt's letter or the picture's color."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    tiny_moe(AT / "experts", hidden_size=128, moe_intermediate_size=64, **heads)
    tiny_idefics3(AT / "images")
    lines: dict[str, list[str]] = {}
    for number in range(48):
        shade, letter, name = 3 * number, "ab"[number % 2], ("train", "train", "test", "test")[number % 4]
        picture(AT / f"{number}.png", (255, shade, shade) if letter == "a" else (shade, shade, 255))
        for kind, row in (
            ("experts", {"prompt": f"{number}+{number}{letter}="}),
            ("images", {"prompt": "which?", "images": [f"{number}.png"]}),
        ):
            lines.setdefault(f"{kind}-{name}", []).append(json.dumps(row | {"answer": letter}) + "\n")
    for file, some in lines.items():
        (AT / f"{file}.jsonl").write_text("".join(some))


def read(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def stage(kind: str, rows: str, epochs: int, rate: float, **model: Any) -> Row:
    """Return the config of a stage."""
    settings = {"per_device_train_batch_size": 16, "gradient_checkpointing": False, "logging_steps": 4}
    return {
        "stage": kind,
        "model": {"path": str(STOPS.base), "dtype": "float32", **model},
        "data": {"train": f"{AT}/{rows}-train.jsonl", "eval": f"{AT}/{rows}-test.jsonl"},
        "trl": settings | {"num_train_epochs": epochs, "learning_rate": rate},
    }


def run(task: Task, preset: str, steps: int, rate: float, **sections: Row) -> Row:
    """Return the config of a run that trains on the policy's own answers."""
    return {
        "extends": ["stories15m-words-cpu.yaml", f"algorithms/{preset}.yaml"],
        "model": {"path": str(task.base)} | sections.get("model", {}),
        "data": {"train": f"{task.rows}train.jsonl", "eval": f"{task.rows}test.jsonl"}
        | sections.get("data", {}),
        "reward": {"functions": [{"function": task.reward}]},
        "batch": {"groups": 4 if task.score else 8},
        "sampling": {"max_prompt_tokens": 64, "max_response_tokens": task.tokens},
        "algorithm": {"kl": {"coefficient": 0}} | sections.get("algorithm", {}),  # those on pairs have beta
        "learner": {"threads": 1, "steps": steps, "optimizer": {"lr": rate, "warmup_steps": 1}},
        "generator": {"engine": "transformers"},
        "eval": {"every": 4, "prompts": PROMPTS},
        "checkpoint": {"every": steps},
    }


ADAPTER, AS_STUDENT = {"lora": {"rank": 16}}, {"path": str(STUDENT)}
TO_TEACHER, SEEN = {"reference": {"path": str(STOPS.base)}}, {"images_key": "images"}
# Configs by the names of their runs; several are a pipeline.
DEMONSTRATIONS: dict[str, dict[str, Row]] = {
    "online-dpo": {"online-dpo": run(WORDS, "dpo", 8, 3e-5)},
    "online-kto": {"online-kto": run(WORDS, "kto", 8, 2e-5)},
    "rm": {"rm": stage("rm", "pairs", 4, 1e-3)},
    "sft": {"sft": stage("sft", "best", 3, 5e-4)},
    "dpo": {"dpo": stage("dpo", "pairs", 2, 2e-4)},
    "distill": {"distill": run(STOPS, "distill", 20, 5e-4, model=AS_STUDENT, algorithm=TO_TEACHER)},
    "pipeline": {
        "lora-sft": stage("sft", "best", 2, 2e-3, **ADAPTER),
        "lora-dpo": stage("dpo", "pairs", 1, 5e-4, **ADAPTER),
        "lora-grpo": run(STOPS, "grpo", 12, 1e-3, model=ADAPTER, algorithm={"kl": {"coefficient": 0.05}}),
    },
    "experts": {"experts": run(EXPERTS, "grpo", 20, 5e-3)},
    "images": {"images": run(IMAGES, "grpo", 20, 5e-3, model={"chat_template": True}, data=SEEN)},
}


def train(name: str, seed: int) -> Row:
    """Run a demonstration, and return what its parts have changed."""
    configs = DEMONSTRATIONS[name]
    for part, config in configs.items():
        run = {"run": {"name": f"{part}-{seed}", "root": str(AT / "runs"), "seed": seed}}
        (AT / f"{part}-{seed}.yaml").write_text(yaml.safe_dump(config | run))
    if is_pipeline := len(configs) > 1:
        parts = [f"{part}-{seed}.yaml" for part in configs]
        (AT / f"{name}-{seed}.yaml").write_text(yaml.safe_dump({"pipeline": parts}))
    command = "pipeline" if is_pipeline else "stage" if "stage" in configs[name] else "up"
    before = digest()
    with (AT / f"{name}-{seed}.out").open("a") as out:
        call = [sys.executable, "-m", "asyncrl", command, "--plain", f"{AT}/{name}-{seed}.yaml"]
        subprocess.run(call, stdout=out, stderr=out, check=True)
    runs = ((part, config, AT / "runs" / f"{part}-{seed}") for part, config in configs.items())
    found = {part: outcome(TASKS.get(name, STOPS), config, run, seed) for part, config, run in runs}
    return {"base_unchanged": digest() == before, **found}


def digest() -> str:
    """Return the SHA-256 of the files of the base."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(STOPS.base.iterdir()))).hexdigest()


def outcome(task: Task, config: Row, run: Path, seed: int) -> Row:
    """Return what a stage or run has measured, and what its policy is like."""
    rows = read(run / "metrics" / "learner.jsonl")
    found: Row = {key: [(row["step"], row[key]) for row in rows if key in row] for key in CURVES}
    if "stage" in config:
        record = json.loads((run / "stage.json").read_text())
        found, policy = found | {key: record[key] for key in ("before", "after")}, run / "hf"
    else:
        policy = max((run / "checkpoints").glob("step-*")) / "hf"
    return found if config.get("stage") == "rm" else found | measured(task, policy, seed)


def p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Return how often random signs of the prompts' differences have at least their mean."""
    gain = np.subtract(after, before)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(100_000, len(gain)))
    return (float(((signs * gain).mean(1) >= gain.mean() - 1e-12).sum()) + 1) / 100_001


def show(name: str, found: Sequence[Row], before: Sequence[Row]) -> None:
    """Print a line of the table, as means over the seeds, and below it curves and measures of each seed."""
    if "score" in found[0]:
        scores = [np.mean([one["score"] for one in of], axis=0) for of in (before, found)]
        each = ", ".join(f"{np.mean(one['score']):.2f}" for one in found)
        nll, kl = (statistics.mean(one[key] for one in found) for key in ("nll", "kl"))
        print(f"| {name} | {scores[1].mean():.3f} ({each}) | {p_value(*scores):.5f} | {nll:.2f} | {kl:.3f} |")
    for key in (key for key in CURVES if found[0].get(key)):
        means = zip(*(one[key] for one in found), strict=True)
        print(f"  {key}:", ", ".join(f"{of[0][0]}: {statistics.mean(v for _, v in of):.3f}" for of in means))
    for key in found[0].get("before", ()):
        pairs = (f"{one['before'][key]:.3f} -> {one['after'][key]:.3f}" for one in found)
        print(f"  {name}, held-out {key}:", ", ".join(pairs))


def main() -> None:
    """Train and measure what is not measured yet, and print all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(DEMONSTRATIONS), choices=DEMONSTRATIONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args()
    (AT / "measured").mkdir(parents=True, exist_ok=True)
    if not (AT / "images-test.jsonl").exists():
        make_rows()
        make_student()
        make_tiny()
    print("| policy | held-out score (each seed) | p | NLL under the base | KL to the base |")
    print("|---|---|---|---|---|")
    for name in given.only:
        task = TASKS.get(name, STOPS)
        start = STUDENT if name == "distill" else task.base
        before = once("-".join(start.parts[1:]), given.seeds, partial(measured, task, start))
        show(str(start), before, before)
        results = once(name, given.seeds, partial(train, name))
        for part in DEMONSTRATIONS[name]:
            found = [result[part] for result in results]
            show(part, found, before)
            before = found
        if len(DEMONSTRATIONS[name]) > 1:
            print(f"  {name}, files of the base unchanged:", all(one["base_unchanged"] for one in results))


def once(name: str, seeds: Sequence[int], measure: Callable[[int], Row]) -> list[Row]:
    """Return what was measured with each seed, now or by an earlier call."""
    paths = {seed: AT / "measured" / f"{name}-{seed}.json" for seed in seeds}
    for seed, path in paths.items():
        if not path.exists():
            path.write_text(json.dumps(measure(seed)))
    return [json.loads(path.read_text()) for path in paths.values()]


if __name__ == "__main__":
    main()
