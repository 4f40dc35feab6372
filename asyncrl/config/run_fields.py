"""The keys of a run's config, which `rules` judges, and what they are for each task.

`schema` has the quantities that follow from them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field

from asyncrl.algo.ranges import NonNegativeInt
from asyncrl.config import sections
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.base import OTHER_RUN, Part, Root, marked
from asyncrl.config.checkpoint_section import CheckpointConfig
from asyncrl.config.data_section import TICKET, DataConfig, DataSource, EvalSet
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.reward_section import RewardConfig, ScorerConfig, reward_parts
from asyncrl.config.store import StoreConfig


def _expanded(root: Path) -> Path:
    """Return a directory with a home in place of `~`, as a shell writes it. Raises ValueError."""
    try:
        return root.expanduser()
    except RuntimeError as error:
        raise ValueError(f"found {root}, but there is no such home; write the directory out") from error


class RunConfig(Part):
    """Name and place of the run."""

    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
        marked(
            stand_in="unnamed", resume=(OTHER_RUN, "it names the run directory and the keys in the store")
        ),
    ]
    """Name of run directory and keys in the store."""
    root: Annotated[Path, AfterValidator(_expanded)] = Path("runs")
    """Parent of the run directory."""
    environment: tuple[str, ...] = ()
    """Further environment variables to inherit, such as `X_*`."""
    seed: Annotated[NonNegativeInt, TICKET] = 0
    """Seed of the prompts' order and the learner."""

    @property
    def directory(self) -> Path:
        """The run directory: config, logs, metrics, samples, checkpoints."""
        return self.root / self.name


class RunFields(Root):
    """Every section of a run."""

    run: RunConfig
    model: sections.ModelConfig
    data: DataConfig
    reward: RewardConfig
    scorers: dict[str, ScorerConfig] = Field(default_factory=dict)
    """Reward models and judges by name, which `model_score` and `model_judge` ask."""
    environment: EnvironmentConfig = EnvironmentConfig()
    batch: sections.BatchConfig = sections.BatchConfig()
    sampling: sections.SamplingConfig = sections.SamplingConfig()
    staleness: sections.StalenessConfig = sections.StalenessConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    learner: sections.LearnerConfig = sections.LearnerConfig()
    generator: sections.GeneratorConfig = sections.GeneratorConfig()
    weights: sections.WeightsConfig = sections.WeightsConfig()
    store: StoreConfig = StoreConfig()
    control: sections.ControlConfig = sections.ControlConfig()
    cluster: sections.ClusterConfig = sections.ClusterConfig()
    eval: sections.EvalConfig = sections.EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: sections.TelemetryConfig = sections.TelemetryConfig()

    def of(self, task: DataSource | EvalSet) -> Self:
        """Return the config with which responses to the prompts of a source or a set are made and scored."""
        found: dict[str, Any] = {}
        if task.reward is not None:
            found["reward"] = self.reward.model_copy(update={"functions": task.reward})
        if (own := task.environment) is not None:
            given = {key: getattr(own, key) for key in own.model_fields_set}
            names = {"uses": (), "command": ()} if given.keys() & {"uses", "command"} else {}
            merged = self.environment.model_copy(update=names | given)
            found["environment"] = merged if merged.is_used else own
        if isinstance(task, EvalSet):
            given = task.model_dump(include={"every", "samples", "temperature"}) | {"prompts": task.limit}
            given = {key: value for key, value in given.items() if value is not None}
            found["eval"] = self.eval.model_copy(update=given)
        return self.model_copy(update=found)

    @property
    def open_groups(self) -> int:
        """Most groups that are under way or waiting at the same time: (L + 1) B."""
        return (self.staleness.max_lag + 1) * self.batch.groups

    @property
    def unsaved_steps(self) -> int:
        """Most steps that the oldest checkpoint lacks, whose groups the store keeps."""
        return min(self.checkpoint.keep * self.checkpoint.every, self.learner.steps)

    @property
    def tasks(self) -> Mapping[str, Self]:
        """The config of every source and set, by the key of each; prompts name theirs by its place."""
        return {key: self.of(one) for key, one in self.data.tasks.items()}

    @property
    def training(self) -> list[Self]:
        """The config of every source."""
        return [self.of(one) for one in self.data.train]

    @property
    def reward_parts(self) -> list[str]:
        """The names of the parts of the reward, of all sources together."""
        named = (name for one in self.training for name in reward_parts(one.reward, one.environment))
        return [*dict.fromkeys(named)]
