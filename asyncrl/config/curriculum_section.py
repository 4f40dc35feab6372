"""The section `data.curriculum` of a config."""

from typing import Annotated

from pydantic import Field

from asyncrl.config.base import Part


class CurriculumConfig(Part):
    """Skips prompts that the policy always or never solves."""

    floor: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Share of tickets that try a skipped prompt again; null skips nothing."""
    solved: float = 1.0
    """Reward from which a response counts as solved. A prompt is always solved if all responses of its newest
    group are, and never solved if all have one equal reward below this one."""
