"""The sections about the weights of a run: which checkpoints stay, and which weights end the training."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.algo.ranges import PositiveInt
from asyncrl.config.base import Part, marked

# As the learner logs it; the pattern refuses a name without its kind.
Metric = Annotated[str, Field(pattern=r"^\w+/\S+$", examples=["eval/accuracy"])]


class HubConfig(Part):
    """Where the model of checkpoints is pushed on the Hugging Face hub, next to training."""

    repo: Annotated[
        str, Field(pattern=r"^[\w.-]+/[\w.-]+$", examples=["you/model"]), marked(stand_in="no/repository")
    ]
    """Repository `OWNER/NAME`; the token is that of `hf auth login`, or HF_TOKEN."""
    every: PositiveInt | None = None
    """Steps between pushes, of those with a checkpoint; null: only the last one."""
    private: bool = True
    """Whether a new repository is private."""


class CheckpointConfig(Part):
    """Saving and resuming of runs."""

    every: PositiveInt = 50
    """Steps between checkpoints; the last step saves one."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept; a damaged one then costs steps but no group."""
    keep_every: PositiveInt | None = None
    """N: every Nth checkpoint is kept for good."""
    best: Metric | None = None
    """Metric such as `eval/accuracy`. The checkpoint with its best value is kept, for `asyncrl export RUN
    --best` and `asyncrl eval RUN --best`."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of that metric is the best."""
    hub: HubConfig | None = None
    """Where to push the model; by default nowhere."""

    def kept(self, steps: int) -> dict[str, int]:
        """Return how many checkpoints are left after so many steps, at most, by the key that keeps them."""
        lasting = steps // (self.every * self.keep_every) if self.keep_every else 0
        return {"keep": self.keep, "keep_every": lasting, "best": int(self.best is not None)}


class StopConfig(Part):
    """End of the training before `learner.steps`, by a metric."""

    metric: Annotated[Metric, marked(stand_in="eval/accuracy")]
    """Metric such as `eval/accuracy`, of evaluations or of steps."""
    reaches: float | None = None
    """Value at which the training ends."""
    patience: PositiveInt | None = None
    """Values in a row without a new best one that end the training."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value is the best; with `lowest`, `reaches` is met from above."""
