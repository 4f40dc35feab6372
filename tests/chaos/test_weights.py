"""A few of each fault on the weights plane. `python -m reliability.chaos.weights` does hundreds."""

import pytest

from asyncrl.cluster.local import obstacle
from reliability.chaos.pairs import ENDINGS
from reliability.chaos.weights import aborted, parted, run, sampling_on, stricken, visitors

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.parametrize("transport", ["slot", "tcp"])
def test_receivers_that_die_or_stop_in_an_update_cost_the_learner_and_the_others_nothing(transport):
    found = run(stricken, 6, transport=transport)
    assert sum(found["injected"].values()) == 6
    assert (found["learner_errors"], found["failed_updates_of_the_others"], found["mixed_tokens"]) == (
        0,
        0,
        0,
    )
    assert found["updates_of_the_others"] > 0 and found["steps_under_faults"] > 0


def test_a_pair_that_loses_an_end_costs_the_learner_and_the_other_hosts_nothing(monkeypatch):
    monkeypatch.delitem(ENDINGS, "stopped until the deadline")
    found = run(parted, 4, transport="nccl")
    assert sum(found["injected"].values()) == 4 and found["updates_of_the_others"] > 0
    assert (found["learner_errors"], found["failed_updates_of_the_others"], found["mixed_tokens"]) == (
        0,
        0,
        0,
    )
    assert (found["wrong_weights"], found["processes_without_a_pair"]) == (0, 0)


def test_generators_come_and_go():
    found = run(visitors, 4)
    assert found["joins"] == sum(found["leaves"].values()) == 4
    assert (found["learner_errors"], found["failed_updates_of_the_steady"], found["mixed_tokens"]) == (
        0,
        0,
        0,
    )
    assert found["readers_that_are_gone"] == 0


@pytest.mark.parametrize("transport", ["slot", "tcp"])
def test_no_token_is_sampled_by_a_mixture_of_weights(transport):
    found = run(aborted, 6, transport=transport)
    assert found["failed_updates"] >= 6 and found["tokens"] > 0
    assert (found["mixed_tokens"], found["wrong_weights"], found["learner_errors"]) == (0, 0, 0)


def test_no_token_is_sampled_by_a_mixture_of_weights_from_another_host():
    if reason := obstacle():
        pytest.skip(reason)
    found = run(aborted, 3, transport="tcp", between_hosts=True)
    assert found["failed_updates"] >= 3 and found["tokens"] > 0
    assert (found["mixed_tokens"], found["wrong_weights"], found["learner_errors"]) == (0, 0, 0)


def test_a_mixture_would_be_seen():
    """An engine that samples on while it loads."""
    assert run(sampling_on, 1)["mixed_tokens"] > 0
