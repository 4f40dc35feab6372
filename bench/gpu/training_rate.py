"""Optimizer steps of the learner's trainer on made-up rollouts."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from asyncrl.batch.packing import TrainSample, microbatch, pack
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.trainer.base import LossSums, MicroBatch, Trainer
from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer
from asyncrl.trainer.device import choose_device

CLIP = 0.2


def rollouts(number: int, vocabulary: int, limit: int, seed: int) -> list[TrainSample]:
    """Return rollouts of at most `limit` tokens, with advantages that differ from one to the next.

    Prompts have 8 to 32 tokens. Response lengths are log-normal with median `limit` / 6.
    """
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(number):
        prompt = int(rng.integers(8, 33))
        response = int(np.clip(rng.lognormal(np.log(limit / 6), 0.8), 4, limit - prompt))
        result.append(
            TrainSample(
                prompt_ids=rng.integers(3, vocabulary, prompt, dtype=np.int32),
                response_ids=rng.integers(3, vocabulary, response, dtype=np.int32),
                keep=np.ones(response, dtype=np.bool_),
                behaviour_logprobs=np.full(response, -np.log(vocabulary), dtype=np.float32),
                advantages=np.full(response, rng.normal(), dtype=np.float32),
                lag=np.zeros(response, dtype=np.int64),
            )
        )
    return result


def clipped(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    """Return PPO's loss of each token."""
    ratio = (logprobs - behaviour).clamp(-20, 20).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def lone_trainer(
    model: str, learner: LearnerConfig, *, dtype: Literal["float32", "bfloat16"], auto: str
) -> Trainer:
    """Open the trainer of a learner's only rank; `auto` is what `learner.device: auto` means."""
    return DeepSpeedTrainer(
        ModelConfig(path=model, dtype=dtype),
        learner,
        temperature=1.0,
        optimizer_steps=1,
        device=choose_device(learner, local_rank=0, auto=auto),
    )


def step_of(trainer: Trainer, items: Sequence[TrainSample], budget: int) -> Callable[[], float]:
    """Return a function that takes one optimizer step over all items, and returns the gradient norm."""
    total = sum(len(one.response_ids) for one in items)

    def loss(batch: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossSums:
        losses_T = clipped(logprobs_T, batch.tokens.behaviour_logprobs_T, batch.tokens.advantages_T)
        return LossSums(loss=losses_T.sum() / total)

    def step() -> float:
        bins = pack([one.tokens for one in items], budget)
        batches = [microbatch([items[i] for i in members], trainer.device) for members in bins]
        norm = trainer.step(batches, loss).grad_norm
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        return norm

    return step
