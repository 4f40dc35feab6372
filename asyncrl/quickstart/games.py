"""Two small text environments: those of `configs/guess.yaml` and `configs/calculator.yaml`.

A text environment is a class with `reset`, which takes columns of the row, and `step`, which takes an answer
of the model and returns (observation, reward, done). The rewards of all steps add up.
"""

import re

LARGEST, GUESSES = 31, 5

Step = tuple[str, float, bool]


class Guess:
    """Find a number from 0 to 31 with five guesses; `<` and `>` say where it lies.

    Bisection finds 31 of the 32 numbers.
    """

    def reset(self, secret: int) -> None:
        """Begin with the number to be found."""
        self._secret = secret
        self._left = GUESSES

    def step(self, response: str) -> Step:
        """Compare a guess of two digits; text of another form says nothing."""
        self._left -= 1
        guess = int(response) if re.fullmatch(r"\d\d", response) else None
        if guess == self._secret:
            return "", 1.0, True
        said = "?" if guess is None else "<" if self._secret < guess else ">"
        return said, 0.0, self._left == 0


class Calculator:
    """Add two numbers. The model may ask `?12+34` for `46>` once, or answer immediately."""

    def reset(self, answer: str) -> None:
        """Begin with the answer that is looked for."""
        self._answer = answer
        self._has_asked = False

    def step(self, response: str) -> Step:
        """Compute what is asked; anything else is the answer."""
        asked = re.fullmatch(r"\?(\d+)\+(\d+)", response)
        if asked is None or self._has_asked:
            return "", float(response == self._answer), True
        self._has_asked = True
        return f"{int(asked[1]) + int(asked[2])}>", 0.0, False
