"""Every planted mistake is named with its line and a way out; good configs come back equal."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import document
from asyncrl.config.load import load_config
from asyncrl.config.named_files import file_problems
from asyncrl.config.resolved import config_hash, config_json, dump_config, eval_digest, host_digest
from asyncrl.config.schema import Config
from asyncrl.config.wording import did_you_mean
from asyncrl.errors import ConfigError
from asyncrl.preflight.validate import validated_config
from tests.support.model_files import model_files

GOOD = """\
run: {name: first}
model: {path: some/model}
data: {train: train.jsonl}
reward:
  functions:
    - function: exact_match
"""


def write(directory: Path, text: str, name: str = "run.yaml") -> Path:
    path = directory / name
    path.write_text(dedent(text), encoding="utf-8")
    return path


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


MISTAKES = [
    # (text after the seven good lines, line of the mistake, key, what must be said)
    ("batch: {gruops: 8}", 7, "batch.gruops", "did you mean `groups`?"),
    ("batsh:\n  groups: 8", 7, "batsh", "did you mean `batch`?"),
    ("learner:\n  lr: 1e-6", 8, "learner.lr", "did you mean `learner.optimizer.lr`?"),
    ("num_generations: 8", 7, "num_generations", "did you mean `batch.group_size`?"),
    (
        "learner:\n  optimizer:\n    lr: fast",
        9,
        "learner.optimizer.lr",
        "found 'fast'; allowed is a number > 0",
    ),
    (
        "learner:\n  optimizer:\n    lr: -1e-6",
        9,
        "learner.optimizer.lr",
        "found -1e-06; allowed is a number > 0",
    ),
    ("learner: {zero_stage: 4}", 7, "learner.zero_stage", "found 4; allowed is one of 0, 1, 2, 3"),
    ("batch:\n  groups: 0", 8, "batch.groups", "found 0; allowed is a whole number >= 1"),
    ("batch:\n  groups: 2.5", 8, "batch.groups", "found 2.5; allowed is a whole number >= 1"),
    ("batch:\n  groups: true", 8, "batch.groups", "found true; allowed is a whole number >= 1"),
    (
        "batch:\n  minibatches: 5",
        8,
        "batch.minibatches",
        "must divide into minibatches (5); use one of [1, 2, 4",
    ),
    (
        "telemetry:\n\n  wandb: offlin",
        9,
        "telemetry.wandb",
        "one of off, online, offline; did you mean `offline`?",
    ),
    ("telemetry:\n  wandb: true", 8, "telemetry.wandb", "found true; allowed is one of off, online, offline"),
    ("sampling:", 7, "sampling", "found nothing; allowed is a section with temperature"),
    ("sampling: fast", 7, "sampling", "found 'fast'; allowed is a section with temperature"),
    (
        "sampling:\n  temperature: .nan",
        8,
        "sampling.temperature",
        "allowed is a finite number from 0.01 to 2",
    ),
    (
        "algorithm:\n  advantage:\n    name: mine.py:advantage\n    scales: [1, .inf]",
        10,
        "algorithm.advantage.scales.1",
        "found inf; allowed is a finite number",
    ),
    (
        "learner:\n  hooks:\n    - name: mine.py:Hook\n      limit: .nan",
        10,
        "learner.hooks.0.limit",
        "found nan; allowed is a finite number",
    ),
    (
        "algorithm:\n  correction: {cap: .inf}",
        8,
        "algorithm.correction.cap",
        "`cap` is inf; it must be a finite number > 0",
    ),
    ("sampling:\n  top_p: 0.9", 8, "sampling.top_p", "set sampling.top_k, 1 to 256"),
    ("sampling: {stop: END}", 7, "sampling.stop", "found 'END'; allowed is a list of text"),
    ("sampling:\n  stop: [a,\n    3]", 9, "sampling.stop.1", 'allowed is text; write it in quotes: "3"'),
    ("model: {path: other}", 7, "model", "found the key twice, first at"),
    (
        "weights:\n  transport: tcp\n  transport: nccl",
        9,
        "weights.transport",
        "found the key twice, first at",
    ),
    ("weights:\n  transport: tcp", 8, "weights.transport", "without control.bind the learner listens on no"),
    ("algorithm:\n  advantage: grppo", 8, "algorithm.advantage.name", "did you mean `grpo`?"),
    ("algorithm:\n  filters: [zero_varianc]", 8, "algorithm.filters.0.name", "did you mean `zero_variance`?"),
    (
        "algorithm:\n  correction:\n    name: truncate\n    captain: 3",
        10,
        "algorithm.correction.captain",
        "no parameter `captain`",
    ),
    (
        "algorithm:\n  kl: {coefficient: 0.1, estimator: k9}",
        8,
        "algorithm.kl.estimator.name",
        "unknown kl `k9`",
    ),
    ("algorithm:\n  advantage: [grpo]", 8, "algorithm.advantage", "found ['grpo']; allowed is a section"),
    ("data2: !!python/object:os.system {}", 7, "data2", "unknown key"),
    ("store: {url: !secret x}", 7, "store.url", "found the tag !secret"),
    ("eval: {samples: 4}", 7, "eval.samples", "set a temperature"),
    ("batch:\n  group_size: 1", 8, "batch.group_size", "use group_size >= 2"),
    ("learner:\n  tokens_per_microbatch: 100", 8, "learner.tokens_per_microbatch", "raise it"),
    ("algorithm:\n  correction: none", 8, "algorithm.correction", "set correction: truncate"),
    ("algorithm:\n  proximal: behaviour", 8, "algorithm.proximal", "set correction: none"),
    ("algorithm:\n  proximal: log_linear", 8, "algorithm.proximal", "set proximal: recompute"),
    ("algorithm:\n  kl:\n    target: 0.1", 9, "algorithm.kl.target", "set a coefficient"),
    (
        "algorithm:\n  kl: {coefficient: 0.1,\n    estimator: k1}",
        9,
        "algorithm.kl.estimator",
        "zero on average",
    ),
    ("critic:\n  clip: 0.2", 7, "critic", "drop the section"),
    (
        "algorithm:\n  correction:\n    name: mask\n    low: 7",
        10,
        "algorithm.correction.low",
        "`low` must be below `high`",
    ),
    (
        "algorithm:\n  correction:\n    name: veto\n    low: three",
        10,
        "algorithm.correction.low",
        "must be a number >= 0",
    ),
    (
        "algorithm:\n  filters:\n    - name: reward_range\n      low: 1\n      high: 0",
        10,
        "algorithm.filters.0.low",
        "nothing between",
    ),
]


@pytest.mark.parametrize(
    ("text", "line", "key", "said"),
    MISTAKES,
    ids=[mistake[2] + ":" + mistake[3][:20] for mistake in MISTAKES],
)
def test_a_mistake_is_named_with_line_key_and_way_out(
    tmp_path: Path, text: str, line: int, key: str, said: str
) -> None:
    path = write(tmp_path, GOOD + text + "\n")
    message = complaint(path)
    (named,) = [row for row in message.splitlines() if said in row]
    assert named.startswith(f"  {path}:{line}  {key}: "), message
    assert message.startswith("1 problem in"), "one mistake is one problem"


def test_all_mistakes_of_a_file_come_at_once_in_reading_order(tmp_path: Path) -> None:
    texts = [
        text
        for text, _, key, _ in MISTAKES
        if key.split(".")[0] in ("batsh", "telemetry", "num_generations", "learner")
    ]
    chosen = [texts[0], texts[1], texts[3], texts[-2]]
    path = write(tmp_path, GOOD + "\n".join(chosen) + "\nrewards: 1\n")
    message = complaint(path, "staleness.max_lag=-1", "eval.every=never")
    lines = [int(found) for found in re.findall(r"run\.yaml:(\d+)  ", message)]
    assert len(lines) >= 4 and lines == sorted(lines)
    assert message.index("run.yaml:") < message.index(
        "override `staleness.max_lag=-1`  staleness.max_lag: found -1"
    )
    assert "override `eval.every=never`  eval.every: found 'never'; allowed is a whole number >= 1" in message
    assert message.startswith(f"{len(message.splitlines()) - 1} problems in {path}")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("run: {name: a\nmodel: b\n", 2, "is not YAML"),
        ("run:\n\tname: a\n", 2, "indent with spaces, not tabs"),
        ("run:\n  name: a: b\n", 2, "quotes"),
        ("run: 'a\n", 2, "is not YAML"),
        ("", 1, "found nothing"),
        ("- a\n", 1, "found no section"),
    ],
)
def test_what_is_no_yaml_is_said_with_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = write(tmp_path, text)
    message = complaint(path)
    assert f"{path}:{line}  " in message and said in message


def test_missing_sections_and_keys_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {}\nreward:\n  functions: []\nrun: {name: a}\n")
    message = complaint(path)
    assert (
        f"{path}:1  model.path: found nothing; it is needed: A Hugging Face directory or hub name; add "
        "`path: ...`" in message
    )
    assert f"{path}  data: found nothing; it is needed: Source of the prompts; add `data: ...`" in message
    assert f"{path}:3  reward.functions: is [] and there is no environment" in message


def test_missing_file_is_said(tmp_path: Path) -> None:
    assert f"cannot read {tmp_path / 'none.yaml'}" in complaint(tmp_path / "none.yaml")


def test_scalars_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        GOOD.replace("some/model", "on")
        + "learner: {optimizer: {lr: 1e-6, eps: 1E-10}, steps: 010}\ntelemetry: {wandb: off}\n"
        "sampling: {stop: [no, 12:30, 2026-01-01, 1_000, '7']}\nbatch: {groups: 0x10}\n",
    )
    config = load_config(path)
    assert (config.learner.optimizer.lr, config.learner.optimizer.eps) == (1e-6, 1e-10)
    assert config.learner.steps == 10
    assert config.batch.groups == 16
    assert config.telemetry.wandb == "off"
    assert config.model.path == "on"
    assert config.sampling.stop == ("no", "12:30", "2026-01-01", "1_000", "7")


def test_later_overrides_win_and_reach_into_lists_and_choices(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "batch: {groups: 4}\nalgorithm: {filters: [zero_variance]}\n")
    config = load_config(
        path,
        [
            "batch.groups=8",
            "batch.groups=16",
            "reward.functions.0.weight=2",
            "algorithm.correction.cap=3.0",
            "sampling.stop=[a, b]",
            "data.eval=x=y.jsonl",
            "staleness.window_groups=",
        ],
    )
    assert config.batch.groups == 16
    assert config.reward.functions[0].weight == 2.0
    assert (config.algorithm.correction.name, config.algorithm.correction.params) == (
        "truncate",
        {"cap": 3.0},
    )
    assert config.sampling.stop == ("a", "b")
    assert [one.path for one in config.data.eval] == ["x=y.jsonl"]
    assert config.staleness.window_groups is None


def test_another_function_does_not_inherit_parameters(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "algorithm: {correction: {name: truncate, cap: 3.0}}\n")
    assert load_config(path, ["algorithm.correction=veto"]).algorithm.correction.params == {}
    assert load_config(path, ["algorithm.correction.name=veto"]).algorithm.correction.params == {}
    assert load_config(path, ["algorithm.correction.name=truncate"]).algorithm.correction.params == {
        "cap": 3.0
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("batch.groups", "found no `key.path=value`"),
        ("=3", "found no `key.path=value`"),
        ("batch.gruops=3", "did you mean `groups`?"),
        ("batch.groups=many", "found 'many'; allowed is a whole number >= 1"),
        ("batch.groups=[1", "is not YAML"),
        ("reward.functions.1.weight=2", "allowed is 0 to 0"),
        ("sampling.stop.0=a", "allowed is the whole list"),
        ("data.train.x=1", "found a section with x; allowed is text"),
        ("reward.functions.0.wieght=2", "did you mean `weight`?"),
        ("batch={groups: 1, groups: 2}", "found the key twice"),
        ("algorithm.advantage=grppo", "did you mean `grpo`?"),
        ("data.template='a' # b", "found text behind the value, beginning with `#`; leave it out"),
        ("telemetry.prometheus_port=false", "found false; allowed is a whole number"),
        ("checkpoint.keep_every=true", "found true; allowed is a whole number"),
        ("batch.groups=!!int many", "found the tag"),
        ("batch.groups=!!bool many", "found the tag"),
        ("batch.groups=!!timestamp many", "found the tag"),
        ("control.bind=tcp://[foo]:5555", "control.bind: 'foo' does not appear to be"),
        ("learner.optimizer.betas=[0.9]", "learner.optimizer.betas: found [0.9]; allowed is"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, said: str) -> None:
    message = complaint(write(tmp_path, GOOD), override)
    assert message.startswith("1 problem in"), message
    (named,) = [row for row in message.splitlines() if said in row]
    assert named.startswith(f"  override `{override}`")


@pytest.mark.parametrize(
    "reason", ["model: {lora: {}, path: some/model}", "data: {train: x, curriculum: {floor: 0.1}}"]
)
def test_an_advantage_that_cannot_be_loaded_hides_no_other_mistake(tmp_path: Path, reason: str) -> None:
    text = "\n".join(line for line in GOOD.splitlines() if line.split(":")[0] != reason.split(":")[0])
    text += (
        f"\n{reason}\nalgorithm: {{advantage: absent.py:f, filters: [zero_variance]}}\nbatch: {{gropus: 3}}\n"
    )
    title, *lines = complaint(write(tmp_path, text)).splitlines()
    assert title.startswith("2 problems") and "batch.gropus: found an unknown key" in lines[1]
    assert "run.yaml:7  algorithm.advantage.name: cannot load `absent.py:f`: absent.py does not" in lines[0]


@pytest.mark.parametrize(
    "value",
    [
        *("a#b", '"### {x}"', "'a # b'", '"#"  ', "### {x}", "a # b", "a #b #c "),
        *("two\nlines", "a\n\nb\n", "a\n  b", "# a\nb"),
    ],
)
def test_a_hash_and_a_line_end_of_an_override_are_text(value: str) -> None:
    found = document.override(Config, f"data.system={value}").plain()
    assert found == {"data": {"system": value.strip().strip("'\"")}}


def test_an_override_of_several_lines_is_still_yaml() -> None:
    def value_of(text: str) -> object:
        return document.override(Config, f"data.system={text}").plain()["data"]["system"]

    assert value_of("- a\n- b\n") == ["a", "b"] and value_of("a: 1\nb: 2") == {"a": 1, "b": 2}
    assert value_of("[a,\n b]") == ["a", "b"] and value_of("|\n  a\n  b\n") == "a\nb\n"
    assert value_of("'a\n  b'") == "a b" and value_of("5\n") == 5


def test_extends_merges_left_to_right_and_keeps_lines(tmp_path: Path) -> None:
    (tmp_path / "presets").mkdir()
    write(
        tmp_path,
        "batch: {groups: 4, group_size: 2}\nalgorithm: {correction: {name: truncate, cap: 5.0}}\n",
        "presets/a.yaml",
    )
    write(tmp_path, "batch: {groups: 6}\nalgorithm: {correction: {name: veto}}\n", "presets/b.yaml")
    config = load_config(write(tmp_path, "extends: [presets/a.yaml, presets/b.yaml]\n" + GOOD))
    assert (config.batch.groups, config.batch.group_size) == (6, 2)
    assert (config.algorithm.correction.name, config.algorithm.correction.params) == ("veto", {})
    config = load_config(
        write(tmp_path, "extends: presets/a.yaml\n" + GOOD + "algorithm: {correction: {cap: 2.0}}\n")
    )
    assert config.algorithm.correction.params == {"cap": 2.0}
    write(tmp_path, "batch: {groups: 4,\n  gruop_size: 2}\n", "presets/a.yaml")
    message = complaint(write(tmp_path, "extends: presets/a.yaml\n" + GOOD))
    assert f"{tmp_path}/presets/a.yaml:2  batch.gruop_size: " in message


def test_extends_that_cannot_work_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "extends: run.yaml\n")
    assert "extends itself" in complaint(path)
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "it is a pipe, and a config is read more than once; give the" in complaint(tmp_path / "pipe.yaml")
    path = write(tmp_path, GOOD + "extends: none.yaml\n")
    message = complaint(path)
    assert f"{path}:7  extends: cannot read" in message
    assert "found 3; allowed is the path" in complaint(write(tmp_path, GOOD + "extends: 3\n"))
    assert "allowed is the path" in complaint(write(tmp_path, GOOD + "extends: []\n"))


def test_an_anchor_that_holds_itself_ends(tmp_path: Path) -> None:
    assert "found an anchor that contains itself" in complaint(
        write(tmp_path, GOOD + "batch: &a {groups: *a}\n")
    )


def test_aliases_of_aliases_do_not_fill_the_memory(tmp_path):
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 12))
    assert "makes the config longer than 100000 values" in complaint(
        write(tmp_path, GOOD + "l0: &l0 [1]\n" + levels)
    )


words = st.text(min_size=1, max_size=12).filter(lambda text: max(text) < "\ud800" or min(text) > "\udfff")
tricky = st.sampled_from(
    [
        "off",
        "1e-6",
        "null",
        "~",
        "0x1F",
        "12:30",
        "yes",
        "=",
        "<<",
        "- a",
        "#x",
        "a: b",
        "\x00\x1b[31m",
        "\x85",
        "",
    ]
)
configs = st.builds(
    lambda name, text, stop, lr, lag, cap, groups: Config.model_validate(
        {
            "run": {"name": name},
            "model": {"path": text},
            "data": {"train": text, "template": text},
            "reward": {"functions": [{"function": "a:" + text, "weight": lr}]},
            "sampling": {"stop": stop, "temperature": min(max(lr, 0.01), 2.0)},
            "staleness": {"max_lag": lag},
            "batch": {"groups": groups},
            "learner": {"optimizer": {"lr": lr}},
            "algorithm": {"correction": {"name": "truncate", "cap": cap}, "filters": ["zero_variance"]},
        }
    ),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,11}", fullmatch=True),
    words | tricky,
    st.lists(words | tricky.filter(bool), max_size=3),
    st.floats(min_value=1e-12, max_value=1e12),
    st.integers(0, 100),
    st.floats(min_value=1.0, max_value=50.0),
    st.integers(1, 64),
)


@given(config=configs)
def test_what_is_dumped_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    path = tmp_path_factory.mktemp("dump") / "resolved.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    loaded = load_config(path)
    assert loaded == config
    assert config_json(loaded) == config_json(config)
    assert config_hash(loaded) == config_hash(config)


def test_the_hash_is_of_what_both_sides_must_agree_on(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    same = ["generator.count=7", "telemetry.wandb=offline", "learner.optimizer.lr=1", "run.root=x"]
    other = [
        "run.seed=1",
        "batch.group_size=4",
        "sampling.temperature=0.5",
        "model.dtype=float32",
        "data.shuffle=false",
    ]
    other += [
        "reward.functions.0.weight=2",
        "staleness.max_lag=1",
        "weights.transport=disk",
        "eval.samples=1",
        "eval.prompts=3",
    ]
    other += ["sampling.top_k=9", "model.lora={}", "model.tool_parser=hermes", "data.filter=a:b"]
    # Generators tell from them which weights a round of evaluation needs.
    other += ["learner.steps=9", "eval.every=3"]
    other += ["algorithm.advantage=remax"]  # generators sample greedy responses for it
    same += ["algorithm.advantage=rloo"]
    base = config_hash(load_config(path))
    assert {config_hash(load_config(path, [text])) for text in same} == {base}
    assert base == config_hash(load_config(path, ["eval.samples=1"]))
    hashes = [config_hash(load_config(path, [text])) for text in other if text != "eval.samples=1"]
    assert base not in hashes and len(set(hashes)) == len(hashes)


def test_hashes_know_the_models_that_score(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        run: {name: first}
        model: {path: some/model}
        data: {train: train.jsonl, eval: [{path: a.jsonl, name: a}, {path: b.jsonl, name: b, reward: [math]}]}
        reward: {functions: [{function: model_score, params: {scorer: preferred}}]}
        scorers: {preferred: {model: some/reward-model}}
        sampling: {temperature: 1.0}
        algorithm: {kl: {coefficient: 0.1}, reference: {path: some/teacher, scorers: 1}}
        """,
    )
    base = load_config(path)

    def hashes(*overrides: str) -> tuple[bool, bool, list[bool]]:
        config = load_config(path, overrides)
        sets = [eval_digest(config, one) != eval_digest(base, one) for one in config.data.eval]
        return config_hash(config) != config_hash(base), host_digest(config) != host_digest(base), sets

    assert hashes("scorers.preferred.model=some/other") == (True, True, [True, False])
    assert hashes("algorithm.reference.path=some/other") == (True, True, [False, False])
    assert hashes("algorithm.reference.template='{prompt} {answer}'")[0]
    # Where they run is each host's own affair.
    assert not hashes("scorers.preferred.count=2", "scorers.preferred.gpus=[1]")[0]
    assert not hashes("algorithm.reference.scorers=2")[0]
    # A teacher of the learner is not of the generators.
    held, other = (["algorithm.reference.scorers=0", f"algorithm.reference.path={one}"] for one in "ab")
    assert config_hash(load_config(path, held)) == config_hash(load_config(path, other))


@pytest.mark.parametrize("given", ["n" * 300, "/".join(["n" * 200] * 30), "n" * 300 + "*.py"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train", "{}"),
        ("model.path", "{}"),
        ("run.root", "{}"),
        ("data.map", "{}.py:f"),
        ("environment.python", "{}"),
        ("reward.functions.0.function", "{}.py:f"),
    ],
)
def test_a_name_that_is_too_long_is_a_mistake_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, key: str, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model_files(tmp_path / "model")
    write(tmp_path, '{"prompt": "a", "answer": "b"}\n', "train.jsonl")
    path = write(tmp_path, GOOD)
    with pytest.raises(ConfigError) as caught:
        validated_config(
            path, ["model.path=model", "environment.uses=game.py:Game", f"{key}={value.format(given)}"]
        )
    assert f"  {key}: found nnn" in str(caught.value) and "at most 255 bytes" in str(caught.value)


def test_a_socket_that_is_too_long_is_a_mistake_and_a_config_too(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert load_config(path, [f"store.url=unix:///{'n' * 106}"])
    assert "a path of 108 bytes; a socket has at most 107" in complaint(
        path, f"store.url=unix:///{'n' * 107}"
    )
    assert "File name too long" in complaint(tmp_path / ("n" * 300))


def test_a_data_set_of_the_hub_needs_the_library_that_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, GOOD)
    config = load_config(path, ["data.train=openai/gsm8k"])
    assert not [*file_problems(config)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    (found,) = file_problems(config)
    assert found.keys == ("data.train",) and "asyncrl[data]" in found.text


def test_a_reward_model_of_a_directory_scores_a_policy_of_the_hub(tmp_path: Path) -> None:
    model_files(tmp_path / "policy", vocab_size=9)
    rewarding = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "good"}}
    model_files(tmp_path / "rm", **rewarding)
    (tmp_path / "policy" / "tokenizer.json").write_text('{"model": {"vocab": {"other": 0}}}')
    asks = "reward.functions=[{function: model_score, params: {scorer: rm}}]"
    overrides = [asks, f"scorers.rm.model={tmp_path / 'rm'}"]
    path = write(tmp_path, GOOD)
    assert not [*file_problems(load_config(path, [*overrides, f"data.train={path}"]))]
    held = [*overrides, f"data.train={path}", f"model.path={tmp_path / 'policy'}"]
    found = {one.keys[0]: one.text for one in file_problems(load_config(path, held))}
    assert "another tokenizer than model.path" in found["scorers.rm.model"]


def test_files_are_checked_without_loading_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_files(tmp_path / "model", max_position_embeddings=128, num_attention_heads=6)
    write(tmp_path, '{"prompt": "a", "answer": "b"}\n', "train.jsonl")
    path = write(tmp_path, GOOD)
    fits = ["model.path=./model", "sampling.max_prompt_tokens=64", "sampling.max_response_tokens=64"]
    validated_config(path, fits)
    mistakes = {
        "data.train=tain.jsonl": "did you mean `train.jsonl`?",
        "data.eval=./eval.jsonl": "data.eval: found no ./eval.jsonl",
        "model.path=./modle": "did you mean `model`?",
        "model.chat_template=true": "has no template",
        "sampling.max_response_tokens=65": "max_prompt_tokens 64 + max_response_tokens 65 = 129; allowed is 128",
        "generator.tensor_parallel=4": "divisor of the 6 attention heads; set one of [1, 2, 3, 6]",
        "learner={ranks: 4, sequence_parallel: 4}": "learner.sequence_parallel: found 4; allowed is a divisor",
        "reward.functions.0.function=score.py:f": "reward.functions.0.function: found no score.py",
        "learner.hooks=[look.py:Look]": "learner.hooks.0.name: found no look.py; give `path.py:Look`",
        "learner.ranks=500": "found 500 ranks for 256 sequences",
    }
    for override, said in mistakes.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            validated_config(path, [*fits, override])
    for name, said in {
        "tokenizer.json": "no tokenizer",
        "model.safetensors": "no weights",
        "config.json": "cannot read",
    }.items():
        content = (tmp_path / "model" / name).read_bytes()
        (tmp_path / "model" / name).unlink()
        with pytest.raises(ConfigError, match=said):
            validated_config(path, fits)
        (tmp_path / "model" / name).write_bytes(content)


@pytest.mark.parametrize(
    ("tracker", "on"),
    [("tensorboard", "true"), ("wandb", "online"), ("wandb", "offline")],
)
def test_a_tracker_that_is_not_installed_is_said_with_the_way_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, on: str
) -> None:
    monkeypatch.chdir(tmp_path)
    fits = ["model.path=Qwen/Qwen3-0.6B", "data.train=openai/gsm8k", f"telemetry.{tracker}={on}"]
    path = write(tmp_path, GOOD)
    validated_config(path, fits)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = (
        f"telemetry.{tracker}: is {on}, but {tracker} is not installed; pip install 'asyncrl[{tracker}]', "
        "or set it to"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        validated_config(path, fits)


def test_an_engine_that_is_not_installed_is_said_with_the_way_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fits = ["model.path=Qwen/Qwen3-0.6B", "data.train=openai/gsm8k", "cluster.kind=ray", "generator.count=1"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = "cluster.kind: is ray, but ray is not installed; pip install 'asyncrl[ray]'"
    with pytest.raises(ConfigError, match=re.escape(said)):
        validated_config(write(tmp_path, GOOD), fits)


def test_a_service_needs_the_library_of_limits_only_with_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "aiolimiter" else real(name))

    def validate(limit: str) -> None:
        service = f"reward.functions=[{{function: http_reward, params: {{url: 'http://a'{limit}}}}}]"
        fits = ["model.path=Qwen/Qwen3-0.6B", "data.train=openai/gsm8k", service]
        validated_config(write(tmp_path, GOOD), fits)

    validate("")
    said = "is http_reward, but aiolimiter is not installed; pip install 'asyncrl[judge]'"
    with pytest.raises(ConfigError, match=re.escape(said)):
        validate(", requests_per_minute: 60")


@pytest.mark.parametrize(
    ("override", "key", "count"),
    [
        ("environment.command='python my_agent.py'", "environment.command", 1),
        ("reward.functions=[3]", "reward.functions.0", 1),
        ("environment={command: 'python a.py', max_turns: 3}", "environment.command", 1),
        ("batch.group_size=one", "batch.group_size", 1),
        ("staleness.max_lag=none", "staleness.max_lag", 1),
        ("learner.optimizer.warmup_steps=-1", "learner.optimizer.warmup_steps", 1),
        ("environment.uses=[3]", "environment.uses.0", 1),
        ("environment.uses=3", "environment.uses", 1),
        ("generator.vllm.seed=.nan", "generator.vllm.seed", 1),
    ],
)
def test_a_value_of_a_wrong_type_is_the_only_problem_of_its_section(
    tmp_path: Path, override: str, key: str, count: int
) -> None:
    """Rules would judge the default in its place."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, GOOD), ["reward.functions=[]"] * ("command" in override) + [override])
    _, *lines = str(caught.value).splitlines()
    assert len(lines) == count and f"  {key}: found " in lines[0]


def test_members_of_a_union_are_described_in_words(tmp_path: Path) -> None:
    said = complaint(write(tmp_path, GOOD), "learner.optimizer.warmup_steps=1.5")
    assert "found 1.5; allowed is a whole number >= 0 or a number > 0 < 1; correct the value" in said


@pytest.mark.parametrize(
    "text",
    [
        '[run]\nname = "first"\n',
        'name = "first"\nsteps = 3\n',
        '# prime-rl\n[model]\npath = "a"\n[[reward.functions]]\nfunction = "exact_match"\n',
    ],
)
def test_toml_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"is TOML; a config is YAML: write a table"):
        load_config(write(tmp_path, text, "run.toml"))


def test_suggestions_overlook_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, GOOD, "ok.yaml")
    with pytest.raises(ConfigError, match=r"did you mean `ok\.yaml`"):
        load_config(Path("OK.yaml"))
    write(tmp_path, "{}", "Train.jsonl")
    with pytest.raises(ConfigError, match=r"did you mean `Train\.jsonl`"):
        validated_config(Path("ok.yaml"), ["model.path=a/b", "data.train=TRAIN.jsonl"])
    assert did_you_mean("EXACT_MATHC", ["exact_match"]) == "; did you mean `exact_match`?"


def test_a_split_of_a_file_has_no_effect_and_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, '{"prompt": "a", "answer": "b"}\n', "train.jsonl")
    path, fits = write(tmp_path, GOOD), ["model.path=a/b", "data.train=train.jsonl", "data.eval=train.jsonl"]
    for key in ("split", "eval_split"):
        with pytest.raises(
            ConfigError, match=rf"data\.{key}: is train\[:10\], but train\.jsonl has no splits"
        ):
            validated_config(path, [*fits, f"data.{key}='train[:10]'"])
    validated_config(path, [*fits, "data.split=train", "data.eval_split=test"])


def test_the_script_of_an_agent_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, '{"prompt": "a", "answer": "b"}\n', "train.jsonl")
    (tmp_path / "my_agent.py").write_text("")
    path = write(tmp_path, GOOD)
    fits = ["model.path=a/b", "data.train=train.jsonl", "model.chat_template=true"]
    validated_config(path, [*fits, "environment.command=[python, my_agent.py, out.py]"])
    validated_config(path, [*fits, "environment.command=[python, -m, my_agent]"])
    with pytest.raises(ConfigError, match=r"environment\.command: found no agent\.py .*`my_agent\.py`"):
        validated_config(path, [*fits, "environment.command=[python, agent.py]"])


def test_hub_names_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    validated_config(write(tmp_path, GOOD), ["model.path=Qwen/Qwen3-0.6B", "data.train=openai/gsm8k"])


def test_reading_a_config_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = (
        "import asyncrl.config.load, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
