"""The talk of one episode: turns of a session, sampled by the engine within the episode's budgets."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from asyncrl.engine.base import Engine, SamplingSpec
from asyncrl.environments.base import Answer, BudgetSpent, Message
from asyncrl.errors import ConfigError, EngineError, EnvironmentFault, ResultError
from asyncrl.session.base import Request, Turn
from asyncrl.session.tree import Session
from asyncrl.types import Rollout

# From the prompt's ids, the rollout and the tools that the answer may call (`AnswerReader.read`).
Read = Callable[[Sequence[int], Rollout, Sequence[Message]], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of one episode."""

    max_prompt_tokens: int  # of the first turn
    max_response_tokens: int  # of everything behind the prompts, in all turns
    max_turns: int
    max_sequences: int
    ends_at_s: float  # by `time.monotonic`


class SessionTalk:
    """The `Talk` of an episode. `close` ends it, whatever the environment does afterwards."""

    def __init__(
        self, session: Session, engine: Engine, spec: SamplingSpec, read: Read, budget: Budget
    ) -> None:
        self._session, self._engine, self._spec = session, engine, spec
        self._read, self._budget = read, budget
        self._salt = engine.salt  # of the episode's start, so that no update costs a prefill of the history
        self._running: set[asyncio.Task[list[Rollout]]] = set()
        self._started = 0  # turns
        self._spent = 0  # tokens behind the prompts
        self._reserved = 0  # tokens that turns in progress may still spend
        self._changed = asyncio.Event()  # set when a turn ends; then another one takes its place
        self._is_closed = False
        self.last: Turn | None = None  # the last one that is trained
        # The engine's first error: the episode has a hole, even if the environment goes on.
        self.error: EngineError | None = None
        self.model_s = 0.0  # seconds in which at least one turn was sampled, if turns do not overlap
        self.transcript: list[Message] = []  # what was said, as chat messages
        self.response = ""  # the text of the last answer
        self.unparsed = 0  # answers with the beginning of a call that could not be parsed

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        calls_tools: bool = True,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        train: bool = True,
    ) -> Answer:
        with _usable("messages"):
            request = self._session.request(messages, tools=tools)
        answer, turn = await self._turn(request, tools if calls_tools else (), max_tokens, stop, train)
        if train and turn.said:
            self.transcript = list(turn.said.messages)
        return answer

    async def complete(
        self, text: str, *, max_tokens: int | None = None, stop: Sequence[str] = (), train: bool = True
    ) -> Answer:
        with _usable("text"):
            request = self._session.request_text(text)
        answer, _ = await self._turn(request, (), max_tokens, stop, train)
        self.transcript += [{"role": "user", "content": text}, answer.message]
        return answer

    def score_turn(self, reward: float | None, state: int | None = None) -> None:
        if self.last is None:
            raise EnvironmentFault("the environment scored a turn before the first answer of the model")
        if reward is not None:
            self.last.reward = reward
        if state is not None:
            self.last.state = state

    def close(self) -> None:
        """Abort the requests; no further turn begins."""
        self._is_closed = True
        for task in self._running:
            task.cancel()

    async def _turn(
        self,
        request: Request,
        tools: Sequence[Message],
        max_tokens: int | None,
        stop: Sequence[str],
        train: bool,
    ) -> tuple[Answer, Turn]:
        ends = (*self._spec.stop, *stop)
        room = await self._room(request, min(max_tokens or sys.maxsize, self._budget.max_response_tokens))
        # Neither limit changes the probability of a token.
        spec = replace(self._spec, max_response_tokens=room, stop=ends)
        added = len(request.delta_ids) if request.parent else 0
        self._reserved += room + added
        self._started += 1
        try:
            rollout = await self._sample(request.prompt_ids, spec)
            self._spent += len(rollout.response_ids) + added
        finally:
            self._reserved -= room + added
            self._changed.set()
            self._changed = asyncio.Event()
        try:
            answer = self._read(request.prompt_ids, rollout, tools)
        except ConfigError as error:  # only this row may have tools, which nothing parses
            raise EnvironmentFault(str(error), reason="start") from error
        self.unparsed += answer.is_unparsed
        # The ids of the text that ends an answer were sampled, and stay.
        place, text = min(
            ((answer.text.find(one), one) for one in stop if one in answer.text), default=(0, "")
        )
        if text:
            answer = replace(answer, text=answer.text[:place], stop=text)
        try:
            turn = self._session.record(request, rollout, answer.message, train=train)
        except (ValueError, RecursionError) as error:
            raise ResultError(str(error)) from error
        if train:
            self.response, self.last = answer.text, turn
        return answer, turn

    async def _room(self, request: Request, wanted: int) -> int:
        """Wait for the number of tokens that the next answer may have. Raises BudgetSpent.

        It is the number that the answer would have if the turns in progress had ended before.
        """
        budget, given = self._budget, len(request.prompt_ids)
        added = len(request.delta_ids) if request.parent else 0
        longest = budget.max_prompt_tokens + budget.max_response_tokens
        while True:
            self._require_turn(request)
            left = budget.max_response_tokens - self._spent - added
            room = min(wanted, left, longest - given)
            if room < 1:
                raise BudgetSpent("length")
            if room <= left - self._reserved or not self._reserved:
                return room
            with suppress(TimeoutError):
                # `wait_for` of Python 3.11 forgets a cancellation that comes with a turn's end.
                async with asyncio.timeout(budget.ends_at_s - time.monotonic()):
                    await self._changed.wait()

    def _require_turn(self, request: Request) -> None:
        """Raise BudgetSpent if no turn may begin."""
        budget, given = self._budget, len(request.prompt_ids)
        if self._is_closed or time.monotonic() >= budget.ends_at_s:
            raise BudgetSpent("time")
        if self._started >= budget.max_turns:
            raise BudgetSpent("turns")
        # A turn in progress may become a sequence of its own, if another one continues the same turn.
        is_new = request.parent is None or request.parent.children > 0
        if self._session.sequences + len(self._running) + is_new > budget.max_sequences:
            raise BudgetSpent("sequences")
        if not self._started and given > budget.max_prompt_tokens:
            raise EnvironmentFault(
                f"the first prompt has {given} tokens; sampling.max_prompt_tokens allows "
                f"{budget.max_prompt_tokens}; raise it, or begin the episode with less text",
                reason="long",
            )

    async def _sample(self, prompt_ids: Sequence[int], spec: SamplingSpec) -> Rollout:
        began_s = time.monotonic()
        task = asyncio.ensure_future(self._engine.sample(prompt_ids, 1, spec, salt=self._salt))
        self._running.add(task)
        try:
            await asyncio.wait({task}, timeout=self._budget.ends_at_s - began_s)
        finally:
            task.cancel()
            self._running.discard(task)
            self.model_s += time.monotonic() - began_s
        if not task.done() or task.cancelled():
            raise BudgetSpent("time")
        try:
            (rollout,) = task.result()
        except ValueError as error:  # the columns of a rollout differ in length, or another number of them
            self.error = ResultError(f"the engine's answer to a turn is malformed: {error}")
            raise self.error from error
        except EngineError as error:
            self.error = error
            raise
        return rollout


@contextmanager
def _usable(what: str) -> Iterator[None]:
    """Raise EnvironmentFault for what user code said in another form than text and chat messages."""
    try:
        yield
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        text = f"the environment's {what} cannot be used ({type(error).__name__}: {error})"
        raise EnvironmentFault(text, reason="returned") from error
