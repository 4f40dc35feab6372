"""Which keys of a config choose a function, and of which kind (see `asyncrl.algo.registry`)."""

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.base import Choice

Keys = tuple[str | int, ...]
"""The way to a value: keys of sections, indices of lists."""

CHOICES: dict[Keys, str] = {
    ("algorithm", "advantage"): "advantage",
    ("algorithm", "policy_loss"): "policy_loss",
    ("algorithm", "correction"): "correction",
    ("algorithm", "aggregation"): "aggregation",
    ("algorithm", "kl", "estimator"): "kl",
}
CHOICE_LISTS: dict[Keys, str] = {
    ("algorithm", "rejections"): "correction",
    ("algorithm", "filters"): "filter",
    ("algorithm", "shaping"): "shaping",
}


def kind_at(keys: Keys) -> str | None:
    """The kind of function chosen at `keys`; None where none is."""
    return CHOICES.get(keys) or (CHOICE_LISTS.get(keys[:-1]) if keys and isinstance(keys[-1], int) else None)


def default_name(keys: Keys) -> str | None:
    """The name that a choice has when a config says nothing; None for items of lists."""
    part: object = AlgorithmConfig()
    for key in keys[1:]:
        part = getattr(part, str(key), None)
    return part.name if isinstance(part, Choice) else None
