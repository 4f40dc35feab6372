"""The whole loop in one process, in seconds and without a GPU: a table of 10 x 10 numbers learns to count.

    python examples/one_process.py

The prompt is a digit, and the right response counts on from it: 3 -> 4 5 6 7. The reward is the share of
right digits.

Both loops, the buffer's protocol, the staleness bound, frames, advantages, masks, packing and the loss are
those of a real run. A small class replaces each part that a real run keeps in another process:

    interface          real run                      here
    Buffer             Redis or Valkey               MemoryBuffer, shipped with asyncrl
    Engine             vLLM                          FakeEngine, shipped: samples from the table
    Trainer            DeepSpeed                     TableTrainer
    GeneratorControl   ZMQ                           Control: a queue of orders
    learner.Run        store, senders, checkpoints   Run: passes the table on, prints a line for each step

Read `train` first, then `asyncrl/learner.py` and `asyncrl/generator.py`.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.algo.trainable import GroupLimits
from asyncrl.batch.hooks import Hooks
from asyncrl.batch.masks import PlanSettings
from asyncrl.batch.recipe import Recipe
from asyncrl.batch.resolve import make_recipe
from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.intake import Collected, Intake
from asyncrl.buffer.judge import Gate, make_judge
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.sections import BatchConfig
from asyncrl.control.base import Heartbeat, Hello, Stop, Welcome
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.fake import FakeEngine
from asyncrl.engine.sampler import Sampler
from asyncrl.generator import Generator, GeneratorSettings, Lane
from asyncrl.learner import Step, run_learner
from asyncrl.rewards.base import RewardInput, Score
from asyncrl.telemetry.base import SampleRecord
from asyncrl.trainer.base import CriticLossFunction, LossFunction, MicroBatch, StepResult, Usage
from asyncrl.types import Prompt
from asyncrl.weights.agreement import Agreement
from asyncrl.weights.base import TensorSpec, UpdateOrder, UpdateReport
from asyncrl.wire.group_frames import decode_group

DIGITS, RESPONSE_TOKENS = 10, 4
STEPS, MAX_LAG = 60, 1
BATCH = BatchConfig(groups=2, group_size=32)  # 4 tickets, a lease, are MAX_LAG + 1 steps
LIMITS = GroupLimits(vocabulary=DIGITS, rollouts=BATCH.group_size, max_tokens=1 + RESPONSE_TOKENS)
PROBE = tuple(range(DIGITS))


# --- the task: prompts and rewards ----------------------------------------------------------------


def prompt(ticket_id: int) -> Prompt:
    """Return a digit; a real run looks the ticket up in its dataset."""
    digit = ticket_id % DIGITS
    return Prompt(token_ids=(digit,), text=str(digit), row={})


class Counting:
    """A `Scorer`: the share of response digits that follow their predecessor."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """Return one score for each response."""
        return [Score(total=share, parts={"right": share}) for share in map(self._share, inputs)]

    def _share(self, answer: RewardInput) -> float:
        digits = [int(character) for character in answer.prompt + answer.response]
        right = sum((before + 1) % DIGITS == after for before, after in pairwise(digits))
        return right / (len(digits) - 1)

    async def close(self) -> None:
        """Nothing to close."""


# --- the learner's side ---------------------------------------------------------------------------


class TableTrainer:
    """A `Trainer` whose policy is a table: row = last token, column = next token, entry = logit."""

    rank, share, shares = 0, 0, 1
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._logits = torch.nn.Parameter(torch.zeros(DIGITS, DIGITS))
        self._optimizer = torch.optim.Adam([self._logits], lr=0.1)

    def _policy(self, microbatch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return logprobs_T and entropy_T."""
        logprobs_TV = self._logits[microbatch.input_ids_N[microbatch.source_T]].log_softmax(-1)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        return logprobs_TV.gather(-1, microbatch.target_T[:, None])[:, 0], entropy_T

    @torch.no_grad()
    def measure(
        self, microbatches: Sequence[MicroBatch], columns: Collection[str]
    ) -> list[dict[str, Tensor]]:
        """Return log-probabilities; the algorithm below needs no other column."""
        assert set(columns) == {"logprobs_T"}
        return [{"logprobs_T": self._policy(microbatch)[0]} for microbatch in microbatches]

    def step(
        self, microbatches: Sequence[MicroBatch], loss: LossFunction, *, entropy_gradient: bool = True
    ) -> StepResult:
        """Add up the gradients of all micro-batches, then step Adam."""
        self._optimizer.zero_grad()
        for microbatch in microbatches:
            loss(microbatch, *self._policy(microbatch)).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([self._logits], 1.0)
        self._optimizer.step()
        return StepResult(metrics={}, grad_norm=float(norm), lr=0.1)

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probabilities of all tokens but the first of each sequence."""
        table = self._logits.log_softmax(-1)
        return [table[list(ids[:-1]), list(ids[1:])].tolist() for ids in sequences]

    score_plainly = score

    def specs(self) -> list[TensorSpec]:
        """Describe the table."""
        return [TensorSpec(name="logits", dtype="float32", shape=(DIGITS, DIGITS))]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the table."""
        yield "logits", self._logits.detach()

    def export(self) -> Callable[[Path], None]:
        """Nothing is exported here."""
        raise NotImplementedError

    def critic_step(self, microbatches: Sequence[MicroBatch], loss: CriticLossFunction) -> StepResult:
        """The algorithm below has no critic."""
        raise NotImplementedError

    def update_reference(self, decay: float) -> None:
        """The algorithm below has no reference model."""
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        """Nothing is saved here."""
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        """Nothing is loaded here."""
        raise NotImplementedError

    def usage(self) -> list[Usage]:
        """Nothing is counted here."""
        return [Usage()]

    def broadcast(self, value: bytes | None) -> bytes:
        """There is one rank."""
        return value or b""

    def gather(self, value: bytes) -> list[bytes]:
        """There is one rank."""
        return [value]

    def close(self) -> None:
        """Nothing to close."""


class Run:
    """A `learner.Run`: takes groups from the buffer, sends weights to the generator, prints rewards."""

    def __init__(self, trainer: TableTrainer, buffer: MemoryBuffer, control: "Control") -> None:
        self._trainer, self.control = trainer, control
        self._initial_logprobs = tuple(trainer.score([PROBE])[0])  # the generator starts with the same table
        self.rewards: list[float] = []  # mean of each step
        self.lags: list[int] = []  # age of the oldest token of each step, in steps
        self.intake = Intake(
            buffer=buffer,
            ledger=Ledger(),
            gate=Gate(lane="train", decode=lambda frame: decode_group(frame, b""), limits=LIMITS),
            judge=make_judge([], drop_older_than=None),
            groups=BATCH.groups,
            window=1,  # strict order: no group becomes older than MAX_LAG
            max_lag=MAX_LAG,
            max_refills=1,
            stall_s=60.0,
        )
        self.intake.recover(version=0)

    def collect(self, version: int) -> Collected:
        """Wait for the groups of the step that trains `version`."""
        while (collected := self.intake.poll(version, wait_s=1.0)) is None:
            pass
        return collected

    def publish(self, version: int) -> None:
        """Order the generator to adopt the weights, and give it credit for the next steps."""
        tensors = {name: tensor.tolist() for name, tensor in self._trainer.tensors()}
        order = UpdateOrder(
            version=version,
            transport="memory",
            deadline_s=10.0,
            details={"tensors": tensors},
            probe_ids=(PROBE,),
            probe_logprobs=tuple(self._trainer.score([PROBE])[0]),
            initial_logprobs=self._initial_logprobs,
        )
        self.control.send(order)
        self.intake.open(version)

    def report(self, step: Step) -> None:
        """Print one line for each step."""
        rollouts = [rollout for group in step.collected.groups for rollout in group.rollouts]
        self.rewards.append(sum(rollout.reward for rollout in rollouts) / len(rollouts))
        self.lags.append(step.version - 1 - min(int(rollout.versions.min()) for rollout in rollouts))
        print(f"step {step.version:2}   reward {self.rewards[-1]:.3f}   oldest token {self.lags[-1]} steps")

    def checkpoint(self, version: int, *, last: bool) -> None:
        """Let the store forget the trained groups; a real run saves first."""
        self.intake.commit(self.intake.settled, version)


# --- the generator's side -------------------------------------------------------------------------


class Control:
    """A `GeneratorControl`: the learner's thread puts orders in, the generator's event loop takes them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._orders: asyncio.Queue[UpdateOrder | Stop] = asyncio.Queue()
        self.refused: list[UpdateReport] = []

    def send(self, order: UpdateOrder | Stop) -> None:
        """Send an order from any thread."""
        self._loop.call_soon_threadsafe(self._orders.put_nowait, order)

    async def join(self, hello: Hello) -> Welcome:
        """Admit every generator."""
        return Welcome(version=0)

    async def next_order(self) -> UpdateOrder | Stop:
        """Wait for an order."""
        return await self._orders.get()

    async def report(self, report: UpdateReport) -> None:
        """Keep reports of orders that were not applied."""
        if not report.applied:
            self.refused.append(report)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Ignore the heartbeat."""

    async def leave(self) -> None:
        """Do nothing."""


class NoStaging:
    """A `Staging` for orders that carry the weights themselves."""

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        """Return the order; there is nothing to fetch."""
        return order

    def close(self) -> None:
        """Nothing to close."""


class NoTracker:
    """A `Tracker` that drops all metrics."""

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Drop them."""

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Drop them."""

    def close(self) -> None:
        """Nothing to close."""


def make_generator(buffer: MemoryBuffer, control: Control) -> Generator:
    """Make a generator with one lane of tickets."""
    engine = FakeEngine(vocabulary=DIGITS, token_s=0.001, logits=[[0.0] * DIGITS] * DIGITS)
    lane = Lane(
        name="train",
        buffer=buffer,
        prompt=prompt,
        spec=SamplingSpec(temperature=1.0, max_response_tokens=RESPONSE_TOKENS),
        limits=LIMITS,
        minimum_version=lambda ticket: ticket.minimum_version,
    )
    return Generator(
        engine=engine,
        lanes=[lane],
        sampler=Sampler(engine, Counting(), lambda ids, **_: "".join(map(str, ids)), "g0"),
        staging=NoStaging(),
        control=control,
        tracker=NoTracker(),
        agreement=Agreement(limit=1e-4, dtype="float32"),
        settings=GeneratorSettings(max_running=256, most_held=256, lease_s=60.0, heartbeat_s=1.0),
    )


# --- both together --------------------------------------------------------------------------------


def make_algorithm() -> Recipe:
    """Make GRPO with the importance correction for tokens of older versions."""
    settings = PlanSettings(
        max_lag=MAX_LAG,
        mask_stale=False,
        mask_truncated=False,
        minibatches=BATCH.minibatches,
        tokens_per_microbatch=1024,
        share=0,
        shares=1,
        device=torch.device("cpu"),
    )
    return make_recipe(
        AlgorithmConfig(),
        BATCH,
        CriticConfig(),
        settings,
        reward_parts=["right"],
        max_response_tokens=RESPONSE_TOKENS,
    )


async def train() -> Run:
    """Run the generator on this event loop and the learner in a thread; neither waits for the other."""
    buffer = MemoryBuffer(BufferRules(groups=BATCH.groups))
    control, trainer = Control(), TableTrainer()
    run = Run(trainer, buffer, control)

    def learn() -> None:
        try:
            run_learner(trainer, run, make_algorithm(), Hooks(), version=0, steps=STEPS)
        finally:
            control.send(Stop(reason="the last step is done"))

    hello = Hello(generator_id="g0", incarnation="first", release="example", config_hash="none", version=0)
    await asyncio.gather(asyncio.to_thread(learn), make_generator(buffer.peer(), control).run(hello))
    return run


if __name__ == "__main__":
    asyncio.run(train())
