"""Types of parameters. To a type checker they are plain numbers; a config is held to their bounds.

A config is checked without torch, by the signatures of this package. So a parameter that a config may set is
annotated with a name from this module, and this module does not import torch.
"""

from collections.abc import Mapping as Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
AboveOne = Annotated[float, Field(gt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
# Of one prompt: they are one group, in one frame.
Samples = Annotated[int, Field(ge=1, le=4096)]
# Of one kind, of one process.
Processes = Annotated[int, Field(ge=1, le=1024)]
ZeroOrOne = Annotated[int, Field(ge=0, le=1)]  # a Literal would accept true and false

# A ratio belongs to a token, or to a sequence: the product or the geometric mean of its tokens' ratios.
Level = Literal["token", "sequence", "geometric"]

# Bound on the rollouts of one episode: the branches of its conversation, and its other conversations.
MOST_SEQUENCES = 256
# Bound on the tokens that a sampled one could have been, of which all are recorded.
MOST_KEPT = 256
# Bound on the absolute value of a reward: sums of squares over a batch stay finite in float32.
MOST_REWARD = 1e9
# Rewards that differ by no more than this are equal, as for the filter `zero_variance`: 0.7 + 0.2 + 0.1 < 1.
EQUAL = 1e-6


def is_solved(reward: Any, solved: float = 1.0) -> Any:
    """Return whether a reward, or each one of a tensor, is at least `solved`, give or take rounding."""
    return reward >= solved - EQUAL
