"""The whole configuration of a run: its sections, and quantities that follow from several of them.

A value belongs to the section of the component that reads it. The component receives only that section.
"""

from typing import Self

from pydantic import ValidationInfo, model_validator

from asyncrl.algo.staleness import lag_bound
from asyncrl.config.agreements import disagreements
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.base import Mistakes, Part
from asyncrl.config.environment_section import EnvironmentConfig
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
    def lag_bound(self) -> int:
        """Largest age of a group when it is trained: L + ceil((W - S) / B) steps with S shards."""
        window, groups, shards = self.window_groups, self.batch.groups, self.store.shards
        return lag_bound(self.staleness.max_lag, window=window, groups=groups, shards=shards)

    @model_validator(mode="after")
    def _sections_agree(self, info: ValidationInfo) -> Self:
        if info.context != SECTIONS_ONLY and (mistakes := list(disagreements(dict(self)))):
            raise Mistakes(*mistakes)
        return self
