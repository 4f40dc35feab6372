"""Names of the choices an algorithm is made of, and what each takes. No torch here: checking a config stays fast.

A choice is a registered name, `package.module:function`, or `path.py:function`. Its keyword-only parameters are the
keys that may stand beside the name in a config. What is checked before torch is imported is read from our own source;
a user's function is checked when it is imported.
"""

import ast
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl import plugins
from asyncrl.algo.ranges import RANGES
from asyncrl.errors import ConfigError

KINDS = ("advantage", "policy_loss", "correction", "aggregation", "kl", "filter", "shaping")


def _table(modules: Mapping[str, str]) -> dict[str, str]:
    """Names that are those of their functions: module -> names, separated by blanks."""
    return {name: f"{module}:{name}" for module, listed in modules.items() for name in listed.split()}


TABLES: Mapping[str, Mapping[str, str]] = {
    "advantage": _table(
        {
            "advantages": "reinforce grpo dr_grpo lite_ppo rloo opo gpg grpo_passk maxrl gdpo reinforce_plus_plus_baseline",
            "token_advantages": "gae reinforce_plus_plus remax optimal_token_baseline",
        }
    ),
    "policy_loss": _table(
        {
            "losses": "ppo_clip reinforce truncated_reinforce cispo sapo dro",
            "sequence_losses": "gspo geo_mean vespo",
            "divergence_losses": "dppo_tv dppo_kl",
            "covariance_losses": "clip_cov kl_cov",
        }
    )
    | {"gpg": "losses:reinforce"},
    "correction": _table({"corrections": "none truncate mask reject veto"}),
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
"""Kind -> name -> module and function in this package."""

POSITIONAL: Mapping[str, tuple[str, ...]] = {
    "advantage": ("rewards",),
    "policy_loss": ("batch", "logprobs_T"),
    "correction": ("batch",),
    "aggregation": ("losses_T", "batch", "counts"),
    "kl": ("logprobs_T", "reference_logprobs_T"),
    "filter": ("group",),
    "shaping": ("reward",),
}
"""What the learner passes by position."""

SUPPLIED: Mapping[str, tuple[str, ...]] = {"shaping": ("response_tokens", "max_response_tokens", "finish_reason")}
"""What the learner passes by keyword, always."""

NEEDS: Mapping[tuple[str, str], frozenset[str]] = {
    ("advantage", "gae"): frozenset({"values_T"}),
    ("advantage", "remax"): frozenset({"greedy_rewards_group"}),
    ("advantage", "optimal_token_baseline"): frozenset({"logprobs_T", "sum_squared_probs_T"}),
}
"""Columns of `GroupRewards` that cost extra: a critic, greedy rollouts, a forward pass. See `needs`."""

ON_REQUEST = frozenset({"entropy_T", "step"})
"""What the learner passes by keyword to functions that have it: see `takes`."""

ORDERED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("policy_loss", "clip_cov"): ("covariance_low", "covariance_high"),
    ("correction", "truncate"): ("floor", "cap"),
    ("correction", "mask"): ("low", "high"),
    ("correction", "reject"): ("low", "high"),
    ("correction", "veto"): ("low", "high"),
    ("filter", "reward_range"): ("low", "high"),
}
"""Parameters of which the first must be below the second: between them lies what is kept, or in `clip_cov` left out."""


SHARED = "ratios"
"""The module whose names for annotations others import."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One key of a config beside a name."""

    annotation: ast.expr
    required: bool
    default: Any = None

    def accepts(self, value: Any) -> bool:
        """Whether a config value fits the annotation."""
        return _accepts(self.annotation, value)

    @property
    def allowed(self) -> str:
        """For people: what the annotation allows."""
        return _describe(self.annotation)


def names(kind: str) -> tuple[str, ...]:
    """Registered names of a kind, sorted."""
    return tuple(sorted(TABLES[kind]))


def parameters(kind: str, name: str) -> Mapping[str, Parameter]:
    """Keys that may stand beside a registered name."""
    supplied = {*SUPPLIED.get(kind, ()), *ON_REQUEST}
    return {key: value for key, value in _keyword_only(TABLES[kind][name]).items() if key not in supplied}


def check(kind: str, name: str, params: Mapping[str, Any]) -> None:
    """Checks what a config says, a name, its keys and their values, without importing torch.

    A user's function (with a colon in its name) is accepted; `resolve` checks it.

    Raises:
        ConfigError: unknown name or key, missing key, value out of range; with a suggestion.
    """
    if ":" in name:
        return
    if name not in TABLES[kind]:
        raise ConfigError(f"unknown {kind} `{name}`{_hint(name, names(kind))} Your own is `package.module:function`")
    known = parameters(kind, name)
    for key, value in params.items():
        if key not in known:
            raise ConfigError(f"{kind} `{name}` has no parameter `{key}`{_hint(key, known)}")
        if not known[key].accepts(value):
            raise ConfigError(f"{kind} `{name}`: `{key}` is {value!r}; it must be {known[key].allowed}")
    for key, parameter in known.items():
        if parameter.required and key not in params:
            raise ConfigError(f"{kind} `{name}` needs `{key}`, {parameter.allowed}; set it beside the name")
    _check_order(kind, name, {key: params.get(key, parameter.default) for key, parameter in known.items()})


def _check_order(kind: str, name: str, values: Mapping[str, Any]) -> None:
    if (kind, name) not in ORDERED:
        return
    low, high = ORDERED[kind, name]
    if values[low] is not None and values[low] >= values[high]:
        raise ConfigError(
            f"{kind} `{name}`: `{low}` is {values[low]!r} and `{high}` is {values[high]!r}, which leaves nothing between them; "
            f"`{low}` must be below `{high}`"
        )


def resolve(kind: str, name: str, params: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with its parameters bound; call it with the positional arguments of its kind.

    Raises:
        ConfigError: as `check`. Or a user's function that cannot be imported or called the way its kind is called.
    """
    check(kind, name, params)
    function = load(name if ":" in name else f"asyncrl.algo.{TABLES[kind][name]}")
    arguments = {**dict.fromkeys(SUPPLIED.get(kind, ())), **params}
    try:
        inspect.signature(function).bind(*POSITIONAL[kind], **arguments)
    except TypeError as error:
        call = ", ".join((*POSITIONAL[kind], *(f"{key}=..." for key in arguments)))
        raise ConfigError(
            f"{kind} `{name}` cannot be called as f({call}): {error}; change its signature or the parameters"
        ) from error
    return functools.partial(function, **params)


def needs(kind: str, name: str) -> frozenset[str]:
    """Costly columns that a choice needs; a user's function names them in its attribute `needs`."""
    if ":" not in name:
        return NEEDS.get((kind, name), frozenset())
    return frozenset(getattr(load(name), "needs", ()))


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Whether a resolved function asks for an argument of `ON_REQUEST`."""
    return parameter in inspect.signature(function).parameters


def load(target: str) -> Callable[..., Any]:
    """What a user's `package.module:name` or `path.py:name` names. Raises ConfigError."""
    try:
        return plugins.load(target)
    except ImportError as error:
        raise ConfigError(f"cannot load `{target}`: {error}") from error


@functools.cache
def _keyword_only(target: str) -> Mapping[str, Parameter]:
    """Keyword-only parameters of a function of this package, read from its source."""
    module, _, function = target.partition(":")
    assigned = [node for name in (SHARED, module) for node in _body(name) if isinstance(node, ast.Assign)]
    aliases = {ast.unparse(node.targets[0]): node.value for node in assigned}
    (node,) = [node for node in _body(module) if isinstance(node, ast.FunctionDef) and node.name == function]
    annotations = {argument.arg: argument.annotation or ast.Constant(None) for argument in node.args.kwonlyargs}
    return {
        name: Parameter(
            aliases.get(ast.unparse(annotation), annotation), default is None, ast.literal_eval(default) if default else None
        )
        for (name, annotation), default in zip(annotations.items(), node.args.kw_defaults, strict=True)
    }


@functools.cache
def _body(module: str) -> list[ast.stmt]:
    return ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")).body


def _accepts(annotation: ast.expr, value: Any) -> bool:
    match annotation:
        case ast.BinOp(left=left, right=right):
            return _accepts(left, value) or _accepts(right, value)
        case ast.Constant(value=None):
            return value is None
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return any(type(value) is type(choice) and value == choice for choice in _choices(choices))
        case ast.Subscript(value=ast.Name(id="Mapping"), slice=ast.Tuple(elts=[key, item])):
            return isinstance(value, Mapping) and all(_accepts(key, k) and _accepts(item, v) for k, v in value.items())
        case ast.Name(id=name):
            return RANGES[name][0](value)
    raise TypeError(f"the registry cannot check the annotation `{ast.unparse(annotation)}`; add it to registry or ranges")


def _describe(annotation: ast.expr) -> str:
    match annotation:
        case ast.BinOp(left=left, right=right):
            return f"{_describe(left)} or {_describe(right)}"
        case ast.Constant(value=None):
            return "null"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return "one of " + ", ".join(str(choice) for choice in _choices(choices))
        case ast.Subscript(value=ast.Name(id="Mapping"), slice=ast.Tuple(elts=[key, item])):
            return f"a map from {_describe(key)} to {_describe(item)}"
        case ast.Name(id=name):
            return RANGES[name][1]
    return ast.unparse(annotation)


def _choices(node: ast.expr) -> tuple[Any, ...]:
    value = ast.literal_eval(node)
    return value if isinstance(value, tuple) else (value,)


def _hint(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word.lower(), known, n=1)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; known are {', '.join(sorted(known))}." if known else "; it takes none."
