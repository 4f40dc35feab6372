"""The processes of a generator that run user code: rewards, and the environment if there is one."""

import logging
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import registry
from asyncrl.config.resolved import config_json
from asyncrl.config.schema import Config
from asyncrl.control.scoring import ScorerService
from asyncrl.data.prompts import PromptSource
from asyncrl.engine.answers import AnswerReader
from asyncrl.engine.base import Engine
from asyncrl.engine.episodes import EpisodeSampler, require_same_start
from asyncrl.engine.sampler import GroupSampler, Sampler, TaskSampler, TaughtSampler
from asyncrl.environments.environments import Environments
from asyncrl.errors import EnvironmentFault
from asyncrl.launch.scorers import scorers_in
from asyncrl.rewards.opened import Asker, Rewards
from asyncrl.run.starts import code_of, unchanged
from asyncrl.session.delta import closer, rewritten

if TYPE_CHECKING:
    from asyncrl.addons.endpoint.agent_process import AgentEnvironment

log = logging.getLogger(__name__)

# What `environment.history` means for a template that rewrites.
HISTORY = {
    "exact": "environment.history is exact, so the policy reads what it sampled: deploy it with a template "
    "that keeps the history, or set template",
    "template": "environment.history is template, so each such turn begins a sequence",
}


@dataclass(frozen=True, slots=True)
class Player:
    """What scores and plays the prompts of a task."""

    config: Config  # as the task sees it
    scorer: Rewards | None
    environment: "Environments | AgentEnvironment | None"

    def sampler(
        self, engine: Engine, prompts: PromptSource, generator_id: str, counts: Counter[str]
    ) -> GroupSampler:
        if self.environment is None:
            assert self.scorer is not None, "a config without an environment has a reward function"
            return Sampler(engine, self.scorer, prompts.decode, generator_id, counts=counts)

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
            most_missing=self.config.batch.missing_episodes,
            counts=counts,
        )

    def require_usable(self, *, is_trained: bool) -> None:
        """Raise EnvironmentFault if nothing gives a reward, or, if it `is_trained`, if it lacks states.

        Functions as tools give no reward, and only some kinds of environments name states.
        """
        kind = self.environment.description.get("kind") if self.environment else None
        if self.scorer is None and kind == "tools":
            raise EnvironmentFault(
                f"reward.functions is [], and environment.uses {self.config.environment.uses} are tools, "
                "which give no reward: nothing scores an episode; name a reward function",
                reason="start",
            )
        name = self.config.algorithm.advantage.name
        needs_states = is_trained and "turn_states_K" in registry.NEEDS.get(("advantage", name), ())
        if needs_states and kind and kind not in ("rollout", "text"):
            raise EnvironmentFault(
                f"algorithm.advantage is {name}, which compares turns from the same state, but "
                f"environment.uses {self.config.environment.uses} has tools, which name no states; write a "
                "class with `step` or a rollout function, or take turn_rloo, rloo or grpo",
                reason="start",
            )


@dataclass(frozen=True, slots=True)
class Players:
    """The processes that run user code, and services that score.

    Tasks with the same reward functions share their processes, and so do tasks with the same environment.
    """

    config: Config
    tasks: dict[int, Player]  # by `Prompt.task`
    counts: Counter[str]
    teacher: Asker | None = None
    code: tuple[str, ...] = ()  # `code_of` what the processes load, which may be newer than the prompts

    @classmethod
    def of(
        cls,
        config: Config,
        run_root: Path,
        directory: Path | None = None,
        tasks: Container[int] | None = None,
    ) -> "Players":
        """Make what the config names, or only what these tasks need; nothing is started.

        Scorers listen in `directory`.
        """
        loaded, counts = unchanged(config), Counter[str]()
        open_scorer = scorers_in(config, directory or run_root)
        rewards: dict[str, Rewards | None] = {}
        environments: dict[str, Environments | AgentEnvironment | None] = {}
        players: dict[tuple[str, str], Player] = {}
        found = {}
        for index, task in enumerate(config.tasks.values()):
            if tasks is not None and index not in tasks:
                continue
            scored, played = key = config_json(task.reward), config_json(task.environment)
            if scored not in rewards:
                made = Rewards(task.reward, run_root, loaded, open_scorer, counts)
                rewards[scored] = made if task.reward.functions else None
            if played not in environments:
                environments[played] = _environment_of(task, loaded)
            found[index] = players.setdefault(key, Player(task, rewards[scored], environments[played]))
        teacher = None
        if directory:
            for name, one in config.teacher.items():
                call_s = config.reward.timeout_s
                service = ScorerService(name, directory, one.count, call_s=call_s, remembers=False)
                teacher = Asker("the teacher (algorithm.reference)", service, config.reward, counts)
        return cls(config, found, counts, teacher, code_of(config))

    async def start(self, prompts: PromptSource) -> None:
        """Start all. Raises RewardError or EnvironmentFault, with nothing left running, for unusable code."""
        firsts = {id(one): index for index, one in reversed(self.tasks.items())}
        try:
            for process in self._processes:
                await process.start()
            for index in firsts.values():
                one = self.tasks[index]
                one.require_usable(is_trained=index < len(self.config.data.train))
                if isinstance(one.environment, Environments):  # what an agent says first may name the day
                    await require_same_start(one.environment, prompts.of_task(index, 1)[0])
        except BaseException:
            await self.close()
            raise

    def sampler(self, engine: Engine, prompts: PromptSource, generator_id: str) -> GroupSampler:
        """Return what samples and scores the group of a ticket."""
        made = {
            id(one): one.sampler(engine, prompts, generator_id, self.counts) for one in self.tasks.values()
        }
        by_task = {index: made[id(one)] for index, one in self.tasks.items()}
        sampler = TaskSampler(by_task) if len(made) > 1 else by_task[min(by_task)]
        one = self.teacher
        return TaughtSampler(sampler, one.answer, one.counts) if one else sampler

    @property
    def _processes(self) -> list["Rewards | Asker | Environments | AgentEnvironment"]:
        scorers = [one.scorer for one in self.tasks.values()]
        environments = [one.environment for one in self.tasks.values()]
        distinct = {id(one): one for one in (*scorers, self.teacher, *environments) if one is not None}
        return [*distinct.values()]

    async def close(self) -> None:
        for one in reversed(self._processes):
            await one.close()


def _environment_of(config: Config, loaded: Callable[[], None]) -> "Environments | AgentEnvironment | None":
    section, variables = config.environment, config.run.environment
    if section.command:
        # It imports a web server, which only agents need.
        from asyncrl.addons.endpoint.agent_process import AgentEnvironment

        return AgentEnvironment(section, variables, loaded)
    return Environments(section, variables, loaded) if section.uses else None
