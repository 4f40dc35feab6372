"""The whole configuration of a run: its sections, and quantities that follow from several of them.

A value belongs to the section of the component that reads it. The component receives only that section.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from asyncrl.algo.staleness import lag_bound
from asyncrl.config.agreements import RULES
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.base import Part, Root, marked
from asyncrl.config.checkpoint_section import CheckpointConfig
from asyncrl.config.data_section import TICKET, DataConfig
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.registry import needs
from asyncrl.config.resume import OTHER_RUN, kept_values
from asyncrl.config.reward_section import TEACHER_NAME, RewardConfig, ScorerConfig
from asyncrl.config.sections import (
    BatchConfig,
    ClusterConfig,
    ControlConfig,
    EvalConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    SamplingConfig,
    StalenessConfig,
    TelemetryConfig,
    WeightsConfig,
)
from asyncrl.config.store import StoreConfig

# Keys of other trainers -> ours.
OTHER_NAMES = {
    "learning_rate": "learner.optimizer.lr",
    "num_generations": "batch.group_size",
    "max_completion_length": "sampling.max_response_tokens",
    "max_prompt_length": "sampling.max_prompt_tokens",
    "max_steps": "learner.steps",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "beta": "algorithm.kl.coefficient",
    "off_policy_steps": "staleness.max_lag",
    "model_name_or_path": "model.path",
    "dataset_name": "data.train",
    "report_to": "telemetry.wandb",
    "actor_rollout_ref": "learner` (actor), `generator` (rollout), `algorithm.kl` (ref) and `model",
    "trainer": "learner",
    "rollout": "generator",
    "actor": "learner",
    "reward_model": "reward",
    "custom_reward_function": "reward.functions",
    "train_files": "data.train",
    "val_files": "data.eval",
    "prompt_key": "data.prompt_field",
    "train_batch_size": "batch.groups",
    "ppo_mini_batch_size": "batch.minibatches",
    "ppo_epochs": "batch.epochs",
    "adv_estimator": "algorithm.advantage",
    "kl_coef": "algorithm.kl.coefficient",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "entropy_coeff": "algorithm.entropy.coefficient",
    "total_training_steps": "learner.steps",
    "save_freq": "checkpoint.every",
    "test_freq": "eval.every",
    "tensor_model_parallel_size": "generator.tensor_parallel",
    "experiment_name": "run.name",
    "gradient_accumulation_steps": "learner.tokens_per_microbatch",
    "per_device_train_batch_size": "batch.groups",
    "num_train_epochs": "learner.steps",
    "seed": "run.seed",
    "output_dir": "run.root",
    **dict.fromkeys(("lora", "peft", "use_peft", "peft_config"), "model.lora"),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "model.lora.rank"),
    "lora_alpha": "model.lora.alpha",
    **dict.fromkeys(("target_modules", "lora_target_modules"), "model.lora.targets"),
    **dict.fromkeys(("lora_path", "lora_adapter_path"), "model.lora.start"),
}


class RunConfig(Part):
    """Name and place of the run."""

    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
        marked(
            stand_in="unnamed", resume=(OTHER_RUN, "it names the run directory and the keys in the store")
        ),
    ]
    """Name of the run directory and of the keys in the store."""
    root: Path = Path("runs")
    """Directory that holds the run directories."""
    environment: tuple[str, ...] = ()
    """Further environment variables that the run's processes inherit: names or patterns such as `X_*`."""
    seed: Annotated[int, TICKET] = 0
    """Seed of the order of prompts and of every random number of the learner."""

    @property
    def directory(self) -> Path:
        """The run directory: config, logs, metrics, samples, checkpoints."""
        return self.root / self.name


class Config(Root):
    """One run."""

    RULES = RULES
    OTHER_NAMES = OTHER_NAMES
    ABSENT = dict.fromkeys(
        ("lora_dropout", "critic_lora"), "an adapter has no dropout here, and a critic trains all its weights"
    )

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    scorers: dict[str, ScorerConfig] = Field(default_factory=dict)
    """Reward models of the run by name, which `model_score` asks."""
    environment: EnvironmentConfig = EnvironmentConfig()
    batch: BatchConfig = BatchConfig()
    sampling: SamplingConfig = SamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    learner: LearnerConfig = LearnerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    weights: WeightsConfig = WeightsConfig()
    store: StoreConfig = StoreConfig()
    control: ControlConfig = ControlConfig()
    cluster: ClusterConfig = ClusterConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def window_groups(self) -> int:
        """W of the anchored window: set, or 0.3 (L + 1) B rounded down to a multiple of S shards, at least S.

        At L = 0 the default is S: if a group could be overtaken, it might be left for the next step, and
        training would not be on-policy.
        """
        shards, lag = self.store.shards, self.staleness.max_lag
        default = int(0.3 * (lag + 1) * self.batch.groups) // shards * shards if lag else 0
        return self.staleness.window_groups or max(shards, default)

    @property
    def ranks_per_host(self) -> int:
        """Ranks of the learner on each of its hosts."""
        return self.learner.ranks // self.cluster.learner_hosts

    @property
    def reference(self) -> ModelConfig:
        """The model that the reference is loaded from: model.path, or the teacher."""
        if self.algorithm.reference is None:
            return self.model
        named = self.algorithm.reference.model_dump(include={"path", "revision"})
        return self.model.model_copy(update={**named, "lora": None, "router_replay": False})

    @property
    def teacher(self) -> dict[str, ScorerConfig]:
        """The teacher as a scorer, by its name; empty if the learner holds it, or if there is none."""
        one = self.algorithm.reference
        if one is None or not one.scorers:
            return {}
        return {TEACHER_NAME: ScorerConfig(model=one.path, count=one.scorers, gpus=one.gpus)}

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
        return kept_values(self) | {"data.train": rows, "algorithm.advantage": advantage}
