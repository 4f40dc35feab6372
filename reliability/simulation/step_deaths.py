"""The deaths of learners within steps as they were, to judge what `launch.step_deaths` makes of its file."""

from collections.abc import Sequence

from asyncrl.launch.step_deaths import MAX_DEATHS, StepDeaths

from .lane import require


class StepDeathsTold:
    """What has happened."""

    def __init__(self) -> None:
        self._under_way: int | None = None
        self._deaths: dict[int, dict[bytes, int]] = {}
        """Version -> its frames -> how many learners in a row have died with each."""

    def began(self, version: int, frames: Sequence[bytes]) -> None:
        """A learner trains on them."""
        before = self._deaths.get(version, {})
        self._deaths[version] = {frame: before.get(frame, 0) for frame in frames}
        self._under_way = version

    def ended(self, version: int) -> None:
        """It has trained."""
        self._deaths.pop(version, None)
        self._under_way = None

    def learner_started(self, counted: StepDeaths) -> None:
        """If a step was under way, another learner has died in it."""
        if self._under_way is not None:
            for frame in self._deaths[self._under_way]:
                self._deaths[self._under_way][frame] += 1
        self._under_way = None
        found = {version: sorted(step.values()) for version, step in counted._steps.items()}
        told = {version: sorted(step.values()) for version, step in self._deaths.items()}
        require(found == told, "the deaths of steps are counted wrongly", found, told)

    def may_condemn(self, frame: bytes) -> bool:
        return any(step.get(frame, 0) >= MAX_DEATHS for step in self._deaths.values())
