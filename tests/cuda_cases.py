"""
Shared by the tests of CUDA's behaviour: calls of every operator at sizes that use many blocks.

Nothing here needs a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from calls import written
from samples.large import LARGE_SAMPLES, _bag, _segment
from samples.large_sizes import SIZES, Build, Size
from samples.read_backs import READ_BACKS
from samples.sample import LAST_SEGMENT, Sample
from torch import Tensor

from torchsparse_rec.compat._parity.reference import SUM

DEVICE = "cuda"


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Let torch warn of calls that wait for the device, or raise a RuntimeError, as ``mode`` says."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- Cases ----------------------------------------------------------------------------------------------------------

# Sizes with popular rows, long bags, one row for all ids, and wide rows.
_CHOSEN = (
    Size(1, 50_000, 7, 17, index=torch.int32),
    Size(100_000, 300_000, 30_000, 8, spread="zipf"),
    Size(100_000, 65_537, 5_000, 9, spread="zipf", dtype=torch.bfloat16),
    Size(5_000, 30_000, 6_000, 64, spread="one"),
    Size(1_000, 5_000, 1_000, 512, spread="zipf"),
)
assert set(_CHOSEN) <= set(SIZES)
_PARTS = [f"-{size}-" for size in _CHOSEN] + ["-200000_from_", "-20000_to_", "_hashed-", "row_optimizer_", "_keys"]
_PARTS += [
    "embedding_collection_current-",
    "embedding_collection_update_-",
    "route-",
    "quantized_embedding",
    "column_ids-",
    "scores_",
]
CASES = [build for build in LARGE_SAMPLES if any(part in build.name for part in _PARTS)]
# With num_segments, as here, the reductions read nothing back.
STATIC_CASES = [build for build in CASES if READ_BACKS.get(build.name.split("-")[0]) in (None, LAST_SEGMENT)]
READ_BACK_CASES = [build for build in CASES if build not in STATIC_CASES]

# A row per lookup would take ten times the memory of everything else.
WIDE = Size(10_000, 65_536, 3_000, 512)
WIDE_CASES = [
    Build(f"{operator}-wide", lambda operator=operator: _wide(operator))
    for operator in (
        "sparse_segment_reduce",
        "sparse_segment_reduce_grad",
        "sparse_segment_reduce_grad_v2",
        "embedding_bag",
        "embedding_dense_backward",
        "embedding_sparse_backward",
        "embedding_coo_backward",
        "embedding_weights_backward",
    )
]


def _wide(operator: str) -> Sample:
    if "segment" in operator:
        return _segment(operator, WIDE, SUM)
    return _bag(operator, WIDE, SUM, weighted=operator == "embedding_weights_backward")


def inputs(sample: Sample) -> list[int]:
    """Return the positions of the tensors that the operator only reads."""
    outputs = written(sample.operator)
    return [i for i, x in enumerate(sample.arguments) if isinstance(x, Tensor) and i not in outputs]


def input_tensors(sample: Sample) -> list[Tensor]:
    """Return the tensors that the operator only reads, including those in lists."""
    outputs = written(sample.operator)
    given = [x if isinstance(x, list) else [x] for i, x in enumerate(sample.arguments) if i not in outputs]
    return [x for items in given for x in items if isinstance(x, Tensor)]


def overwrite(target: Sample, source: Sample) -> None:
    """Copy the inputs of one call into those of another, in place."""
    for x, y in zip(input_tensors(target), input_tensors(source), strict=True):
        x.copy_(y)


def blank(sample: Sample) -> Sample:
    """Return the same call with zeros for inputs: harmless ids, and wrong results if they are used."""
    zeros = sample.map_tensors(torch.zeros_like).arguments
    outputs = written(sample.operator)
    return replace(sample, arguments=tuple(x if i in outputs else zeros[i] for i, x in enumerate(sample.arguments)))


def mirrored(sample: Sample) -> Sample:
    """Return a call of the same sizes with other values: every input reversed, and numbers negated."""
    names = [
        argument.name for argument in getattr(torch.ops.torchsparse_rec, sample.operator).default._schema.arguments
    ]
    entries = dict(zip(names, sample.arguments, strict=False)).get("indices")  # defaults may be missing
    changed = list(sample.arguments)
    for i in inputs(sample):
        x = changed[i]
        backwards = x.flip(0)
        if names[i] in ("offsets", "segment_ids", "row_ids") and len(x) and "unsorted" not in sample.operator:
            backwards = x[0] + x[-1] - backwards
        if names[i] == "indices" and "weights" in names and "tables" in names:
            # Reversed ids may belong to another table: keep to ids that all tables have.
            backwards = backwards % min(len(table) for table in sample.arguments[names.index("weights")])
        if names[i] == "argmax":
            backwards = torch.where(backwards < 0, backwards, len(entries) - 1 - backwards)
        changed[i] = -backwards if x.is_floating_point() else backwards
    if "values" in names and isinstance(changed[names.index("values")], list):
        changed[names.index("values")] = [-x for x in changed[names.index("values")]]
    if "columns" in names:
        changed[names.index("columns")] = [x.flip(0) for x in changed[names.index("columns")]]
    return replace(sample, arguments=tuple(changed))
