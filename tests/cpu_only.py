"""The operators to which not every rule of operators applies, and why: the lists that the tests of these rules read."""

from __future__ import annotations

_FILES = "reads or writes what is in files, and a file's bytes are in the host's memory"
_DRAWS = "draws one id after the other, some thousand for a batch"

_OF_FILES = [
    "crc32c",
    "to_byte_planes",
    "from_byte_planes",
    "join_byte_planes_",
    "tfrecord_frames",
    "tfrecord_framed",
    "parse_examples",
    "encode_examples",
]
CPU_ONLY = dict.fromkeys(_OF_FILES, _FILES) | dict.fromkeys(["candidates_", "candidates_unigrams"], _DRAWS)

# Operators that stand for others, by the number of a plan: no compiler, transform or mode sees what that is.
PLANNED = {
    "collection_plan",
    "collection_plan_free",
    "planned_collection",
    "planned_collection_current",
    "planned_collection_update_",
}
