"""Packing: all comes out once, within the budget, evenly, and the indices point at the right logits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.batch.packing import TrainSample, microbatch, pack, share_out
from asyncrl.errors import ShapeError

LENGTHS = st.lists(st.integers(1, 64) | st.integers(50, 64), max_size=60)
CPU = torch.device("cpu")


def sequence(prompt: int, response: int, *, first_id: int = 0, keep: list[bool] | None = None) -> TrainSample:
    ids = np.arange(first_id, first_id + prompt + response, dtype=np.int32)
    return TrainSample(
        prompt_ids=ids[:prompt],
        response_ids=ids[prompt:],
        keep=np.array([True] * response if keep is None else keep),
        behaviour_logprobs=-ids[prompt:].astype(np.float32),
        advantages=ids[prompt:].astype(np.float32) / 8,
        lag=ids[prompt:].astype(np.int64) % 3,
    )


@given(LENGTHS, st.integers(64, 200))
def test_every_sequence_is_in_exactly_one_bin_within_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in members) <= budget for members in bins)


@given(LENGTHS, st.integers(64, 200))
def test_number_of_bins_is_within_the_bound_of_first_fit_decreasing(lengths: list[int], budget: int) -> None:
    # Dosa 2007: FFD <= 11/9 OPT + 6/9, and OPT is at least the total over the budget (and 1 per item over
    # half of it).
    least = max(-(-sum(lengths) // budget), sum(2 * length > budget for length in lengths))
    if len(pack(lengths, budget)) > 11 / 9 * least + 6 / 9:
        # Then the volume bound is not OPT: awkward large items.
        assert any(length > budget // 3 for length in lengths)


@given(LENGTHS, st.integers(64, 200), st.integers(1, 9))
def test_no_rank_idles_while_there_are_sequences_to_share(
    lengths: list[int], budget: int, ranks: int
) -> None:
    """Every round is full, and there is no more of them than first-fit decreasing needs."""
    bins = pack(lengths, budget, ranks)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in members) <= budget for members in bins)
    rounds = -(-len(pack(lengths, budget)) // ranks)
    assert len(bins) == min(rounds * ranks, len(lengths))


def test_six_sequences_are_shared_out_to_four_ranks() -> None:
    shares = share_out(pack([6, 6, 5, 5, 4, 4], 12, 4), 4, [6, 6, 5, 5, 4, 4])
    assert all(any(members for members in share) for share in shares)


def test_where_the_even_spread_does_not_fit_first_fit_stays() -> None:
    """3, 3, 2, 2, 2 fill two bins of 6 exactly; the emptiest bin first would need 7."""
    assert sorted(map(sorted, pack([3, 3, 2, 2, 2], 6))) == [[0, 1], [2, 3, 4]]


def test_loads_are_even_where_first_fit_would_fill_one_bin_and_leave_a_rest() -> None:
    bins = pack([10] * 11, 100)
    assert sorted(len(members) for members in bins) == [5, 6]


def test_a_sequence_over_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(ShapeError, match=r"101 tokens .* 100 tokens; raise learner.tokens_per_microbatch"):
        pack([5, 101], 100)


@given(LENGTHS, st.integers(1, 5))
def test_ranks_get_equally_many_bins_and_every_bin_once(lengths: list[int], ranks: int) -> None:
    bins = pack(lengths, 64)
    shares = share_out(bins, ranks, lengths)
    assert len(shares) == ranks
    assert {len(share) for share in shares} == {-(-len(bins) // ranks)}
    assert sorted(members for share in shares for members in share if members) == sorted(bins)


@given(LENGTHS.filter(lambda lengths: len(lengths) > 0), st.integers(2, 5))
def test_no_rank_carries_more_than_one_largest_bin_above_another(lengths: list[int], ranks: int) -> None:
    bins = pack(lengths, 64)
    loads = [
        sum(lengths[i] for members in share for i in members) for share in share_out(bins, ranks, lengths)
    ]
    assert max(loads) - min(loads) <= max(sum(lengths[i] for i in members) for members in bins)


def test_the_first_response_token_is_predicted_by_the_last_prompt_token() -> None:
    batch = microbatch([sequence(3, 2), sequence(2, 3, first_id=50)], CPU)
    assert batch.sequence_starts == (0, 5, 10)
    assert batch.position_ids_N.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert batch.source_T.tolist() == [2, 3, 6, 7, 8]
    assert torch.equal(batch.input_ids_N[batch.source_T + 1], batch.target_T)


@given(st.data())
def test_only_kept_tokens_become_action_tokens_and_columns_stay_aligned(data: st.DataObject) -> None:
    sequences = [
        sequence(
            data.draw(st.integers(1, 5)),
            r,
            first_id=100 * s,
            keep=data.draw(st.lists(st.booleans(), min_size=r, max_size=r)),
        )
        for s, r in enumerate(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5)))
    ]
    batch = microbatch(sequences, CPU)
    expected = [
        int(i) for one in sequences for i, kept in zip(one.response_ids, one.keep, strict=True) if kept
    ]
    assert batch.target_T.tolist() == expected
    assert torch.equal(batch.input_ids_N[batch.source_T + 1], batch.target_T)
    assert (-batch.tokens.behaviour_logprobs_T).tolist() == expected
    assert (batch.tokens.advantages_T * 8).tolist() == expected
    assert batch.tokens.lag_T is not None and batch.tokens.lag_T.tolist() == [i % 3 for i in expected]
    assert batch.tokens.sequence_T.tolist() == [i // 100 for i in expected]
    assert batch.tokens.num_sequences == len(sequences)


def test_an_empty_microbatch_has_no_tokens() -> None:
    batch = microbatch([], CPU)
    assert (
        batch.input_ids_N.numel()
        == batch.target_T.numel()
        == batch.tokens.tokens
        == batch.tokens.num_sequences
        == 0
    )


def test_columns_of_another_length_and_empty_prompts_are_refused() -> None:
    good = sequence(2, 3)
    columns = {name: getattr(good, name) for name in TrainSample.__slots__}
    with pytest.raises(ShapeError, match=r"3 response tokens.*'lag': 2"):
        TrainSample(**(columns | {"lag": good.lag[:2]}))
    with pytest.raises(ShapeError, match="empty prompt"):
        TrainSample(**(columns | {"prompt_ids": good.prompt_ids[:0]}))


def test_the_larger_bin_of_each_round_goes_to_another_rank() -> None:
    assert share_out([[0], [1], [2], [3]], 2, [8, 7, 2, 1]) == [[[0], [3]], [[1], [2]]]
