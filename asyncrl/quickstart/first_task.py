"""What a user begins with: the task of `asyncrl init`, and the model and data of `asyncrl quickstart`."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.named_files import has_chat_template
from asyncrl.config.resolved import dump_values
from asyncrl.errors import ConfigError, RunError
from asyncrl.rewards.builtin import obstacle

# The quick-start model, so that a first run waits for no warm-up; `python examples/pupils.py sums DIRECTORY`
# makes the same again.
SHIPPED = Path(__file__).with_name("adder")
RECORD = "build.json"
CONFIG = "task.yaml"
OWN, EXAMPLES = "own", "examples"
# The numbers of the example rows; the last two rows are held out.
_NUMBERS = ((12, 34), (7, 58), (40, 25), (63, 19), (28, 46), (81, 16), (5, 77), (39, 52))
_HELD_OUT = 2
_HEADER = """\
# Written by `asyncrl init`. Paths are relative to the directory in which a command is given.
#
#     asyncrl reward test {config}     # scores reference and wrong answers
#     asyncrl up {config}              # trains; the same command resumes
#
# docs/config.md has every key. A model without a chat template needs `chat_template: false`.
"""
_FUNCTION = '''\
"""The reward of this task: see docs/own-task.md."""

import re


def reward(prompt: str, response: str, answer: str, **columns) -> tuple[float, str | None]:
    """Score 1 if the last number of the response is the row's column `answer`; also return that number."""
    numbers = re.findall(r"\\d+", response)
    found = numbers[-1] if numbers else None
    return float(found == answer), found
'''


def _sum(text: str) -> Callable[[int, int], dict[str, Any]]:
    return lambda a, b: {"prompt": text.format(f"{a} + {b}"), "answer": str(a + b)}


def _story(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"Write a story about {a} geese and {b} foxes."}


# A row of two numbers for each reward function: its columns are those that the function needs.
ROWS: Mapping[str, Callable[[int, int], dict[str, Any]]] = {
    OWN: _sum("What is {}?"),
    "arithmetic": _sum("What is {}? Reply with the number only."),
    "boxed": _sum("What is {}? Put the answer into \\boxed{{}}."),
    "choice": lambda a, b: {"prompt": f"What is {a} + {b}? (A) {a + b + 10} (B) {a + b}", "answer": "B"},
    "code": lambda a, b: {
        "prompt": f"Write a Python function f(x) that returns {a} * x + {b}.",
        "tests": [f"assert f({x}) == {a * x + b}" for x in (0, 3)],
    },
    "exact_match": _sum("What is {}? Reply with the number only."),
    "format": lambda a, b: {"prompt": f"What is {a} + {b}? Reply as <think>...</think><answer>...</answer>."},
    "gsm8k": lambda a, b: {
        "prompt": f"Ann has {a} figs and buys {b}. How many has she? End with #### and the number.",
        "answer": f"{a} + {b} = {a + b}\n#### {a + b}",
    },
    "json_schema": lambda a, b: {
        "prompt": f'What is {a} + {b}? Reply as JSON, such as {{"sum": 3}}.',
        "schema": {"type": "object", "required": ["sum"], "properties": {"sum": {"const": a + b}}},
    },
    "length": _story,
    "math": _sum("What is {}? Put the answer into \\boxed{{}}."),
    "regex": lambda a, b: {"prompt": f"What is {a} + {b}? Reply with the number only."},
    "repetition": _story,
    "words_used": lambda a, b: {**_story(a, b), "words": ["goose", "fox"]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What `asyncrl init` asks."""

    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """A Hugging Face directory or hub name."""
    rows: str = EXAMPLES
    """`examples`, or the place of the user's rows, as in `data.train`."""
    reward: str = OWN
    """A key of `ROWS`."""
    longest: int = 256
    """Token limit of responses."""
    device: str = "cpu"
    """cpu or gpu."""

    def config(self, directory: Path) -> dict[str, Any]:
        """Return the values of the config."""
        path, on_cpu = Path(self.model), self.device == "cpu"
        # As `run.name` allows.
        name = re.sub(r"[^A-Za-z0-9._-]", "-", directory.resolve().name).lstrip("._-")[:64] or "task"
        model = {"path": self.model, "chat_template": not path.is_dir() or has_chat_template(path)}
        data = {"train": self.rows}
        if self.rows == EXAMPLES:
            data = {"train": str(directory / "train.jsonl"), "eval": str(directory / "test.jsonl")}
        function: dict[str, Any] = {"function": self.reward}
        if self.reward == OWN:
            function = {"function": f"{directory / 'task.py'}:reward"}
        elif self.reward == "length":
            function["params"] = {"target": max(1, self.longest // 2), "most": max(2, self.longest)}
        elif self.reward == "regex":
            function["params"] = {"regex": r"\s*\d+\s*"}
        return {
            "run": {"name": name},
            # CPUs are slow at bfloat16.
            "model": model | ({"dtype": "float32"} if on_cpu else {}),
            "data": data,
            "reward": {"functions": [function]},
            "batch": {"groups": 8 if on_cpu else 32, "group_size": 8},
            "sampling": {"max_response_tokens": self.longest},
            "learner": {"steps": 100, "device": "cpu" if on_cpu else "cuda"},
        }


def require_absent(files: Iterable[Path]) -> None:
    """Raise ConfigError with the names of files that exist."""
    if found := [str(file) for file in files if os.path.lexists(file)]:
        cure = "give another directory, or move them away"
        raise ConfigError(f"init: found {', '.join(found)}, and writes over no file; {cure}")


def write_task(directory: Path, answers: Answers) -> list[Path]:
    """Write the files of a task; return their paths, the config first. Raises ConfigError if one exists."""
    if lacking := obstacle(answers.reward):
        raise ConfigError(f"init: {lacking}")
    if answers.reward == OWN and ":" in str(directory):
        text = "has a `:`, which divides FILE:FUNCTION in reward.functions; give another directory"
        raise ConfigError(f"init: {directory} {text}")
    text = dump_values(answers.config(directory))
    files = {CONFIG: _HEADER.format(config=directory / CONFIG) + text}
    if answers.rows == EXAMPLES:
        rows = [json.dumps(ROWS[answers.reward](a, b)) + "\n" for a, b in _NUMBERS]
        files |= {"train.jsonl": "".join(rows[:-_HELD_OUT]), "test.jsonl": "".join(rows[-_HELD_OUT:])}
    if answers.reward == OWN:
        files["task.py"] = _FUNCTION
    paths = {directory / name: content for name, content in files.items()}
    require_absent(paths)
    directory.mkdir(parents=True, exist_ok=True)
    for path, content in paths.items():
        path.write_text(content, encoding="utf-8")
    return list(paths)


def found_model(directory: Path, digest: str, report: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the record of the model in `directory` if it is the one of `digest`.

    Raises RunError if the directory holds something else than a quick-start model.
    """
    record = directory / RECORD
    if not record.is_file():
        if directory.exists():
            cure = "remove it or name another directory"
            raise RunError(f"{directory} exists without a quick-start model; {cure}")
        return None
    built: dict[str, Any] = json.loads(record.read_text())
    if built["digest"] != digest:
        return None
    report(f"the quick-start model is ready in {directory}: held-out accuracy {built['accuracy']:.0%}")
    return built


def place_model(directory: Path, report: Callable[[str], None]) -> None:
    """Copy model and data to `directory` unless they are there. Raises RunError."""
    digest = json.loads((SHIPPED / RECORD).read_text())["digest"]
    if found_model(directory, digest, report) is None:
        from asyncrl.run.directory import write_directory  # it imports what `asyncrl init` needs not

        with write_directory(directory) as writing:
            shutil.copytree(SHIPPED, writing, dirs_exist_ok=True)
        found_model(directory, digest, report)
