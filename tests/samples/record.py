"""
A sample of each operator of the family ``record``, none of which has a CUDA kernel.

They are no part of :mod:`samples.operators`, whose samples run on all devices; their references are in
tests/ops/test_record*.py.
"""

from __future__ import annotations

import torch
from samples.sample import Sample
from torch import Tensor

from torchsparse_rec import ops

_NONE, _NO_BYTES = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8)
_COLUMNS = {"a": ops.ExampleColumn("int64", 2), "b": ops.ExampleColumn("bytes", None)}
_TEXT = torch.tensor([*b"xyz"], dtype=torch.uint8)
_ENDS = torch.tensor([0, 1, 3])
# Names, dtypes and sizes of the columns, as encode_examples and parse_examples take them.
_LAYOUT = (torch.tensor([*b"ab"], dtype=torch.uint8), torch.tensor([0, 1, 2]), [0, 3], [2, -1])
_VALUES: list[Tensor] = [torch.arange(4), _NONE, _NONE, _NO_BYTES, _TEXT, _ENDS, torch.tensor([0, 1, 2]), _NO_BYTES]
_MESSAGES, _OFFSETS = ops.encode_examples(
    {"a": ops.ExampleValues(_VALUES[0]), "b": ops.ExampleValues(_TEXT, _ENDS, _VALUES[6])}, _COLUMNS, 2
)
_RANGES = torch.stack([_OFFSETS[:-1], _OFFSETS[1:]], 1)
_PLANES = torch.arange(18, dtype=torch.uint8).view(2, 9)

_CALLS: dict[str, tuple] = {
    "crc32c": ([_TEXT, _NO_BYTES],),
    "to_byte_planes": (torch.arange(5),),
    "from_byte_planes": (_PLANES,),
    "join_byte_planes_": (
        torch.zeros(64, dtype=torch.uint8),
        [*_PLANES],
        torch.tensor([[0, 0, 8], [1, 0, 8]]),
        torch.tensor([[2, 9]]),
    ),
    "tfrecord_frames": (ops.tfrecord_framed(_TEXT, _ENDS), True),
    "tfrecord_framed": (_TEXT, _ENDS),
    "parse_examples": (_MESSAGES, _RANGES, *_LAYOUT, [1, 2], [torch.tensor([7, 8]), _NONE, _NO_BYTES, _NONE]),
    "encode_examples": (*_LAYOUT, _VALUES, 2),
}
RECORD_SAMPLES = {name: [Sample(name, "by_hand", arguments, representative=True)] for name, arguments in _CALLS.items()}
