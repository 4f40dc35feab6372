"""What goes wrong and how often, drawn per seed: some runs have one kind of fault only, some have all."""

from dataclasses import dataclass
from random import Random
from typing import ClassVar

CHANCES = {"lost_request": 0.03, "delayed_request": 0.02, "lost_reply": 0.04, "late_duplicate": 0.04}
"""Per request."""
MEAN_S = {
    "generator_kill": 20.0,
    "generator_pause": 30.0,
    "generator_hang": 60.0,
    "generator_leave": 60.0,
    "strange_message": 10.0,
    "learner_kill": 25.0,
    "learner_hang": 60.0,
    "learner_pause": 50.0,
    "second_learner": 50.0,
    "store_kill": 30.0,
    "store_wipe": 60.0,
    "store_failover": 60.0,
    "store_relapse": 30.0,
    "store_pause": 60.0,
    "functions_lost": 60.0,
    "clock_jump": 60.0,
    "out_of_memory": 60.0,
}
"""Mean time between two faults of a kind."""
OTHER = {
    "garbage_frame": 0.2,  # per group
    "foreign_group": 0.05,  # authentic, and of no use: of another lane, or of other settings
    "deadly_group": 0.08,  # kills every learner that trains on it
    "late_group": 0.3,
    "reward_fails": 0.1,
    "lost_message": 0.1,  # per message of a generator to the learner
    "late_message": 0.05,
    "repeated_message": 0.05,
    "lost_order": 0.05,  # per message of the learner
    "late_order": 0.05,
    "repeated_order": 0.05,
    "failed_transfer": 0.2,
    "false_report": 0.2,  # per update of weights, before it is there: of other weights
    "torn_checkpoint": 0.3,  # per start of a learner
    "changed_settings": 0.3,
    "ambush": 0.15,  # per rare call of one
    "echo": 0.5,  # whenever the store loses something
    "usurper_of_nothing": 0.3,  # per second learner
}
RARE = {"reject": 10.0, "commit": 3.0, "recover": 3.0, "close": 3.0}
"""How much likelier a lost reply or repeated request is, for functions that are called less often."""


@dataclass(slots=True)
class Faults:
    """The faults of one run; none after `end`."""

    random: Random
    chances: dict[str, float]
    means_s: dict[str, float]
    is_on: bool = True
    struck: dict[str, int] | None = None

    NAMES: ClassVar[tuple[str, ...]] = (*CHANCES, *OTHER, *MEAN_S)

    @classmethod
    def draw(cls, random: Random) -> "Faults":
        """Half of all kinds, each more or less often."""
        chances = {name: chance * random.choice([0, 0, 1, 3]) for name, chance in (CHANCES | OTHER).items()}
        means_s = {
            name: mean_s * random.choice([0.5, 1.0])
            for name, mean_s in MEAN_S.items()
            if random.random() < 0.5
        }
        return cls(random, chances, means_s, struck={})

    def strikes(self, name: str, *, share: float = 1.0, also_in_calm: bool = False) -> bool:
        """Whether this happens now; `share` scales its chance."""
        chance = share * self.chances[name]
        if not ((self.is_on or also_in_calm) and chance and self.random.random() < chance):
            return False
        self.count(name)
        return True

    def count(self, name: str) -> None:
        """For the figures."""
        assert self.struck is not None
        self.struck[name] = self.struck.get(name, 0) + 1
