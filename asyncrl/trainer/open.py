"""The learner opens its trainer here: the only module that imports the adapters."""

import torch

from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.trainer.base import Trainer
from asyncrl.trainer.collectives import Rendezvous


def open_trainer(
    model: ModelConfig,
    learner: LearnerConfig,
    *,
    temperature: float,
    optimizer_steps: int,
    device: torch.device,
    rendezvous: Rendezvous | None = None,
    reference: ModelConfig | None = None,
    critic: CriticConfig | None = None,
    slots: int = 0,
) -> Trainer:
    """Open the trainer of `learner.backend`. Raises ConfigError, DataError, RunError.

    The trainer loads the policy, the reference's model, and the policy's again for a critic.

    Args:
        model: what is trained.
        learner: how it is trained.
        temperature: divides the logits of a step.
        optimizer_steps: their number per batch.
        device: what `choose_device` returned.
        rendezvous: where all ranks meet; None for a single rank.
        reference: the reference's model; None without one.
        critic: how a critic is trained; None without one.
        slots: published versions that rank 0 will have on its GPU.
    """
    match learner.backend:
        case "deepspeed":
            from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer

            return DeepSpeedTrainer(
                model,
                learner,
                temperature=temperature,
                optimizer_steps=optimizer_steps,
                device=device,
                rendezvous=rendezvous or Rendezvous(),
                reference=reference,
                critic=critic,
                slots=slots,
            )
