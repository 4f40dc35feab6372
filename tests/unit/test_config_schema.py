"""Derived quantities and rules between keys."""

from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.algo import registry
from asyncrl.config.base import Part
from asyncrl.config.choices import CHOICE_LISTS, CHOICES, default_name
from asyncrl.config.resolved import SHARED
from asyncrl.config.schema import Config


def config(**parts: Any) -> Config:
    base: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {"path": "m"},
        "data": {"train": "t"},
        "reward": {"functions": [{"function": "exact_match"}]},
    }
    return Config.model_validate(base | parts)


@pytest.mark.parametrize(
    ("groups", "lag", "window", "expected_window", "bound"),
    [
        (32, 4, None, 48, 4 + 2),  # floor(0.3 * 5 * 32) = 48; ceil(47 / 32) = 2
        (32, 4, 1, 1, 4),  # strict order: exactly L
        (32, 0, None, 9, 1),
        (1, 0, None, 1, 0),  # never below 1
        (4, 2, 9, 9, 2 + 2),
    ],
)
def test_window_and_lag_bound_follow_their_formulas(
    groups: int, lag: int, window: int | None, expected_window: int, bound: int
) -> None:
    made = config(batch={"groups": groups}, staleness={"max_lag": lag, "window_groups": window})
    assert made.window_groups == expected_window
    assert made.lag_bound == bound


def test_all_broken_rules_between_parts_are_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        config(
            batch={"group_size": 1}, eval={"samples": 2}, data={"train": "t", "system": "s"}, learner={"tokens_per_microbatch": 9}
        )
    text = str(caught.value)
    assert all(key in text for key in ("batch.group_size", "eval.samples", "data.system", "learner.tokens_per_microbatch"))


def test_reward_parts_need_different_names() -> None:
    functions = [{"function": "a:f"}, {"function": "b:f"}]
    with pytest.raises(ValidationError, match="different names"):
        config(reward={"functions": functions})
    functions[1]["name"] = "g"
    assert [function.part for function in config(reward={"functions": functions}).reward.functions] == ["f", "g"]


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().batch.groups = 3  # type: ignore[misc]


def test_every_default_choice_is_registered() -> None:
    for keys, kind in CHOICES.items():
        registry.check(kind, default_name(keys) or "", {})
    assert {*CHOICES.values(), *CHOICE_LISTS.values()} == set(registry.KINDS)


def test_every_hashed_field_exists() -> None:
    for part, fields in SHARED.items():
        model = getattr(config(), part)
        assert isinstance(model, Part)
        assert set(fields) <= set(type(model).model_fields), part


def test_every_choice_of_the_schema_is_checked_by_the_registry() -> None:
    from asyncrl.config.report import describe, schema_at

    algorithm = schema_at(("algorithm",))["properties"]
    found = {("algorithm", key) for key, schema in algorithm.items() if "Choice" in str(schema.get("$ref"))}
    lists = {("algorithm", key) for key, schema in algorithm.items() if "Choice" in str(schema.get("items"))}
    assert found | {("algorithm", "kl", "estimator")} == set(CHOICES)
    assert lists == set(CHOICE_LISTS)
    assert describe(schema_at(("learner", "optimizer", "betas"))) == "a list of 2: a number >= 0 and <= 1, a number >= 0 and <= 1"
