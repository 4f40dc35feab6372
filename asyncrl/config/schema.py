"""The whole configuration of a run: its sections, and quantities that follow from several of them.

A value belongs to the section of the component that reads it. The component receives only that section.
"""

import hashlib
from collections.abc import Container, Iterator, Mapping
from typing import Any

from asyncrl.algo.staleness import lag_bound
from asyncrl.config.base import Mistake, Root, judged
from asyncrl.config.data_section import DataSource, EvalSet
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.outline import kept_values
from asyncrl.config.registry import needs
from asyncrl.config.reward_section import TEACHER_NAME, ModelJudge, RewardFunctionConfig, ScorerConfig
from asyncrl.config.rules import RULES, RUN_RULES
from asyncrl.config.run_fields import RunFields
from asyncrl.config.sections import ModelConfig

# Our keys, and those of other trainers with the same meaning.
_SAME = {
    "learner.optimizer.lr": "learning_rate",
    "batch.group_size": "num_generations",
    "sampling.max_response_tokens": "max_completion_length",
    "sampling.max_prompt_tokens": "max_prompt_length",
    "learner.steps": "max_steps total_training_steps num_train_epochs",
    "checkpoint.every": "save_steps save_freq",
    "eval.every": "eval_steps test_freq",
    "algorithm.kl.coefficient": "beta kl_coef kl_loss_coef",
    "staleness.max_lag": "off_policy_steps",
    "model.path": "model_name_or_path",
    "data.train": "dataset_name train_files",
    "telemetry.wandb": "report_to",
    "learner` (actor), `generator` (rollout), `algorithm.kl` (ref) and `model": "actor_rollout_ref",
    "learner": "trainer actor",
    "generator": "rollout",
    "reward": "reward_model",
    "reward.functions": "custom_reward_function",
    "data.eval": "val_files",
    "data.prompt_field": "prompt_key",
    "batch.groups": "train_batch_size per_device_train_batch_size",
    "batch.minibatches": "ppo_mini_batch_size",
    "batch.epochs": "ppo_epochs",
    "algorithm.advantage": "adv_estimator",
    "algorithm.entropy.coefficient": "entropy_coeff",
    "generator.tensor_parallel": "tensor_model_parallel_size",
    "run.name": "experiment_name",
    "learner.tokens_per_microbatch": "gradient_accumulation_steps",
    "run.seed": "seed",
    "run.root": "output_dir",
    "model.lora": "lora peft use_peft peft_config",
    "model.lora.rank": "r lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "target_modules lora_target_modules",
    "model.lora.start": "lora_path lora_adapter_path",
    "model.lora.load_in_4bit": "quantization_config qlora",
}
OTHER_NAMES = {other: ours for ours, others in _SAME.items() for other in others.split()}

# Sections that say nothing of an evaluation: mistakes of their keys are not of its sets.
TRAINING = {"algorithm", "batch", "checkpoint", "critic", "learner", "staleness", "store", "telemetry"}


class Config(RunFields):
    """One run."""

    RULES = RULES
    OTHER_NAMES = OTHER_NAMES
    ABSENT = dict.fromkeys(
        ("lora_dropout", "critic_lora"), "an adapter has no dropout here, and a critic trains all its weights"
    )

    @property
    def reward_functions(self) -> Mapping[str, RewardFunctionConfig]:
        """Every reward function of the run by its key."""
        found = {f"reward.functions.{i}": one for i, one in enumerate(self.reward.functions)}
        for key in self.data.tasks:
            found |= self.functions_of(key)
        return found

    def functions_of(self, place: str) -> dict[str, RewardFunctionConfig]:
        """Return the reward functions of the source or set at a key, by their keys."""
        task = self.data.tasks[place]
        key = "reward.functions" if task.reward is None else f"{place}.reward"
        return {f"{key}.{i}": one for i, one in enumerate(self.of(task).reward.functions)}

    @property
    def judges(self) -> frozenset[str]:
        """The scorers that answer in words."""
        remotes = (one.remote for one in self.reward_functions.values())
        return frozenset(one.scorer for one in remotes if isinstance(one, ModelJudge))

    @property
    def environments(self) -> Mapping[str, EnvironmentConfig]:
        """Every environment of the run by its key."""
        own = {key: one for key, one in self.data.tasks.items() if one.environment is not None}
        merged = {f"{key}.environment": self.of(one).environment for key, one in own.items()}
        return {"environment": self.environment} | merged

    @property
    def plays(self) -> bool:
        """Whether any task has an environment."""
        return any(one.is_used for one in self.environments.values())

    @property
    def environment_names(self) -> list[tuple[str, str, EnvironmentConfig]]:
        """Key, text and environment of every name in a key `uses`."""
        return [
            (f"{key}.uses", name, one)
            for key, one in self.environments.items()
            for name in ((one.uses,) if isinstance(one.uses, str) else one.uses)
        ]

    def disagreements(self, *, without: Container[str] = ()) -> Iterator[Mistake]:
        """Yield a mistake for every broken rule: of the run, and of the sections for each source and set."""
        yield from judged(self, RUN_RULES, without)
        told: set[str] = set()
        for key, task in self.data.tasks.items():
            others = TRAINING if isinstance(task, EvalSet) else {"eval"} if self.data.eval else set[str]()
            left_out = {name for name, _ in self if name in without or name in others}
            for mistake in Root.disagreements(self.of(task), without=left_out):
                if mistake.text not in told:
                    told.add(mistake.text)
                    yield Mistake(tuple(_own_key(key, task, name) for name in mistake.keys), mistake.text)

    @property
    def window_groups(self) -> int:
        """W of the anchored window: set, or 0.3 (L + 1) B rounded down to a multiple of S shards, at least S.

        At L = 0 the default is S: an overtaken group might wait for the next step, where it is off-policy.
        """
        shards, lag = self.store.shards, self.staleness.max_lag
        default = 3 * (lag + 1) * self.batch.groups // 10 // shards * shards if lag else 0
        return self.staleness.window_groups or max(shards, default)

    @property
    def ranks_per_host(self) -> int:
        """Ranks of the learner on each of its hosts."""
        return self.learner.ranks // self.cluster.learner_hosts

    @property
    def reference(self) -> ModelConfig:
        """The model that the reference is loaded from: model.path, or the teacher."""
        if (one := self.algorithm.reference) is None:
            return self.model
        is_other = one.path is not None or one.revision is not None
        named = {"path": one.path or self.model.path, "revision": one.revision} if is_other else {}
        return self.model.model_copy(update={**named, "lora": None, "router_replay": False})

    @property
    def teacher_template(self) -> str | None:
        """The template of what the teacher reads in place of the prompt."""
        return self.algorithm.reference.template if self.algorithm.reference else None

    @property
    def teacher(self) -> dict[str, ScorerConfig]:
        """The teacher as a scorer, by its name; empty if the learner holds it, or if there is none."""
        one = self.algorithm.reference
        if one is None or not one.scorers:
            return {}
        return {TEACHER_NAME: ScorerConfig(model=self.reference.path, count=one.scorers, gpus=one.gpus)}

    @property
    def served(self) -> dict[str, ScorerConfig]:
        """All models that processes other than generators serve: `scorers`, and the teacher."""
        return {**self.scorers, **self.teacher}

    @property
    def taken_gpus(self) -> frozenset[int]:
        """GPUs that these have to themselves, by number, on each host with generators."""
        return frozenset(gpu for one in self.served.values() for gpu in one.gpus)

    @property
    def lag_bound(self) -> int:
        """Largest age of a group when it is trained: L + ceil((W - S) / B) steps with S shards."""
        window, groups, shards = self.window_groups, self.batch.groups, self.store.shards
        return lag_bound(self.staleness.max_lag, window=window, groups=groups, shards=shards)

    def fixed_values(self, *, rows: str) -> dict[str, Any]:
        """Return the values of the keys that must not change, for the checkpoint.

        `rows` is the fingerprint of `data.train`: the file may be moved, but its rows may not change.
        """
        has_critic = "values_T" in needs("advantage", self.algorithm.advantage.name)
        advantage = f"one {'with' if has_critic else 'without'} a critic"
        fixed = kept_values(self) | {"data.train": rows, "algorithm.advantage": advantage}
        if isinstance(template := self.model.chat_template, str):
            digest = hashlib.blake2b(template.encode(), digest_size=8).hexdigest()
            fixed["model.chat_template"] = f"a template with digest {digest}"
        return fixed


def _own_key(place: str, task: DataSource | EvalSet, key: str) -> str:
    """Return the key of a task that stands in place of a key of the config, if it has one."""
    section, _, name = key.partition(".")
    if section == "reward" and task.reward is not None:
        return f"{place}.reward"
    if section == "environment" and task.environment is not None:
        return f"{place}.{key}"
    if section == "eval" and getattr(task, name, None) is not None:
        return f"{place}.{name}"
    return key
