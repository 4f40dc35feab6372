"""Reads the shape of a model as the learner trains it."""

from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.hosting.machine import read_model
from asyncrl.hosting.memory_use import ModelShape


def read_trained_shape(model: ModelConfig, learner: LearnerConfig | None) -> ModelShape:
    """Return the shape of a model, with what its layers keep for the backward pass of a `learner`.

    Raises:
        DataError: the config cannot be read, or transformers does not know the architecture.
        ConfigError: the learner would refuse the model.
    """
    config, shape = read_model(model)
    if learner is None:
        return shape
    from asyncrl.trainer.kept import counted  # slow to import
    from asyncrl.trainer.miniature import require_agreement

    require_agreement(config)
    return counted(shape, config, model, learner.gradient_checkpointing)
