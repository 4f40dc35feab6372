"""Calls a user's own classes on every rank before and after each step."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Self

from asyncrl.config import registry
from asyncrl.config.base import Choice
from asyncrl.errors import ConfigError
from asyncrl.plugins import described

METHODS = ("before_step", "after_step")


class Hooks:
    """The hooks of a run. The numbers that a method returns are published under `hook/` and their names."""

    def __init__(self, hooks: Sequence[tuple[str, object]] = ()) -> None:
        """Take pairs of name and hook. Raises ConfigError for a hook without any of the methods."""
        for name, hook in hooks:
            if not any(callable(getattr(hook, method, None)) for method in METHODS):
                wanted = " or ".join(METHODS)
                raise ConfigError(f"learner.hooks: `{name}` has no method {wanted}; write one of them")
        self._hooks = tuple(hooks)

    @classmethod
    def load(cls, choices: Sequence[Choice]) -> Self:
        """Load each hook's class and construct it with its keyword arguments. Raises ConfigError."""
        hooks: list[tuple[str, object]] = []
        for choice in choices:
            where = f"learner.hooks: `{choice.name}`"
            if ":" not in choice.name:
                raise ConfigError(f"{where} is not a class; write `path.py:Class` or `package.module:Class`")
            hook_class = registry.load(choice.name)
            try:
                hooks.append((choice.name, hook_class(**choice.params)))
            except (Exception, SystemExit) as error:
                found = f"{where} cannot be made with {choice.params}: {described(error)}"
                raise ConfigError(found) from error
        return cls(hooks)

    def before_step(self, plan: object) -> dict[str, float]:
        """Call the hooks after the plan is made and before the first optimizer step."""
        return self._call("before_step", plan)

    def after_step(self, step: object) -> dict[str, float]:
        """Call the hooks after the weights are published."""
        return self._call("after_step", step)

    def _call(self, method: str, argument: object) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, hook in self._hooks:
            if (function := getattr(hook, method, None)) is not None:
                metrics |= _metrics(f"learner.hooks: `{name}`.{method}", function, argument)
        return metrics


def _metrics(where: str, function: Callable[[Any], Any], argument: object) -> dict[str, float]:
    try:
        returned = function(argument)
        if returned is None:
            return {}
        if isinstance(returned, Mapping) and all(
            isinstance(value, Real) and not isinstance(value, bool) for value in returned.values()
        ):
            return {f"hook/{name}": float(value) for name, value in returned.items()}
    except (Exception, SystemExit) as error:
        message = f"{where} failed: {described(error)}; fix it, or remove it from learner.hooks"
        raise ConfigError(message) from error
    raise ConfigError(
        f"{where} returned {str(returned)[:80]!r}; it may return None or a mapping of names to numbers"
    )
