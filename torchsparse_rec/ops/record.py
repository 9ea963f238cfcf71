"""
Family ``record``: files of records: checksums, byte planes, TFRecord's framing. CPU only.

Contract: csrc/record*.h. Kernels: csrc/cpu/record*.cpp, csrc/cpu/crc32c.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._in_place import without_result
from .autograd import not_differentiable

__all__ = [
    "FrameStatus",
    "crc32c",
    "from_byte_planes",
    "join_byte_planes_",
    "tfrecord_framed",
    "tfrecord_frames",
    "to_byte_planes",
]

# The reasons why the frames end, in the order of FrameFault in csrc/record.h.
_FAULTS = (None, "incomplete", "length_crc", "data_crc")

_ops = torch.ops.torchsparse_rec


def crc32c(buffers: Sequence[Tensor]) -> Tensor:
    """
    Compute the CRC-32C of the bytes of each tensor: the checksum of TFRecord, iSCSI and ext4.

    Buffers are computed in parallel, large ones in pieces, by the processor's instruction where it has one. Not
    masked: TFRecord stores a rotation of it. Not differentiable.

    Args:
        buffers: tensors on the CPU, of any dtype and shape. One that is not contiguous is copied first: its elements
            count in their logical order.

    Returns:
        ``[len(buffers)]``, int64, in ``[0, 2 ** 32)``. An empty tensor's is 0.

    Raises:
        ValueError: if a tensor is not on the CPU, or sparse.
        TypeError: for one tensor instead of a sequence, or an element that is no tensor.

    Source:
        RFC 3720, appendix B.4; ``crc32c::Value`` of TensorFlow.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> digits = torch.tensor(list(b"123456789"), dtype=torch.uint8)
        >>> [hex(crc) for crc in ops.crc32c([digits, digits[:0]]).tolist()]
        ['0xe3069283', '0x0']
    """
    if isinstance(buffers, Tensor):
        raise TypeError("crc32c: buffers must be a sequence of tensors, got one tensor")
    buffers = list(buffers)
    for position, buffer in enumerate(buffers):
        check_cpu("crc32c", f"buffers[{position}]", buffer)
    return _ops.crc32c.default(buffers) if buffers else torch.empty(0, dtype=torch.int64)


def to_byte_planes(x: Tensor) -> Tensor:
    """
    Put the lowest bytes of all elements side by side, then the next ones, and so on: they compress better then.

    Bytes of the same significance resemble each other: the high bytes of ids are mostly zeros, the high bytes of floats
    mostly the same few exponents. Not differentiable.

    Args:
        x: a tensor of any dtype and shape, on the CPU.

    Returns:
        ``[x.element_size(), x.numel()]``, uint8: plane k holds byte k, little endian, of every element.

    Raises:
        ValueError: if ``x`` is not on the CPU, or sparse.

    Source:
        The shuffle filter of HDF5 and Blosc.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> ops.to_byte_planes(torch.tensor([1, 2, 259], dtype=torch.int16))
        tensor([[1, 2, 3],
                [0, 0, 1]], dtype=torch.uint8)
    """
    check_cpu("to_byte_planes", "x", x)
    return _ops.to_byte_planes.default(x)


def from_byte_planes(planes: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Put the bytes of elements together again that ``to_byte_planes`` has set apart.

    Not differentiable.

    Args:
        planes: ``[bytes of an element, N]``, uint8, on the CPU.
        dtype: the elements' dtype, which must have as many bytes as there are planes.

    Returns:
        ``[N]``, of ``dtype``.

    Raises:
        ValueError: if ``planes`` is not a uint8 matrix on the CPU, or has another number of planes than ``dtype`` has
            bytes.

    Source:
        The shuffle filter of HDF5 and Blosc.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> planes = torch.tensor([[1, 2, 3], [0, 0, 1]], dtype=torch.uint8)
        >>> ops.from_byte_planes(planes, torch.int16)
        tensor([  1,   2, 259], dtype=torch.int16)
    """
    check_cpu("from_byte_planes", "planes", planes)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"from_byte_planes: dtype must be a torch.dtype, got {dtype!r}")
    if planes.dim() == 2 and planes.shape[0] != dtype.itemsize:
        raise ValueError(
            f"from_byte_planes: planes must have {dtype.itemsize} rows, the bytes of {dtype}, got {planes.shape[0]}"
        )
    return _ops.from_byte_planes.default(planes).view(dtype)


def join_byte_planes_(out: Tensor, sources: Sequence[Tensor], planes: Tensor, parts: Tensor) -> Tensor:
    """
    Join byte planes, which lie anywhere in some buffers, to the elements of many arrays at once, in place.

    Column files are decoded so. Not differentiable.

    Args:
        out: ``[B]``, uint8, on the CPU, contiguous, in none of the sources' memory. It receives the elements of all
            arrays, each array from the next multiple of 64 bytes on, with zeros between; bytes beyond them are not
            written. Its least size follows from ``parts``.
        sources: uint8 vectors, on the CPU.
        planes: ``[P, 3]``, int64, on the CPU: rows ``(source, start, bits)``: a plane's source, and where it begins
            there. With 8 bits the plane's bytes are stored. With 0 one byte is stored, which all of them equal. With 1
            to 7 bits all bytes are below ``2 ** bits`` and stored as bit planes, in ``bits * ceil(N / 8)`` bytes. Each
            block of 1,024 bytes, or of the rest, has ``M = ceil(block / 8)`` stored bytes for each bit. Bit q of the
            block's byte ``r * M + t`` is bit r of its stored byte ``q * M + t``.
        parts: ``[Q, 2]``, int64, on the CPU: rows ``(bytes of an element, N)``, one for each array. Its planes are the
            next rows of ``planes``, as many as an element has bytes: 1, 2, 4 or 8.

    Returns:
        ``out``.

    Raises:
        ValueError: for a wrong dtype, rank or device, or a plane that leaves its source. Also for another number of
            planes than the parts' elements have bytes, or an ``out`` that is too small or shares memory with another
            tensor.

    Source:
        The shuffle filter of HDF5 and Blosc.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> low, high = torch.tensor([1, 2, 3, 0], dtype=torch.uint8), torch.tensor([1], dtype=torch.uint8)
        >>> planes = torch.tensor([[0, 0, 8], [1, 0, 0]])
        >>> out = torch.empty(64, dtype=torch.uint8)
        >>> ops.join_byte_planes_(out, [low, high], planes, torch.tensor([[2, 3]]))[:6].view(torch.int16)
        tensor([257, 258, 259], dtype=torch.int16)
    """
    if isinstance(sources, Tensor):
        raise TypeError("join_byte_planes_: sources must be a sequence of tensors, got one tensor")
    check_cpu("join_byte_planes_", "out", out)
    for position, source in enumerate(sources):
        check_cpu("join_byte_planes_", f"sources[{position}]", source)
    check_cpu("join_byte_planes_", "planes", planes)
    check_cpu("join_byte_planes_", "parts", parts)
    _ops.join_byte_planes_.default(out, sources, planes, parts)
    return out


class FrameStatus(NamedTuple):
    """
    The place and the reason at which ``tfrecord_frames`` stopped.

    Attributes:
        fault: None if the bytes end with a record; ``"incomplete"`` if they end within one; ``"length_crc"`` or
            ``"data_crc"`` if a record does not fit its checksum.
        end: the byte after the last good record, where the fault is.
        needed: the number of bytes of the record at ``end``, its frame included, as far as it is known: 16 where its
            header is incomplete.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> ops.tfrecord_frames(torch.zeros(5, dtype=torch.uint8))[1]
        FrameStatus(fault='incomplete', end=0, needed=16)
    """

    fault: str | None
    end: int
    needed: int


def tfrecord_frames(bytes: Tensor, *, verify: bool = True) -> tuple[Tensor, FrameStatus]:
    """
    Find the records of a TFRecord file, or of a part of one that begins with a record.

    Not differentiable.

    Args:
        bytes: ``[M]``, uint8, on the CPU.
        verify: whether to compare the checksums of the records' lengths and of their data.

    Returns:
        ``(ranges, status)``: int64 ``[n, 2]``, where each whole record's data begin and end; and a
        :class:`FrameStatus`. The caller must judge the latter: the file may go on with the rest of an incomplete
        record.

    Raises:
        ValueError: if ``bytes`` is not a uint8 vector on the CPU.

    Source:
        ``tf.data.TFRecordDataset``; tensorflow/core/lib/io/record_reader.h.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> framed = ops.tfrecord_framed(torch.tensor(list(b"onetwo"), dtype=torch.uint8), torch.tensor([0, 3, 6]))
        >>> ops.tfrecord_frames(framed)
        (tensor([[12, 15],
                [31, 34]]), FrameStatus(fault=None, end=38, needed=0))
        >>> ops.tfrecord_frames(framed[:-1])[1]
        FrameStatus(fault='incomplete', end=19, needed=19)
    """
    check_cpu("tfrecord_frames", "bytes", bytes)
    ranges, status = _ops.tfrecord_frames.default(bytes, verify)
    fault, end, needed = status.tolist()
    return ranges, FrameStatus(_FAULTS[fault], end, needed)


def tfrecord_framed(bytes: Tensor, offsets: Tensor) -> Tensor:
    """
    Put byte strings into TFRecord's frames: length, checksum of the length, data, checksum of the data.

    Not differentiable.

    Args:
        bytes: ``[M]``, uint8, on the CPU.
        offsets: ``[n + 1]``, int64: record i is ``bytes[offsets[i]:offsets[i + 1]]``.

    Returns:
        uint8: the bytes of a TFRecord file with these records; files may be joined.

    Raises:
        ValueError: for a wrong dtype or rank, or offsets that decrease or leave ``[0, M]``.

    Source:
        ``tf.io.TFRecordWriter``; tensorflow/core/lib/io/record_writer.h.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> ops.tfrecord_framed(torch.tensor([65, 66], dtype=torch.uint8), torch.tensor([0, 2])).tolist()
        [2, 0, 0, 0, 0, 0, 0, 0, 120, 39, 11, 52, 65, 66, 0, 102, 88, 44]
    """
    check_cpu("tfrecord_framed", "bytes", bytes)
    check_cpu("tfrecord_framed", "offsets", offsets)
    return _ops.tfrecord_framed.default(bytes, offsets)


def check_cpu(operator: str, name: str, x: Tensor) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless x is a dense tensor on the CPU."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{operator}: {name} must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise ValueError(f"{operator}: {name} must be a dense tensor, got one of layout {x.layout}")
    if x.device.type != "cpu":
        raise ValueError(f"{operator}: {name} must be on the CPU, got {x.device}")


@torch.library.register_fake("torchsparse_rec::crc32c")
def _crc32c_fake(buffers: list[Tensor]) -> Tensor:
    return buffers[0].new_empty((len(buffers),), dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::to_byte_planes")
def _to_byte_planes_fake(x: Tensor) -> Tensor:
    return x.new_empty((x.element_size(), x.numel()), dtype=torch.uint8)


@torch.library.register_fake("torchsparse_rec::from_byte_planes")
def _from_byte_planes_fake(planes: Tensor) -> Tensor:
    return planes.new_empty((planes.numel(),))


@torch.library.register_fake("torchsparse_rec::tfrecord_frames")
def _tfrecord_frames_fake(bytes: Tensor, verify: bool) -> tuple[Tensor, Tensor]:
    records = torch.library.get_ctx().new_dynamic_size()
    return bytes.new_empty((records, 2), dtype=torch.int64), bytes.new_empty((3,), dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::tfrecord_framed")
def _tfrecord_framed_fake(bytes: Tensor, offsets: Tensor) -> Tensor:
    return bytes.new_empty((torch.library.get_ctx().new_dynamic_size(),))


without_result("join_byte_planes_")
not_differentiable("crc32c", "to_byte_planes", "from_byte_planes", "tfrecord_frames", "tfrecord_framed")
