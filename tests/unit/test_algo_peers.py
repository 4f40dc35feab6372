"""The same numbers as five independent libraries, run on the same inputs; provenance is in the file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.corrections import combined, none
from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.kl import bias_corrected
from asyncrl.algo.losses import value_loss
from asyncrl.algo.token_advantages import value_targets
from asyncrl.algo.tokens import TokenBatch
from asyncrl.batch.coefficients import adapt_coefficient
from asyncrl.config import registry

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/algo_peers.json").read_text())
INPUTS = GOLDEN["inputs"]


def column(name: str) -> torch.Tensor:
    return torch.tensor(INPUTS[name], dtype=torch.float64)


def sequence_T() -> torch.Tensor:
    return torch.arange(len(INPUTS["lengths"])).repeat_interleave(torch.tensor(INPUTS["lengths"]))


def batch() -> TokenBatch:
    return TokenBatch(
        sequence_T=sequence_T(),
        num_sequences=len(INPUTS["lengths"]),
        behaviour_logprobs_T=column("behaviour"),
        proximal_logprobs_T=column("proximal"),
        advantages_T=column("advantages"),
    )


def rewards() -> GroupRewards:
    return GroupRewards(
        rewards_S=torch.tensor(INPUTS["rewards"]),
        group_S=torch.arange(len(INPUTS["groups"])).repeat_interleave(torch.tensor(INPUTS["groups"])),
        num_groups=len(INPUTS["groups"]),
        lengths_S=torch.tensor(INPUTS["lengths"]),
        sequence_T=sequence_T(),
        values_T=column("values"),
        greedy_rewards_group=column("greedy"),
        logprobs_T=column("proximal"),
        sum_squared_probs_T=column("sum_squared_probs"),
    )


def label(entry: dict[str, Any]) -> str:
    return f"{entry['name']}-{entry.get('aggregation', '')}-{entry['source'].replace(' ', '-')}"


def close(actual: torch.Tensor, expected: list[float], *, rel: float = 1e-6) -> None:
    assert actual.tolist() == pytest.approx(expected, rel=rel, abs=1e-7)


def aggregated(losses_T: torch.Tensor, name: str) -> torch.Tensor:
    return registry.resolve("aggregation", name, {})(losses_T, batch(), Counts.of(batch()))


@pytest.mark.parametrize("entry", GOLDEN["losses"], ids=label)
def test_loss_and_gradient_agree(entry):
    tokens = batch()
    if entry.get("anchor") == "behaviour":
        tokens = dataclasses.replace(tokens, proximal_logprobs_T=None)
    if "correction" in entry:
        correct = registry.resolve("correction", entry["correction"]["name"], entry["correction"]["params"])
        tokens = dataclasses.replace(tokens, weights_T=correct(tokens).weights_T)
    logprobs_T = column("current").requires_grad_()
    losses_T = registry.resolve("policy_loss", entry["name"], entry["params"])(tokens, logprobs_T).losses_T
    if "kl" in entry:
        kl_T = registry.resolve("kl", entry["kl"]["name"], {})(logprobs_T, column("reference"))
        if entry["kl"]["bias_corrected"]:
            tokens = dataclasses.replace(tokens, reference_logprobs_T=column("reference"))
            kl_T = bias_corrected(kl_T, tokens, logprobs_T)
        losses_T = losses_T + entry["kl"]["coefficient"] * kl_T
    loss = aggregated(losses_T, entry["aggregation"])
    loss.backward()
    if entry["loss"] is not None:
        assert loss.item() == pytest.approx(entry["loss"], rel=1e-6)
    close(logprobs_T.grad, entry["gradient"])


@pytest.mark.parametrize("entry", GOLDEN["advantages"], ids=label)
def test_advantages_agree(entry):
    close(
        registry.resolve("advantage", entry["name"], entry["params"])(rewards()),
        entry["advantages"],
        rel=1e-5,
    )
    if "targets" in entry:
        close(value_targets(rewards(), **entry["params"]), entry["targets"], rel=1e-5)


@pytest.mark.parametrize("entry", GOLDEN["corrections"], ids=lambda entry: str(entry["params"]))
def test_weights_agree(entry):
    close(registry.resolve("correction", entry["name"], entry["params"])(batch()).weights_T, entry["weights"])


@pytest.mark.parametrize("entry", GOLDEN["rejections"], ids=lambda entry: entry["source"])
def test_the_same_tokens_are_rejected(entry):
    tokens = batch()
    rejections = [registry.resolve("correction", "reject", params)(tokens) for params in entry["rejections"]]
    assert combined(none(tokens), rejections).keep_T.tolist() == [keep == 1.0 for keep in entry["keep"]]


@pytest.mark.parametrize("entry", GOLDEN["values"], ids=lambda entry: entry["aggregation"])
def test_loss_of_the_critic_agrees(entry):
    values_T = column("values").requires_grad_()
    old_values_T, returns_T = (
        torch.tensor(entry[name], dtype=torch.float64) for name in ("old_values", "returns")
    )
    loss = aggregated(
        value_loss(values_T, old_values_T, returns_T, **entry["params"]).losses_T, entry["aggregation"]
    )
    loss.backward()
    assert loss.item() == pytest.approx(entry["loss"], rel=1e-6)
    close(values_T.grad, entry["gradient"])


@pytest.mark.parametrize("entry", GOLDEN["kl_controllers"], ids=lambda entry: str(entry["kl"]))
def test_the_coefficient_of_the_kl_is_steered_alike(entry):
    assert adapt_coefficient(entry["coefficient"], entry["kl"], **entry["params"]) == pytest.approx(
        entry["next"]
    )


@pytest.mark.parametrize("entry", GOLDEN["kl"], ids=label)
def test_kl_agrees(entry):
    logprobs_T = column("current").requires_grad_()
    kl_T = registry.resolve("kl", entry["name"], {})(logprobs_T, column("reference"))
    kl_T.sum().backward()
    close(kl_T, entry["kl"])
    close(logprobs_T.grad, entry["gradient"])
