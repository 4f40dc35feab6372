"""Talks for tests of the endpoint: one that says what it is told, and the talk of a run."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from asyncrl.engine.answers import AnswerReader
from asyncrl.engine.base import Engine, SamplingSpec
from asyncrl.engine.talk import Budget, SessionTalk
from asyncrl.environments.base import Answer, Message
from asyncrl.session.chat_template import TemplateRenderer
from asyncrl.session.tree import Session

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<eos>"
    "{% else %}[{{ m.role }}]{{ m.content }}[/{{ m.role }}]{% endif %}{% endfor %}"
)


def character_tokenizer() -> Any:
    """One token per character, `<eos>` is token 0, and a chat template of three parts."""
    vocabulary = {token: index for index, token in enumerate(["<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    return fast


class ScriptedTalk:
    """Gives one answer after the other, and keeps what it was asked."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.release = asyncio.Event()
        self.release.set()

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
        asked = {"messages": [*messages], "tools": [*tools], "max_tokens": max_tokens, "train": train}
        return await self._next(asked | ({} if calls_tools else {"calls_tools": False}))

    async def complete(
        self, text: str, *, max_tokens: int | None = None, stop: Sequence[str] = (), train: bool = True
    ) -> Answer:
        return await self._next({"text": text, "max_tokens": max_tokens, "train": train})

    async def _next(self, asked: dict[str, Any]) -> Answer:
        self.asked.append(asked)
        answer = self.answers.pop(0)
        await self.release.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


def engine_talk(engine: Engine, spec: SamplingSpec) -> tuple[SessionTalk, Session]:
    """The talk of a run, with room for many turns, and its session."""
    tokenizer = character_tokenizer()
    renderer = TemplateRenderer(tokenizer)
    session = Session(renderer)
    budget = Budget(
        max_sequences=256,
        max_prompt_tokens=1000,
        max_response_tokens=spec.max_response_tokens,
        max_turns=100,
        ends_at_s=time.monotonic() + 600,
    )
    return SessionTalk(session, engine, spec, AnswerReader(tokenizer, renderer).read, budget), session
