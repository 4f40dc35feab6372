import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import TransferError
from asyncrl.weights import layout as module
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout, checksum_threads, checksums, verify

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "int64", "uint8"])


@st.composite
def spec_lists(draw):
    pairs = draw(st.lists(st.tuples(dtypes, shapes), max_size=20))
    return [TensorSpec(name=f"t{i}", dtype=dtype, shape=shape) for i, (dtype, shape) in enumerate(pairs)]


def filled(layout):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (layout.total_bytes,), dtype=torch.uint8, generator=generator)


@given(spec_lists(), st.integers(1, 2000))
def test_tensors_are_aligned_do_not_overlap_and_keep_their_values(specs, bucket_bytes):
    layout = Layout.plan(specs, bucket_bytes)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    originals = [
        torch.arange(1, 1 + torch.Size(s.shape).numel()).to(getattr(torch, s.dtype)).view(s.shape)
        for s in specs
    ]
    for index, original in enumerate(originals):
        layout.view(buffer, index).copy_(original)
    assert layout.offsets[0] == 0 and len(layout.offsets) == len(specs) + 1
    for index, original in enumerate(originals):
        assert layout.offsets[index] % 64 == 0
        assert 0 <= layout.offsets[index + 1] - layout.offsets[index] - original.nbytes < 64
        assert torch.equal(layout.view(buffer, index), original)


@given(spec_lists(), st.integers(1, 2000))
def test_the_plan_survives_the_wire(specs, bucket_bytes):
    layout = Layout.plan(specs, bucket_bytes)
    assert Layout.from_plain(layout.to_plain()) == layout


@given(spec_lists().filter(lambda specs: any(0 not in s.shape for s in specs)), st.data())
def test_one_flipped_bit_in_a_tensor_is_found_and_named_and_padding_is_ignored(specs, data):
    layout = Layout.plan(specs, 256)
    buffer = filled(layout)
    expected = checksums(buffer, layout)
    verify(buffer, layout, expected)
    index = data.draw(st.sampled_from([i for i, s in enumerate(specs) if 0 not in s.shape]))
    bytes_of_tensor = layout.view(buffer, index).view(-1).view(torch.uint8)
    bytes_of_tensor[data.draw(st.integers(0, len(bytes_of_tensor) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(TransferError, match=f"'t{index}'"):
        verify(buffer, layout, expected)
    for each in range(len(specs)):
        if each == index:
            with pytest.raises(TransferError, match=f"'t{index}'"):
                verify(buffer, layout, expected, each)
        else:
            verify(buffer, layout, expected, each)


def test_padding_is_not_part_of_the_checksum():
    layout = Layout.plan([TensorSpec(name="a", dtype="uint8", shape=(3,))], 64)
    buffer = filled(layout)
    expected = checksums(buffer, layout)
    buffer[3:] += 1
    verify(buffer, layout, expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs=spec_lists(), threads=st.integers(1, 5))
def test_threads_find_the_checksums_of_the_tensors(specs, threads, monkeypatch):
    layout = Layout.plan(specs, 256)
    buffer = filled(layout)
    monkeypatch.setattr(module, "checksum_threads", lambda size_bytes: threads)
    views = (
        layout.view(buffer, index).contiguous().view(-1).view(torch.uint8) for index in range(len(specs))
    )
    assert checksums(buffer, layout) == tuple(xxhash.xxh3_64_intdigest(view.numpy().data) for view in views)


def test_an_error_in_a_thread_is_raised(monkeypatch):
    layout = Layout.plan([TensorSpec(name="a", dtype="uint8", shape=(3,))], 64)
    monkeypatch.setattr(module, "checksum_threads", lambda size_bytes: 2)
    with pytest.raises((ValueError, BufferError, RuntimeError, TypeError)):
        checksums(torch.zeros(3, dtype=torch.uint8, device="meta"), layout)


def test_only_a_large_version_takes_threads():
    assert checksum_threads(1 << 20) == 1
    assert 1 <= checksum_threads(1 << 40) <= 4


def test_a_missing_checksum_is_an_error():
    layout = Layout.plan([TensorSpec(name="a", dtype="uint8", shape=(3,))], 64)
    with pytest.raises(TransferError, match="0 checksums for 1"):
        verify(filled(layout), layout, ())


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, "malformed"),
        ({"specs": [["a", "float32"]], "bucket_bytes": 1}, "malformed"),
        ({"specs": [["a", "Tensor", [1]]], "bucket_bytes": 1}, "torch dtype"),
        ({"specs": [["a", "float32", [-1]]], "bucket_bytes": 1}, "0 or more"),
        ({"specs": [["a", "float32", [1]], ["a", "float32", [1]]], "bucket_bytes": 1}, "twice"),
    ],
)
def test_what_is_no_layout_is_refused_with_its_reason(plain, message):
    with pytest.raises(TransferError, match=message):
        Layout.from_plain(plain)
