"""Every check of csrc/embedding.h: the error names the argument, the value, its position and what was expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from devices import KERNELS
from ops.test_sparse_segment import ID_DTYPES, ITEMS, POSITIONS, VALUES_OUTSIDE, has, names
from pairs import in_pairs
from samples.sample import FLOATS
from torch import Tensor

from torchsparse_rec import ops

pytestmark = pytest.mark.usefixtures("kernels")

_ops = torch.ops.torchsparse_rec
TABLE = torch.ones(50, 3)
MODES = {"sum": 0, "mean": 1, "sqrtn": 2, "max": 3}
BAGS = 500


def long_indices(dtype: torch.dtype = torch.int64) -> Tensor:
    return (torch.arange(ITEMS) * 7 % 50).to(dtype)


def long_offsets(dtype: torch.dtype = torch.int64) -> Tensor:
    return (torch.arange(BAGS + 1) * ITEMS // BAGS).to(dtype)


def _per_id_backward(name: str) -> Callable:
    def call(indices: Tensor, offsets: Tensor) -> object:
        return getattr(_ops, name)(torch.ones(indices.shape[0], 3), indices, None, None, None, 50, 0, -1, False)

    return call


def _backward(name: str, mode: str) -> Callable:
    def call(indices: Tensor, offsets: Tensor) -> object:
        grad = torch.ones(offsets.shape[0] - 1, 3)
        argmax = torch.zeros(grad.shape, dtype=torch.int64) if mode == "max" else None
        return getattr(_ops, name)(grad, indices, offsets, None, argmax, 50, MODES[mode], -1, False)

    return call


def _bag(mode: str, weighted: bool = False) -> Callable:
    def call(indices: Tensor, offsets: Tensor) -> object:
        weights = torch.ones(indices.shape[0]) if weighted else None
        return ops.embedding_bag(TABLE, indices, offsets, mode=mode, per_sample_weights=weights)

    return call


def _weights_backward(indices: Tensor, offsets: Tensor) -> object:
    pooled, weights = torch.ones(offsets.shape[0] - 1, 3), torch.ones(indices.shape[0])
    return _ops.embedding_weights_backward(pooled, TABLE, indices, offsets, weights, pooled, 1, -1)


WITH_OFFSETS = {f"bag_{mode}": _bag(mode) for mode in MODES} | {"bag_weighted": _bag("sqrtn", weighted=True)}
WITH_OFFSETS |= {
    f"{kind}_backward_{mode}": _backward(f"embedding_{kind}_backward", mode)
    for kind in ("dense", "sparse")
    for mode in MODES
}
WITH_OFFSETS |= {"weights_backward": _weights_backward}
WITHOUT_OFFSETS = {
    "embedding": lambda indices, offsets: ops.embedding(TABLE, indices),
    "dense_backward": _per_id_backward("embedding_dense_backward"),
    "sparse_backward": _per_id_backward("embedding_sparse_backward"),
}
EVERY = WITH_OFFSETS | WITHOUT_OFFSETS

# ---- Bad values -----------------------------------------------------------------------------------------------------


@in_pairs(has, dtype=ID_DTYPES, value=VALUES_OUTSIDE, position=POSITIONS, name=EVERY, kernels=KERNELS)
def test_index_out_of_range(dtype: torch.dtype, value: int, position: int, name: str) -> None:
    indices = long_indices(dtype)
    indices[position] = value
    with pytest.raises(IndexError, match=names("indices", value, position)):
        EVERY[name](indices, long_offsets())


def test_position_in_ids_of_higher_rank_is_that_of_the_flat_ids() -> None:
    indices = torch.zeros(20, 30, dtype=torch.int64)
    indices[4, 7] = 61
    with pytest.raises(IndexError, match=names("indices", 61, 127)):
        ops.embedding(TABLE, indices)


@pytest.mark.parametrize("mode", MODES)
def test_padding_idx_excuses_only_itself(mode: str) -> None:
    indices = torch.tensor([4, 4, 77])
    with pytest.raises(IndexError, match=names("indices", 77, 2)):
        ops.embedding_bag(TABLE, indices, torch.tensor([0, 3]), mode=mode, padding_idx=4)
    with pytest.raises(IndexError, match=names("indices", -1, 0)):
        ops.embedding_bag(TABLE, torch.tensor([-1]), torch.tensor([0, 1]), mode=mode)


# By position.
BAD_OFFSETS = [(0, 1), (0, -1), (1, -2), (1, ITEMS + 9), (231, 3), (231, -7), (231, 2**31 - 1), (BAGS, ITEMS - 6)]


@in_pairs(bad=BAD_OFFSETS, name=WITH_OFFSETS, dtype=ID_DTYPES, kernels=KERNELS)
def test_bad_offsets(bad: tuple[int, int], name: str, dtype: torch.dtype) -> None:
    offsets, (position, value) = long_offsets(dtype), bad
    offsets[position] = value
    with pytest.raises(ValueError, match=r"offsets") as error:
        WITH_OFFSETS[name](long_indices(), offsets)
    # A value that is too large may be noticed by the decrease after it, which the message then names.
    places = {position, position + 1}
    assert any(f"{place}" in str(error.value) for place in places)
    values = {value, int(offsets[min(position + 1, BAGS)]), ITEMS}
    assert any(f"{number}" in str(error.value) for number in values)


@pytest.mark.parametrize("name", WITH_OFFSETS)
def test_offsets_must_end_at_the_number_of_ids(name: str) -> None:
    for end in (ITEMS - 1, ITEMS + 1):
        offsets = long_offsets()
        offsets[-1] = end
        with pytest.raises(ValueError, match=rf"(?=.*offsets)(?=.*(?<!\d){end}(?!\d))(?=.*(?<!\d){ITEMS}(?!\d))"):
            WITH_OFFSETS[name](long_indices(), offsets)


@in_pairs(mode=["sum", "mean", "sqrtn"], position=POSITIONS, dtype=FLOATS, kernels=KERNELS)
def test_nan_weights(mode: str, position: int, dtype: torch.dtype) -> None:
    weights = torch.ones(ITEMS, dtype=dtype)
    weights[position] = torch.nan
    with pytest.raises(ValueError, match=rf"(?i)(?=.*per_sample_weights)(?=.*nan)(?=.*(?<!\d){position}(?!\d))"):
        ops.embedding_bag(TABLE.to(dtype), long_indices(), long_offsets(), per_sample_weights=weights, mode=mode)


# ---- Bad shapes, dtypes and arguments -------------------------------------------------------------------------------

INDICES, OFFSETS, WEIGHTS = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 2, 4]), torch.ones(4)
TABLE_CHECKS = [
    (dict(weight=TABLE.int()), "weight must be float16, bfloat16, float32 or float64, got Int"),
    (dict(weight=TABLE[0]), r"weight must have rank 2, got shape \[3\]"),
    (dict(weight=TABLE[None]), r"weight must have rank 2, got shape \[1, 50, 3\]"),
    (dict(indices=INDICES.float()), "indices must be int32 or int64, got Float"),
    (dict(indices=INDICES.to(torch.uint8)), "indices must be int32 or int64, got Byte"),
]
BAG_CHECKS = [
    (dict(padding_idx=51), "padding_idx must be <= 50, got 51"),
    (dict(indices=INDICES.reshape(2, 2)), r"indices must have rank 1, got shape \[2, 2\]"),
    (dict(offsets=OFFSETS.reshape(2, 2)), r"offsets must have rank 1, got shape \[2, 2\]"),
    (dict(offsets=OFFSETS.double()), "offsets must be int32 or int64, got Double"),
    (dict(per_sample_weights=WEIGHTS[:3]), "per_sample_weights must have the length of indices, 4, got 3"),
    (dict(per_sample_weights=WEIGHTS.reshape(2, 2)), r"per_sample_weights must have rank 1, got shape \[2, 2\]"),
    (
        dict(per_sample_weights=WEIGHTS.double()),
        "per_sample_weights must have the dtype of weight, Float, got Double",
    ),
    (dict(per_sample_weights=WEIGHTS, mode="max"), "per_sample_weights must be None in mode max"),
]


@pytest.mark.parametrize(("wrong", "text"), TABLE_CHECKS)
def test_embedding_checks(wrong: dict, text: str) -> None:
    with pytest.raises(ValueError, match=f"embedding: {text}"):
        ops.embedding(**dict(weight=TABLE, indices=INDICES) | wrong)


@pytest.mark.parametrize(("wrong", "text"), TABLE_CHECKS + BAG_CHECKS)
def test_embedding_bag_checks(wrong: dict, text: str) -> None:
    with pytest.raises(ValueError, match=f"embedding_bag: {text}"):
        ops.embedding_bag(**dict(weight=TABLE, indices=INDICES, offsets=OFFSETS) | wrong)


def test_arguments_of_the_public_functions() -> None:
    with pytest.raises(ValueError, match="embedding: padding_idx must be < 50, got 50"):
        ops.embedding(TABLE, INDICES, padding_idx=50)
    with pytest.raises(ValueError, match="padding_idx must be None or >= 0, got -2"):
        ops.embedding(TABLE, INDICES, padding_idx=-2)
    with pytest.raises(ValueError, match="padding_idx must be None or >= 0, got -1"):
        ops.embedding_bag(TABLE, INDICES, OFFSETS, padding_idx=-1)
    with pytest.raises(ValueError, match="mode must be one of 'sum', 'mean', .*, got 'prod'"):
        ops.embedding_bag(TABLE, INDICES, OFFSETS, mode="prod")
    with pytest.raises(ValueError, match=r"reduction must be in \[0, 4\], got 5"):
        _ops.embedding_bag(TABLE, INDICES, OFFSETS, None, 5, -1, False, False)


BACKWARD = dict(
    grad=torch.ones(3, 2),
    indices=INDICES,
    offsets=OFFSETS,
    per_sample_weights=None,
    argmax=None,
    num_embeddings=5,
    mode=0,
    padding_idx=-1,
    scale_grad_by_freq=False,
)
ARGMAX = torch.zeros(3, 2, dtype=torch.int64)
# Both kinds of kernels share these checks.
BACKWARD_CHECKS = {
    "grad must be float16, bfloat16, float32 or float64, got Int": dict(grad=torch.ones(3, 2).int()),
    r"grad must have rank 2, got shape \[3\]": dict(grad=torch.ones(3)),
    "grad must have one row per bag, 3, got 4": dict(grad=torch.ones(4, 2)),
    "grad must have one row per bag, 4, got 3": dict(grad=torch.ones(3, 2), offsets=None),
    r"indices must have rank 1, got shape \[2, 2\]": dict(indices=INDICES.reshape(2, 2)),
    "indices must be int32 or int64, got Float": dict(indices=INDICES.float()),
    "offsets must have one element more than there are bags, got none": dict(offsets=OFFSETS[:0]),
    "per_sample_weights must have the length of indices, 4, got 3": dict(per_sample_weights=WEIGHTS[:3]),
    "per_sample_weights must have the dtype of grad, Float, got Half": dict(per_sample_weights=WEIGHTS.half()),
    "num_embeddings must be >= 0, got -1": dict(num_embeddings=-1),
    "padding_idx must be <= 5, got 6": dict(padding_idx=6),
    r"reduction must be in \[0, 4\], got 5": dict(mode=5),
    r"reduction must be in \[0, 4\], got -1": dict(mode=-1),
    "mode max needs offsets and argmax, and takes no per_sample_weights": dict(mode=3),
    "mode min needs offsets and argmax": dict(mode=4, argmax=ARGMAX, per_sample_weights=WEIGHTS),
    r"argmax must be int64 of grad's shape \[3, 2\], got \[2, 2\]": dict(mode=3, argmax=ARGMAX[:2]),
    r"argmax must be int64 of grad's shape \[3, 2\], got": dict(mode=3, argmax=ARGMAX.int()),
    "without offsets, mode must be sum": dict(mode=1, offsets=None, grad=torch.ones(4, 2)),
    "without offsets, .*weights None": dict(per_sample_weights=WEIGHTS, offsets=None, grad=torch.ones(4, 2)),
}


@in_pairs(text=BACKWARD_CHECKS, name=["embedding_dense_backward", "embedding_sparse_backward"], kernels=KERNELS)
def test_backward_checks(text: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"embedding_backward: {text}"):
        getattr(_ops, name).default(*(BACKWARD | BACKWARD_CHECKS[text]).values())


WEIGHTS_BACKWARD = dict(
    grad=torch.ones(3, 3),
    weight=TABLE,
    indices=INDICES,
    offsets=OFFSETS,
    per_sample_weights=WEIGHTS,
    output=torch.ones(3, 3),
    mode=1,
    padding_idx=-1,
)
POOLED = r"grad and output must have shape \[3, 3\] and the dtype of weight, got"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (dict(weight=TABLE.int()), "weight must be float16, bfloat16, float32 or float64, got Int"),
        (dict(weight=TABLE[0]), r"weight must have rank 2, got shape \[3\]"),
        (dict(indices=INDICES.reshape(2, 2)), r"indices must have rank 1, got shape \[2, 2\]"),
        (dict(offsets=OFFSETS.float()), "offsets must be int32 or int64, got Float"),
        (dict(per_sample_weights=WEIGHTS[:3]), "per_sample_weights must have the length of indices, 4, got 3"),
        (dict(grad=torch.ones(2, 3)), rf"{POOLED} \[2, 3\]"),
        (dict(grad=torch.ones(3, 4)), rf"{POOLED} \[3, 4\]"),
        (dict(grad=torch.ones(9)), rf"{POOLED} \[9\]"),
        (dict(output=torch.ones(3, 2)), rf"{POOLED} \[3, 2\]"),
        (dict(output=torch.ones(3, 3).half()), POOLED),
        (dict(mode=3), r"reduction must be in \[0, 2\], got 3"),
        (dict(padding_idx=51), "padding_idx must be <= 50, got 51"),
    ],
)
def test_weights_backward_checks(wrong: dict, text: str) -> None:
    with pytest.raises(ValueError, match=f"embedding_weights_backward: {text}"):
        _ops.embedding_weights_backward.default(*(WEIGHTS_BACKWARD | wrong).values())
