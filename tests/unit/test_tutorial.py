"""The task of docs/tutorial.md is what the page says."""

import json
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "plain.py"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("A duck swims on the pond near a leaf", 1.0),
        ("A duck, a leaf and a pond in the sun", 0.0),
        ("A duck and a leaf in sun", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_eight_words_without_a_comma(response: str, score: float) -> None:
    assert runpy.run_path(str(EXAMPLE))["plain"]("Describe a duck and a leaf.", response) == score


def test_held_out_prompts_have_other_nouns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    train, test = (
        [
            json.loads(line)["prompt"]
            for line in (tmp_path / "build" / "plain" / f"{name}.jsonl").read_text().splitlines()
        ]
        for name in ("train", "test")
    )
    assert (len(set(train)), len(set(test))) == (180, 120)
    nouns = [
        {prompt.split()[2] for prompt in prompts} | {prompt.split()[5].strip(".") for prompt in prompts}
        for prompts in (train, test)
    ]
    assert not nouns[0] & nouns[1]
