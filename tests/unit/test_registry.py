"""Names and parameters of choices: checked without torch, with a suggestion, and bound when resolved."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import registry
from asyncrl.config.wording import describe
from asyncrl.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in registry.KINDS for name in registry.names(kind)]
)
def test_every_name_resolves_to_a_function_called_as_its_kind(kind, name):
    required = {
        key: 1.0 for key, field in registry.parameters(kind, name).model_fields.items() if field.is_required()
    }
    if name == "soft_overlong":
        required = {"buffer_tokens": 4}
    if name == "reward_range":
        required = {"low": 0.0, "high": 1.0}
    function = registry.resolve(kind, name, required)
    positional = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert tuple(positional) == registry.POSITIONAL[kind]


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in registry.KINDS for name in registry.names(kind)]
)
def test_what_is_read_from_source_is_what_python_sees(kind, name):
    """The check without torch must not drift from the functions."""
    module, _, attribute = registry.TABLES[kind][name].partition(":")
    real = inspect.signature(
        getattr(__import__(f"asyncrl.algo.{module}", fromlist=[attribute]), attribute)
    ).parameters
    supplied = {*registry.SUPPLIED.get(kind, ()), *registry.ON_REQUEST}
    keyword_only = {key: p for key, p in real.items() if p.kind is p.KEYWORD_ONLY and key not in supplied}
    model = registry.parameters(kind, name)
    read = model.model_fields
    assert list(read) == list(keyword_only)
    for key, parameter in keyword_only.items():
        assert read[key].is_required() == (parameter.default is parameter.empty)
        assert "another value" not in describe(model.model_json_schema()["properties"][key])
        if not read[key].is_required():
            assert read[key].default == parameter.default and type(read[key].default) is type(
                parameter.default
            )
    required = {key: 1 for key, field in read.items() if field.is_required()}
    if name != "reward_range":
        # the defaults are within their own ranges
        assert not list(
            registry.mistakes(
                kind,
                name,
                required | {key: field.default for key, field in read.items() if key not in required},
            )
        )


def test_kinds_are_complete():
    assert set(registry.KINDS) == set(registry.TABLES) == set(registry.POSITIONAL)
    for kind in registry.KINDS:
        assert registry.names(kind) == tuple(sorted(registry.TABLES[kind]))


def test_checking_imports_no_torch():
    code = """
import sys
from asyncrl.config import registry
for kind in registry.KINDS:
    for name in registry.names(kind):
        registry.parameters(kind, name)
list(registry.mistakes("advantage", "grpo", {"std_eps": 1e-4}))
sys.exit("torch" in sys.modules or "numpy" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("kind", "name", "params", "message"),
    [
        ("advantage", "gpro", {}, "unknown advantage `gpro`; did you mean `grpo`?"),
        ("aggregation", "zzz", {}, "known are seq-mean-token-mean, .*token-sum"),
        ("policy_loss", "ppo_clip", {"clip_lo": 0.1}, "has no parameter `clip_lo`; did you mean `clip_low`?"),
        ("policy_loss", "reinforce", {"clip": 0.1}, "has no parameter `clip`; it takes none"),
        ("policy_loss", "ppo_clip", {"entropy_T": 1.0}, "has no parameter `entropy_T`"),
        (
            "shaping",
            "soft_overlong",
            {"buffer_tokens": 4, "response_tokens": 3},
            "has no parameter `response_tokens`",
        ),
        ("aggregation", "seq-mean-token-sum-norm", {}, "needs `scale`, a number > 0"),
        ("policy_loss", "dro", {}, "needs `beta`"),
        ("filter", "reward_range", {"low": 0.0}, "needs `high`"),
        ("advantage", "grpo", {"std_eps": 0}, "`std_eps` is 0; it must be a number > 0"),
        ("advantage", "spo", {"decay": 1.5}, "`decay` is 1.5; it must be a number from 0 to 1"),
        ("advantage", "spo", {"decai": 0.5}, "did you mean `decay`?"),
        ("advantage", "grpo", {"std_eps": "small"}, "'small'; it must be a number > 0"),
        ("advantage", "grpo", {"std_eps": True}, "True; it must be a number > 0"),
        ("advantage", "grpo", {"ddof": 2}, "a whole number from 0 to 1"),
        ("advantage", "grpo", {"ddof": True}, "a whole number from 0 to 1"),
        ("advantage", "grpo", {"scale": "groop"}, "one of group, batch, none"),
        ("correction", "truncate", {"level": "row"}, "one of token, sequence, geometric"),
        ("correction", "truncate", {"normalise": 1}, "true or false"),
        ("correction", "mask", {"low": -0.1}, "a number >= 0"),
        ("policy_loss", "ppo_clip", {"dual_clip": 1.0}, "a number > 1 or null"),
        ("policy_loss", "ppo_clip", {"clip_low": 1.1}, "a number from 0 to 1"),
        ("policy_loss", "ppo_clip", {"clip_low": -0.1}, "a number from 0 to 1"),
        ("policy_loss", "ppo_clip", {"top_entropy": 0}, "a number > 0 <= 1"),
        ("shaping", "soft_overlong", {"buffer_tokens": 0}, "a whole number >= 1"),
        ("shaping", "soft_overlong", {"buffer_tokens": 2.5}, "a whole number >= 1"),
        ("advantage", "gdpo", {"weights": {"a": "b"}}, "a map from text to a number or null"),
        ("advantage", "gae", {"whitened": "yes"}, "true or false"),
        ("correction", "mask", {"low": 6.0}, "`low` is 6.0 and `high` is 5.0.*must be below"),
        ("correction", "mask", {"high": 0.5}, "`low` is 0.5 and `high` is 0.5.*must be below"),
        ("correction", "reject", {"low": 3, "high": 2}, "`low` is 3 and `high` is 2.*must be below"),
        ("correction", "veto", {"high": 1e-5}, "`low` must be below `high`"),
        (
            "policy_loss",
            "clip_cov",
            {"covariance_low": 9},
            "`covariance_low` is 9 and `covariance_high` is 5.0",
        ),
        ("filter", "reward_range", {"low": 1, "high": 0}, "`low` is 1 and `high` is 0"),
    ],
)
def test_a_wrong_choice_is_explained(kind, name, params, message):
    (mistake,) = registry.mistakes(kind, name, params)
    assert re.search(message.replace("?", r"\?"), mistake.text)
    with pytest.raises(ConfigError, match=re.escape(mistake.text)):
        registry.resolve(kind, name, params)


def test_advantages_need_exactly_what_the_registry_says():
    import torch

    from asyncrl.algo.group_rewards import GroupRewards

    rewards = GroupRewards(
        rewards_S=torch.tensor([0.0, 1.0]),
        group_S=torch.tensor([0, 0]),
        num_groups=1,
        lengths_S=torch.tensor([2, 1]),
        sequence_T=torch.tensor([0, 0, 1]),
        parts={"exact_match": torch.tensor([0.0, 1.0])},
    )
    for name in registry.names("advantage"):
        function = registry.resolve("advantage", name, {})
        if registry.needs("advantage", name):
            with pytest.raises(ConfigError, match="does not compute"):
                function(rewards)
        else:
            assert function(rewards).isfinite().all(), name


@pytest.mark.parametrize(
    ("kind", "name", "params"),
    [
        ("policy_loss", "ppo_clip", {"clip_low": 0, "clip_high": 1, "dual_clip": None}),
        ("policy_loss", "ppo_clip", {"dual_clip": 10, "max_drift": 0.1, "top_entropy": 0.2}),
        ("policy_loss", "cispo", {"clip_low": None, "clip_high": 4}),
        ("advantage", "gdpo", {"weights": {"a": 1, "b": 0.5}}),
        ("advantage", "grpo", {"ddof": 0, "scale": "batch"}),
        ("correction", "truncate", {"level": "sequence", "cap": 5}),
        ("correction", "reject", {"high": 1.01}),
        ("correction", "reject", {"low": 0.99, "high": 1.01}),
        ("filter", "reward_range", {"low": -1, "high": 0}),
        ("advantage", "somewhere.else:function", {"anything": 1}),
    ],
)
def test_a_right_choice_passes(kind, name, params):
    assert not list(registry.mistakes(kind, name, params))


def test_parameters_are_bound():
    clip = registry.resolve("shaping", "soft_overlong", {"buffer_tokens": 10, "penalty": 2.0})
    assert clip(1.0, response_tokens=20, max_response_tokens=20, finish_reason="length") == -1.0


MINE = '''
class Advantage:
    """A choice that keeps state is a class with __call__."""

constant = 3

def advantage(rewards, *, scale: float = 2.0):
    return [scale * reward for reward in rewards]

def needs_more(rewards, other):
    return rewards

def loss(batch, logprobs_T, *, entropy_T=None):
    return entropy_T

def shape(reward, **given):
    return reward + given["response_tokens"]
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "choices_of_mine.py"
    path.write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return path


@pytest.mark.parametrize("form", ["module", "file"])
def test_a_function_of_the_users_own_is_bound(mine, form):
    target = "choices_of_mine" if form == "module" else str(mine)
    assert registry.resolve("advantage", f"{target}:advantage", {})([1.0]) == [2.0]
    assert registry.resolve("advantage", f"{target}:advantage", {"scale": 3.0})([1.0]) == [3.0]
    assert (
        registry.resolve("shaping", f"{target}:shape", {})(
            1, response_tokens=2, max_response_tokens=9, finish_reason="stop"
        )
        == 3
    )


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("choices_of_mine:advantage", {"sclae": 1.0}, "sclae"),
        ("choices_of_mine:needs_more", {}, "other"),
        ("choices_of_mine:missing", {}, "cannot load `choices_of_mine:missing`"),
        ("choices_of_mine:constant", {}, "has no function `constant`, only a value of type int"),
        ("no_such_module_here:f", {}, "cannot load"),
        ("/no/such/file.py:f", {}, "cannot load"),
    ],
)
def test_a_function_of_the_users_own_that_does_not_fit_is_explained(mine, name, params, message):
    with pytest.raises(ConfigError, match=message):
        registry.resolve("advantage", name, params)


def test_only_functions_that_ask_for_entropies_get_them(mine):
    assert registry.takes(registry.resolve("policy_loss", "ppo_clip", {"clip_low": 0.1}), "entropy_T")
    assert not registry.takes(registry.resolve("policy_loss", "gspo", {}), "entropy_T")
    assert registry.takes(registry.resolve("policy_loss", "choices_of_mine:loss", {}), "entropy_T")
