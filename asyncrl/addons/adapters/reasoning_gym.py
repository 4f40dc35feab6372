"""`reasoning_gym:NAME`, for example `reasoning_gym:chain_sum?max_terms=4`: tasks of Reasoning Gym.

A row of `asyncrl dataset` has the task in the column `entry`; without that column, a task is made from the
episode's seed. The answer is what stands between the last `<answer>` and `</answer>`, or the whole response.
The option `attempts` (1) allows more than one; the reward is the score of the last attempt.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from asyncrl.addons.adapters.base import split_options

AGAIN = "This answer is wrong. Try again."


def environment(name: str) -> type:
    """Return the class of a text environment. Other options are those of the dataset. Raises ValueError."""
    dataset_name, options = split_options(name)
    most = options.pop("attempts", 1)
    scorer = reasoning_gym.create_dataset(dataset_name, size=1, seed=0, **options)

    class Task:
        def reset(self, seed: int, entry: Mapping[str, Any] | None = None) -> str | None:
            """Begin. The row's prompt has the question of an entry already."""
            self._left = most
            self._entry = entry
            if entry is not None:
                return None
            self._entry = reasoning_gym.create_dataset(dataset_name, size=1, seed=seed, **options)[0]
            return question(self._entry)

        def step(self, response: str) -> tuple[str, float, bool]:
            answer = extract_answer(response)
            score = float(scorer.score_answer(response.strip() if answer is None else answer, self._entry))
            self._left -= 1
            is_over = score == 1.0 or self._left <= 0
            return ("", score, True) if is_over else (AGAIN, 0.0, False)

    return Task


def rows(name: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return rows of a dataset with the columns `prompt` and `entry`. Raises ValueError."""
    dataset_name, options = split_options(name)
    options.pop("attempts", None)
    dataset = reasoning_gym.create_dataset(dataset_name, size=size, seed=seed, **options)
    for entry in dataset:
        kept, right = json.loads(json.dumps(entry)), entry["answer"]
        if right is not None and dataset.score_answer(right, kept) != dataset.score_answer(right, entry):
            raise ValueError("its tasks have values that JSON does not keep; take data.train: seeds:N")
        yield {"prompt": question(entry), "entry": entry}


def question(entry: Mapping[str, Any]) -> str:
    """Return the prompt of a task, which says where the answer goes."""
    return f"{entry['question']}\n\n{SYSTEM_PROMPTS['direct']}"
