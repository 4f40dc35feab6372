"""The whole configuration of a run: its sections, and what follows from several of them.

A value belongs to the section of the component that reads it, and that component is handed its section, never
the whole config. Derived quantities are properties, so a config cannot contradict itself.
"""

from typing import Self

from pydantic import ValidationInfo, model_validator

from asyncrl.algo.staleness import lag_bound
from asyncrl.config.agreements import disagreements
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.base import Mistakes, Part
from asyncrl.config.sections import (
    BatchConfig,
    CheckpointConfig,
    ControlConfig,
    DataConfig,
    EvalConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    StalenessConfig,
    TelemetryConfig,
    WeightsConfig,
)
from asyncrl.config.store import StoreConfig

# Context of a validation that checks each section, but not whether they agree.
SECTIONS_ONLY = "sections only"


class Config(Part):
    """One run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
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
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def window_groups(self) -> int:
        """W of the anchored window: set, or 0.3 (L + 1) B, at least 1; by default the shards' share of it is
        whole.

        At L = 0 no group overtakes another by default. Otherwise a group could be left for the next step, and
        training would not be on-policy.
        """
        shards, lag = self.store.shards, self.staleness.max_lag
        default = int(0.3 * (lag + 1) * self.batch.groups) // shards * shards if lag else 0
        return self.staleness.window_groups or max(shards, default)

    @property
    def lag_bound(self) -> int:
        """No group is older than this when it is trained: L + ceil((W - S) / B) optimizer steps with S
        shards."""
        return lag_bound(
            self.staleness.max_lag,
            window=self.window_groups,
            groups=self.batch.groups,
            shards=self.store.shards,
        )

    @model_validator(mode="after")
    def _sections_agree(self, info: ValidationInfo) -> Self:
        if info.context != SECTIONS_ONLY and (mistakes := list(disagreements(dict(self)))):
            raise Mistakes(*mistakes)
        return self
