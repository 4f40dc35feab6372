"""The section `environment` of a config."""

import ast
from functools import cache
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, TypeGuard

from pydantic import AfterValidator, Field

from asyncrl.algo.ranges import MOST_SEQUENCES, NonNegativeInt, Positive, PositiveInt, Processes
from asyncrl.config.addresses import one_interface
from asyncrl.config.base import Part
from asyncrl.plugins import package_spec

ENVIRONMENT_PART = "environment"  # the name of the part of the reward that the environment gives


class EnvironmentConfig(Part):
    """Episodes of several turns in an environment; without `uses` or `command` an episode is one response."""

    uses: str | tuple[str, ...] = ()
    """`path.py:Name` or `module:Name` of a class or an `async` function, or a list of functions as tools;
    `python` is a built-in one. `library:NAME` is another library's environment (adapters.md)."""
    command: tuple[str, ...] = ()
    """Program and arguments of an agent, instead of `uses`; each process plays one episode."""
    address: Annotated[str, AfterValidator(one_interface)] = "127.0.0.1"
    """Address of the unencrypted endpoint that agents call; every generator's host has it."""
    frozen: tuple[str, ...] = ()
    """Names of models, such as a judge's, whose answers are not trained; the policy answers."""
    constraints: Literal["refuse", "ignore"] = "refuse"
    """An agent's calls that ask for JSON or force a tool: `refuse` answers 400, `ignore` samples freely."""
    python: Path | None = None
    """Interpreter of the environment's processes and of `python` in `command`; it needs no asyncrl."""
    max_turns: PositiveInt = 16
    """Most answers in an episode; `sampling.max_response_tokens` is their common budget."""
    step_s: Positive = 10.0
    """Time limit of one reset, step or tool call."""
    episode_s: Positive = 600.0
    """Time limit of an episode, which then counts as truncated."""
    episodes_per_slot: PositiveInt = 4
    """Most episodes per slot of `generator.max_running`; with slow tools more keep the engine busy."""
    replays: NonNegativeInt = 2
    """Further attempts at an episode whose environment failed; then its ticket fails, or its group goes
    without it (`batch.missing_episodes`)."""
    weight: float = 1.0
    """Factor of the environment's own reward."""
    workers: Processes = 1
    """Processes per generator that load the environment."""
    memory_gib: Annotated[float, Field(ge=0.25)] | None = None
    """Address-space limit of each such process."""
    max_observation_characters: PositiveInt = 16384
    """Length to which an observation is cut."""
    history: Literal["exact", "template"] = "exact"
    """Earlier turns that the chat template would rewrite: `exact` keeps what was sampled, `template` begins
    another sequence."""

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
        begins = self.command or _names_rollout(self.uses) or (self.uses and self.history == "template")
        return min(self.max_turns, MOST_SEQUENCES) if begins else 1


def is_rollout(node: ast.AST | None) -> TypeGuard[ast.AsyncFunctionDef]:
    """Return whether a definition is a rollout function, as `environments.user_code` says of a loaded one."""
    if not isinstance(node, ast.AsyncFunctionDef):
        return False
    return [one.arg for one in (*node.args.posonlyargs, *node.args.args)][:1] == ["session"]


@cache
def _names_rollout(uses: str | tuple[str, ...]) -> bool:
    """Whether `uses` names a rollout function of a file or a module that can be read."""
    if not isinstance(uses, str):
        return len(uses) == 1 and _names_rollout(uses[0])
    place, _, name = uses.rpartition(":")
    try:
        source = place if place.endswith(".py") else source_of(place)
        body = ast.parse(Path(source).read_bytes()).body if source else []
    except (ImportError, LookupError, OSError, SyntaxError, ValueError):  # `asyncrl validate` reports it
        return False
    return any(is_rollout(node) and node.name == name for node in body)


def source_of(module: str) -> str | None:
    """Return the file of a module, found without importing the packages that it is in."""
    package, *names = accumulate(module.split("."), "{}.{}".format)
    spec = package_spec(package)
    for name in names:
        places = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(name, list(places)) if places else None
    return spec.origin if spec else None
