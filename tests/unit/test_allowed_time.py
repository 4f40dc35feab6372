"""The time that an update may take: passes of each transport at measured rates, and an allowance for calls."""

import pytest

from bench.gpu.allowed_time import CALLS_S, TENSOR_S, allowed_time, measured_rate, passes
from bench.gpu.figures import Place, append, noted

# GB/s, of the order of an H100's.
RATES = {
    "host: copy": 10.0,
    "host: XXH3 in one thread": 20.0,
    "GPU to pageable host memory": 8.0,
    "pageable host memory to GPU": 12.0,
    "GPU: copy": 1200.0,
    "copy 0 to 1": 250.0,
    "tcp": 4.0,
    "nccl": 300.0,
}
BYTES, TENSORS = 10**9, 290
CALLS = CALLS_S + TENSORS * TENSOR_S


@pytest.mark.parametrize(
    ("transport", "gpu", "bytes_s"),
    [
        ("slot", None, 1 / 10 + 1 / 20),
        ("disk", None, 1 / 10 + 1 / 20),
        ("tcp", None, 1 / 4 + 1 / 10 + 1 / 20),
        ("slot", 0, 3 / 1200),
        ("slot", 1, 2 / 250 + 2 / 1200),
        ("disk", 1, 1 / 12 + 1 / 20),
        ("tcp", 1, 1 / 4 + 1 / 20 + 1 / 12),
        ("nccl", 1, 1 / 300 + 2 / 1200 + 1 / 8 + 1 / 12),
    ],
)
def test_the_allowed_time_is_that_of_the_passes_and_of_the_calls(transport, gpu, bytes_s):
    allowed = allowed_time(passes(transport, gpu), RATES.get, BYTES, TENSORS)
    assert allowed.total_s == pytest.approx(bytes_s / 0.85 + CALLS)
    assert allowed.bare_rate == RATES[allowed.bare_name]
    assert f"allowed are {1000 * allowed.total_s:.3g} ms" in allowed.note


def test_a_slot_in_memory_of_the_host_is_checked_and_copied_there():
    assert passes("slot", 1, on_host=True) == passes("disk", 1)


def test_the_note_says_how_the_limit_is_made_up():
    assert allowed_time(passes("tcp", 1), RATES.get, BYTES, TENSORS).note == (
        "allowed are 529 ms: 383 ms for 1,000.0 MB at tcp (4 GB/s) + host: XXH3 in one thread (20 GB/s) + "
        "pageable host memory to GPU (12 GB/s), divided by 0.85, and 78 ms for the calls of 290 tensors"
    )


def test_without_the_rate_of_a_pass_there_is_no_limit():
    assert allowed_time(passes("nccl", None), (RATES | {"nccl": None}).get, BYTES, TENSORS) is None
    assert allowed_time(passes("tcp", 1), (RATES | {"tcp": 0.0}).get, BYTES, TENSORS) is None


def test_rates_are_those_of_earlier_rows(tmp_path):
    place = Place(tmp_path, "cpu", "model")
    append(tmp_path / "copies.jsonl", noted("host: copy", 7.0, "GB/s"))
    append(tmp_path / "links.jsonl", noted("tcp", 3.0, "GB/s"))
    assert [measured_rate(place, name) for name in ("host: copy", "tcp", "nccl")] == [7.0, 3.0, None]
