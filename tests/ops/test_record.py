"""Checksums, byte planes and TFRecord's frames: known values, references, every length, layouts, errors."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from typing import Any

import pytest
import torch
from calls import operator
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.record_cases import tensor
from samples.record import RECORD_SAMPLES
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import record as reference

LENGTHS = [*range(34), 255, 256, 767, 768, 769, 1600, 3 * 4096 - 1, 3 * 4096, 3 * 4096 + 771]
DTYPES = [torch.bool, torch.int8, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.complex128]


def as_bytes(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bytes(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


# ---- crc32c ---------------------------------------------------------------------------------------------------------


def test_crc32c_of_the_rfc() -> None:
    """Compare with RFC 3720, B.4."""
    texts = [bytes(32), b"\xff" * 32, bytes(range(32)), bytes(range(31, -1, -1)), b"123456789", b""]
    wanted = [0x8A9136AA, 0x62A8AB43, 0x46DD794E, 0x113FDB5C, 0xE3069283, 0]
    assert ops.crc32c([tensor(text) for text in texts]).tolist() == wanted


def test_crc32c_of_every_length_and_address() -> None:
    for size in LENGTHS:
        data = random_bytes(size + 3)[3:]
        assert ops.crc32c([data]).tolist() == [reference.crc32c(as_bytes(data))], size


def test_crc32c_of_many_buffers_in_pieces(restore_threads: None) -> None:
    """Join the checksums of pieces of 1 MiB, of which each depends on the number of bytes after it."""
    data = random_bytes((3 << 20) + 5)
    halves = [data[: 1 << 20], data[1 << 20 :], data, data[:0], data[:7]]
    one = ops.crc32c(halves)
    torch.set_num_threads(1)
    assert torch.equal(ops.crc32c(halves), one) and one.dtype == torch.int64
    # Zeros alone, so that a slow loop in Python can compute the checksum.
    sparse = torch.zeros((2 << 20) + 9, dtype=torch.uint8)
    register = 0xFFFFFFFF
    for _ in range(sparse.numel()):
        register = (register >> 8) ^ TABLE[register & 0xFF]
    assert ops.crc32c([sparse]).tolist() == [register ^ 0xFFFFFFFF]


TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = (_byte >> 1) ^ (0x82F63B78 if _byte & 1 else 0)
    TABLE.append(_byte)


def test_crc32c_takes_any_dtype_and_layout() -> None:
    x = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    wanted = [reference.crc32c(as_bytes(y)) for y in (x, x.t(), x[:, ::2], x[0, 0])]
    assert ops.crc32c([x, x.t(), x[:, ::2], x[0, 0]]).tolist() == wanted


def test_crc32c_of_no_buffers_is_empty() -> None:
    assert ops.crc32c([]).shape == (0,) and ops.crc32c([]).dtype == torch.int64


def test_crc32c_refuses_what_is_no_list_of_tensors() -> None:
    with pytest.raises(TypeError, match=r"crc32c: buffers\[0\] must be a tensor, got int"):
        ops.crc32c([1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="crc32c: buffers must be a sequence of tensors, got one tensor"):
        ops.crc32c(torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"crc32c: buffers\[0\] must be a dense tensor, got one of layout "):
        ops.crc32c([torch.eye(2).to_sparse()])


def test_crc32c_refuses_other_devices() -> None:
    with pytest.raises(ValueError, match=r"crc32c: buffers\[1\] must be on the CPU, got meta"):
        ops.crc32c([torch.zeros(1), torch.zeros(1, device="meta")])


LEVELS = """
import torch
from torchsparse_rec import ops
x = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
parts = [x[a:b] for a, b in ((0, 3 << 20), (1, 5000), (3, 900), (2, 2))]
planes = [ops.to_byte_planes(x.view(dtype)[3:]) for dtype in (torch.int16, torch.int32, torch.int64)]
again = [ops.from_byte_planes(y, dtype) for y, dtype in zip(planes, (torch.int16, torch.int32, torch.int64))]
assert all(torch.equal(y, x.view(y.dtype)[3:]) for y in again)
joined = torch.zeros(500_000, dtype=torch.uint8)
rows = [[0, 0, 8], [0, 5, 3], [0, 9, 0], [0, 1 << 19, 7], [0, 77, 1], [0, 9, 8], [0, 8, 8], [0, 5, 8]]
sizes = [(1, 99_999), (1, 70_000), (2, 77_777), (4, 33_333)]
ops.join_byte_planes_(joined, [x], torch.tensor(rows), torch.tensor(sizes))
sums = ops.crc32c([*parts, *planes, joined]).tolist()
"""


@pytest.mark.parametrize("level", ["baseline", pytest.param("avx2", marks=pytest.mark.full)])
def test_all_instruction_sets_give_the_same(level: str) -> None:
    """Compute by tables where the processor has no instruction; each level has its own loops for planes."""
    here: dict[str, object] = {}
    exec(LEVELS, here)
    environment = {**os.environ, "TORCHSPARSE_REC_CPU": level, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", LEVELS + "print(sums)"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(here["sums"])


# ---- Byte planes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_byte_planes_there_and_back(dtype: torch.dtype) -> None:
    for n in (0, 1, 7, 64, 1023, 1024, 1025, 300_001):
        x = random_bytes(n * dtype.itemsize)
        x = (x & 1 if dtype == torch.bool else x).view(dtype)
        planes = ops.to_byte_planes(x)
        assert planes.shape == (dtype.itemsize, n) and planes.dtype == torch.uint8 and planes.is_contiguous()
        assert [as_bytes(plane) for plane in planes] == reference.byte_planes(as_bytes(x), dtype.itemsize), n
        again = ops.from_byte_planes(planes, dtype)
        assert again.dtype == dtype and again.shape == (n,) and as_bytes(again) == as_bytes(x), n


def test_byte_planes_of_any_layout() -> None:
    x = torch.arange(30, dtype=torch.int32).reshape(5, 6)
    assert torch.equal(ops.to_byte_planes(x.t()), ops.to_byte_planes(x.t().contiguous()))
    planes = ops.to_byte_planes(x)
    wide = torch.full((4, 60), 9, dtype=torch.uint8)
    wide[:, ::2] = planes
    assert torch.equal(ops.from_byte_planes(wide[:, ::2], torch.int32), x.reshape(-1))


def test_byte_planes_of_elements_at_any_address() -> None:
    data = random_bytes(8 * 3000 + 1)
    for dtype in (torch.int16, torch.int32, torch.int64):
        x = torch.frombuffer(data.numpy().data, dtype=dtype, offset=1, count=3000)
        wanted = reference.byte_planes(as_bytes(x), dtype.itemsize)
        assert [as_bytes(plane) for plane in ops.to_byte_planes(x)] == wanted


def test_byte_planes_say_what_is_wrong() -> None:
    planes = torch.zeros(4, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"planes must have 8 rows, the bytes of torch.int64, got 4"):
        ops.from_byte_planes(planes, torch.int64)
    with pytest.raises(ValueError, match=r"planes must be a uint8 matrix, got Float of shape \[4, 3\]"):
        ops.from_byte_planes(planes.float(), torch.int32)
    with pytest.raises(ValueError, match=r"planes must be a uint8 matrix, got Byte of shape \[12\]"):
        ops.from_byte_planes(planes.reshape(-1), torch.int32)
    with pytest.raises(TypeError, match="from_byte_planes: dtype must be a torch.dtype, got 'float32'"):
        ops.from_byte_planes(planes, "float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"to_byte_planes: x must be on the CPU, got meta"):
        ops.to_byte_planes(planes.to("meta"))
    with pytest.raises(ValueError, match=r"from_byte_planes: planes must be on the CPU, got meta"):
        ops.from_byte_planes(planes.to("meta"), torch.int32)


def join(sources: list[bytes], planes: list[tuple[int, int, int]], parts: list[tuple[int, int]]) -> bytes:
    """Return what the operator makes of bytes, in a buffer that is a little too long."""
    size = sum((width * count + 63) // 64 * 64 for width, count in parts)
    out = torch.full((size + 5,), 77, dtype=torch.uint8)
    tensors = [tensor(x) for x in sources]
    rows = torch.tensor(planes, dtype=torch.int64).reshape(-1, 3), torch.tensor(parts, dtype=torch.int64).reshape(-1, 2)
    assert ops.join_byte_planes_(out, tensors, *rows) is out
    assert out[size:].tolist() == [77] * 5
    return as_bytes(out[:size])


@settings(max_examples=60)
@given(data=st.data())
def test_planes_that_lie_anywhere_are_joined(data: st.DataObject) -> None:
    random = data.draw(st.randoms(use_true_random=False))
    sources, planes, parts = [b"", b"xyz"], [], []
    for _ in range(data.draw(st.integers(0, 5))):
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        count = data.draw(st.sampled_from([0, 1, 7, 8, 9, 1023, 1024, 1025, 3000]))
        parts.append((width, count))
        for _ in range(width):
            source, bits = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 8))
            values = random.randbytes(count)
            stored = values if bits == 8 else random.randbytes(1) if bits == 0 else b""
            if 0 < bits < 8:
                stored = reference.packed(bytes(x % 2**bits for x in values), bits)
            planes.append((source, len(sources[source]), bits))
            sources[source] += stored
    assert join(sources, planes, parts) == reference.join_byte_planes(sources, planes, parts)


def test_a_large_part_is_joined_as_small_ones() -> None:
    x = torch.randint(0, 1 << 19, (300_001,), dtype=torch.int32)
    planes = [as_bytes(plane) for plane in ops.to_byte_planes(x)]
    third = reference.packed(planes[2], 3)
    sources = [planes[0], planes[1] + third + b"\0"]
    rows = [(0, 0, 8), (1, 0, 8), (1, len(x), 3), (1, len(x) + len(third), 0)]
    assert join(sources, rows, [(4, len(x))])[: 4 * len(x)] == as_bytes(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.zeros(63, dtype=torch.uint8)}, "out must have room for 64 bytes, got 63"),
        ({"out": torch.zeros(64)}, r"out must be a contiguous uint8 vector, got Float of shape \[64\]"),
        ({"out": torch.zeros(128, dtype=torch.uint8)[::2]}, "out must be a contiguous uint8 vector"),
        (
            {"sources": [torch.zeros(2, 2, dtype=torch.uint8)]},
            r"sources\[0\] must be a uint8 vector, got Byte",
        ),
        ({"sources": [torch.zeros(9)]}, r"sources\[0\] must be a uint8 vector, got Float"),
        (
            {"sources": []},
            r"\(source below 0, start, bits up to 8\), got \(0, 0, 8\) at position 0",
        ),
        ({"planes": torch.zeros(2, 3)}, "planes must be an int64 matrix of 3 columns, got Float of shape"),
        ({"planes": torch.zeros(2, 2, dtype=torch.int64)}, "planes must be an int64 matrix of 3 columns"),
        ({"planes": torch.tensor([[0, 0, 8]])}, "a row for each byte of the parts' elements, got 1 rows, too few for"),
        ({"planes": torch.zeros(3, 3, dtype=torch.int64)}, "got 3 rows for 2 bytes"),
        ({"planes": torch.tensor([[0, 0, 8], [0, 0, 9]])}, r"got \(0, 0, 9\) at position 1"),
        ({"planes": torch.tensor([[0, 0, 8], [1, 0, 8]])}, r"got \(1, 0, 8\) at position 1"),
        ({"planes": torch.tensor([[-1, 0, 8], [0, 0, 8]])}, r"got \(-1, 0, 8\) at position 0"),
        (
            {"planes": torch.tensor([[0, 0, 8], [0, 1, 8]])},
            "plane 1 of 9 bytes from 1 on must lie within its",
        ),
        ({"planes": torch.tensor([[0, 0, 8], [0, 9, 0]])}, "plane 1 of 1 bytes from 9 on must lie within"),
        ({"planes": torch.tensor([[0, 0, 8], [0, 2, 4]])}, "plane 1 of 8 bytes from 2 on must lie within"),
        ({"planes": torch.tensor([[0, -1, 8], [0, 0, 8]])}, "plane 0 of 9 bytes from -1 on must lie within"),
        ({"planes": torch.tensor([[0, 2**63 - 1, 8], [0, 0, 8]])}, "plane 0 of 9 bytes from 9223372036854775807 on"),
        ({"parts": torch.tensor([[3, 9]])}, r"1, 2, 4 or 8 bytes, elements\), got \(3, 9\) at position 0"),
        ({"parts": torch.tensor([[2, -1]])}, r"got \(2, -1\) at position 0"),
        ({"parts": torch.tensor([[2, 2**62]])}, r"got \(2, 4611686018427387904\) at position 0"),
        ({"parts": torch.tensor([2, 9])}, "parts must be an int64 matrix of 2 columns, got Long of shape"),
        ({"parts": torch.tensor([[2, 9]], device="meta")}, "parts must be on the CPU, got meta"),
        ({"sources": [torch.zeros(9, dtype=torch.uint8, device="meta")]}, r"sources\[0\] must be on the CPU, got meta"),
    ],
)
def test_joining_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "out": torch.zeros(64, dtype=torch.uint8),
        "sources": [torch.zeros(9, dtype=torch.uint8)],
        "planes": torch.tensor([[0, 0, 8], [0, 0, 8]]),
        "parts": torch.tensor([[2, 9]]),
    }
    ops.join_byte_planes_(**good)
    with pytest.raises(ValueError, match="join_byte_planes_: .*" + message):
        ops.join_byte_planes_(**{**good, **change})


def test_joining_within_a_source_is_refused() -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    rows = torch.tensor([[0, 0, 8]]), torch.tensor([[1, 9]])
    with pytest.raises(ValueError, match=r"sources\[0\] must not share memory with out"):
        ops.join_byte_planes_(memory[:64], [memory[50:]], *rows)
    ops.join_byte_planes_(memory[:64], [memory[64:]], *rows)
    with pytest.raises(TypeError, match="join_byte_planes_: sources must be a sequence of tensors, got one tensor"):
        ops.join_byte_planes_(memory[:64], memory[64:], *rows)  # type: ignore[arg-type]


# ---- Frames ---------------------------------------------------------------------------------------------------------


def strings(texts: list[bytes]) -> tuple[Tensor, Tensor]:
    return tensor(b"".join(texts)), torch.tensor([0, *map(len, texts)]).cumsum(0)


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=40), max_size=8), st.booleans())
def test_frames_equal_the_reference(texts: list[bytes], verify: bool) -> None:
    data = ops.tfrecord_framed(*strings(texts))
    assert as_bytes(data) == reference.framed(texts)
    ranges, status = ops.tfrecord_frames(data, verify=verify)
    assert ranges.shape == (len(texts), 2) and status == (None, data.numel(), 0)
    assert [as_bytes(data[a:b]) for a, b in ranges.tolist()] == texts


def test_frames_of_a_part_of_the_bytes() -> None:
    data, offsets = strings([b"ab", b"cde", b""])
    assert as_bytes(ops.tfrecord_framed(data, offsets[1:])) == reference.framed([b"cde", b""])


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=9), max_size=3), st.data())
def test_faults_of_frames_equal_the_references(texts: list[bytes], draw: st.DataObject) -> None:
    """Cut the bytes anywhere, and change one byte anywhere."""
    data = bytearray(reference.framed(texts))
    data = data[: draw.draw(st.integers(0, len(data)))]
    if data and draw.draw(st.booleans()):
        data[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    verify = draw.draw(st.booleans())
    ranges, status = ops.tfrecord_frames(tensor(bytes(data)), verify=verify)
    wanted, (fault, end, needed) = reference.frames(bytes(data), verify)
    assert ranges.tolist() == wanted and (status.fault, status.end) == (fault, end)
    assert fault == "length_crc" or status.needed == needed


def test_a_length_that_no_buffer_has() -> None:
    length = struct.pack("<Q", 2**64 - 1)
    header = length + struct.pack("<I", reference.masked_crc32c(length))
    ranges, status = ops.tfrecord_frames(tensor(header + bytes(30)))
    assert ranges.shape == (0, 2) and status == ("incomplete", 0, 2**63 - 1)


def test_the_first_of_many_bad_checksums(restore_threads: None) -> None:
    data = ops.tfrecord_framed(random_bytes(400_000), torch.arange(0, 400_001, 100))
    for record in (3999, 2500, 1234):
        data[116 * record + 50] ^= 1
        for threads in (1, 2):
            torch.set_num_threads(threads)
            ranges, status = ops.tfrecord_frames(data)
            assert ranges.shape[0] == record and status == ("data_crc", 116 * record, 116)


def test_frames_say_what_is_wrong() -> None:
    data, offsets = strings([b"ab", b"c"])
    bad = r"tfrecord_frames: bytes must be a uint8 vector, got Float of shape \[3\]"
    with pytest.raises(ValueError, match=bad):
        ops.tfrecord_frames(data.float())
    with pytest.raises(ValueError, match=r"tfrecord_framed: bytes must be a uint8 vector, got Byte of shape \[1, 3\]"):
        ops.tfrecord_framed(data[None], offsets)
    with pytest.raises(ValueError, match=r"offsets must be an int64 vector of at least one element, got Int of shape"):
        ops.tfrecord_framed(data, offsets.int())
    with pytest.raises(ValueError, match=r"must not decrease and stay in \[0, 3\], got 1 at position 2"):
        ops.tfrecord_framed(data, torch.tensor([0, 2, 1]))
    with pytest.raises(ValueError, match=r"must not decrease and stay in \[0, 3\], got 4 at position 1"):
        ops.tfrecord_framed(data, torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"tfrecord_frames: bytes must be on the CPU, got meta"):
        ops.tfrecord_frames(data.to("meta"))
    with pytest.raises(ValueError, match=r"tfrecord_framed: offsets must be on the CPU, got meta"):
        ops.tfrecord_framed(data, offsets.to("meta"))


# ---- Registrations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORD_SAMPLES)
def test_opcheck(name: str) -> None:
    """Check operators on examples too."""
    for sample in RECORD_SAMPLES[name]:
        torch.library.opcheck(operator(name), sample.arguments)


def test_nothing_is_differentiable() -> None:
    x = torch.arange(4.0, requires_grad=True)
    assert not ops.crc32c([x]).requires_grad and not ops.to_byte_planes(x).requires_grad
