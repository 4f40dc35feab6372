"""The deaths of learners within steps as they were, to judge what `launch.step_deaths` makes of its file."""

from collections import Counter

from asyncrl.launch.step_deaths import MAX_DEATHS


class StepDeathsTold:
    """What has happened."""

    def __init__(self) -> None:
        self._under_way: tuple[bytes, ...] = ()
        self._deaths = Counter[tuple[bytes, ...]]()
        """By the frames of a step."""

    def began(self, frames: list[bytes]) -> None:
        """A learner trains on them."""
        self._under_way = tuple(frames)

    def ended(self) -> None:
        """It has trained."""
        self._under_way = ()

    def learner_started(self) -> None:
        """If a step was under way, another learner has died in it."""
        if self._under_way:
            self._deaths[self._under_way] += 1
        self._under_way = ()

    def may_condemn(self, frame: bytes) -> bool:
        return any(deaths >= MAX_DEATHS and frame in frames for frames, deaths in self._deaths.items())
