"""What a source of data.train and a set of data.eval say for themselves, and what they leave to the sections."""

import asyncio
import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.algo.trainable import GroupLimits
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.load import load_config
from asyncrl.config.resolved import config_hash, dump_config, host_digest
from asyncrl.engine.duty import Clock
from asyncrl.engine.sampler import TaskSampler
from asyncrl.errors import ConfigError
from asyncrl.evaluation import Rounds, summarise
from asyncrl.launch import generator_parts
from asyncrl.launch.players import Players
from asyncrl.preflight.validate import validated_config
from asyncrl.run.directory import RunDirectory
from asyncrl.run.starts import code_of
from asyncrl.telemetry.history import History, of_sets, score
from asyncrl.types import Group, Prompt
from tests.support.task_config import config_of

GOOD = """\
run: {name: x}
model: {path: some/model}
data:
  train:
    - {path: sums.jsonl, weight: 0.7}
    - path: games.jsonl
      weight: 0.3
      reward: []
      environment: {uses: "game.py:Guess", max_turns: 4}
  eval:
    - {path: test.jsonl, every: 5, limit: 500}
    - {path: far/math500.jsonl, name: math, reward: [gsm8k], every: 20, samples: 4, temperature: 1.0}
reward: {functions: ["task.py:right"]}
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("far").mkdir()
    for name in ("sums", "games", "test", "far/math500"):
        Path(f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("bare.jsonl").write_text('{"prompt": "1+1="}\n')
    Path("game.py").write_text("class Guess:\n    def reset(self): ...\n    def step(self, response): ...\n")
    Path("task.py").write_text("def right(prompt, response, answer): ...\n")
    Path("run.yaml").write_text(GOOD)


def test_a_key_that_a_task_leaves_out_is_that_of_the_section_and_every_config_reads_itself_back() -> None:
    config = load_config(Path("run.yaml"), ["environment.step_s=3", "eval.prompts=7"])
    sums, games, test, far = config.tasks.values()
    assert [one.function for one in sums.reward.functions] == ["task.py:right"]
    assert games.reward.functions == () and games.reward.workers == config.reward.workers
    assert (games.environment.uses, games.environment.max_turns, games.environment.step_s) == (
        "game.py:Guess",
        4,
        3,
    )
    assert not sums.environment.is_used and config.reward_parts == ["right", "environment"]
    assert (test.eval.every, test.eval.prompts, test.eval.samples) == (5, 500, 1)
    assert (far.eval.every, far.eval.prompts, far.eval.samples, far.eval.temperature) == (20, 7, 4, 1.0)
    Path("again.yaml").write_text(dump_config(config))
    assert load_config(Path("again.yaml")) == config
    assert list(load_config(Path("again.yaml")).tasks.values())[1] == games, "only what was given counts"


@pytest.mark.parametrize(
    ("section", "own", "uses", "command"),
    [
        ({"uses": "a:A"}, {"command": ["b"]}, (), ("b",)),
        ({"command": ["b"]}, {"uses": "a:A"}, "a:A", ()),
        ({"uses": "a:A", "max_turns": 3}, {"uses": []}, (), ()),
        ({"uses": "a:A"}, {"max_turns": 2}, "a:A", ()),
        ({"uses": "a:A"}, None, "a:A", ()),
    ],
)
def test_a_task_has_one_environment_or_none(section, own, uses, command) -> None:
    train = [{"path": "x.jsonl", "environment": own}]
    config = config_of(environment=section, data={"train": train})
    (task,) = config.tasks.values()
    assert (task.environment.uses, task.environment.command) == (uses, command)
    if not task.environment.is_used:
        assert task.environment == EnvironmentConfig(uses=()), (
            "keys of an environment that is not played do not count"
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "data.eval.1.name=test",
            "run.yaml:10  data.eval: the sets have the names test, test, which must differ",
        ),
        ("data.eval.1.name=se", "data.eval: a set has the name se"),
        ("data.eval.1.temperature=0", "data.eval.1.samples: eval.samples is 4 at eval.temperature 0"),
        ("data.eval.1.temperature=5", "data.eval.1.temperature: found 5; allowed is a number from 0 to 2"),
        ("data.eval.1.path=bare.jsonl", "run.yaml:12  data.eval.1.reward.0.function: wants column `answer`"),
        (
            "data.eval.0.path=bare.jsonl",
            "reward.functions.0.function: wants column `answer`, which bare.jsonl",
        ),
        ("data.eval.0.split=dev", "data.eval.0.split: is dev, but test.jsonl has no splits"),
        ("data.eval.1.reward=[nothing]", "data.eval.1.reward.0.function: found no built-in `nothing`"),
        ("data.eval.1.reward=[gsm8k, gsm8k]", "data.eval.1.reward: the functions need different names"),
        ("data.train.1.environment.uses=game.py:Gess", "data.train.1.environment.uses: found no `Gess`"),
        ("data.train.1.environment.command=[x]", "data.train.1.environment.uses: environment.uses and"),
        ("data.train.1.environment.uses=[]", "data.train.1.reward: reward.functions is [] and there is no"),
        ("data.train.1.name=right", "data.train.1: right is also the name of a part of the reward"),
        ("checkpoint.best=eval/accuracy", "begin with eval/test/, eval/math/; name one of these"),
        ("checkpoint.best=eval/test/acuracy", "did you mean `eval/test/accuracy`?"),
        ("checkpoint.best=eval/math/pass@1", "did you mean `eval/math/pass@4`?"),
        (
            "learner.stop_when={metric: reward/men, patience: 1}",
            "stop_when.metric: is reward/men, which this run will not have; did you mean `reward/mean`?",
        ),
        ("checkpoint.best=eval/math/maj@8", "did you mean `eval/math/maj@4`?"),
        ("checkpoint.best=eval/test/maj@16", "is eval/test/maj@16, which this run will not have"),
        ("checkpoint.best=eval/math/best@*", "is eval/math/best@*, which this run will not have"),
        ("checkpoint.best=alarm/entropy", "is alarm/entropy, which this run will not have"),
        ("checkpoint.best=hook/length", "checkpoint.best: is hook/length, which this run will not have"),
        ("checkpoint.best=policy/mine", "checkpoint.best: is policy/mine, which this run will not have"),
        (
            'data.train.0.reward=[{"function": "llm_judge", "params": {"url": "http://a", "prompt": "p"}}]',
            "data.train.0.reward.0: params of `llm_judge` needs `model`",
        ),
    ],
)
def test_a_mistake_of_a_task_is_named_at_its_own_key(change: str, said: str) -> None:
    assert validated_config(Path("run.yaml"))
    with pytest.raises(ConfigError) as refused:
        validated_config(Path("run.yaml"), [change])
    assert said in str(refused.value)


@pytest.mark.parametrize("metric", ["reward/right/mean", "environment/moves", "eval/math/best@4", "eval/math/maj@4", "groups/rejected_own",
                                    "hook/length", "policy/mine", "policy/ratio/max", "eval/math/se/accuracy"])  # fmt: skip
def test_a_metric_may_be_of_a_part_an_environment_a_hook_or_a_loss(metric: str) -> None:
    own = ["learner.hooks=[task.py:right]", "algorithm.policy_loss=task.py:right"]
    assert load_config(
        Path("run.yaml"), [*own, f"checkpoint.best={metric}", "checkpoint.every=20", "learner.steps=99"]
    )


ASKED = {"function": "model_score", "params": {"scorer": "judge"}}
SECOND = {"path": "y.jsonl", "reward": [{"function": "exact_match"}]}
PLAIN = {"data": {"train": "x.jsonl", "eval": "y.jsonl"}}


@pytest.mark.parametrize(
    ("sections", "unused"),
    [
        (
            {"reward": {"functions": [ASKED]}, "scorers": {"judge": {"model": "m"}}}
            | {"data": {"train": "x.jsonl", "eval": [SECOND]}},
            {"reward": {"functions": [{"function": "math"}]}},
        ),
        (
            {"algorithm": {"advantage": {"name": "gdpo", "weights": {"reward": 1, "exact_match": 2}}}}
            | {"data": {"train": [{"path": "x.jsonl"}, SECOND]}},
            PLAIN,
        ),
        (
            {"batch": {"missing_episodes": 1}}
            | {"data": {"train": [{"path": "x.jsonl"}, SECOND | {"environment": {"uses": "game.py:Guess"}}]}},
            PLAIN,
        ),
        (
            {"eval": {"samples": 4}, "data": {"train": "x.jsonl", "eval": [SECOND | {"temperature": 1.0}]}},
            PLAIN,
        ),
    ],
)
def test_what_one_task_uses_need_not_be_used_by_the_others(sections: Any, unused: Any) -> None:
    assert len(config_of(**sections).tasks) == 2
    with pytest.raises(ValidationError):
        config_of(**sections | unused)


def test_the_interval_of_the_named_set_decides_whether_a_best_checkpoint_can_be_found() -> None:
    best = ["learner.steps=12", "checkpoint.every=4"]
    assert load_config(Path("run.yaml"), [*best, "checkpoint.best=eval/test/accuracy", "data.eval.0.every=3"])
    with pytest.raises(ConfigError, match=r"evaluated \(every 20\); set data.eval.1.every: 4"):
        load_config(Path("run.yaml"), [*best, "checkpoint.best=eval/math/accuracy"])


def test_every_set_has_its_rounds_and_a_lane_of_its_own() -> None:
    config, nine = load_config(Path("run.yaml"), ["data.eval.1.path=test.jsonl"]), [(9, "some"), (9, "rows")]
    test, far = Rounds.of(config, nine).values()
    assert (test.prompts, test.every, far.prompts, far.every) == (9, 5, 9, 20)
    same = [{"path": "test.jsonl", "name": name} for name in "ab"]
    lanes = [
        one.lane for one in Rounds.of(config_of(data={"train": "x", "eval": same}), [(3, "")] * 2).values()
    ]
    assert len(set(lanes)) == 2, "equal sets do not share answers"
    # A set that changes leaves the rounds of the others alone.
    other = load_config(Path("run.yaml"), ["data.eval.1.path=test.jsonl", "data.eval.1.samples=2"])
    assert [
        a == b for a, b in zip(Rounds.of(config, nine).values(), Rounds.of(other, nine).values(), strict=True)
    ] == [True, False]
    # So does a set whose rows are edited.
    edited = Rounds.of(config, [(9, "other"), (9, "rows")]).values()
    assert [a.lane == b.lane for a, b in zip((test, far), edited, strict=True)] == [False, True]
    # A set that is given by its path alone is the one that a section without names has always had.
    plain, listed = (config_of(data={"train": "x", "eval": one}) for one in ("e", [{"path": "e"}]))
    assert Rounds.of(plain, [(3, "")]) == Rounds.of(listed, [(3, "")]) and list(plain.data.sets) == [""]


def test_code_of_a_task_is_compared_between_hosts_and_watched() -> None:
    one = load_config(Path("run.yaml"))
    other = load_config(Path("run.yaml"), ["data.eval.1.reward=[math]"])
    assert config_hash(one) != config_hash(other) and host_digest(one) != host_digest(other)
    assert [name.partition(" ")[0] for name in code_of(one)] == ["game.py", "task.py"]


def group(ticket_id: int, rewards: list[float]) -> Group:
    from tests.support.steps import rollout

    rollouts = tuple(rollout(a=reward) for reward in rewards)
    return Group(ticket_id=ticket_id, rollouts=rollouts, generator_id="g", finished_version=3)


def test_metrics_of_a_set_are_those_of_the_only_set_under_its_name() -> None:
    groups = [group(1, [1.0, 0.0]), group(2, [1.0, 1.0])]
    plain, named = (summarise(groups, 3, name).metrics for name in ("", "math"))
    assert named == {name.replace("eval/", "eval/math/", 1): value for name, value in plain.items()}
    history = History()
    history.add({"step": 3, "time": 1.0, **named})
    assert of_sets("eval/accuracy", history.names) == ["eval/math/accuracy"]
    assert of_sets("eval/pass@*", history.names) == ["eval/math/pass@2"]
    assert score(history.rows[3], "eval/math/accuracy") == "0.75 ± 0.25 (n 2)"


class Player:
    """A sampler that says who it is."""

    def __init__(self, name: str) -> None:
        self.name, self.clock, self.faults, self.counts = name, Clock(), Counter(), Counter()

    async def group(self, prompt, ticket_id, limits, spec, *, greedy=False) -> Any:
        self.faults["hung"] += 1
        return self.name


def test_a_prompt_is_sampled_by_its_task_and_all_count_together() -> None:
    players = {0: Player("a"), 2: Player("b")}
    sampler = TaskSampler(players)
    limits, spec = GroupLimits(vocabulary=9, rollouts=1, max_tokens=9), None

    async def ask(task: int) -> Any:
        return await sampler.group(Prompt(token_ids=(1,), text="", row={}, task=task), 1, limits, spec)

    assert [asyncio.run(ask(task)) for task in (0, 2, 0)] == ["a", "b", "a"]
    assert sampler.faults == {"hung": 3} and all(one.clock is sampler.clock for one in players.values())


@pytest.mark.parametrize(
    ("own", "slots"),
    [([{}, {}], 0), ([{"environment": {"uses": "game.py:Guess", "episodes_per_slot": 1}}, {}], 1)],
)
def test_only_tasks_with_an_environment_say_how_many_episodes_are_held(tmp_path, monkeypatch, own, slots):
    """A task of single responses has the section's default, 4."""
    sources = [{"path": f"{index}.jsonl", **one} for index, one in enumerate(own)]
    config = config_of(data={"train": sources}, generator={"max_running": 16})
    monkeypatch.setattr(generator_parts, "Generator", lambda **given: given["settings"].most_held)
    monkeypatch.setattr(generator_parts, "lanes", lambda *_: [])
    monkeypatch.setattr(generator_parts, "vocabulary_size", lambda _: 64)
    names = ("store", "prompts", "engine", "sampler", "control", "wire_key")
    given = {**dict.fromkeys(names), "generator_id": "g", "logs": SimpleNamespace(follow=None)}
    with ExitStack() as stack:
        assert generator_parts.open_generator(stack, config, RunDirectory(tmp_path), **given) == 16 * slots


def test_equal_functions_and_environments_share_their_processes(tmp_path: Path) -> None:
    same = {"path": "test.jsonl", "reward": [{"function": "exact_match"}], "name": "same"}
    config = load_config(
        Path("run.yaml"), ["reward.functions=[exact_match]", f"data.eval.0={json.dumps(same)}"]
    )
    made = Players.of(config, tmp_path)
    sums, games, test, far = (made.tasks[index] for index in range(4))
    assert sums is test and sums.scorer is not far.scorer and games.scorer is None
    assert games.environment is not None and far.environment is None
    assert list(Players.of(config, tmp_path, tasks=[3]).tasks) == [3], "what is not asked for is not opened"
