"""The operators that have no CUDA kernel, and why: the one list that the tests of registrations read."""

from __future__ import annotations

_FILES = "reads or writes what is in files, and a file's bytes are in the host's memory"

CPU_ONLY = dict.fromkeys(
    [
        "crc32c",
        "to_byte_planes",
        "from_byte_planes",
        "join_byte_planes_",
        "tfrecord_frames",
        "tfrecord_framed",
        "parse_examples",
        "encode_examples",
    ],
    _FILES,
)
