"""The functions that an algorithm may be composed of: their names and their parameters.

A choice is a registered name, `package.module:function`, or `path.py:function`. Its keyword-only parameters
are the keys that a config may set for it, so a default or a bound is stated once, in the signature. Checks
must stay fast: registered signatures are read without importing torch, users' functions checked when loaded.
"""

import ast
import builtins
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from asyncrl import algo, plugins
from asyncrl.algo import ranges
from asyncrl.config.base import Choice, Mistake
from asyncrl.config.wording import did_you_mean, wanted
from asyncrl.errors import ConfigError

KINDS = ("advantage", "policy_loss", "correction", "aggregation", "kl", "filter", "shaping")


def _table(modules: Mapping[str, str]) -> dict[str, str]:
    """Build a table of names that equal their functions' names, from module -> names separated by blanks."""
    return {name: f"{module}:{name}" for module, listed in modules.items() for name in listed.split()}


# Kind -> name -> module and function in `asyncrl.algo`.
TABLES: Mapping[str, Mapping[str, str]] = {
    "advantage": _table(
        {
            "advantages": "reinforce grpo dr_grpo lite_ppo rloo opo spo gpg grpo_passk maxrl gdpo "
            "reinforce_plus_plus_baseline",
            "token_advantages": "gae reinforce_plus_plus remax optimal_token_baseline",
            "turn_advantages": "turn_rloo gigpo mt_grpo turn_gae",
            "preferences": "dpo_pairs ipo_pairs kto best_of_n distill",
        }
    ),
    "policy_loss": _table(
        {
            "losses": "ppo_clip reinforce truncated_reinforce cispo sapo dro cfpo gspo geo_mean topr vespo "
            "dppo_tv dppo_kl clip_cov kl_cov",
        }
    )
    | {"gpg": "losses:reinforce"},
    "correction": _table({"corrections": "none truncate mask reject veto m2po"}),
    "aggregation": {
        "token-mean": "aggregation:token_mean",
        "token-sum": "aggregation:token_sum",
        "seq-mean-token-sum": "aggregation:seq_mean_token_sum",
        "seq-mean-token-mean": "aggregation:seq_mean_token_mean",
        "seq-mean-token-sum-norm": "aggregation:seq_mean_token_sum_norm",
    },
    "kl": {
        "k1": "kl:k1",
        "k2": "kl:k2",
        "k3": "kl:k3",
        "abs": "kl:absolute",
        "k1+": "kl:k1_straight_through",
        "k3+": "kl:k3_straight_through",
        "abs+": "kl:absolute_straight_through",
    },
    "filter": _table({"filters": "zero_variance reward_range"}),
    "shaping": _table({"shaping": "soft_overlong"}),
}

# Arguments that the learner passes by position.
POSITIONAL: Mapping[str, tuple[str, ...]] = {
    "advantage": ("rewards",),
    "policy_loss": ("batch", "logprobs_T"),
    "correction": ("batch",),
    "aggregation": ("losses_T", "batch", "counts"),
    "kl": ("logprobs_T", "reference_logprobs_T"),
    "filter": ("group",),
    "shaping": ("reward",),
}

# Arguments that the learner always passes by keyword.
SUPPLIED: Mapping[str, tuple[str, ...]] = {
    "shaping": ("response_tokens", "max_response_tokens", "finish_reason")
}

# Advantages that are the gradient of a loss on given answers, whichever policy sampled them, at the weights
# that a batch's only optimizer step starts from.
ON_PAIRS = frozenset({"dpo_pairs", "ipo_pairs", "kto", "best_of_n"})

# Columns of `GroupRewards` that only an environment gives.
OF_TURNS = frozenset({"turn_rewards_K", "turn_states_K"})

# Log-probabilities of the policy and of the reference, of which the reference is another model.
OF_REFERENCE = frozenset({"logprobs_T", "reference_logprobs_T"})

# Column of `GroupRewards` that is kept over the batches.
EXPECTED = "expected_S"

# Columns of `GroupRewards` that cost extra: a critic, greedy rollouts, a forward pass, rewards of turns.
NEEDS: Mapping[tuple[str, str], frozenset[str]] = {
    ("advantage", "gae"): frozenset({"values_T"}),
    ("advantage", "spo"): frozenset({EXPECTED}),
    ("advantage", "remax"): frozenset({"greedy_rewards_group"}),
    ("advantage", "optimal_token_baseline"): frozenset({"logprobs_T", "sum_squared_probs_T"}),
    ("advantage", "turn_rloo"): frozenset({"turn_rewards_K"}),
    ("advantage", "gigpo"): OF_TURNS,
    ("advantage", "mt_grpo"): frozenset({"turn_rewards_K"}),
    ("advantage", "turn_gae"): frozenset({"turn_rewards_K", "values_T"}),
    ("advantage", "dpo_pairs"): OF_REFERENCE,
    ("advantage", "ipo_pairs"): OF_REFERENCE,
    ("advantage", "kto"): OF_REFERENCE,
    ("advantage", "distill"): OF_REFERENCE,
}

# Arguments that the learner passes by keyword to functions that declare them.
ON_REQUEST = frozenset({"entropy_T", "step"})

# Pairs of parameters of which the first must be below the second.
ORDERED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("policy_loss", "clip_cov"): ("covariance_low", "covariance_high"),
    ("correction", "truncate"): ("floor", "cap"),
    ("correction", "mask"): ("low", "high"),
    ("correction", "reject"): ("low", "high"),
    ("correction", "veto"): ("low", "high"),
    ("filter", "reward_range"): ("low", "high"),
}


def names(kind: str) -> tuple[str, ...]:
    """Return the registered names of a kind, sorted."""
    return tuple(sorted(TABLES[kind]))


@functools.cache
def parameters(kind: str, name: str) -> type[BaseModel]:
    """Return the model of the keys that a config may set for a registered name."""
    module, _, function = TABLES[kind][name].partition(":")
    (node,) = [node for node in _body(module) if isinstance(node, ast.FunctionDef) and node.name == function]
    fields: dict[str, Any] = {
        argument.arg: (_annotation(argument.annotation), _default(default))
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if argument.arg not in (*SUPPLIED.get(kind, ()), *ON_REQUEST)
    }
    return create_model(
        name, __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False), **fields
    )


@functools.cache
def _body(module: str) -> list[ast.stmt]:
    return ast.parse((Path(algo.__path__[0]) / f"{module}.py").read_text(encoding="utf-8")).body


def _default(node: ast.expr | None) -> Any:
    """Return a default, which is a literal or a name of `ranges`; `...` if there is none."""
    if isinstance(node, ast.Name):
        return vars(ranges)[node.id]
    return ast.literal_eval(node) if node else ...


def _annotation(node: ast.expr | None) -> Any:
    """Return the type that an annotation names, if it uses only `ranges`, builtins, `|` and `[...]`."""
    match node:
        case ast.Name(id=name):
            return vars(ranges)[name] if name in vars(ranges) else getattr(builtins, name)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _annotation(left) | _annotation(right)
        case ast.Subscript(value=generic, slice=index):
            return _annotation(generic)[_annotation(index)]
        case ast.Tuple(elts=parts):
            return tuple(map(_annotation, parts))
        case ast.Constant(value=value):
            return value
    raise TypeError("a parameter that a config may set has an annotation that `algo/ranges.py` allows")


def mistakes(kind: str, name: str, params: Mapping[str, Any]) -> Iterator[Mistake]:
    """Find what is wrong with a choice: an unknown name or key, a missing key, a value out of range.

    A user's function (with a colon in its name) is accepted; `resolve` checks it.
    """
    if ":" in name:
        return
    if name not in TABLES[kind]:
        text = f"unknown {kind} `{name}`{_hint(name, names(kind))} Your own is `package.module:function`"
        yield Mistake(("name",), text)
        return
    model = parameters(kind, name)
    try:
        model.model_validate(dict(params))
    except ValidationError as error:
        # A value that fits no member of a union is an error for each of them.
        for key, found in {str(detail["loc"][0]): detail["type"] for detail in error.errors()}.items():
            yield Mistake((key, "name"), f"{kind} `{name}`{complaint(model, key, found, params.get(key))}")
        return
    if (kind, name) in ORDERED:
        low, high = ORDERED[kind, name]
        values = {key: field.default for key, field in model.model_fields.items()} | dict(params)
        if values[low] is not None and values[low] >= values[high]:
            found = f"`{low}` is {values[low]!r} and `{high}` is {values[high]!r}, with nothing between"
            yield Mistake((low, high), f"{kind} `{name}`: {found}; `{low}` must be below `{high}`")


def complaint(model: type[BaseModel], key: str, found: str, value: Any) -> str:
    """Say what is wrong with a parameter, from the type of pydantic's error."""
    if found == "extra_forbidden":
        return f" has no parameter `{key}`{_hint(key, model.model_fields)}"
    allowed = wanted(model.model_json_schema()["properties"][key], found)
    if found == "missing":
        return f" needs `{key}`, {allowed}; set it next to the name"
    return f": `{key}` is {value!r}; it must be {allowed}"


def resolve(kind: str, name: str, params: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function with its parameters bound, to be called with the positional arguments of its kind.

    Raises ConfigError: see `mistakes`; also if a user's function cannot be loaded, or called as its kind is.
    """
    if texts := [mistake.text for mistake in mistakes(kind, name, params)]:
        raise ConfigError("\n".join(texts))
    function = load(name if ":" in name else f"{algo.__name__}.{TABLES[kind][name]}")
    arguments = {**dict.fromkeys(SUPPLIED.get(kind, ())), **params}
    arguments |= dict.fromkeys(ON_REQUEST & inspect.signature(function).parameters.keys())
    try:
        inspect.signature(function).bind(*POSITIONAL[kind], **arguments)
    except TypeError as error:
        call = ", ".join((*POSITIONAL[kind], *(f"{key}=..." for key in arguments)))
        text = f"{kind} `{name}` cannot be called as f({call}): {error}"
        raise ConfigError(f"{text}; change its signature or the parameters") from error
    return functools.partial(function, **params)


def needs(kind: str, name: str) -> frozenset[str]:
    """Return the costly columns that a choice needs; a user's function has them in its attribute `needs`."""
    if ":" not in name:
        return NEEDS.get((kind, name), frozenset())
    return frozenset(getattr(load(name), "needs", ()))


def sees_step(correction: Choice) -> bool:
    """Return whether a correction depends on all tokens of the optimizer step, before the step begins."""
    return correction.name == "m2po" or bool(correction.params.get("normalise"))


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Return whether a resolved function declares an argument of `ON_REQUEST`."""
    return parameter in inspect.signature(function).parameters


def load(target: str) -> Callable[..., Any]:
    """Load a user's `package.module:name` or `path.py:name`. Raises ConfigError."""
    try:
        return plugins.load(target)
    except ImportError as error:
        raise ConfigError(f"cannot load `{target}`: {error}") from error


def _hint(word: str, known: Iterable[str]) -> str:
    known = list(known)
    otherwise = f"known are {', '.join(sorted(known))}." if known else "it takes none."
    return did_you_mean(word.lower(), known, otherwise, cutoff=0.7)  # `ppo` is not `spo`
