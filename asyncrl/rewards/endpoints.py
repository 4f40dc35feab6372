"""Rewards behind an HTTP address, and judges: `http_reward`, `llm_judge` and `model_judge`.

http_reward   {"prompts": [text], "completions": [text], "columns": {name: [value]}}  ->  {"rewards": [0.5]}
judges        a chat completion of one user message, the rendered template
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.config.reward_section import TEXT_BYTES, HttpReward, Judge, LlmJudge
from asyncrl.errors import RewardError, from_extra
from asyncrl.rewards.base import Question, RewardInput, Service, Unanswered, number, unreadable

if TYPE_CHECKING:
    from aiolimiter import AsyncLimiter

MAX_REPLY_BYTES = 1 << 20
SHOWN_CHARACTERS = 200
_MOST_BRACES = 1000
# Variables of a template that are not columns.
GIVEN = frozenset({"prompt", "response", "first", "second"})
# Verdicts on a pair: the probability that the first text is better.
VERDICTS = {"a": 1.0, "b": 0.0, "c": 0.5, "tie": 0.5}
# Estimate before the service has reported the size of an answer.
CHARACTERS_PER_TOKEN = 4


class HttpService:
    """The Service behind `http_reward`."""

    def __init__(self, settings: HttpReward, *, place: str = "") -> None:
        """Take the path behind the address. Raises RewardError if the service's key is not set."""
        self._settings = settings
        self._url = settings.url.rstrip("/") + place if place else settings.url
        self._key = key_of(settings)
        self._client: Any = None
        self._limiter: AsyncLimiter | None = None
        self.remembers = settings.cache

    async def start(self) -> None:
        with from_extra("judge"):
            from openai import DefaultAsyncHttpxClient
        headers = {"authorization": f"Bearer {self._key or 'none'}", "content-type": "application/json"}
        # The client of httpx with openai's many connections. openai's own repetitions would not be counted.
        # The address of a redirect was not allowed by anybody.
        self._client = DefaultAsyncHttpxClient(follow_redirects=False, timeout=None, headers=headers)
        self._limiter = _limiter_of(self._settings.requests_per_minute)

    def questions(self, one: RewardInput) -> list[Question]:
        def read(reply: Any) -> tuple[float | None, str]:
            rewards = reply.get("rewards") if isinstance(reply, dict) else None
            if not isinstance(rewards, list) or len(rewards) != 1:
                found = str(reply)[:SHOWN_CHARACTERS]
                raise unreadable(f'{found}; for one completion it must be {{"rewards": [number]}}')
            return None if rewards[0] is None else number(rewards[0]), ""

        columns = {name: [value] for name, value in one.columns.items()}
        request = {"prompts": [one.prompt], "completions": [one.response], "columns": columns}
        return [Question(request=request, read=read)]

    async def admit(self, question: Question) -> None:
        if self._limiter is not None:
            await self._limiter.acquire()

    async def ask(self, question: Question) -> Any:
        """The JSON of the answer. Its size is limited."""
        content, body = json.dumps(question.request, default=str), bytearray()
        try:
            async with self._client.stream("POST", self._url, content=content) as reply:
                async for piece in reply.aiter_bytes():
                    body += piece
                    if len(body) > MAX_REPLY_BYTES:
                        break
        except Exception as error:  # of httpx, or of httpx2, as the release of openai has it
            cause = error.__cause__ or error
            lost = f"lost the connection ({type(cause).__name__}: {cause})"
            raise Unanswered(lost, reason="unavailable") from error
        if len(body) > MAX_REPLY_BYTES:
            raise unreadable(f"an answer of more than {MAX_REPLY_BYTES >> 20} MiB")
        if not reply.is_success:
            raise self._refusal(
                reply.status_code, reply.headers.get("retry-after"), body.decode("utf-8", "replace")
            )
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            shown = bytes(body[:SHOWN_CHARACTERS])
            raise unreadable(f"{shown!r}, which is not JSON ({type(error).__name__})") from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _refusal(self, status: int, retry_after: str | None, text: str) -> Unanswered:
        if self._key:
            text = text.replace(self._key, "***")
        message = f"asked {self._url}, which answered status {status}: {text[:SHOWN_CHARACTERS]}"
        if status not in (408, 429) and status < 500:
            return Unanswered(message, reason="refused", may_pass=False)
        try:
            pause_s = max(0.0, float(retry_after or ""))
        except ValueError:  # a date, or none: the usual pauses
            pause_s = None
        return Unanswered(message, reason="limited" if status == 429 else "unavailable", pause_s=pause_s)


class JudgeService:
    """The Service behind `llm_judge` and `model_judge`: puts questions to a model's own Service."""

    def __init__(self, settings: Judge, model: Service, fields: Mapping[str, Any]) -> None:
        """Take what a request has besides its messages. Raises RewardError for an unusable template."""
        self._settings, self._model, self._fields = settings, model, fields
        self._template, _ = _read_template(settings.prompt)
        self._limiter: AsyncLimiter | None = None
        # Of the answers so far, for the limit of tokens.
        self._answers, self._tokens = 0, 0
        self.remembers = settings.cache
        self.close = model.close
        self.ask = model.ask

    async def start(self) -> None:
        await self._model.start()
        if isinstance(self._settings, LlmJudge):
            self._limiter = _limiter_of(self._settings.tokens_per_minute)

    async def admit(self, question: Question) -> None:
        if self._limiter is not None:
            guess = len(question.prompt) / CHARACTERS_PER_TOKEN
            expected_tokens = self._tokens / self._answers if self._answers else guess
            await self._limiter.acquire(min(expected_tokens, self._limiter.max_rate))
        await self._model.admit(question)

    def questions(self, one: RewardInput) -> list[Question]:
        settings, against = self._settings, self._settings.against
        # What the template shows besides, and how a verdict on it is read.
        shown: list[tuple[Mapping[str, str], Callable[[object], float]]] = [({}, _number)]
        if against is not None:
            if not isinstance(other := one.columns.get(against), str):
                raise RewardError(f"compares with column `{against}`, which holds no text: {other!r:.80}")
            shown = [({"first": one.response, "second": other}, _share)]
            if settings.both_orders:
                swapped = {"first": other, "second": one.response}
                shown.append((swapped, lambda found: 1.0 - _share(found)))
        questions: list[Question] = []
        for pair, value_of in shown:
            given = {**one.columns, "prompt": one.prompt, "response": one.response, **pair}
            try:
                prompt = self._template.render(given)
            except Exception as error:  # of the expressions in the template
                raise RewardError(f"cannot render {settings.prompt}: {error}") from error
            request = {"messages": [{"role": "user", "content": prompt}], **self._fields}
            read = partial(self._read, value_of)
            for _ in range(settings.votes):
                questions.append(Question(request=request, read=read, prompt=prompt, vote=len(questions)))
        return questions

    def _read(self, value_of: Callable[[object], float], reply: Any) -> tuple[float, str]:
        try:
            words = reply["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            words = None
        if not isinstance(words, str):
            raise unreadable(f"no text in choices[0].message.content: {str(reply)[:SHOWN_CHARACTERS]}")
        usage = reply.get("usage")
        if isinstance(usage, dict) and isinstance(tokens := usage.get("total_tokens"), int):
            self._answers, self._tokens = self._answers + 1, self._tokens + tokens
        # More is not shown, and thousands of answers are remembered.
        return value_of(self._verdict(words)), words[:TEXT_BYTES]

    def _verdict(self, words: str) -> object:
        """The part of the answer that has the score."""
        if self._settings.parse == "json":
            scored, at = dict[str, Any](), 0
            for _ in range(_MOST_BRACES):  # the judge may think aloud before, and write braces
                if (at := words.find("{", at)) < 0:
                    break
                try:
                    found, at = json.JSONDecoder().raw_decode(words, at)
                    scored = found if "score" in found else scored
                except (ValueError, RecursionError):
                    at += 1
            if scored:
                return scored["score"]
            raise unreadable(f"{words[-SHOWN_CHARACTERS:]!r}, without a JSON object that has `score`")
        found = list(re.finditer(self._settings.pattern, words))
        if not found:
            raise unreadable(f"{words[-SHOWN_CHARACTERS:]!r}, where `{self._settings.pattern}` finds nothing")
        return found[-1][1]


def _limiter_of(rate: int | None) -> "AsyncLimiter | None":
    """Return what admits amounts of at most `rate` per minute together; None without a rate."""
    if rate is None:
        return None
    with from_extra("judge"):
        from aiolimiter import AsyncLimiter
    return AsyncLimiter(rate)


def key_of(settings: HttpReward) -> str | None:
    """Return the key of a service, or None if it needs none. Raises RewardError."""
    if settings.key_env is None:
        return None
    # A secret that was made from a file often ends in a newline.
    key = os.environ.get(settings.key_env, "").strip()
    if key and key.isascii() and key.isprintable():
        return key
    found = "has characters that no HTTP header can hold" if key else "is not set"
    cure = "export it, or drop key_env for a service without a key"
    raise RewardError(f"{settings.key_env} (key_env), the key of {settings.url}, {found}; {cure}")


def _read_template(path: Path) -> tuple[jinja2.Template, frozenset[str]]:
    """Read a judge's template, and the columns that it uses. Raises RewardError."""
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        text = path.read_text(encoding="utf-8")
        used = jinja2.meta.find_undeclared_variables(environment.parse(text))
        return environment.from_string(text), frozenset(used - GIVEN)
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"cannot read {path}: {error}; give the path of a Jinja template") from error
    except jinja2.TemplateSyntaxError as error:
        raise RewardError(f"{path}:{error.lineno} is not a valid template: {error}; correct it") from error


def columns_of(judge: Judge) -> frozenset[str]:
    """Return the columns that a judge needs. Raises RewardError."""
    _, columns = _read_template(judge.prompt)
    return columns | {judge.against} if judge.against else columns


def _number(found: object) -> float:
    """The score that a judge wrote, as a number or as text."""
    try:
        return number(float(found) if isinstance(found, str) else found)
    except ValueError:
        raise unreadable(f"the score {found!r:.80}, which is no number") from None


def _share(found: object) -> float:
    """The probability that the first text is better."""
    verdict = VERDICTS.get(found.strip().lower()) if isinstance(found, str) else None
    share = _number(found) if verdict is None else verdict
    if not 0.0 <= share <= 1.0:
        raise unreadable(f"the verdict {found!r:.80}; allowed are A, B, C, tie, and 0 to 1")
    return share
