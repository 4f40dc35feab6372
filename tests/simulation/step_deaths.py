"""The deaths of learners within steps as they were, to judge what `launch.step_deaths` makes of its file."""

from asyncrl.launch.step_deaths import MAX_DEATHS, StepDeaths

from .lane import require


class StepDeathsTold:
    """What has happened."""

    def __init__(self) -> None:
        self._under_way: int | None = None
        self._deaths: dict[int, tuple[list[bytes], int]] = {}
        """Version -> the frames that are trained on, and how many learners have died of it."""

    def began(self, version: int, frames: list[bytes]) -> None:
        """A learner trains on them."""
        if self._deaths.get(version, ([], 0))[0] != frames:
            self._deaths[version] = (frames, 0)
        self._under_way = version

    def ended(self, version: int) -> None:
        """It has trained."""
        self._deaths.pop(version, None)
        self._under_way = None

    def learner_started(self, counted: StepDeaths) -> None:
        """If a step was under way, another learner has died in it."""
        if self._under_way is not None:
            frames, deaths = self._deaths[self._under_way]
            self._deaths[self._under_way] = (frames, deaths + 1)
        self._under_way = None
        found = {version: step.deaths for version, step in counted._steps.items()}
        told = {version: deaths for version, (_, deaths) in self._deaths.items()}
        require(found == told, "the deaths of steps are counted wrongly", found, told)

    def may_condemn(self, frame: bytes) -> bool:
        return any(deaths >= MAX_DEATHS and frame in frames for frames, deaths in self._deaths.values())
