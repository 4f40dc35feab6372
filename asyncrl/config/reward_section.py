"""The section `reward`: functions that run in processes of the run, and rewards that a service computes."""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from asyncrl.algo.ranges import NonNegativeInt, Positive, PositiveInt, Processes
from asyncrl.config.base import Mistake, Mistakes, Part, marked
from asyncrl.config.environment_section import ENVIRONMENT_PART, EnvironmentConfig
from asyncrl.config.registry import complaint

# Of a question and its answer in a group; longer texts are cut off. In JSON a quote takes two bytes.
TEXT_BYTES = 2000
JUDGEMENT_BYTES = 2 * 2 * TEXT_BYTES + 192

_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")


def _address(value: str) -> str:
    if _ADDRESS.fullmatch(value):
        return value
    allowed = "it must be http://HOST:PORT/PATH or https://..., without user, password, `?` and `#`"
    raise ValueError(f"{allowed}; a key goes into the variable that `key_env` names")


def _pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except (re.error, OverflowError) as error:
        raise ValueError(f"it is not a regular expression: {error}") from error
    if not groups:
        raise ValueError(r"it needs a group around the score, such as `score: (\d+)`")
    return value


class Remote(Part):
    """A reward that another process computes."""

    cache: bool = True
    """Whether a request that was answered before gets the same answer without being sent."""


class OfScorer(Remote):
    """A reward that a model of the run computes, in processes of its own."""

    scorer: str
    """Name of the model in `scorers`."""


class ModelScore(OfScorer):
    """The number of a reward model."""


class HttpReward(Remote):
    """A reward that a service computes: numbers for prompts, completions and columns."""

    url: Annotated[str, AfterValidator(_address)]
    """Where requests are posted."""
    key_env: (
        Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(KEY|TOKEN)$", examples=["JUDGE_API_KEY"])] | None
    ) = None
    """Environment variable that holds the key of the service; from its name logs know that they hide it."""
    requests_per_minute: PositiveInt | None = None
    """Most requests of each generator per minute, on average, after a first burst of as many."""


class Judge(Remote):
    """A reward that a language model gives in words."""

    prompt: Path
    """Jinja template of the question, with `prompt`, `response` and the columns of the row as variables."""
    parse: Literal["json", "regex"] = "json"
    """`json`: the answer holds an object with `score`. `regex`: `pattern` finds the score."""
    pattern: Annotated[str, AfterValidator(_pattern)] = r"\[\[(.+?)\]\]"
    """Regular expression whose last match in the answer has the score as its first group."""
    votes: PositiveInt = 1
    """Number of times that the question is asked; the score is the mean."""
    against: str | None = None
    """Column with the text that the response is compared with; the template's variables `first` and `second`
    are the two, and the score is the probability that the first one is better, or `A`, `B`, or `C` for a tie.
    """
    both_orders: bool = True
    """Whether a comparison (`against`) is asked for in both orders, because judges prefer a position."""

    @property
    def questions(self) -> int:
        """Number of questions about a response."""
        return self.votes * (2 if self.against and self.both_orders else 1)


class LlmJudge(Judge, HttpReward):
    """A judge behind the interface of OpenAI."""

    model: str
    """Name of the model at the service."""
    tokens_per_minute: PositiveInt | None = None
    """Most tokens of each generator per minute, as `requests_per_minute`, counted as the service reports."""
    request: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the request, such as `temperature` and `max_tokens`."""


class ModelJudge(Judge, OfScorer):
    """A judge in processes of the run."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature of its answers; 0 takes the most probable token."""
    max_tokens: PositiveInt = 512
    """Most tokens of an answer."""


REMOTE: dict[str, type[Remote]] = {
    "http_reward": HttpReward,
    "llm_judge": LlmJudge,
    "model_judge": ModelJudge,
    "model_score": ModelScore,
}


# Name of the processes of `algorithm.reference.scorers`.
TEACHER_NAME = "teacher"


class ScorerConfig(Part):
    """A reward model of the run, or a judge."""

    model: str
    """Directory or hub name: for `model_score` a sequence classifier with one label and the policy's
    tokenizer, for `model_judge` a language model with a chat template."""
    max_tokens: PositiveInt = 4096
    """Most tokens of a question to a judge and its answer."""
    count: Processes = 1
    """Processes, each with a copy of the model; each answers all generators of this host."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """GPUs of each process in turn, by number, which generators leave free; by default the first GPU."""

    def gpus_of(self, index: int) -> tuple[int, ...]:
        """Return the GPU of a process; empty without `gpus`."""
        return self.gpus[index % len(self.gpus) :][:1] if self.gpus else ()


class RewardFunctionConfig(Part):
    """One reward function. A text is its `function`."""

    model_config = ConfigDict(json_schema_extra={"named_by": "function"})
    function: str
    """`module:function`, `path.py:function`, a built-in such as `math` (rewards.md), or a service:
    `http_reward`, `llm_judge`, `model_score`, `model_judge` (judges.md)."""
    params: Annotated[
        dict[str, JsonValue], WithJsonSchema({"type": "object", "additionalProperties": True})
    ] = Field(default_factory=dict)
    """Arguments by name, in place of columns; of a service, its parameters."""
    weight: float = 1.0
    """Factor in the sum."""
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")] | None = None
    """Name in metrics; by default the function's."""

    @property
    def part(self) -> str:
        """The name under which the part is reported."""
        return self.name or self.function.rsplit(":", 1)[-1]

    @cached_property
    def remote(self) -> Remote | None:
        """The parameters of a service; None for a function that runs in a reward process."""
        kind = REMOTE.get(self.function)
        return kind.model_validate(self.params) if kind else None

    @model_validator(mode="after")
    def _service_has_its_parameters(self) -> Self:
        # Mistakes are of all functions: a draft has a stand-in for them, but not for a service.
        key, kind = ("reward.functions",), REMOTE.get(self.function)
        if kind is None:
            return self
        try:
            _ = self.remote
        except ValidationError as error:
            found = [f"params of `{self.function}`{_said(kind, self.params, one)}" for one in error.errors()]
            raise Mistakes(*(Mistake(key, f"{one}; correct it there") for one in found)) from None
        return self


def _said(kind: type[Remote], params: dict[str, Any], detail: Mapping[str, Any]) -> str:
    """What is wrong with a parameter."""
    name = str(detail["loc"][0])
    value = params.get(name)
    if name == "key_env" or "@" in str(value):
        value = "***"  # perhaps the key itself, or a password
    if reason := detail.get("ctx", {}).get("error"):
        return f": `{name}` is {value!r}; {reason}"
    return complaint(kind, name, detail["type"], value)


def _names_differ(functions: tuple[RewardFunctionConfig, ...]) -> tuple[RewardFunctionConfig, ...]:
    names = [function.part for function in functions]
    if ENVIRONMENT_PART in names:
        found = f"`{ENVIRONMENT_PART}` is the name of the environment's own reward"
        raise ValueError(f"{found}; set another `name`")
    if len(set(names)) != len(names):
        raise ValueError(f"the functions need different names, got {names}; set `name` on one of them")
    return functions


Functions = Annotated[tuple[RewardFunctionConfig, ...], Field(max_length=64), AfterValidator(_names_differ)]


class RewardConfig(Part):
    """Scoring of rollouts."""

    functions: Annotated[Functions, marked(stand_in=[{"function": "exact_match"}])]
    """Parts of the reward, a weighted sum; `[]` only with an environment that gives rewards."""
    timeout_s: Positive = 10.0
    """Time limit of a call, with its repetitions."""
    workers: Processes = 1
    """Reward processes per generator."""
    attempts: PositiveInt = 3
    """Failures after which a ticket is dead."""
    sandbox: Literal["none", "bubblewrap"] = "none"
    """`bubblewrap` isolates rewards that run programs of the model (security.md); needs `memory_gib` and
    `bwrap`."""
    memory_gib: Annotated[float, Field(ge=0.25)] | None = None
    """Address-space limit of each reward process; unset for rewards on a GPU."""

    @model_validator(mode="after")
    def _code_has_its_own_sandbox(self) -> Self:
        if self.sandbox != "none" and any(one.function == "code" for one in self.functions):
            found = "is bubblewrap, in which `code` cannot make the sandbox that each program has"
            raise Mistakes(Mistake(("reward.sandbox",), f"{found}; drop it, or `code`"))
        return self

    @property
    def judgement_bytes(self) -> int:
        """Most bytes that a group holds of what judges were asked about a response, and said."""
        judges = [remote for one in self.functions if isinstance(remote := one.remote, Judge)]
        return JUDGEMENT_BYTES * sum(judge.questions for judge in judges)


def reward_parts(reward: RewardConfig, environment: EnvironmentConfig) -> dict[str, float]:
    """Return the weights of the parts of the reward, by their names."""
    own = {ENVIRONMENT_PART: environment.weight} if environment.is_used else {}
    return {function.part: function.weight for function in reward.functions} | own
