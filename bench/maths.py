r"""The built-in reward `math` beside the library under it: `python -m bench.maths FILES [--json FILE]`.

Column `answer` of each row of the files, such as MATH-500 and the test set of GSM8K, is scored against its
own row in several ways of writing, and against two other rows in `\boxed{}`. Reward and library take turns.
Seconds are those of the processor, so that other work on the machine matters less.
"""

import argparse
import json
import operator
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from math_verify import parse, verify

from asyncrl.rewards.builtin import maths
from bench.environment import describe, report

BOXED = r"\boxed{%s}"
WAYS = {"plain": "%s", "$": "$%s$", "boxed": BOXED, "prose": "The answer is $%s$."}
# How far behind a row the two rows are whose answers are wrong for it, as a rule.
OTHERS = (1, 7)
# Texts of a turn: more than math-verify remembers (20), so that no side profits from the other's work.
BLOCK = 50


def cases(rows: list[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the name of each case, and its pairs of response and column `answer`."""
    texts = [row.rpartition("####")[2].strip() for row in rows]
    for name, way in WAYS.items():
        yield name, [(way % text, row) for text, row in zip(texts, rows, strict=True)]
    yield "other rows", [(BOXED % texts[at - back], row) for back in OTHERS for at, row in enumerate(rows)]


def reward(response: str, answer: str) -> float:
    """The score of the built-in reward."""
    return maths("", response, answer)[0]


def library(response: str, answer: str) -> float:
    """The verdict of math-verify on the same texts."""
    return float(verify(parse(BOXED % answer.rpartition("####")[2].strip()), parse(response)))


def measured(rows: list[str]) -> Iterator[dict[str, object]]:
    """One row of the table per case."""
    sides = (reward, library)
    for name, pairs in cases(rows):
        scores: tuple[list[float], list[float]] = ([], [])
        spent_s = [0.0, 0.0]
        for start in range(0, len(pairs), BLOCK):
            for side in (0, 1) if start // BLOCK % 2 else (1, 0):
                started_s = time.process_time()
                scores[side].extend(sides[side](*pair) for pair in pairs[start : start + BLOCK])
                spent_s[side] += time.process_time() - started_s
        yield {
            "case": name,
            "n": len(pairs),
            "scored_1_percent": round(100 * sum(scores[0]) / len(pairs), 2),
            "as_math_verify_percent": round(100 * sum(map(operator.eq, *scores)) / len(pairs), 2),
            "s_per_1000": round(1000 * spent_s[0] / len(pairs), 2),
            "ratio_to_math_verify": round(spent_s[0] / spent_s[1], 3),
        }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.jsonl")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    # Other work on the machine ends no comparison: the limit of `maths` is by the clock.
    alarm, limit = signal.alarm, "asyncrl.rewards.builtin._DECISION_S"
    with mock.patch("signal.alarm", lambda seconds: alarm(20 * seconds)), mock.patch(limit, 100.0):
        sets = {
            f"{file.parent.name}/{file.stem}": [json.loads(line)["answer"] for line in file.open()]
            for file in options.files
        }
        for rows in sets.values():  # warms up
            list(measured(rows[:BLOCK]))
        table = [{"rows": name, **row} for name, rows in sets.items() for row in measured(rows)]
    print(*table[0], sep="\t")
    for row in table:
        print(*row.values(), sep="\t")
    if options.json is not None:
        report({"environment": describe("math-verify", "sympy"), "rows": table}, options.json)


if __name__ == "__main__":
    main()
