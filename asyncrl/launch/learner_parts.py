"""What the learner takes in, as a config has it: groups to train on, and rounds of held-out evaluation."""

from collections.abc import Callable
from functools import partial

from asyncrl.batch.resolve import GREEDY
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.gate import Gate
from asyncrl.buffer.intake import Intake
from asyncrl.buffer.judge import make_judge
from asyncrl.buffer.shards import Ledgers, ShardedBuffer, ShardedIntake, join
from asyncrl.config import registry
from asyncrl.config.schema import Config
from asyncrl.data.dataset import Rows, load_rows
from asyncrl.evaluation import Evaluation, lane_name, resume_ledger
from asyncrl.launch.wiring import eval_lane, eval_limits, eval_rules, train_limits
from asyncrl.lineage import History
from asyncrl.run.learner_state import LearnerState
from asyncrl.types import Group

Decode = Callable[[bytes], Group]


def open_intake(
    config: Config,
    lane: ShardedBuffer,
    ledgers: Ledgers,
    decode: Decode,
    *,
    condemned: Callable[[bytes], str | None],
    vocabulary: int,
    history: History,
) -> ShardedIntake:
    """Goes on from `ledgers`. Raises ConfigError where they are of another number of shards."""
    shards = lane.shards
    judge = make_judge(
        [registry.resolve("filter", choice.name, choice.params) for choice in config.algorithm.filters],
        drop_older_than=config.staleness.max_lag if config.staleness.policy == "drop" else config.lag_bound,
        needs_greedy=GREEDY in registry.needs("advantage", config.algorithm.advantage.name),
        history=history,
    )
    gate = Gate(lane="train", decode=decode, limits=train_limits(config, vocabulary), condemned=condemned)
    return ShardedIntake(
        tuple(
            Intake(
                buffer=buffer,
                ledger=ledger,
                gate=gate,
                judge=judge,
                groups=config.batch.groups // len(shards),
                window=config.window_groups // len(shards),
                max_lag=config.staleness.max_lag,
                max_refills=config.algorithm.max_refills * len(shards),  # luck is not even between small shares
                stall_s=config.control.stall_s,
                history=history,
                name_of=partial(join, shard, shards=len(shards)),
            )
            for shard, (buffer, ledger) in enumerate(zip(shards, ledgers.expect(len(shards)).shards, strict=True))
        )
    )


def held_out_rows(config: Config) -> Rows | None:
    """Those of data.eval."""
    return load_rows(config.data.eval, config.data.eval_split) if config.data.eval else None


def eval_prompts(config: Config) -> int:
    """Held-out prompts of one round; 0 without held-out data. Raises DataError."""
    return min(config.eval.prompts, len(held_out_rows(config) or ()))


def open_evaluation(
    config: Config, store: StoreConnection, state: LearnerState, decode: Decode, *, vocabulary: int, history: History
) -> Evaluation:
    """Goes on from `state`, or with the next round where a round now means something else."""
    prompts = eval_prompts(config)
    rules = eval_rules(config, prompts)
    return Evaluation(
        buffer=eval_lane(config, store, prompts),
        ledger=resume_ledger(state.evaluation, version=state.version, **rules),
        gate=Gate(lane=lane_name(**rules), decode=decode, limits=eval_limits(config, vocabulary)),
        history=history,
        **rules,
    )
