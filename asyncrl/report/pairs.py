"""Appends the best and the worst answer of each trained group to a file that TRL reads as preferences."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.learner import Step
from asyncrl.telemetry.jsonl import Lines, Tail
from asyncrl.types import Prompt


class PairsFile:
    """JSON lines with TRL's columns `prompt`, `chosen`, `rejected`, and the step."""

    def __init__(
        self,
        path: Path,
        prompts: Mapping[tuple[int, ...], Prompt],
        decode: Callable[[Sequence[int]], str],
        *,
        step: int,
    ) -> None:
        """Append to the file, without the pairs of steps after `step`, which will be trained again.

        `prompts` has the prompt of each row of the data by its token ids.
        """
        _forget(path, step)
        self._lines, self._prompts, self._decode = Lines(path), prompts, decode

    def write(self, step: Step) -> None:
        """Append a line for each group of the step whose rewards, after shaping, differ."""
        self._lines.write([*self._pairs(step)])

    def close(self) -> None:
        self._lines.close()

    def _pairs(self, step: Step) -> Iterator[dict[str, Any]]:
        rewards = iter(step.plan.rewards.rewards_S.tolist())
        for group in step.collected.groups:
            scored = [(next(rewards), rollout) for rollout in group.rollouts]
            (most, best), (least, worst) = (of(scored, key=lambda one: one[0]) for of in (max, min))
            if most == least:
                continue
            prompt = self._prompts[tuple(best.prompt_ids.tolist())]
            answers = [one.response_ids.tolist() for one in (best, worst)]
            chosen, rejected = (
                [{"role": "assistant", "content": self._decode(ids)}]
                if prompt.messages
                else text_after(self._decode, best.prompt_ids.tolist(), ids)
                for ids in answers
            )
            asked = list(prompt.messages) or prompt.text
            yield {"step": step.version, "prompt": asked, "chosen": chosen, "rejected": rejected}


def text_after(decode: Callable[[Sequence[int]], str], before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that the tokens add to those before them.

    Tokenizers such as Llama 2's drop the blank that begins a text, so a response decoded alone would be glued
    to the last word of its prompt.
    """
    start, whole = decode(before), decode([*before, *ids])
    return whole[len(start) :] if whole.startswith(start) else decode(ids)


def _forget(path: Path, step: int) -> None:
    """Cut the file before the first line of a later step, and remove lines broken by crash or full disk."""
    if path.exists():
        with path.open("rb+") as file:  # in place, behind what is read: there may be no room for a copy
            for record in Tail(path):
                if record["step"] > step:
                    break
                file.write(json.dumps(record).encode() + b"\n")
            file.truncate()
