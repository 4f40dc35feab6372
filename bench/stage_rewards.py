"""What answers are worth in demonstrations of bench/stages.py."""

from typing import Any


def letter(prompt: str, response: str, answer: str, **row: Any) -> float:
    """Return how many more characters are the answer than the other one of `a` and `b`, in fours."""
    return (response.count(answer) - response.count("ab".replace(answer, ""))) / 4


def stops(prompt: str, response: str, **row: Any) -> float:
    """Return the full stops of a story, of at most six, as a share of six."""
    return min(response.count("."), 6) / 6
