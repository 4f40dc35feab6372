"""TRL's own DPO, IPO and KTO losses on the same log-probabilities have the same gradient as one step of ours."""

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import asyncrl  # noqa: F401 before trl: it hides builds that trl would import and that cannot be
from asyncrl.algo.aggregation import Counts
from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.preferences import preference_metrics
from asyncrl.algo.tokens import TokenBatch
from asyncrl.config import registry

pytest.importorskip("trl", reason="needs asyncrl[stages]")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GROUPS, SIZE, LONGEST, BETA = 5, 4, 9, 0.3


def batch_of(seed: int, lengths: int | None = None) -> GroupRewards:
    """Groups whose rewards all differ: each has one best and one worst."""
    draw = torch.Generator().manual_seed(seed)
    S = GROUPS * SIZE
    lengths_S = (
        torch.randint(1, LONGEST + 1, (S,), generator=draw) if lengths is None else torch.full((S,), lengths)
    )
    T = int(lengths_S.sum())
    return GroupRewards(
        rewards_S=torch.rand(S, generator=draw),
        group_S=torch.arange(GROUPS).repeat_interleave(SIZE),
        num_groups=GROUPS,
        lengths_S=lengths_S,
        sequence_T=torch.arange(S).repeat_interleave(lengths_S),
        logprobs_T=-3 * torch.rand(T, generator=draw),
        reference_logprobs_T=-3 * torch.rand(T, generator=draw),
    )


def gradient(rewards: GroupRewards, name: str, **params: Any) -> Tensor:
    """Of one step of ours by the log-probability of each token."""
    assert rewards.logprobs_T is not None
    logprobs_T = rewards.logprobs_T.clone().requires_grad_()
    batch = TokenBatch(
        sequence_T=rewards.sequence_T,
        num_sequences=rewards.num_sequences,
        behaviour_logprobs_T=rewards.logprobs_T,
        advantages_T=registry.resolve("advantage", name, params)(rewards),
    )
    losses_T = registry.resolve("policy_loss", "reinforce", {})(batch, logprobs_T).losses_T
    loss = registry.resolve("aggregation", "seq-mean-token-sum", {})(losses_T, batch, Counts.of(batch))
    return torch.autograd.grad(loss, logprobs_T)[0]


class Model:
    """Answers with the given log-probabilities of completions, padded on the right, after one prompt token."""

    def __init__(self, columns: list[Tensor]) -> None:
        self.log_probs = torch.nn.utils.rnn.pad_sequence(columns, batch_first=True)

    def __call__(self, **inputs: Any) -> SimpleNamespace:
        zeros = torch.zeros_like(self.log_probs).detach()
        return SimpleNamespace(
            log_probs=self.log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )


class Unused(torch.nn.Module):
    """The policy, where TRL asks only what it is."""

    is_gradient_checkpointing = False


def trainer(**settings: Any) -> Any:
    """What TRL's loss functions read of their trainer."""

    def same(value: Any) -> Any:
        return value

    return SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        model=Unused(), beta=BETA, aux_loss_enabled=False, precompute_ref_logps=False, _total_train_tokens=0, _tp_size=1,
        _metrics={"train": defaultdict(list)}, **settings,
    )  # fmt: skip


def inputs_of(lengths: list[int]) -> dict[str, Tensor]:
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in lengths], batch_first=True)
    mask = torch.cat([torch.zeros(len(lengths), 1), mask], dim=1).long()
    ones = torch.ones_like(mask)
    return {"input_ids": ones, "attention_mask": ones, "completion_mask": mask}


def split(column_T: Tensor, rewards: GroupRewards, episodes: list[int]) -> list[Tensor]:
    pieces = torch.split(column_T, rewards.lengths_S.tolist())
    return [pieces[episode] for episode in episodes]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "loss_type"), [("dpo_pairs", "sigmoid"), ("ipo_pairs", "ipo")])
def test_pairs_have_the_gradient_of_trls_loss(seed: int, name: str, loss_type: str) -> None:
    from trl import DPOTrainer

    # TRL's IPO divides by the length of an answer; ours, as the paper, takes whole answers.
    rewards = batch_of(seed, lengths=1 if loss_type == "ipo" else None)
    assert rewards.logprobs_T is not None and rewards.reference_logprobs_T is not None
    of_groups = rewards.rewards_S.view(GROUPS, SIZE)
    first = SIZE * torch.arange(GROUPS)
    order = [*(first + of_groups.argmax(1)).tolist(), *(first + of_groups.argmin(1)).tolist()]
    policy_T = rewards.logprobs_T.clone().requires_grad_()
    own = trainer(
        loss_types=[loss_type], loss_weights=[1.0], ld_alpha=None, f_divergence_type="reverse_kl",
        use_weighting=False, ref_model=Model(split(rewards.reference_logprobs_T, rewards, order)),
    )  # fmt: skip
    inputs = inputs_of([int(rewards.lengths_S[episode]) for episode in order])
    loss = DPOTrainer._compute_loss(own, Model(split(policy_T, rewards, order)), inputs, False)
    (expected_T,) = torch.autograd.grad(loss, policy_T)
    assert float(expected_T.abs().max()) > 1e-3
    assert float((gradient(rewards, name, beta=BETA) - expected_T).abs().max()) <= 1e-6

    theirs = {key: values[-1] for key, values in own._metrics["train"].items()}
    ours = preference_metrics(rewards)
    assert ours["preference/pairs"] == GROUPS
    assert BETA * ours["preference/margin"] == pytest.approx(theirs["rewards/margins"], abs=1e-5)
    assert ours["preference/accuracy"] == pytest.approx(theirs["rewards/accuracies"])
    assert ours["preference/chosen_logprob"] == pytest.approx(theirs["logps/chosen"], abs=1e-5)
    assert ours["preference/rejected_logprob"] == pytest.approx(theirs["logps/rejected"], abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("closer", [-2.0, 0.0, 2.0])
def test_desirable_and_undesirable_have_the_gradient_of_trls_loss(seed: int, closer: float) -> None:
    """`closer` moves the reference, so that the baseline z is 0 or above; TRL takes z from these answers, too."""
    from trl import KTOTrainer

    rewards = batch_of(seed)
    assert rewards.logprobs_T is not None and rewards.reference_logprobs_T is not None
    reference_T = rewards.reference_logprobs_T + closer
    rewards = dataclasses.replace(rewards, reference_logprobs_T=reference_T)
    everyone = list(range(rewards.num_sequences))
    policy_T = rewards.logprobs_T.clone().requires_grad_()
    policy, reference = (Model(split(column_T, rewards, everyone)) for column_T in (policy_T, reference_T))
    own = trainer(
        loss_type="kto", desirable_weight=1.0, undesirable_weight=1.5, calculate_KL=True, ref_model=reference,
        _compute_kl_logps=lambda model, batch: model.log_probs.detach().sum(1),
    )  # fmt: skip
    inputs = inputs_of(rewards.lengths_S.tolist()) | {"label": rewards.rewards_S > 0.5}
    loss = KTOTrainer._compute_loss(own, policy, inputs, False)
    (expected_T,) = torch.autograd.grad(loss, policy_T)
    assert float(expected_T.abs().max()) > 1e-4
    found_T = gradient(rewards, "kto", beta=BETA, threshold=0.5, undesirable=1.5)
    assert float((found_T - expected_T).abs().max()) <= 1e-6
