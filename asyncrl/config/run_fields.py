"""The keys of a run's config, which `rules` judges. `schema` has the quantities that follow from them."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.base import Part, Root, marked
from asyncrl.config.checkpoint_section import CheckpointConfig
from asyncrl.config.data_section import TICKET, DataConfig
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.resume import OTHER_RUN
from asyncrl.config.reward_section import RewardConfig, ScorerConfig
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
    """Environment variables that the run's processes inherit too, such as `X_*`."""
    seed: Annotated[int, TICKET] = 0
    """Seed of the prompts' order and of the learner."""

    @property
    def directory(self) -> Path:
        """The run directory: config, logs, metrics, samples, checkpoints."""
        return self.root / self.name


class RunFields(Root):
    """Every section of a run."""

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
