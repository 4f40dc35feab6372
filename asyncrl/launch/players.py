"""The processes of a generator that run user code: rewards, and the environment if there is one."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.algo.ranges import MOST_SEQUENCES
from asyncrl.config import registry
from asyncrl.config.schema import Config
from asyncrl.control.scoring import ScorerService
from asyncrl.data.prompts import PromptSource
from asyncrl.endpoint.agent_process import AgentEnvironment
from asyncrl.engine.answers import AnswerReader
from asyncrl.engine.base import Engine
from asyncrl.engine.episodes import EpisodeSampler, require_same_start
from asyncrl.engine.sampler import GroupSampler, Sampler
from asyncrl.engine.taught import TaughtSampler
from asyncrl.environments.environments import Environments
from asyncrl.errors import EnvironmentFault
from asyncrl.launch.scorers import scorers_in
from asyncrl.rewards.opened import Asker, Rewards
from asyncrl.run.starts import unchanged
from asyncrl.session.delta import closer, rewritten
from asyncrl.wire.group_frames import MAX_ROLLOUTS

log = logging.getLogger(__name__)

# What `environment.history` means for a template that rewrites.
HISTORY = {
    "exact": "environment.history is exact, so the policy reads what it sampled: deploy it with a template "
    "that keeps the history, or set template",
    "template": "environment.history is template, so each such turn begins a sequence",
}


@dataclass(frozen=True, slots=True)
class Players:
    """The processes that run user code: those of the reward functions, and those of the environment."""

    config: Config
    scorer: Rewards | None
    environment: Environments | AgentEnvironment | None
    teacher: Asker | None = None

    @classmethod
    def of(cls, config: Config, run_root: Path, directory: Path | None = None) -> "Players":
        """Make what the config names; nothing is started. Scorers run in the run of `directory`."""
        loaded = unchanged(config)
        open_scorer = scorers_in(config, directory or run_root)
        scorer = Rewards(config.reward, run_root, loaded, open_scorer) if config.reward.functions else None
        counts = scorer.counts if scorer else Counter[str]()
        teacher = _teacher_of(config, directory, counts) if directory else None
        return cls(config, scorer, _environment_of(config, loaded), teacher)

    async def start(self, prompts: PromptSource) -> None:
        """Start the processes. Raises RewardError and EnvironmentFault for code that cannot be used.

        Then nothing is left running.
        """
        try:
            if self.scorer:
                await self.scorer.start()
            if self.teacher:
                await self.teacher.start()
            if self.environment:
                await self.environment.start()
                self._require_states(self.environment)
                self._require_reward(self.environment)
                if isinstance(self.environment, Environments):  # what an agent says first may name the day
                    await require_same_start(self.environment, prompts.prompt(1))
        except BaseException:
            await self.close()
            raise

    def sampler(self, engine: Engine, prompts: PromptSource, generator_id: str) -> GroupSampler:
        """Return what samples and scores the group of a ticket."""
        sampler = self._sampler(engine, prompts, generator_id)
        one = self.teacher
        return TaughtSampler(sampler, one.answer, one.counts) if one else sampler

    def _sampler(self, engine: Engine, prompts: PromptSource, generator_id: str) -> GroupSampler:
        if self.environment is None:
            assert self.scorer is not None, "a config without an environment has a reward function"
            return Sampler(engine, self.scorer, prompts.decode, generator_id, counts=self.scorer.counts)

        model = self.config.model
        renderer = prompts.renderer
        if model.chat_template and (places := rewritten(renderer)):
            kept = HISTORY[self.config.environment.history]
            log.warning("the chat template rewrites history behind %s; %s", " and ".join(places), kept)
        end = closer(renderer) if model.chat_template else ""
        if end and not {*renderer.encode(end)} <= renderer.stop_ids:
            log.warning(
                "the chat template closes an answer with %s, and the model does not stop there; add the "
                "token's id to eos_token_id in generation_config.json of model.path",
                end,
            )
        reader = AnswerReader(prompts.tokenizer, renderer, model.tool_parser, model.reasoning_parser)
        if isinstance(self.environment, Environments) and (tools := self.environment.schemas):
            reader.require_tools(tools)  # an agent brings its own
        return EpisodeSampler(
            engine,
            self.scorer,
            self.environment,
            self.config.environment,
            renderer=renderer,
            read=reader.read,
            max_prompt_tokens=self.config.sampling.max_prompt_tokens,
            generator_id=generator_id,
            seed=self.config.run.seed,
            max_sequences=self._max_sequences,
            most_missing=self.config.batch.missing_episodes,
            counts=self.scorer.counts if self.scorer else Counter(),
        )

    @property
    def _max_sequences(self) -> int:
        """Most sequences of an episode, so that each group fits a frame."""
        episodes = max(self.config.batch.group_size, self.config.eval.samples)
        return max(1, min(MOST_SEQUENCES, MAX_ROLLOUTS // episodes))

    def _require_states(self, environment: Environments | AgentEnvironment) -> None:
        """Raise EnvironmentFault if the advantage needs states that this kind of environment never names."""
        name, kind = self.config.algorithm.advantage.name, environment.description.get("kind")
        needs = registry.NEEDS.get(("advantage", name), ())
        if kind not in ("rollout", "text") and "turn_states_K" in needs:
            raise EnvironmentFault(
                f"algorithm.advantage is {name}, which compares turns from the same state, but "
                f"environment.uses {self.config.environment.uses} has tools, which name no states; write a "
                "class with `step` or a rollout function, or take turn_rloo, rloo or grpo",
                reason="start",
            )

    def _require_reward(self, environment: Environments | AgentEnvironment) -> None:
        """Raise EnvironmentFault for functions as tools, which give no reward, if no function scores."""
        if self.scorer is None and environment.description.get("kind") == "tools":
            raise EnvironmentFault(
                f"reward.functions is [], and environment.uses {self.config.environment.uses} are tools, "
                "which give no reward: nothing scores an episode; name a reward function",
                reason="start",
            )

    async def close(self) -> None:
        """Kill the processes."""
        if self.environment:
            await self.environment.close()
        if self.scorer:
            await self.scorer.close()
        if self.teacher:
            await self.teacher.close()


def _teacher_of(config: Config, directory: Path, counts: Counter[str]) -> Asker | None:
    for name, one in config.teacher.items():
        service = ScorerService(name, directory, one.count, remembers=False)
        return Asker("the teacher (algorithm.reference)", service, config.reward, counts)
    return None


def _environment_of(config: Config, loaded: Callable[[], None]) -> Environments | AgentEnvironment | None:
    section, variables = config.environment, config.run.environment
    if section.command:
        return AgentEnvironment(section, variables, loaded)
    return Environments(section, variables, loaded) if section.uses else None
