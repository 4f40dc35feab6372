"""A run is resumed with one key changed: store, generators' loop, intake, evaluation and checkpoints are
real, no model is.

Steps are made, some of them saved, and the learner and its generator die with groups in every place. Then
both come back with another config. Keys that are refused are refused in tests/unit/test_resume.py.
"""

import asyncio
import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.buffer.base import kind_of
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.intake import Collected
from asyncrl.buffer.judge import Gate
from asyncrl.buffer.lanes import eval_lane, group_limits, open_intake, train_lane
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.server import StoreServer
from asyncrl.buffer.shards import ledgers_of
from asyncrl.config.document import keys_of
from asyncrl.config.load import load_config
from asyncrl.config.outline import bound, known_keys, resume_findings
from asyncrl.config.schema import Config
from asyncrl.config.store import StoreConfig
from asyncrl.control.base import Hello, Stop, Welcome
from asyncrl.data.data_files import DataFiles
from asyncrl.data.row_functions import load_parts
from asyncrl.engine.fake import FakeEngine
from asyncrl.engine.sampler import Sampler
from asyncrl.evaluation import Evaluation, Rounds, resume_ledger
from asyncrl.generator import Generator, GeneratorSettings
from asyncrl.launch.generator_parts import lanes
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.rewards.base import RewardInput, Score
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.saved import LearnerState
from asyncrl.types import Prompt
from asyncrl.weights.agreement import Agreement
from asyncrl.weights.base import UpdateOrder
from asyncrl.wire.group_frames import decode_group
from reliability.chaos.helpers import order_of
from tests.support.nowhere import Nowhere
from tests.support.waiting import elapse, until

pytestmark = pytest.mark.integration

VOCABULARY, KEY = 16, b"key"
SAVED, UNSAVED, STEPS = 4, 2, 10
"""Steps that the first life saves, steps that it makes beyond, and steps of the whole run."""
names = itertools.count(1)

CHANGES = """
batch.groups=64 batch.groups=8 batch.groups=1 batch.group_size=2 batch.group_size=6 batch.minibatches=4;batch.epochs=2
sampling.temperature=0.5 sampling.max_prompt_tokens=4 sampling.max_response_tokens=2 sampling.max_response_tokens=9
sampling.stop=[x];sampling.top_p=1;sampling.top_k=0;sampling.min_p=0
staleness.max_lag=0 staleness.max_lag=6 staleness.window_groups=1 staleness.window_groups=90 staleness.policy=drop
staleness.policy=correct_only learner.steps=12 learner.stop_when={"metric":"reward/mean","reaches":9} learner.tokens_per_microbatch=14
learner.device=auto;learner.logprob_chunk_tokens=8;learner.threads=1;learner.gradient_checkpointing=true;learner.sequence_parallel=1;learner.hooks=[own.py:Hook]
eval.every=1 eval.every=3 eval.prompts=2 eval.samples=3;eval.temperature=0.5 data.eval=train.jsonl data.eval=null
store.url=OTHER store.max_gib=0.01
store.password_env=OTHER;store.fsync=no;store.bind=tcp://127.0.0.1:1;store.insecure=true;learner.optimizer.lr=1e-4
reward.functions=[{"function":"gsm8k"}]
reward.functions.0.weight=2 reward.functions.0.function=gsm8k reward.functions.0.name=other reward.attempts=1
reward.timeout_s=1;reward.workers=2;reward.memory_gib=1;reward.sandbox=bubblewrap
algorithm.advantage=remax algorithm.policy_loss=reinforce algorithm.max_refills=1
algorithm.filters=[{"name":"reward_range","low":-9,"high":9}] generator.max_running=8 checkpoint.every=1
"""
"""Overrides; those with a semicolon are one change of several keys."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StoreServer, StoreServer]]:
    with (
        StoreServer(StoreConfig(fsync="no"), tmp_path_factory.mktemp("one")) as one,
        StoreServer(StoreConfig(fsync="no"), tmp_path_factory.mktemp("other")) as other,
    ):
        yield one, other


def config_in(directory: Path) -> Path:
    """16 groups a step, and a little of everything that lags, is rejected or is evaluated."""
    for name in ("train", "test"):
        (directory / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": "1", "answer": "1"}) + "\n" for _ in range(4))
        )
    values = {
        "run": {"name": f"resumed-{next(names)}"},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "eval": "test.jsonl"},
        "reward": {"functions": [{"function": "exact_match"}]},
        "batch": {"groups": 16, "group_size": 4},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 6},
        "staleness": {"max_lag": 2},
        "learner": {"steps": STEPS, "device": "cpu"},
        "generator": {"max_running": 64, "lease_s": 1},
        "eval": {"every": 2, "prompts": 3},
        "checkpoint": {"every": 2},
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(values))
    return directory / "run.yaml"


class Control:
    """The learner's end of the control plane, in this process."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[UpdateOrder | Stop] = asyncio.Queue()

    async def join(self, hello: Hello) -> Welcome:
        return Welcome(version=0)

    async def next_order(self) -> UpdateOrder | Stop:
        return await self.orders.get()

    async def report(self, report: Any) -> None: ...
    def beat(self, heartbeat: Any) -> None: ...
    async def leave(self) -> None: ...


class Rewards:
    def __init__(self, config: Config) -> None:
        self.functions = config.reward.functions

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        parts = [{one.part: float(len(each.response) % 3) for one in self.functions} for each in inputs]
        return [
            Score(total=sum(one.weight * part[one.part] for one in self.functions), parts=part)
            for part in parts
        ]

    async def close(self) -> None: ...


class Prompts:
    def __init__(self, config: Config) -> None:
        self.held_out = load_parts(config.data, config.data.eval)

    def prompt(self, ticket_id: int) -> Prompt:
        return Prompt(token_ids=(ticket_id % VOCABULARY,) * 3, text="", row={})

    def eval_prompts(self, count: int, name: str) -> list[Prompt]:
        return [self.prompt(1)] * min(count, 4)


class History:
    """A trainer whose weights are what it was trained on: (version, groups, rejected)."""

    rank = 0

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def broadcast(self, value: bytes | None) -> bytes:
        return value or b""

    def save(self, directory: Path) -> None:
        (directory / "weights.json").write_text(json.dumps(self.steps))

    def load(self, directory: Path) -> None:
        self.steps = json.loads((directory / "weights.json").read_text())

    def train(self, version: int, collected: Collected) -> None:
        ids = [group.ticket_id for group in collected.groups]
        gone = [(group.ticket_id, kind_of(reason)) for group, reason in collected.rejected]
        oldest = min(
            s.version
            for group in collected.groups
            for rollout in group.rollouts
            for s in rollout.version_spans
        )
        self.steps.append({"version": version, "trained": ids, "rejected": gone, "lag": version - oldest})


class Life:
    """Learner and generator from the last checkpoint on, with one config."""

    def __init__(self, config: Config, url: str, checkpoints: Path) -> None:
        self.config = config
        self.connections = [StoreConnection(url, retry_s=5.0) for _ in range(2)]
        self.checkpoints = CheckpointStore(checkpoints, KEY, config.checkpoint.keep)
        self.trainer = History()
        values = self.checkpoints.load(self.trainer) or {}
        self.state = LearnerState.from_dict(values)
        self.history = self.state.history.resumed(
            self.state.version, lineage=next(names), longest_lag=config.lag_bound
        )
        self.lane = train_lane(config, self.connections[0])
        condemned = StepDeaths(checkpoints.parent / "step_under_way.json").reason
        limits, eval_limits = group_limits(config, VOCABULARY)
        gate = Gate(lane="train", decode=decode_group, limits=limits, condemned=condemned)
        self.intake = open_intake(config, self.lane, self.state.ledger, gate, self.history)
        self.evaluations = [
            Evaluation(
                name=name,
                buffer=eval_lane(config, self.connections[0], rounds.lane, rounds.prompts),
                ledger=resume_ledger(self.state.evaluation.get(name, {}), rounds, version=self.state.version),
                gate=Gate(lane=rounds.lane, decode=decode_group, limits=eval_limits),
                rounds=rounds,
                history=self.history,
            )
            for name, rounds in Rounds.of(config, DataFiles(config).held_out).items()
        ]
        self.evaluated: list[tuple[int, int, float]] = []
        self.control, self.engine = Control(), FakeEngine(vocabulary=VOCABULARY, seed=next(names))
        self.generator = Generator(
            engine=self.engine,
            lanes=lanes(config, self.connections[1], Prompts(config), VOCABULARY),  # type: ignore[arg-type]
            sampler=Sampler(self.engine, Rewards(config), lambda ids, **_: "x" * len(ids), "g0"),
            staging=Nowhere(),
            control=self.control,
            tracker=Nowhere(),
            agreement=Agreement(limit=1e-3, dtype="float32"),
            settings=GeneratorSettings(
                max_running=config.generator.max_running,
                most_held=config.generator.max_running * config.environment.episodes_per_slot,
                lease_s=config.generator.lease_s,
                heartbeat_s=1.0,
            ),
        )

    async def live(self, steps: int, *, saves: int) -> None:
        """Train up to version `steps` and save up to `saves`; then generator and learner die halfway."""
        hello = Hello(
            generator_id="g0", incarnation=str(next(names)), release="r", config_hash="c", version=0
        )
        generator = asyncio.create_task(self.generator.run(hello))
        try:
            async with asyncio.timeout(60):
                await self._learn(steps, saves, generator)
        finally:
            generator.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await generator
            for connection in self.connections:
                connection.close()

    async def _learn(self, steps: int, saves: int, generator: "asyncio.Task[None]") -> None:
        version = self.state.version
        await self._publish(version)
        self.intake.recover(version)
        for one in self.evaluations:
            one.recover(version)
        self.issued_before = self.lane.audit().issued
        self.under_way = self.issued_before - self._consumed
        while version < steps:
            assert not generator.done(), generator.exception()
            # Else answers are there when this life ends.
            if version <= SAVED or self.config.learner.steps == saves:
                self._evaluate()
            collected = await asyncio.to_thread(self.intake.poll, version, wait_s=0.02)
            if collected is None:
                continue
            self.trainer.train(version, collected)
            version += 1
            await self._publish(version)
            self.intake.open(version)
            for one in self.evaluations:
                one.open(version)
            if version <= saves and (version % self.config.checkpoint.every == 0 or version == saves):
                self._save(version)
            assert self.lane.audit().missing == 0
        while any(one.missing for one in self.evaluations) and version == self.config.learner.steps:
            self._evaluate()
            await elapse(0.01)
        await until(
            lambda: (
                version >= self.config.learner.steps
                or any(one.buffer.audit().ready for one in self.evaluations)
            )
        )
        await self._use_up_the_credit()

    async def _use_up_the_credit(self) -> None:
        """(L + 1) B groups may be under way, and no more."""
        credit = self._consumed + (self.config.staleness.max_lag + 1) * self.config.batch.groups
        await until(lambda: self.lane.audit().issued >= credit)
        await elapse(0.1)
        assert self.lane.audit().issued == max(credit, self.issued_before)

    async def _publish(self, version: int) -> None:
        await self.control.orders.put(order_of(version, str(self.history)))

    def _evaluate(self) -> None:
        for result in [result for one in self.evaluations for result in one.poll()]:
            whole = {len(group.rollouts) for group in result.groups} == {self.config.eval.samples}
            assert whole, "an answer of before is in this round"
            self.evaluated.append((result.version, len(result.groups), result.metrics["eval/dead_groups"]))

    def _save(self, version: int) -> None:
        state = LearnerState(
            version=version,
            ledger=self.intake.settled,
            history=self.history,
            evaluation={one.name: one.state() for one in self.evaluations},
            fixed=self.config.fixed_values(rows=DataFiles(self.config).train),
        )
        oldest = self.checkpoints.state(self.checkpoints.save(version, self.trainer, state.to_dict()))
        self.intake.commit(LearnerState.from_dict(oldest).ledger, version)

    @property
    def _consumed(self) -> int:
        return sum(ledger.consumed for ledger in self.ledgers)

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        return ledgers_of(self.intake.settled, self.config.store.shards)


def begin(path: Path, server: StoreServer, *overrides: str) -> Life:
    """The life before; when it ends, there are groups in every place."""
    with contextlib.chdir(path.parent):
        life = Life(load_config(path, overrides), server.url, path.parent / "checkpoints")
        asyncio.run(life.live(SAVED + UNSAVED, saves=SAVED))
    return life


def resume(path: Path, servers: tuple[StoreServer, StoreServer], first: Life, *overrides: str) -> Life:
    """The life after; whatever was changed, no group is lost or trained twice."""
    with contextlib.chdir(path.parent):
        config = load_config(
            path, [override.replace("url=OTHER", f"url={servers[1].url}") for override in overrides]
        )
        assert not list(
            resume_findings(
                Config,
                first.config.fixed_values(rows=DataFiles(first.config).train),
                config.fixed_values(rows=DataFiles(config).train),
                weights=path,
            )
        )
        second = Life(config, config.store.url or servers[0].url, path.parent / "checkpoints")
        assert second.state.version == SAVED
        asyncio.run(second.live(config.learner.steps, saves=config.learner.steps))
    check(first, second)
    return second


@pytest.fixture(scope="module")
def begun(
    servers: tuple[StoreServer, StoreServer], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Life, dict[bytes, bytes]]:
    """A run that has begun, and what the store has of it."""
    path = config_in(tmp_path_factory.mktemp("begun"))
    life = begin(path, servers[0])
    with contextlib.closing(StoreConnection(servers[0].url, retry_s=5.0)) as connection:
        return (
            path,
            life,
            {
                key: connection.client.dump(key)
                for key in connection.client.keys(f"*{life.config.run.name}:*")
            },
        )


def check(first: Life, second: Life) -> None:
    steps, ledgers = second.trainer.steps, second.ledgers
    assert [step["version"] for step in steps] == list(range(second.config.learner.steps))
    sizes = [len(step["trained"]) for step in steps]
    rest = second.config.learner.steps - SAVED
    assert sizes == [first.config.batch.groups] * SAVED + [second.config.batch.groups] * rest
    trained = [ticket_id for step in steps for ticket_id in step["trained"]]
    rejected = [ticket_id for step in steps for ticket_id, _ in step["rejected"]]
    assert len(trained + rejected) == len({*trained, *rejected}), "an id was taken twice"
    assert [sum(ledger.trained for ledger in ledgers), sum(ledger.total_rejected for ledger in ledgers)] == [
        len(trained),
        len(rejected),
    ]
    assert sum(ledger.consumed for ledger in ledgers) == len(trained) + len(rejected)
    if not second.config.algorithm.filters:
        assert len(rejected) <= second.under_way, "more was rejected than had been under way"
    assert max(step["lag"] for step in steps[SAVED:]) <= second.config.lag_bound
    if second.config.data.eval:
        prompts, last = min(second.config.eval.prompts, 4), second.config.learner.steps
        assert second.evaluated[-1] == (last, prompts, 0) and {one[1:] for one in second.evaluated} == {
            (prompts, 0)
        }


@pytest.mark.parametrize("change", CHANGES.split())
def test_a_run_goes_on_with_one_key_changed(change, begun, servers, tmp_path):
    path, first, stored = begun
    shutil.copytree(path.parent, tmp_path, dirs_exist_ok=True)
    with contextlib.closing(StoreConnection(servers[0].url, retry_s=5.0)) as connection:
        connection.client.flushall()
        for key, value in stored.items():
            connection.client.restore(key, 0, value)
    resume(tmp_path / path.name, servers, first, *change.split(";"))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(64, 32), (8, 64), (32, 64), (64, 2)])
def test_a_run_goes_on_with_another_batch(before, after, shards, servers, tmp_path):
    """What is sampled for the new batch is all trained; what had been sampled before is trained as far as it
    is young enough."""
    path, same = config_in(tmp_path), [f"store.shards={shards}", "eval.every=5"]
    second = resume(
        path,
        servers,
        begin(path, servers[0], *same, f"batch.groups={before}"),
        *same,
        f"batch.groups={after}",
    )
    reasons = {reason for step in second.trainer.steps for _, reason in step["rejected"]}
    assert reasons <= {"stale", "discarded_lineage"}


def test_every_key_that_may_change_here_is_changed():
    here = ("batch", "staleness", "sampling", "learner", "eval", "store", "reward", "reward.functions.0")
    changed = {
        override.split("=")[0].replace(".0.", ".")
        for change in CHANGES.split()
        for override in change.split(";")
    }
    keys = [(section, key) for section in here for key in known_keys(Config, keys_of(section))]
    free = {".".join(key).replace(".0.", ".") for key in keys} - bound(Config).keys() - {"learner.optimizer"}
    # The first is refused without an environment, the other without a service.
    assert free - {"batch.missing_episodes", "reward.functions.params"} <= changed
