"""A user's own classes, called on every rank before and after each step."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Self

from asyncrl.config import registry
from asyncrl.config.base import Choice
from asyncrl.errors import ConfigError
from asyncrl.plugins import described

METHODS = ("before_step", "after_step")


class Hooks:
    """`learner.hooks`, built. What a method returns is published under `hook/` and its names."""

    def __init__(self, hooks: Sequence[tuple[str, object]] = ()) -> None:
        """Take pairs of name and hook. Raises ConfigError for a hook without any of the methods."""
        for name, hook in hooks:
            if not any(callable(getattr(hook, method, None)) for method in METHODS):
                raise ConfigError(
                    f"learner.hooks: `{name}` has no method {' or '.join(METHODS)}; write one of them"
                )
        self._hooks = tuple(hooks)

    @classmethod
    def load(cls, choices: Sequence[Choice]) -> Self:
        """Load each hook's class and construct it with its keyword arguments. Raises ConfigError."""
        return cls([(choice.name, _construct(choice)) for choice in choices])

    def before_step(self, plan: object) -> dict[str, float]:
        """`before_step(plan)` of every hook that has it: after the plan, before the first optimizer step."""
        return self._call("before_step", plan)

    def after_step(self, step: object) -> dict[str, float]:
        """`after_step(step)` of every hook that has it: when the weights are published."""
        return self._call("after_step", step)

    def _call(self, method: str, argument: object) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, hook in self._hooks:
            function = getattr(hook, method, None)
            if function is not None:
                metrics |= _metrics(f"learner.hooks: `{name}`.{method}", function, argument)
        return metrics


def _construct(choice: Choice) -> object:
    where = f"learner.hooks: `{choice.name}`"
    if ":" not in choice.name:
        raise ConfigError(
            f"{where} is no `path.py:Class` or `package.module:Class`; give the class with its file or module"
        )
    hook_class = registry.load(choice.name)
    try:
        return hook_class(**choice.params)
    except Exception as error:
        raise ConfigError(f"{where} cannot be made with {choice.params}: {described(error)}") from error


def _metrics(where: str, function: Callable[[Any], Any], argument: object) -> dict[str, float]:
    try:
        returned = function(argument)
    except Exception as error:
        raise ConfigError(
            f"{where} failed: {described(error)}; fix it, or remove it from learner.hooks"
        ) from error
    if returned is None:
        return {}
    if not isinstance(returned, Mapping) or not all(map(_is_number, returned.values())):
        raise ConfigError(
            f"{where} returned {str(returned)[:80]!r}; it may return None or a mapping of names to numbers"
        )
    return {f"hook/{name}": float(value) for name, value in returned.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
