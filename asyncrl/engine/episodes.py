"""Plays, scores and flattens the episodes of a prompt, in training, in evaluation and in `asyncrl play`."""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

from asyncrl.algo.ranges import MOST_SEQUENCES
from asyncrl.algo.trainable import GroupLimits
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.engine.base import Engine, SamplingSpec
from asyncrl.engine.duty import Clock
from asyncrl.engine.sampler import Episode, Scoring
from asyncrl.engine.talk import Budget, Read, SessionTalk
from asyncrl.environments.base import Answer, Environment, Message, Outcome
from asyncrl.errors import EnvironmentFault, RewardError, ungrouped
from asyncrl.rewards.base import EPISODE_COLUMNS, RewardInput, Scorer
from asyncrl.session.base import Renderer, without_stop
from asyncrl.session.tree import Session
from asyncrl.types import Prompt
from asyncrl.wire.group_frames import MAX_ROLLOUTS

log = logging.getLogger(__name__)

# Limit for ending a killed episode; multiple of `step_s` for an environment to end and score a late episode.
END_S, LAST_STEPS = 10.0, 3


class EpisodeFailed(RewardError):
    """The environment failed in all attempts at an episode."""

    def __init__(self, message: str, reason: str) -> None:
        """Give the reason of the last failure, as in EnvironmentFault."""
        super().__init__(message)
        self.reason = reason


@dataclass(eq=False)
class EpisodeSampler(Scoring):
    """Plays and scores whole groups of episodes, in which environment and model act in turn."""

    engine: Engine
    scorer: Scorer | None
    environment: Environment
    config: EnvironmentConfig
    _: KW_ONLY
    renderer: Renderer
    read: Read
    max_prompt_tokens: int
    generator_id: str
    seed: int  # of the run
    # Episodes that failed, without which a group may go if its limits do not ask for whole groups.
    most_missing: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    clock: Clock = field(init=False, default_factory=Clock)
    faults: Counter[str] = field(init=False, default_factory=Counter)

    async def sampled(
        self, prompt: Prompt, ticket_id: int, limits: GroupLimits, specs: Sequence[SamplingSpec]
    ) -> tuple[Sequence[Episode], Mapping[str, Any]]:
        size = limits.rollouts
        # A held-out prompt has the same seed in all evaluations, which can then be compared.
        seed = group_seed(self.seed, ticket_id if prompt.held_out is None else -1 - prompt.held_out)
        # An episode is cut off when it would begin another sequence: each group fits a frame.
        most = max(1, min(MOST_SEQUENCES, MAX_ROLLOUTS // size))
        # Statistics of whole groups need all episodes, and the advantage that asks for it the greedy one.
        most_missing = 0 if limits.whole else min(self.most_missing, size - 1)
        missing: Counter[str] = Counter()

        async def play(index: int, one: SamplingSpec) -> Episode | None:
            try:
                return await self.play(prompt, one, seed=seed, episode=index, sequences=most)
            except EpisodeFailed as failed:
                if index >= size or missing.total() >= most_missing:
                    raise
                missing[failed.reason] += 1
                log.warning("ticket %d goes without its episode %d: %s", ticket_id, index, failed)
                return None

        with self.clock.group(len(specs)), ungrouped():
            async with asyncio.TaskGroup() as tasks:
                playing = [tasks.create_task(play(index, one)) for index, one in enumerate(specs)]
        played = [episode for task in playing if (episode := task.result()) is not None]
        return played, {"missing": missing}

    async def play(
        self, prompt: Prompt, spec: SamplingSpec, *, sequences: int = MOST_SEQUENCES, seed: int, episode: int
    ) -> Episode:
        """One unscored episode of at most so many sequences; after a fault it is played again from the start.

        Raises EngineError, and EpisodeFailed if every replay fails.
        """
        faults: list[str] = []
        while len(faults) <= self.config.replays:
            try:
                played = await self._attempt(prompt, spec, sequences, seed=seed, episode=episode)
            except EnvironmentFault as fault:
                faults.append(str(fault))
                log.warning("the environment failed, attempt %d: %s", len(faults), fault)
                self.faults[last := fault.reason] += 1
            else:
                return replace(played, metrics={**played.metrics, "replays": float(len(faults))})
        reasons = "; ".join(f"{count} x {reason}" for reason, count in Counter(faults).items())
        text = f"the environment failed in all {len(faults)} attempts at an episode: {reasons}"
        raise EpisodeFailed(text, last)

    async def _attempt(
        self, prompt: Prompt, spec: SamplingSpec, sequences: int, *, seed: int, episode: int
    ) -> Episode:
        config, began_s = self.config, time.monotonic()
        session = Session(self.renderer, history=config.history, own=prompt.messages or prompt.text)
        budget = Budget(
            max_prompt_tokens=self.max_prompt_tokens,
            max_response_tokens=spec.max_response_tokens,
            max_turns=config.max_turns,
            max_sequences=sequences,
            ends_at_s=began_s + config.episode_s,
        )
        talk = SessionTalk(session, self.engine, spec, self.read, budget)
        try:
            outcome = await self._outcome(talk, prompt, seed=seed, episode=episode)
        except EnvironmentFault:
            if talk.error is not None:  # the fault follows from it
                raise talk.error from None
            raise
        if talk.error is not None:  # the environment went on although a turn had failed
            raise talk.error
        rollouts = session.rollouts()
        if not rollouts:
            text = "the episode ended without an answer of the model that can be trained on"
            if outcome.finish_reason == "time":
                text = f"environment.episode_s ({config.episode_s:g}) passed before the first answer was "
                text += "whole; raise it, or lower sampling.max_response_tokens"
            raise EnvironmentFault(text, reason="silent")
        if self.scorer is None and outcome.reward is None and outcome.finish_reason == "stop":
            found = "the episode ended by itself, the environment gave no reward, and reward.functions is []"
            raise EnvironmentFault(f"{found}; give a reward, or name a function", reason="returned")
        last_ids = talk.last.sampled_ids.tolist() if talk.last else []
        result = {"reward": outcome.reward, "parts": dict(outcome.parts), "metrics": dict(outcome.metrics)}
        asked = RewardInput(
            prompt=prompt.text,
            response=talk.response,
            raw_response=partial(self.renderer.decode, without_stop(self.renderer, last_ids)),
            row=prompt.row,
            chat=prompt.chat,
            played=dict(zip(EPISODE_COLUMNS, ([*talk.transcript], len(session.turns), result), strict=True)),
            truncated=outcome.finish_reason != "stop",
            response_tokens=sum(one.actions for one in rollouts),
            token_ids=talk.last.ids if talk.last else (),
        )
        counts = {f"chat/{name}": float(count) for name, count in session.counts.items()}
        played_s = time.monotonic() - began_s
        return Episode(
            rollouts=tuple(replace(one, finish_reason=outcome.finish_reason) for one in rollouts),
            reward=outcome.reward,
            weight=config.weight,
            asked=lambda: asked,
            metrics={
                **counts,
                **outcome.metrics,
                "unparsed_calls": float(talk.unparsed),
                "model_s": talk.model_s,
                "environment_s": max(0.0, played_s - talk.model_s),
                "turns": float(len(session.turns)),
            },
        )

    async def _outcome(self, talk: SessionTalk, prompt: Prompt, *, seed: int, episode: int) -> Outcome:
        """Let the environment play. First its turns are ended, then its process, each within a bound.

        When the episode's time is up, its next turn says so to the environment, which may still score. An
        environment that does not even end is killed. Then the reward functions score the episode; if there
        are none, that is a fault.
        """
        opening = prompt.messages or prompt.text
        playing = asyncio.ensure_future(
            self.environment.play(talk, prompt.row, prompt=opening, seed=seed, episode=episode)
        )
        try:
            bound_s = self.config.episode_s + LAST_STEPS * self.config.step_s
            await asyncio.wait({playing}, timeout=bound_s)
        finally:
            talk.close()
            if not playing.done():
                playing.cancel()
                await asyncio.wait({playing}, timeout=END_S)
        if playing.done() and not playing.cancelled():
            return playing.result()
        if self.scorer is None:
            found = f"the environment neither ended within {bound_s:g} s nor gave a reward"
            advice = "raise environment.episode_s, or bound what the environment waits for"
            raise EnvironmentFault(f"{found}; {advice}", reason="hung")
        return Outcome(finish_reason="time")


def group_seed(run_seed: int, ticket_id: int) -> int:
    """The seed of all episodes of a ticket's group, 31 bits: they begin alike and can be compared."""
    digest = hashlib.blake2b(f"{run_seed} {ticket_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


async def require_same_start(environment: Environment, prompt: Prompt) -> None:
    """Raise EnvironmentFault unless two episodes of one row and seed begin alike, which is all it costs."""
    seed = group_seed(0, 0)
    said: list[Any] = [None, None]
    for episode in (0, 1):
        opening = prompt.messages or prompt.text
        try:
            await environment.play(_Listener(), prompt.row, prompt=opening, seed=seed, episode=episode)
        except _Heard as heard:
            (said[episode],) = heard.args
    if said[0] != said[1]:
        raise EnvironmentFault(
            f"two episodes of one row begin differently with the same seed: {said[0]!r:.300} and "
            f"{said[1]!r:.300}; the episodes of a group are compared, so draw their start from `seed`"
        )


class _Heard(Exception):
    """Ends an episode with what the model would have been shown; for a spent budget it would be scored."""


class _Listener:
    """A talk that ends the episode with its first turn."""

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Message] = (), **limits: Any
    ) -> Answer:
        raise _Heard((list(messages), list(tools)))

    async def complete(self, text: str, **limits: Any) -> Answer:
        raise _Heard(text)

    def score_turn(self, reward: float | None, state: int | None = None) -> None: ...
