"""Every check of csrc/embedding_collection.h: the error names argument, value, position, and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import KERNELS, cpu_only
from pairs import in_pairs
from samples.embedding_collection import Collection, random_collection
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import MAX, MEAN, SQRTN, SUM
from torchsparse_rec.ops.row_optimizer_rules import OPTIMIZER_RULES

pytestmark = pytest.mark.usefixtures("kernels")

_ops = torch.ops.torchsparse_rec
SGD = (0, [0.5, 0.0, 0.0, 0.0, 0.0])
MOMENTUM = (0, [0.5, 0.5, 0.0, 0.0, 0.0])


def usual(**changes: Any) -> Collection:
    """Return three lookups of two tables, of 9 and 12 rows."""
    x = random_collection(
        "",
        rows=(9, 12),
        dims=(3, 2),
        tables=(0, 1, 0),
        keys=(0, 1, 2),
        bags=(4, 4, 4),
        padding_idx=(-1, -1),
        weighted=True,
        seed=3,
    )
    return replace(x, **changes)


def forward(x: Collection) -> Any:
    return _ops.embedding_collection.default(x.weights, *x.inputs, *x.lists, False)


def current(x: Collection) -> Any:
    zeros = [torch.zeros_like(weight) for weight in x.weights]
    last_steps = [torch.zeros(weight.shape[0], dtype=torch.int32) for weight in x.weights]
    tables = (x.weights, zeros, last_steps, torch.zeros(2, 8, dtype=torch.float64))
    return _ops.embedding_collection_current.default(*tables, *x.inputs, *x.lists, *MOMENTUM, 0, 0)


def backward(name: str) -> Callable[[Collection], Any]:
    operator = getattr(_ops, name).default
    return lambda x: operator(x.grad, *x.inputs, x.argmax(), *x.sizes, *x.lists, x.wanted)


def of_weights(x: Collection) -> Any:
    tables = (x.weights, [], [], None)
    return _ops.embedding_collection_weights_backward.default(x.grad, *tables, *x.inputs, x.grad, *x.lists, 0, [], 0, 0)


def update(x: Collection) -> Any:
    step = (None, *SGD, 1, 0, False, [])
    inputs = (x.grad, *x.inputs, x.argmax(), *x.lists, x.wanted)
    return _ops.embedding_collection_update_.default(x.weights, [], [], None, *inputs, *step)


READERS: dict[str, Callable[[Collection], Any]] = {
    "embedding_collection": forward,
    "embedding_collection_current": current,
    "embedding_collection_weights_backward": of_weights,
    "embedding_collection_update_": update,
}
BACKWARDS = {
    name: backward(name) for name in (f"embedding_collection_{kind}_backward" for kind in ("dense", "sparse", "coo"))
}
EVERY = READERS | BACKWARDS
of_every = pytest.mark.parametrize("name", EVERY)


def refused(name: str, x: Collection, message: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=re.escape(f"{name}: {message}")):
        EVERY[name](x)


# ---- Ids and weights ------------------------------------------------------------------------------------------------


def first_of(x: Collection, key: int) -> int:
    """Return the position of a key's first id."""
    assert x.offsets is not None
    return int(x.offsets[sum(x.bags[:key])])


@in_pairs(name=EVERY, key=(0, 1, 2), beyond=(0, -1, 1000), kernels=KERNELS)
def test_index_out_of_range(name: str, key: int, beyond: int) -> None:
    """Name the first id that is outside its own table."""
    x, rows = usual(), (9, 12, 9)[key]
    position, value = first_of(x, key), rows + beyond if beyond >= 0 else beyond
    x.indices[position] = value
    x.indices[-1] = 10**6
    refused(name, x, f"indices[{position}] must be in [0, {rows}), got {value}", IndexError)


@cpu_only
@pytest.mark.parametrize("key", [0, 1, 2])
def test_an_update_with_a_bad_id_writes_nothing(key: int) -> None:
    """Write nothing on the CPU; on CUDA, which does not wait for the check, only the bad id is left out."""
    x = usual()
    x.indices[first_of(x, key)] = 99
    before = [weight.clone() for weight in x.weights]
    with pytest.raises(IndexError):
        update(x)
    assert all(torch.equal(weight, kept) for weight, kept in zip(x.weights, before, strict=True))


@of_every
def test_an_id_may_suit_one_table_only(name: str) -> None:
    x = usual(tables=[1, 0, 0], keys=[0, 0, 2], bags=[4, 0, 8], side_by_side=False)
    x = replace(x, grad=torch.ones(4 * 2 + 4 * 3 + 8 * 3))
    x.indices[0] = 10
    refused(name, x, "indices[0] must be in [0, 9), got 10", IndexError)


@pytest.mark.parametrize("name", EVERY)
def test_ids_of_keys_without_lookups_are_not_looked_at(name: str) -> None:
    x = usual(tables=[0], keys=[0], modes=[SUM], grad=torch.ones(4, 3))
    x.indices[first_of(x, 1) :] = -5
    EVERY[name](x)


@pytest.mark.parametrize("name", ["embedding_collection", "embedding_collection_current"])
def test_nan_weights(name: str) -> None:
    x = usual()
    assert x.per_sample_weights is not None
    x.per_sample_weights[5:] = torch.nan
    refused(name, x, "per_sample_weights[5] must be a number, got nan")


# ---- Lists ----------------------------------------------------------------------------------------------------------

LISTS = {
    "no_lookups": ({"tables": [], "keys": [], "modes": []}, "tables must hold at least one lookup's table, got none"),
    "keys": ({"keys": [0, 1]}, "keys must have one entry for each lookup, 3, got 2"),
    "modes": ({"modes": [0, 1, 0, 1]}, "modes must have one entry for each lookup, 3, got 4"),
    "padding_idx": ({"padding_idx": [-1]}, "padding_idx must have one entry for each table, 2, got 1"),
    "padding_value": ({"padding_idx": [9, 13]}, "padding_idx[1] must be <= 12, got 13"),
    "negative_bags": ({"bags": [4, -1, 4]}, "bags[1] must be >= 0, got -1"),
    "sum_of_bags": ({"bags": [4, 4, 4, 1]}, "bags must add up to the bags of offsets, 12, got 13"),
    "far_too_many_bags": (
        {"bags": [4, 4, 4, *[2**62] * 4]},  # their sum overflows to 12 in 64 bits
        f"bags must add up to less than 2^63, got {2**62} in bags[4] after {2**62 + 12}",
    ),
    "unequal_bags": (
        {"bags": [4, 3, 5]},
        "side by side, every key must have as many bags as keys[0], 4, got 3 of keys[1]",
    ),
    "table": ({"tables": [0, 2, 0]}, "tables[1] must be in [0, 2), got 2"),
    "negative_table": ({"tables": [-1, 0, 0]}, "tables[0] must be in [0, 2), got -1"),
    "key": ({"keys": [0, 1, 3]}, "keys[2] must be in [0, 3), got 3"),
    "mode": ({"modes": [0, 5, 0]}, "modes[1] must be in [0, 5), got 5"),
    "weights_with_max": ({"modes": [0, MAX, 0]}, "per_sample_weights must be None with mode max, which modes[1] is"),
    "weights_without_offsets": (
        {"offsets": None, "bags": [12, 12, 12], "indices": torch.zeros(36, dtype=torch.int64)},
        "per_sample_weights must have the length of indices, 36, got",
    ),
}


# Both kinds of kernels share these checks.
@in_pairs(name=EVERY, case=LISTS, kernels=KERNELS)
def test_lists(name: str, case: str) -> None:
    changes, message = LISTS[case]
    refused(name, usual(**changes), message)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "embedding_collection_weights_backward"])
def test_without_offsets(name: str) -> None:
    x = usual(offsets=None, indices=torch.zeros(12, dtype=torch.int64), per_sample_weights=None)
    refused(name, replace(x, modes=[SUM, MEAN, SUM]), "without offsets, modes must be sum, got 1 in modes[1]")
    short = replace(x, indices=torch.zeros(11, dtype=torch.int64))
    refused(name, short, "without offsets, bags must add up to the number of indices, 11, got 12")
    weighted = replace(x, per_sample_weights=torch.ones(12), modes=[SUM] * 3)
    refused(name, weighted, "without offsets, per_sample_weights must be None")


# ---- Tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READERS)
def test_tables(name: str) -> None:
    x = usual()
    one, other = x.weights
    refused(name, replace(x, weights=[one, torch.ones(12)]), "weights[1] must have rank 2, got shape [12]")
    refused(name, replace(x, weights=[one, other.double()]), "weights[1] must have the dtype of weights[0], Float")
    refused(name, replace(x, weights=[one.int(), other]), "weights must be float16, bfloat16, float32 or float64")


def test_no_tables() -> None:
    with pytest.raises(ValueError, match="embedding_collection: weights must hold at least one table, got none"):
        forward(usual(weights=[]))


@of_every
def test_offsets(name: str) -> None:
    x = usual()
    assert x.offsets is not None
    refused(name, replace(x, offsets=x.offsets.clone().index_fill_(0, torch.tensor([0]), 1)), "offsets")
    refused(name, replace(x, indices=x.indices.float()), "indices must be int32 or int64, got Float")
    refused(name, replace(x, offsets=x.offsets.float()), "offsets must be int32 or int64, got Float")
    refused(name, replace(x, per_sample_weights=torch.ones(x.indices.shape, dtype=torch.float64)), "per_sample_weights")


@pytest.mark.parametrize("name", [*BACKWARDS, "embedding_collection_weights_backward", "embedding_collection_update_"])
def test_gradients_shape(name: str) -> None:
    x = usual()
    refused(name, replace(x, grad=torch.ones(4, 7)), "grad must have the shape of the output, [4, 8], got [4, 7]")
    flat = replace(x, side_by_side=False)
    refused(name, flat, "grad must have the shape of the output, [32], got [4, 8]")


@pytest.mark.parametrize("name", [*BACKWARDS, "embedding_collection_update_"])
def test_argmax(name: str) -> None:
    x = usual(per_sample_weights=None, modes=[MAX, SUM, SQRTN])

    class Other(Collection):
        """A collection whose ``argmax`` returns what a test sets."""

        wrong: Tensor | None = None

        def argmax(self, weights: list[Tensor] | None = None) -> Tensor | None:
            return self.wrong

    for wrong, got in ((None, "None"), (torch.zeros(11), "Float of shape [11]")):
        Other.wrong = wrong
        refused(name, Other(**vars(x)), f"for these modes, argmax must be int64 of shape [12], got {got}")


@pytest.mark.parametrize("name", BACKWARDS)
def test_backward_lists(name: str) -> None:
    refused(name, usual(wanted=[True]), "num_embeddings, dims and wanted must have one entry for each table, got 2, 2")


def test_sizes_beyond_64_bits() -> None:
    """Look up tables without rows, which may have any number of columns."""
    x = usual(weights=[torch.empty(0, 2**62)] * 2, indices=torch.empty(0, dtype=torch.int64), per_sample_weights=None)
    message = f"the lookups must have less than 2^63 columns, got {2**62} before the {2**62} of tables[1]"
    refused("embedding_collection", replace(x, offsets=torch.zeros(13, dtype=torch.int64)), message)
    one = replace(x, tables=[0], keys=[0], modes=[SUM], bags=[4], offsets=torch.zeros(5, dtype=torch.int64))
    message = f"the output must have less than 2^63 elements, got 0 before the 4 bags of {2**62} columns of tables[0]"
    refused("embedding_collection", one, message)


def test_a_coo_gradient_of_too_large_a_table() -> None:
    """Refuse a table of which torch could not count the elements; strided gradients of its rows can be had."""
    lists = ([2, 2**61], [1, 4], [0, 1], [0, 1], [SUM, SUM], [1, 1], [-1, -1], True, [True, True])
    inputs = (torch.ones(1, 5), torch.tensor([1, 7]), None, None, None, *lists)
    assert _ops.embedding_collection_sparse_backward.default(*inputs)[1][1].tolist() == [7]
    message = f"num_embeddings[1] must be such that the table has less than 2^63 elements, got {2**61} rows of 4"
    with pytest.raises(ValueError, match=re.escape(f"embedding_collection_coo_backward: {message}")):
        _ops.embedding_collection_coo_backward.default(*inputs)


def test_an_update_shares_no_memory() -> None:
    """Refuse shared memory: the update reads its arguments while it writes the tables."""
    x = usual(tables=[0], keys=[0], modes=[SUM], bags=[9])
    x = replace(x, grad=x.weights[0], offsets=torch.arange(10), per_sample_weights=None, indices=x.indices[:9])
    x.indices.fill_(1)
    refused("embedding_collection_update_", x, "grad must not share memory with weights[0]")
    weights = x.weights[1].view(-1)[:9]
    x = replace(x, grad=torch.ones(9, 3), per_sample_weights=weights)
    refused("embedding_collection_update_", x, "per_sample_weights must not share memory with weights[1]")
    x = replace(x, weights=[x.weights[0], x.weights[0]], per_sample_weights=None)
    refused("embedding_collection_update_", x, "weights[1] must not share memory with weights[0]")
    update(replace(x, wanted=[True, False]))


@cpu_only
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("on_meta", [0, 1])
def test_one_table_on_meta(name: str, on_meta: int) -> None:
    """Put one table on meta: even one makes torch call the fake kernel."""
    x = usual()
    x = replace(x, weights=[weight.to("meta") if k == on_meta else weight for k, weight in enumerate(x.weights)])
    devices = ("cpu", "meta") if on_meta else ("meta", "cpu")
    message = "weights[1] must be on the device of weights[0], {}, got {}".format(*devices)
    refused(name, x, message)


def test_update_lists() -> None:
    refused("embedding_collection_update_", usual(wanted=[True]), "wanted must have one entry for each table, 2, got 1")


# ---- Optimizers -----------------------------------------------------------------------------------------------------


def stepped(message: str, kind: type[Exception] = ValueError, **changes: Any) -> None:
    """Check that an update is refused for its optimizer's arguments."""
    x = usual()
    given = {
        "states": [torch.zeros_like(weight) for weight in x.weights],
        "last_steps": [torch.zeros(weight.shape[0], dtype=torch.int32) for weight in x.weights],
        "history": torch.zeros(8, 8, dtype=torch.float64),
        "wanted": [True, True],
        "grad_scale": None,
        "rule": MOMENTUM[0],
        "hyperparameters": MOMENTUM[1],
        "step": 4,
        "base": 1,
        "seeds": [],
    } | changes
    before = [weight.clone() for weight in x.weights]
    inputs = (x.grad, *x.inputs, None, *x.lists, given["wanted"], given["grad_scale"])
    with pytest.raises(kind, match=re.escape(f"embedding_collection_update_: {message}")):
        _ops.embedding_collection_update_.default(
            *(x.weights, given["states"], given["last_steps"], given["history"], *inputs),
            *(given["rule"], given["hyperparameters"], given["step"], given["base"], False, given["seeds"]),
        )
    assert all(torch.equal(weight, kept) for weight, kept in zip(x.weights, before, strict=True))


def test_optimizers() -> None:
    stepped(f"rule must be in [0, {len(OPTIMIZER_RULES)}), got 99", rule=99)
    stepped("hyperparameters must be 5 for sgd, got 1", hyperparameters=[0.5])
    stepped("step must be in [base + 1, base + 2^31), got 1 with base 1", step=1)
    stepped("states must be 1 for each of the 2 tables, got 1", states=[torch.zeros(9, 3)])
    stepped("states must be 1 for each of the 1 tables, got 2", wanted=[False, True])
    stepped("last_steps must be none, or one for each of the 2 tables, got 1", last_steps=[torch.zeros(9).int()])
    stepped("history must be given with last_steps, got None", history=None)
    stepped("history must have shape [at least 4, 8], got [3, 8]", history=torch.zeros(3, 8, dtype=torch.float64))
    stepped("grad_scale must have one element, got shape [2]", grad_scale=torch.ones(2))
    stepped("rounding_seeds must be none, or one for each of the 2 tables, got 1", seeds=[1])


def test_current_lookups() -> None:
    x = usual()
    zeros = [torch.zeros_like(weight) for weight in x.weights]
    last_steps = [torch.zeros(weight.shape[0], dtype=torch.int32) for weight in x.weights]
    history = torch.zeros(8, 8, dtype=torch.float64)

    def call(states: list[Tensor], last: list[Tensor], message: str, step: int = 3) -> None:
        with pytest.raises(ValueError, match=re.escape(f"embedding_collection_current: {message}")):
            _ops.embedding_collection_current.default(
                x.weights, states, last, history, *x.inputs, *x.lists, *MOMENTUM, step, 1
            )

    call(zeros[:1], last_steps, "states must be 1 for each of the 2 tables, got 1")
    call(zeros, [], "last_steps must be one for each of the 2 tables, got 0")
    call(zeros, last_steps, "step must be in [base + 0, base + 2^31), got 0 with base 1", step=0)
    call(zeros, last_steps, "history must have shape [at least 10, 8], got [8, 8]", step=6)


def test_states_without_history() -> None:
    x = usual()
    zeros = [torch.zeros_like(weight) for weight in x.weights]
    with pytest.raises(ValueError, match="without history, states and last_steps must be none, got 2 and 0"):
        _ops.embedding_collection_weights_backward.default(
            x.grad, x.weights, zeros, [], None, *x.inputs, x.grad, *x.lists, *MOMENTUM, 3, 1
        )


# ---- The public function --------------------------------------------------------------------------------------------


@cpu_only
def test_public_function() -> None:
    x = usual()

    def call(message: str, **changes: Any) -> None:
        given = {"modes": ["sum"] * 3, "padding_idx": None} | changes
        with pytest.raises(ValueError, match=re.escape(message)):
            ops.embedding_collection(
                x.weights, x.indices, x.offsets, tables=x.tables, keys=x.keys, bags=x.bags, **given
            )

    call("modes must be of 'sum', 'mean', 'sqrtn', ", modes=["sum", "last", "sum"])
    call("padding_idx[1] must be None or >= 0, got -1", padding_idx=[None, -1])
    call("padding_idx must have one entry for each table, 2, got 1", padding_idx=[None])
