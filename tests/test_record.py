"""Checksums, byte planes and TFRecord's frames: known values, references, every length, layouts, errors."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest
import reference_record as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchsparse_rec import ops

LENGTHS = [*range(34), 255, 256, 767, 768, 769, 1600, 3 * 4096 - 1, 3 * 4096, 3 * 4096 + 771]
DTYPES = [torch.bool, torch.int8, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.complex128]


def tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_bytes(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bytes(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


# ---- crc32c ---------------------------------------------------------------------------------------------------------


def test_crc32c_of_the_rfc() -> None:
    """RFC 3720, B.4."""
    texts = [bytes(32), b"\xff" * 32, bytes(range(32)), bytes(range(31, -1, -1)), b"123456789", b""]
    wanted = [0x8A9136AA, 0x62A8AB43, 0x46DD794E, 0x113FDB5C, 0xE3069283, 0]
    assert ops.crc32c([tensor(text) for text in texts]).tolist() == wanted


def test_crc32c_of_every_length_and_address() -> None:
    for size in LENGTHS:
        data = random_bytes(size + 3)[3:]
        assert ops.crc32c([data]).tolist() == [reference.crc32c(as_bytes(data))], size


def test_crc32c_of_many_buffers_in_pieces(restore_threads: None) -> None:
    """Pieces of 1 MiB are joined; the bytes before are told apart by their place."""
    data = random_bytes((3 << 20) + 5)
    halves = [data[: 1 << 20], data[1 << 20 :], data, data[:0], data[:7]]
    one = ops.crc32c(halves)
    torch.set_num_threads(1)
    assert torch.equal(ops.crc32c(halves), one) and one.dtype == torch.int64
    # Of a part that can be computed slowly: all of it but zeros, which leave a register of zeros alone.
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
sums = ops.crc32c([*parts, *planes]).tolist()
"""


@pytest.mark.parametrize("level", ["baseline", pytest.param("avx2", marks=pytest.mark.full)])
def test_all_instruction_sets_give_the_same(level: str) -> None:
    """Without the processor's instruction the tables compute; of planes each level has loops of its own."""
    here: dict[str, object] = {}
    exec(LEVELS, here)
    environment = {**os.environ, "TORCHSPARSE_REC_CPU": level, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", LEVELS + "print(sums)"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(here["sums"])


# ---- Byte planes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 64, 1023, 1024, 1025, 300_001])
def test_byte_planes_there_and_back(dtype: torch.dtype, n: int) -> None:
    x = random_bytes(n * dtype.itemsize)
    x = (x & 1 if dtype == torch.bool else x).view(dtype)
    planes = ops.to_byte_planes(x)
    assert planes.shape == (dtype.itemsize, n) and planes.dtype == torch.uint8 and planes.is_contiguous()
    assert [as_bytes(plane) for plane in planes] == reference.byte_planes(as_bytes(x), dtype.itemsize)
    again = ops.from_byte_planes(planes, dtype)
    assert again.dtype == dtype and again.shape == (n,) and as_bytes(again) == as_bytes(x)


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


# ---- Frames ---------------------------------------------------------------------------------------------------------


def strings(texts: list[bytes]) -> tuple[Tensor, Tensor]:
    return tensor(b"".join(texts)), torch.tensor([0, *map(len, texts)]).cumsum(0)


@settings(deadline=None, max_examples=50)
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


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(max_size=9), max_size=3), st.data())
def test_faults_of_frames_equal_the_references(texts: list[bytes], draw: st.DataObject) -> None:
    """Cut anywhere, with a byte changed anywhere."""
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

_OPS = torch.ops.torchsparse_rec
_FRAMED = ops.tfrecord_framed(*strings([b"ab", b"c"]))
CALLS = {
    "crc32c": ([torch.arange(5.0), torch.arange(3)],),
    "to_byte_planes": (torch.arange(6.0).reshape(2, 3),),
    "from_byte_planes": (torch.zeros(4, 3, dtype=torch.uint8),),
    "tfrecord_frames": (_FRAMED, True),
    "tfrecord_framed": strings([b"ab", b"c"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(_OPS, name).default, CALLS[name])


def test_nothing_is_differentiable() -> None:
    x = torch.arange(4.0, requires_grad=True)
    assert not ops.crc32c([x]).requires_grad and not ops.to_byte_planes(x).requires_grad
