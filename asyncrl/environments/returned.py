"""Reads what user code returned. Another type than those that are allowed is a fault of the environment."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments.base import Message
from asyncrl.errors import EnvironmentFault, as_unicode

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
    state: int = field(default=0, compare=False)  # of the environment after the step, see `state_of`


def read_reset(reply: Mapping[str, Any]) -> tuple[Observation, int]:
    """Return the first observation, and its state; Gymnasium returns a pair of the first and a dict."""
    value, info = reply["value"], None
    if reply.get("tuple"):
        if len(value) != 2 or not isinstance(value[1], Mapping):
            raise _wrong("reset", value, "an observation, or (observation, info)")
        value, info = value
    return _read_observation("reset", value), state_of(value, info)


def read_step(reply: Mapping[str, Any]) -> Step:
    """Return a step in one of the forms of `STEP`."""
    info: object = None
    match reply["value"]:
        case [observation, reward, bool(done)]:
            step = (observation, reward, done, False)
        case [observation, reward, bool(terminated), bool(truncated), info]:
            step = (observation, reward, terminated or truncated, truncated and not terminated)
        case {"done": bool(done), **info}:
            observation = next((info[name] for name in OBSERVATIONS if name in info), None)
            step = (observation, info.get("reward", info.get("rewards")), done, False)
        case value:
            raise _wrong("step", value, STEP)
    observation, reward, done, truncated = step
    state = state_of(observation, info)
    return Step(_read_observation("step", observation), read_reward("step", reward), done, truncated, state)


def state_of(observation: object, info: object) -> int:
    """Return a hash of 64 bits, never 0, of what `info` names `state`, and without it of the observation.

    Turns that begin with equal hashes began in the same state. `gigpo` compares them.
    """
    named = info.get("state") if isinstance(info, Mapping) else None
    text = json.dumps(observation if named is None else [named], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) or 1


def read_reward(method: str, value: object) -> float | None:
    """Return a finite number, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(method, value, "a reward that is one finite number, or None")
    with suppress(OverflowError):  # of an integer that is too large for a float
        if math.isfinite(value):
            return float(value)
    found = f"`{method}` returned the reward {value!s:.80}"
    raise EnvironmentFault(f"{found}; it must be finite", reason="returned")


def read_numbers(what: str, given: Mapping[str, Any]) -> dict[str, float]:
    """Return finite numbers by name, without those that are None: they are unknown, and not 0."""
    read = {name: read_reward(f"{what} {name}", one) for name, one in given.items()}
    return {name: one for name, one in read.items() if one is not None}


def read_result(what: str, value: object) -> tuple[float | None, dict[str, float]]:
    """Return the reward of an episode, and its parts if it is an object of numbers: their sum."""
    if not isinstance(value, dict):
        return read_reward(what, value), {}
    parts = read_numbers(f"{what}, part", {as_unicode(name): one for name, one in value.items()})
    return read_reward(what, sum(parts.values()) if parts else None), parts


def read_done(value: object) -> bool:
    """Return whether the episode is over; None, of an object that does not say it, is False."""
    if value not in (None, False, True) or isinstance(value, float):
        raise _wrong("is_done or done", value, "True or False; give another attribute another name")
    return bool(value)


def _read_observation(method: str, value: object) -> Observation:
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
