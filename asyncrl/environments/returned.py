"""Reads what user code returned. Another type than those that are allowed is a fault of the environment."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.environments.base import Message
from asyncrl.errors import EnvironmentFault

# Names of SkyRL and OpenRLHF, in their dicts.
OBSERVATIONS = ("observations", "observation", "environment_feedback")
STEP = (
    "(observation, reward, done), (observation, reward, terminated, truncated, info), or a dict with "
    "`observations` or `environment_feedback`, `reward` or `rewards`, and `done`"
)

Observation = str | Sequence[Message] | None


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a text environment."""

    observation: Observation
    reward: float | None
    done: bool
    truncated: bool = False


def read_reset(reply: Mapping[str, Any]) -> Observation:
    """Return the first observation; Gymnasium returns a pair of it and a dict."""
    value = reply["value"]
    if reply.get("tuple"):
        if len(value) != 2 or not isinstance(value[1], Mapping):
            raise _wrong("reset", value, "an observation, or (observation, info)")
        value = value[0]
    return read_observation("reset", value)


def read_step(reply: Mapping[str, Any]) -> Step:
    """Return a step in one of the forms of `STEP`."""
    match reply["value"]:
        case [observation, reward, bool(done)]:
            step = (observation, reward, done, False)
        case [observation, reward, bool(terminated), bool(truncated), _]:
            step = (observation, reward, terminated or truncated, truncated and not terminated)
        case {"done": bool(done), **fields}:
            observation = next((fields[name] for name in OBSERVATIONS if name in fields), None)
            step = (observation, fields.get("reward", fields.get("rewards")), done, False)
        case value:
            raise _wrong("step", value, STEP)
    observation, reward, done, truncated = step
    return Step(read_observation("step", observation), read_reward("step", reward), done, truncated)


def read_reward(method: str, value: object) -> float | None:
    """Return a finite number, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(method, value, "a reward that is one finite number, or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise EnvironmentFault(
            f"`{method}` returned the reward {number}; it must be finite", reason="returned"
        )
    return number


def read_observation(method: str, value: object) -> Observation:
    """Return text, messages with a role and text, or None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in value
    ):
        return value
    raise _wrong(method, value, "an observation that is text, or a list of messages {role, content}")


def _wrong(method: str, value: object, allowed: str) -> EnvironmentFault:
    found = f"{type(value).__name__} `{str(value)[:80]}`"
    return EnvironmentFault(f"`{method}` returned {found}; allowed is {allowed}", reason="returned")
