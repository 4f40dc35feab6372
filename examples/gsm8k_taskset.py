"""GSM8K as a taskset of verifiers 0.4, for configs/verifiers-gsm8k-qwen2.5-1.5b-8gpu.yaml.

`source` is a dataset of the Hugging Face hub, or a file of JSON lines with `question` and `answer`.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["GSM8K"]

SYSTEM = "Solve the problem step by step. End with a line `#### ` and the final number."
NUMBER = re.compile(r"#### *(-?[\d,]*\.?\d+)")


class Problem(vf.TaskData):
    answer: str


class Solve(vf.Task[Problem]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        found = NUMBER.findall(trace.last_reply)
        return float(bool(found) and number(found[-1]) == number(self.data.answer))

    @vf.metric
    async def has_answer(self, trace: vf.Trace) -> float:
        return float(bool(NUMBER.search(trace.last_reply)))


class Config(vf.TasksetConfig):
    source: str = "openai/gsm8k"
    split: str = "train"


class GSM8K(vf.Taskset[Solve, Config]):
    """The problems of one split."""

    def load(self) -> Iterable[Solve]:
        for row in self.rows():
            answer = NUMBER.findall(row["answer"])[-1]
            yield Solve(
                Problem(prompt=row["question"], system_prompt=SYSTEM, answer=answer), self.config.task
            )

    def rows(self) -> Iterable[dict[str, str]]:
        if Path(self.config.source).is_file():
            return map(json.loads, Path(self.config.source).read_text().splitlines())
        from datasets import load_dataset

        return load_dataset(self.config.source, "main", split=self.config.split)


def number(text: str) -> float:
    return float(text.replace(",", ""))
