"""The sections about the weights of a run: which checkpoints stay, and which weights end the training."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from asyncrl.algo.ranges import PositiveInt
from asyncrl.config.base import Mistake, Mistakes, Part, marked

# As the learner logs it; the pattern refuses a name without its kind.
Metric = Annotated[str, Field(pattern=r"^\w+/\S+$", examples=["eval/accuracy"])]


class CheckpointConfig(Part):
    """Saving and resuming of runs."""

    every: PositiveInt = 50
    """Steps between checkpoints; the last step always saves one."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Number of checkpoints kept. The store forgets a group when the oldest of them holds it, so a damaged
    newest checkpoint costs steps but no group."""
    keep_every: PositiveInt | None = None
    """N: every Nth checkpoint, of the steps that N times `every` divides, is kept for good. Null: none."""
    best: Metric | None = None
    """Metric such as `eval/accuracy`. The checkpoint with its best value is kept, and named in the file
    `checkpoints/BEST`; `asyncrl export RUN --best` and `asyncrl eval RUN --best` take it."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of that metric is the best."""

    @model_validator(mode="after")
    def _best_is_of_a_metric(self) -> Self:
        if self.best is None and self.best_is != "highest":
            text = (
                "checkpoint.best_is is lowest, but checkpoint.best names no metric; name it, or drop best_is"
            )
            raise Mistakes(Mistake(("checkpoint.best_is", "checkpoint.best"), text))
        return self

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
    """Number of values in a row, none of them a new best one, after which the training ends."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value is the best; with `lowest`, `reaches` is a value from above."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.reaches is None and self.patience is None:
            text = "found neither reaches nor patience; set a value that ends the training, or a patience"
            raise Mistakes(Mistake(("learner.stop_when.reaches", "learner.stop_when.patience"), text))
        return self
