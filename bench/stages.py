"""What preferences do to a storyteller, on held-out words and over several seeds: DPO, KTO, a reward model.

    python -m bench.stages [--only online-dpo online-kto rm] [--seeds 0 1 2]

The pairs of the reward model are the base's own stories: the best and the worst of eight for each prompt.
After training, a policy tells four stories to each of 24 prompts whose words no training row has. A second
call goes on with what build/stages has. The p-value is one-sided: the share of random signs
of the prompts' differences whose mean is as large. Differences are means over stories and seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import asyncrl  # noqa: F401 - before transformers: it hides builds that transformers cannot import

# isort: split
import numpy as np
import torch
import transformers
import yaml

from asyncrl.rewards.builtin import words_used

AT, STORIES = Path("build/stages"), Path("build/stories15m")
BASE = STORIES / "model"
TOKENS, PROMPTS, ROWS = 24, 24, 200
CURVES = ("eval/reward_mean", "reference/nll", "preference/chosen_logprob", "preference/rejected_logprob")
Row = dict[str, Any]


@torch.no_grad()
def tell(policy: Path, rows: Sequence[Row], count: int, seed: int) -> tuple[list[list[str]], float, float]:
    """Return `count` stories of each row, and per token their NLL under the base and KL(policy, base)."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = [load(path, dtype=torch.float32).eval() for path in (policy, BASE)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(BASE, padding_side="left", pad_token="</s>")
    torch.manual_seed(seed)
    texts, nll, kl, tokens = list[str](), 0.0, 0.0, 0
    prompts = [row["prompt"] for row in rows for _ in range(count)]
    for first in range(0, len(prompts), 64):
        asked = tokenizer(prompts[first : first + 64], return_tensors="pt", padding=True)
        start = asked.input_ids.shape[1]
        ids = models[0].generate(**asked, do_sample=True, top_k=0, max_new_tokens=TOKENS)
        texts += tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
        ends = torch.isin(ids[:, start:], torch.tensor([1, 2])).long()
        told = ends.cumsum(1) - ends == 0  # up to and with the end of the story
        mask = torch.cat([asked.attention_mask, told.long()], dim=1)
        places = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        own, base = (model(ids, **places).logits[:, start - 1 : -1].log_softmax(-1) for model in models)
        nll -= float((base.gather(2, ids[:, start:, None])[..., 0] * told).sum())
        kl += float(((own.exp() * (own - base)).sum(-1) * told).sum())
        tokens += int(told.sum())
    return [texts[at : at + count] for at in range(0, len(texts), count)], nll / tokens, kl / tokens


def measured(policy: Path, seed: int) -> Row:
    """Return what the policy's stories of held-out words are like."""
    rows = read(STORIES / "test.jsonl")[:PROMPTS]
    stories, nll, kl = tell(policy, rows, 4, seed)
    shares = [
        [words_used("", story, row["words"]) for story in some]
        for row, some in zip(rows, stories, strict=True)
    ]
    return {"used": [statistics.mean(some) for some in shares], "nll": nll, "kl": kl}


def make_rows() -> None:
    """Write the best and the worst of eight stories of prompts to train on, and of others."""
    for name, count in (("train", ROWS), ("test", 2 * PROMPTS)):
        rows = read(STORIES / f"{name}.jsonl")[:count]
        pairs = []
        for row, stories in zip(rows, tell(BASE, rows, 8, 0)[0], strict=True):
            scored = sorted((words_used("", story, row["words"]), story) for story in stories if story)
            if scored[0][0] < scored[-1][0]:
                pairs.append({"prompt": row["prompt"], "chosen": scored[-1][1], "rejected": scored[0][1]})
        (AT / f"pairs-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))


def read(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def online(preset: str, rate: float) -> Row:
    """Return the config of a run in which the policy's own stories are compared."""
    return {
        "extends": ["stories15m-words-cpu.yaml", f"algorithms/{preset}.yaml"],
        "model": {"path": str(BASE)},
        "data": {"train": str(STORIES / "train.jsonl"), "eval": str(STORIES / "test.jsonl")},
        "batch": {"groups": 4},
        "sampling": {"max_prompt_tokens": 32, "max_response_tokens": TOKENS},
        "algorithm": {"kl": {"coefficient": 0}},  # beta of the advantage holds the policy to the base
        "learner": {"threads": 1, "steps": 8, "optimizer": {"lr": rate, "warmup_steps": 1}},
        "generator": {"engine": "transformers"},
        "eval": {"every": 4, "prompts": PROMPTS},
        "checkpoint": {"every": 8},
    }


DEMONSTRATIONS: dict[str, Row] = {
    "online-dpo": online("dpo", 3e-5),
    "online-kto": online("kto", 2e-5),
    "rm": {
        "stage": "rm",
        "model": {"path": str(BASE), "dtype": "float32"},
        "data": {"train": f"{AT}/pairs-train.jsonl", "eval": f"{AT}/pairs-test.jsonl"},
        "trl": {
            "num_train_epochs": 3,
            "learning_rate": 1e-4,
            "per_device_train_batch_size": 16,
            "gradient_checkpointing": False,
            "logging_steps": 4,
        },
    },
}


def train(name: str, seed: int) -> Row:
    """Run a demonstration. Return what it has measured, and what its policy is like."""
    config, file, run = DEMONSTRATIONS[name], AT / f"{name}-{seed}.yaml", AT / "runs" / f"{name}-{seed}"
    own = {"run": {"name": run.name, "root": str(run.parent), "seed": seed}}
    file.write_text(yaml.safe_dump(config | own))
    command = ["stage"] if "stage" in config else ["up", "--plain"]
    with file.with_suffix(".out").open("a") as out:
        call = [sys.executable, "-m", "asyncrl", *command, str(file)]
        subprocess.run(call, stdout=out, stderr=out, check=True)
    if "stage" in config:
        record = json.loads((run / "stage.json").read_text())
        return {key: record[key] for key in ("before", "after")}
    rows = read(run / "metrics" / "learner.jsonl")
    curves = {key: [(row["step"], row[key]) for row in rows if key in row] for key in CURVES}
    return curves | measured(run / "checkpoints" / "step-000008" / "hf", seed)


def p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Return how often random signs of the prompts' differences have at least their mean."""
    gain = np.subtract(after, before)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(100_000, len(gain)))
    return (float(((signs * gain).mean(1) >= gain.mean() - 1e-12).sum()) + 1) / 100_001


def show(name: str, found: Sequence[Row], before: Sequence[Row]) -> None:
    """Print a line of the table, as means over the seeds, and below it curves and measures of each seed."""
    if "used" in found[0]:
        used = [np.mean([one["used"] for one in of], axis=0) for of in (before, found)]
        each = ", ".join(f"{np.mean(one['used']):.2f}" for one in found)
        nll, kl = (statistics.mean(one[key] for one in found) for key in ("nll", "kl"))
        p = p_value(*used)
        print(f"| {name} | {used[1].mean():.3f} ({each}) | {p:.5f} | {nll:.2f} | {kl:.3f} |")
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
    if not (AT / "pairs-test.jsonl").exists():
        make_rows()
    print("| policy | held-out share of words used (each seed) | p | NLL under the base | KL to the base |")
    print("|---|---|---|---|---|")
    base = once("base", given.seeds, partial(measured, BASE))
    show("base", base, base)
    for name in given.only:
        show(name, once(name, given.seeds, partial(train, name)), base)


def once(name: str, seeds: Sequence[int], measure: Callable[[int], Row]) -> list[Row]:
    """Return what was measured with each seed, now or by an earlier call."""
    paths = {seed: AT / "measured" / f"{name}-{seed}.json" for seed in seeds}
    for seed, path in paths.items():
        if not path.exists():
            path.write_text(json.dumps(measure(seed)))
    return [json.loads(path.read_text()) for path in paths.values()]


if __name__ == "__main__":
    main()
