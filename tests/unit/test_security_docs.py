"""docs/security.md names tests that exist, and its promises hold for every key of a config."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.commands.found import wishes
from asyncrl.config.base import SECTIONS_ONLY
from asyncrl.config.outline import schema_at
from asyncrl.config.reward_section import REMOTE
from asyncrl.config.schema import Config
from asyncrl.hosting.route import reaches
from tests.support.task_config import config_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/[^`]+)`", PAGE)
    assert len(named) >= 8
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_weights_are_said_to_come_from_any_port_as_their_listener_lets_the_kernel_choose():
    far = config_of(control={"bind": "tcp://far:1"})
    (weights,) = [one for one in reaches(far, "far") if one.what == "weights"]
    assert weights.port == 0
    for text in (PAGE, (ROOT / "docs" / "config.md").read_text()):
        assert "come from any free port of" in text and "two further" not in text


def texts(schema: dict[str, Any], key: str) -> Iterator[str]:
    """Yield every key whose value may be any text: `*` is an item of a list, and `?` a name in a mapping."""
    for one in schema.get("anyOf", ()):
        yield from texts(one, key)
    is_anything = not schema.keys() & {"anyOf", "type", "properties", "enum", "const"}
    if is_anything or (schema.get("type") == "string" and "enum" not in schema and "const" not in schema):
        yield key
    for name, one in schema.get("properties", {}).items():
        yield from texts(one, f"{key}.{name}".removeprefix("."))
    for one in (schema.get("items"), *schema.get("prefixItems", ())):
        yield from texts(one, f"{key}.*") if one else ()
    if more := schema.get("additionalProperties"):
        yield from texts({} if more is True else more, f"{key}.?")
    elif more == {}:
        yield f"{key}.?"


# Keys of sections that sources and sets of data have, too.
OF_TASKS = {
    "reward.functions.*.function": "reward.*.function",
    "environment.uses": "environment.uses",
    "environment.uses.*": "environment.uses.*",
    "environment.command.*": "environment.command.*",
    "environment.python": "environment.python",
    "data.filter": "filter",
    "data.map": "map",
}
TASKS = ("data.train.*", "data.eval.*")

# Code, and variables: the host of a generator is asked for each.
ASKED = {
    *OF_TASKS,
    *(f"{task}.{key}" for task in TASKS for key in OF_TASKS.values()),
    *("algorithm.advantage.name", "generator.vllm.?", "run.environment.*", "store.password_env"),
    # The model's own code, which `model.trust_remote_code` lets run.
    *("model.path", "model.revision", "algorithm.reference.path", "algorithm.reference.revision"),
    "scorers.?.model",
}
ASKED_OF_SERVICES = {"http_reward.url", "http_reward.key_env", "llm_judge.url", "llm_judge.key_env"}
ASKED_OF_SERVICES |= {"llm_judge.prompt", "model_judge.prompt"}

# Why no other text needs consent.
FREE = {
    "the learner alone loads it": "algorithm.policy_loss.name algorithm.correction.name "
    "algorithm.rejections.*.name algorithm.aggregation.name algorithm.kl.estimator.name "
    "algorithm.filters.*.name algorithm.shaping.*.name learner.hooks.*.name model.lora.start checkpoint.best "
    "checkpoint.hub.repo learner.stop_when.metric cluster.claim cluster.image cluster.sbatch.* "
    "telemetry.wandb_project model.lora.targets.*",
    "an argument of a function that is built in or was asked for": "algorithm.advantage.? "
    "algorithm.policy_loss.? algorithm.correction.? algorithm.rejections.*.? algorithm.aggregation.? "
    "algorithm.kl.estimator.? algorithm.filters.*.? algorithm.shaping.*.? learner.hooks.*.? "
    "learner.optimizer.schedule_arguments.? critic.optimizer.schedule_arguments.? "
    "reward.functions.*.params.? data.train.*.reward.*.params.? data.eval.*.reward.*.params.?",
    "rows, which are data": "data.train data.train.*.path data.eval data.eval.*.path data.split "
    "data.eval_split data.eval.*.split data.prompt_field data.images_key",
    "a name or a text": "run.name run.root reward.functions.*.name data.train.*.name data.eval.*.name "
    "data.train.*.reward.*.name data.eval.*.reward.*.name data.system data.train.*.system "
    "data.eval.*.system sampling.stop.* environment.frozen.* data.train.*.environment.frozen.* "
    "data.eval.*.environment.frozen.*",
    "a template that can run nothing": "model.chat_template data.template algorithm.reference.template",
    "one of a list of vLLM's": "model.tool_parser model.reasoning_parser",
    "an address": "control.bind store.bind store.url telemetry.prometheus_host environment.address "
    "data.train.*.environment.address data.eval.*.environment.address",
}
FREE_OF_SERVICES = {"llm_judge.against", "llm_judge.model", "llm_judge.pattern", "llm_judge.request.?"}
FREE_OF_SERVICES |= {"model_judge.against", "model_judge.pattern", "model_judge.scorer", "model_score.scorer"}

SERVICES = {
    "http_reward": {"url": "http://h:1/x"},
    "llm_judge": {"url": "http://h:1/x", "model": "m", "prompt": "j.jinja"},
    "model_judge": {"scorer": "any", "prompt": "j.jinja"},
}
PLAIN = {
    "run": {"name": "far"},
    "model": {"path": "own", "trust_remote_code": True},
    "data": {"train": "x"},
    "reward": {"functions": [{"function": "model_judge", "params": SERVICES["model_judge"]}]},
    "scorers": {"any": {"model": "judge"}},
    "algorithm": {"reference": {"path": "teacher", "scorers": 1}},
    "store": {"url": "redis://far:1"},
}


def nested(keys: list[str], value: str) -> Any:
    if not keys:
        return value
    key, below = keys[0], nested(keys[1:], value)
    return [below] if key == "*" else {"any" if key == "?" else key: below}


def merged(base: Any, over: Any) -> Any:
    """The values of `over` in `base`; what a source or set must have is added."""
    if isinstance(over, list):
        return [
            {"path": "x", **one} if isinstance(one, dict) and "function" not in one else one for one in over
        ]
    if not isinstance(over, dict) or not isinstance(base, dict):
        return over
    return base | {key: merged(base.get(key, {}), value) for key, value in over.items()}


def asked(over: Any) -> list[str]:
    return [text for _, text in wishes(Config.model_validate(merged(PLAIN, over), context=SECTIONS_ONLY))]


def test_for_every_text_of_a_config_it_is_said_whether_it_names_code():
    """A new key that may name code belongs to ASKED, and to `wishes` of `commands.found`."""
    free = [key for keys in FREE.values() for key in keys.split()]
    choices = {"learner.backend", "learner.gradient_checkpointing"}
    found = {*texts(schema_at(Config, ()), "")} - choices
    assert sorted(found ^ {*ASKED, *free}) == [] and not ASKED & {*free}
    found = {key for name, kind in REMOTE.items() for key in texts(schema_at(kind, ()), name)}
    assert sorted(found ^ {*ASKED_OF_SERVICES, *FREE_OF_SERVICES}) == []


@pytest.mark.parametrize("key", sorted(ASKED))
def test_a_host_is_asked_for_code_that_a_key_names(key: str):
    value = "evil:f" if key.endswith(("function", "uses", "uses.*", "filter", "map", "name")) else "evil"
    assert not any("evil" in text for text in asked({}))
    assert [text for text in asked(nested(key.split("."), value)) if "evil" in text]


@pytest.mark.parametrize("key", sorted(ASKED_OF_SERVICES))
def test_a_host_is_asked_for_a_service_and_its_template(key: str):
    name, _, parameter = key.partition(".")
    value = {"url": "http://evil:1/x", "key_env": "evil_KEY"}.get(parameter, "evil")
    function = {"function": name, "params": SERVICES[name] | {parameter: value}}
    assert [text for text in asked({"reward": {"functions": [function]}}) if "evil" in text]


def test_the_code_of_each_model_is_asked_for_by_its_own_name_and_revision():
    teacher = {"path": "teacher", "revision": "old"}
    found = asked({"model": {"revision": "refs/pr/1"}, "algorithm": {"reference": teacher}})
    assert found[-3:] == ["model:own@refs/pr/1", "model:teacher@old", "model:judge"]
    assert not [text for text in asked({"model": {"trust_remote_code": False}}) if "model:" in text]
