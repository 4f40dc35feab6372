"""The section `environment` of a config."""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from asyncrl.algo.ranges import MOST_SEQUENCES, NonNegativeInt, Positive, PositiveInt
from asyncrl.config.addresses import require_one_interface
from asyncrl.config.base import Part

ENVIRONMENT_PART = "environment"  # the name of the part of the reward that the environment gives


class EnvironmentConfig(Part):
    """Episodes of several turns in an environment; without `uses` or `command` an episode is one response."""

    uses: str | tuple[str, ...] = ()
    """`path.py:Name` or `module:Name` of a class or an `async` function, or a list of functions, which are
    tools; `python` is a built-in tool. `library:NAME` is an environment of another library (adapters.md)."""
    command: tuple[str, ...] = ()
    """Program and arguments of an agent, instead of `uses`: it plays one episode, calls the model through
    the endpoint of the generator, and ends the episode by exiting."""
    address: str = "127.0.0.1"
    """Address at which agents call the endpoint: one that every generator's host has, and that containers or
    other machines of the agents reach. The calls are not encrypted."""
    frozen: tuple[str, ...] = ()
    """Names of models whose calls an agent makes without being trained on the answers, such as a judge's: the
    policy answers them, and samples show the answers."""
    constraints: Literal["refuse", "ignore"] = "refuse"
    """Calls of an agent that ask for JSON or force a tool: `refuse` answers 400, and `ignore` samples freely,
    so that the agent's own check of the answer decides. Both are counted; sampling stays the run's."""
    python: Path | None = None
    """Python interpreter of the environment's processes, which needs neither asyncrl nor vLLM; by default
    that of the run. In `command`, the program `python` is this interpreter; by default the one on PATH."""
    max_turns: PositiveInt = 16
    """Most answers of the model in an episode; `sampling.max_response_tokens` is the budget of all together,
    with the text that the environment adds."""
    step_s: Positive = 10.0
    """Time limit of one reset, step or tool call."""
    episode_s: Positive = 600.0
    """Time limit of an episode, after which it is cut off and counts as truncated."""
    episodes_per_slot: PositiveInt = 4
    """Most episodes that a generator holds for each of its `generator.max_running` slots, while others wait
    for their environment. With slow tools more keep the engine busy; each may be a process."""
    replays: NonNegativeInt = 2
    """Further attempts at an episode whose environment failed; then its ticket fails, or its group goes
    without it (`batch.missing_episodes`). It never scores 0."""
    weight: float = 1.0
    """Factor of the environment's own reward, the part `environment`, in the sum that is trained on."""
    workers: PositiveInt = 1
    """Processes per generator that load the environment; each runs many episodes."""
    memory_gib: Annotated[float, Field(ge=0.25)] | None = None
    """Address-space limit of each process of the environment, in GiB."""
    max_observation_characters: PositiveInt = 16384
    """Length to which a tool's result or an observation is cut."""
    history: Literal["exact", "template"] = "exact"
    """`exact` keeps what was sampled when the chat template would rewrite earlier turns; `template` renders
    them again, which costs one more sequence for each rewritten turn."""

    @field_validator("address")
    @classmethod
    def _listens_on_one_interface(cls, address: str) -> str:
        require_one_interface("environment.address", address)
        return address

    @property
    def is_used(self) -> bool:
        """Whether there is an environment."""
        return bool(self.uses or self.command)

    @property
    def program(self) -> str:
        """The first word of `command`, of which `python` is the interpreter of `python` if that is set."""
        word = self.command[0]
        return str(self.python) if self.python is not None and word in ("python", "python3") else word

    @property
    def sequences(self) -> int:
        """Most sequences of an episode: a turn whose history was rewritten begins another one.

        An agent or a rollout function may begin a conversation with each turn. The source of `uses` shows
        whether its name is a rollout function; nothing is imported here.
        """
        begins = self.command or _is_rollout(self.uses) or (self.uses and self.history == "template")
        return min(self.max_turns, MOST_SEQUENCES) if begins else 1


@cache
def _is_rollout(uses: str | tuple[str, ...]) -> bool:
    """Whether `uses` names an `async` function of a file or a module that can be read."""
    if not isinstance(uses, str):
        return len(uses) == 1 and _is_rollout(uses[0])
    place, _, name = uses.rpartition(":")
    try:
        source = place if place.endswith(".py") else source_of(place)
        body = ast.parse(Path(source).read_bytes()).body if source else []
    except (ImportError, LookupError, OSError, SyntaxError, ValueError):  # `asyncrl validate` reports it
        return False
    return any(isinstance(node, ast.AsyncFunctionDef) and node.name == name for node in body)


def source_of(module: str) -> str | None:
    """Return the file of a module, found without importing the packages that it is in."""
    places: Iterable[str] | None = [*sys.path, str(Path.cwd())]
    source = None
    for name in accumulate(module.split("."), "{}.{}".format):
        spec = PathFinder.find_spec(name, list(places)) if places else None
        if spec is None:
            return None
        source, places = spec.origin, spec.submodule_search_locations
    return source
