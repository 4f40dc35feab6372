"""The episodes that agents may call, by their keys, and the calls in progress."""

import asyncio
import re
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from asyncrl.addons.endpoint import reading
from asyncrl.addons.endpoint.base import Call, Dialect, Json, Past, Refused
from asyncrl.environments.base import Answer, BudgetSpent, Talk
from asyncrl.errors import ConfigError, EngineError, EnvironmentFault, RenderError

MOST_CALLS = 16  # of one episode at the same time
MOST_REQUESTS = 32  # the same, with those that still arrive or repeat a call
REMEMBERED = 32  # answers of one episode that a retry gets again
MOST_CLOSED = 65536  # keys of ended episodes that are answered with 403
_NUMBER = re.compile(r"_([0-9a-f]{24})")  # of an answer, in its id and in the ids of its items
# Refusals that leave no hole in a conversation: the episode ends, or the call is repeated, maybe shorter.
HARMLESS = ("context_length_exceeded", "episode_over", "too_many_calls", "body_too_slow", "body_too_long")


class OpenEpisode:
    """One episode: its key, its talk, and what became of its calls."""

    def __init__(self, talk: Talk) -> None:
        self.key = secrets.token_hex(16)
        self.calls = 0  # answers that the agent got
        self.spent = ""  # the budget that ended the episode: `turns`, `sequences` or `time`
        self.overridden = 0  # calls with parameters that have no effect
        self.retries = 0  # calls that got the answer of an earlier attempt
        self.refused = 0  # calls, of any reason
        self.overflowed = False  # whether a conversation was too long
        self.overlong = ""  # the first call that was too long to begin with: an agent may call with less
        self.is_cut = False  # whether the run, and not the agent, cut off or refused the last answer
        self.fault = ""  # the first call that failed: the agent goes on with a hole
        self.mistake = ""  # the first call that asked for constraints: an agent may go on without them
        self._past: dict[str, Past] = {}  # by the number of the answer
        self._talk = talk
        # Calls by their digest, those first that were repeated least recently; and those refused as too many.
        self._recent: OrderedDict[bytes, deque[asyncio.Task[Json]]] = OrderedDict()
        self._unbegun: Counter[bytes] = Counter()
        self._running: set[asyncio.Task[Json]] = set()
        # The text of a conversation without a chat template, with and without what ended the last answer.
        self._completed = ("", "")
        self._has_chatted = False
        self._is_closed = False
        self._requests = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it arrives and is answered. Raises Refused if there are too many."""
        if self._requests >= MOST_REQUESTS:
            text = f"{MOST_REQUESTS} requests of this episode are in progress; wait until one has ended"
            raise self.noted(Refused(429, text, "too_many_calls"))
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    def read(self, dialect: Dialect, body: bytes, path: str, *, is_free: bool) -> Call:
        """Return the call that a body is. Raises Refused, also for constraints unless it `is_free`."""
        try:
            call = dialect.read(reading.body_of(body, dialect.keys), self._recall)
            if call.constraints and not is_free:
                raise reading.constrained(call.constraints)
        except Refused as refused:
            raise self.noted(refused) from None
        except Exception as error:  # of a form that no dialect foresaw
            text = (
                f"the call cannot be read ({type(error).__name__}: {error}); see the documentation of {path}"
            )
            raise self.noted(reading.wrong(text)) from error
        self.overridden += bool(call.overridden or call.constraints)
        return call

    async def answer(self, dialect: Dialect, call: Call, *, digest: bytes, retry: str, train: bool) -> Json:
        """Return the answer. Raises Refused.

        A `retry`, the first of which is "1", has its call's `digest` and gets that call's answer, also if
        still in progress; retries of equal calls get one each, and the newest call comes first. A call whose
        connection is lost continues, so that a retry finds it.
        """
        same, was_refused = self._recent.get(digest), retry != "0" and self._unbegun[digest] > 0
        if retry != "0" and same and not was_refused:
            same.rotate(retry == "1")  # the newest comes to the front, where a second retry finds it
            task = same[0]
            self.retries += 1
        else:
            if len(self._running) >= MOST_CALLS:
                self._unbegun[digest] += not was_refused
                text = f"{MOST_CALLS} calls of this episode are in progress; wait until one has ended"
                raise self.noted(Refused(429, text, "too_many_calls"))
            self._unbegun.subtract([digest] * was_refused)
            task = asyncio.ensure_future(self._answer(dialect, call, train))
            self._running.add(task)
            task.add_done_callback(self._ended)
            self._recent.setdefault(digest, deque(maxlen=REMEMBERED)).append(task)
            while len(self._recent) > REMEMBERED:
                self._recent.popitem(last=False)
        await asyncio.wait({task})
        if task.cancelled():
            raise _over()
        return task.result()

    def noted(self, refused: Refused) -> Refused:
        """Count a refusal; after most the agent's conversation has a hole, which is a fault."""
        self.refused += 1
        text = f"a call of the model was refused with {refused.status}: {refused}"
        if refused.code == reading.CONSTRAINED:
            self.mistake = self.mistake or text
        elif refused.code not in HARMLESS:
            self.fault = self.fault or text
        return refused

    def close(self) -> None:
        """End the calls in progress."""
        self._is_closed = True
        for task in self._running:
            task.cancel()
        self._recent.clear()

    async def _answer(self, dialect: Dialect, call: Call, train: bool) -> Json:
        try:
            answers = await self._answers(call, train)
        except Refused as refused:
            raise self.noted(refused) from refused.__cause__
        self.calls += len(answers)
        limit = call.max_tokens
        self.is_cut = any(
            one.finish_reason == "length" and (limit is None or one.tokens < limit) for one in answers
        )
        number = secrets.token_hex(12)
        written = dialect.write(call, answers, number)
        self._past[number] = Past(call=call, message=answers[0].message, answer=written)
        return written

    def _recall(self, given: str) -> Past:
        found = _NUMBER.search(given) if isinstance(given, str) else None
        if found is None or (past := self._past.get(found[1])) is None:
            text = f"{given!r:.60} is not the id of an answer in this episode; send the whole conversation"
            raise reading.wrong(text, "unknown_id")
        return past

    async def _answers(self, call: Call, train: bool) -> list[Answer]:
        if self._is_closed or self.spent:
            raise _over()
        limits: dict[str, Any] = {"max_tokens": call.max_tokens, "stop": call.stop, "train": train}
        try:
            if call.prompt is not None:
                answer = await self._talk.complete(self._new_text(call.prompt), **limits)
                text = call.prompt + answer.text
                self._completed = (text + answer.stop, text)
                return [answer]
            self._has_chatted = True
            chat = partial(self._talk.chat, tools=call.tools, calls_tools=call.calls_tools)
            answers, spent = await _all(chat(call.messages, **limits) for _ in range(call.choices))
            if spent is not None and not answers:
                raise spent
            # The choices that ended are answered: the agent gets all that is trained.
            if spent is not None:
                self._spend(spent)
            return answers
        except BudgetSpent as spent:
            self._spend(spent)
            if spent.finish_reason == "length":
                text = "the conversation is longer than the context, or the episode's tokens are used up"
                raise Refused(400, text, "context_length_exceeded") from spent
            raise _over() from spent
        except (ConfigError, RenderError, EnvironmentFault, RecursionError, UnicodeError, TypeError) as error:
            if isinstance(error, EnvironmentFault) and error.reason == "long":
                self.overlong = self.overlong or str(error)
                raise Refused(400, str(error), "context_length_exceeded") from error
            raise Refused(400, f"the messages cannot be used: {error}", "invalid_request") from error
        except EngineError as error:
            raise Refused(503, f"the model cannot answer: {error}", "engine") from error

    def _spend(self, spent: BudgetSpent) -> None:
        if spent.finish_reason == "length":
            # The answer to a shorter call takes `is_cut` back.
            self.overflowed = self.is_cut = True
        else:
            self.spent = spent.finish_reason

    def _ended(self, task: asyncio.Task[Json]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, Refused):
            self.fault = self.fault or f"a call of the model failed: {type(error).__name__}: {error}"

    def _new_text(self, prompt: str) -> str:
        """What a prompt adds to the text so far, which it must begin with."""
        if self._has_chatted:
            raise reading.wrong(
                "this episode has calls with messages, and a prompt would continue the last one"
            )
        for text in self._completed:
            if prompt.startswith(text):
                return prompt[len(text) :]
        raise reading.wrong(
            "the prompt must begin with the text of the episode so far: all prompts and answers"
        )


class OpenEpisodes:
    """All episodes of a generator by key."""

    def __init__(self) -> None:
        self._open: dict[str, OpenEpisode] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def open(self, talk: Talk) -> OpenEpisode:
        """Return a new episode, which is called with its key until it is closed."""
        episode = OpenEpisode(talk)
        self._open[episode.key] = episode
        return episode

    def close(self, episode: OpenEpisode) -> None:
        """Refuse further calls and end those in progress."""
        episode.close()
        if self._open.pop(episode.key, None):
            self._closed[episode.key] = None
            while len(self._closed) > MOST_CLOSED:
                self._closed.popitem(last=False)

    def find(self, headers: Mapping[str, str]) -> OpenEpisode:
        """Return the episode of a request. Raises Refused."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if episode := self._open.get(key):
            return episode
        if key in self._closed:
            raise _over()
        text = "no episode has this key; send the one in OPENAI_API_KEY or ANTHROPIC_API_KEY"
        raise Refused(401, text, "invalid_api_key")


def _over() -> Refused:
    """Return the refusal of a call after the end of its episode, which no client library repeats."""
    return Refused(403, "the episode is over", "episode_over")


async def _all(chats: Iterable[Coroutine[Any, Any, Answer]]) -> tuple[list[Answer], BudgetSpent | None]:
    """Return the answers, and why there are not more; if one fails otherwise, the others end."""

    async def within_budget(chat: Coroutine[Any, Any, Answer]) -> Answer | BudgetSpent:
        try:
            return await chat
        except BudgetSpent as spent:
            return spent

    tasks = [asyncio.ensure_future(within_budget(chat)) for chat in chats]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    answers = [one for one in found if isinstance(one, Answer)]
    return answers, next((one for one in found if isinstance(one, BudgetSpent)), None)
