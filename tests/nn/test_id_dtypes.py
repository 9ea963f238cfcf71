"""Ids of every integer dtype in every module that looks up; and ids of 64 bits without a sign."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from torchsparse_rec import JaggedTensor, KeyedJaggedCollate, KeyedJaggedTensor, nn
from torchsparse_rec.data import PrebatchedDataset, to_tensors, write_prebatched

LARGE = 2**63 + 5
DTYPES = (torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
IDS = torch.tensor([3, 1, 2])
UNSIGNED = torch.tensor([7, LARGE, 1], dtype=torch.uint64)


def collections() -> list[torch.nn.Module]:
    pooled = nn.EmbeddingBagConfig(10, 2, name="t", feature_names=["x"])
    return [
        nn.EmbeddingBagCollection([pooled]),
        nn.EmbeddingCollection([nn.EmbeddingConfig(10, 2, name="t", feature_names=["x"])]),
    ]


def values_of(result: object) -> Tensor:
    result = result["x"] if not isinstance(result, Tensor) else result  # type: ignore[index]
    return result.values() if isinstance(result, JaggedTensor) else result  # type: ignore[no-any-return]


def test_every_module_takes_ids_of_every_integer_dtype() -> None:
    bag = nn.EmbeddingBag(10, 2, mode="sum")
    modules = [nn.Embedding(10, 2), nn.Embedding(10, 2, grad_mode="dense"), nn.EmbeddingVariable(2), bag]
    offsets = {bag: (torch.arange(3),)}
    modules += [nn.quantize(torch.nn.ModuleList([nn.Embedding(10, 2)]).eval())[0]]
    nested = torch.nested.nested_tensor_from_jagged
    for dtype in DTYPES:
        ids = IDS.to(dtype)
        for module in modules:
            more = offsets.get(module, ())
            assert torch.equal(module(ids, *more), module(IDS, *more)), (module, dtype)
        table = modules[0]
        assert torch.equal(table(nested(ids, torch.tensor([0, 3]))).values(), table(IDS)), dtype
        for module in collections():
            for make in (lambda x: {"x": x}, lambda x: KeyedJaggedTensor(["x"], x, lengths=torch.tensor([1, 1, 1]))):
                assert torch.equal(values_of(module(make(ids))), values_of(module(make(IDS)))), (module, dtype)
    table(IDS.to(torch.int8)).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None and gradient.to_dense().sum() == 6
    with pytest.raises(IndexError, match=r"input\[1\] must be in \[0, 10\), got 200"):
        table(torch.tensor([1, 200], dtype=torch.uint8))


def test_ids_beyond_int64_are_named_or_keep_their_bits(tmp_path) -> None:
    place = f"got {LARGE} at 1"
    for module in (nn.Embedding(10, 2), nn.EmbeddingVariable(2)):
        with pytest.raises(ValueError, match=f"{type(module).__name__}: input: ids must be below 2.*, {place}"):
            module(UNSIGNED)
    keyed = KeyedJaggedTensor(["w", "x"], torch.cat([UNSIGNED[:1]] * 3 + [UNSIGNED]), lengths=torch.ones(6).int())
    for module in collections():
        for given in ({"x": UNSIGNED}, {"x": pa.array(UNSIGNED.tolist(), pa.uint64())}, keyed):
            with pytest.raises(ValueError, match=rf"Collection\['x'\]: ids must be below .*, {place}"):
                module(given)
    bits = UNSIGNED.view(torch.int64)
    assert bits.tolist() == [7, LARGE - 2**64, 1]
    nn.EmbeddingVariable(2)(bits)

    batch = pa.record_batch(
        {"x": pa.array([7, LARGE, None], pa.uint64()), "y": pa.array([[LARGE]] * 3, pa.list_(pa.uint64()))}
    )
    tensors = to_tensors(batch, bits=True, fill=-3)
    assert tensors["x"].tolist() == [7, LARGE - 2**64, -3] and tensors["y"].values().tolist() == [LARGE - 2**64] * 3
    assert tensors["x"].dtype == tensors["y"].values().dtype == torch.int64
    with pytest.raises(ValueError, match=f"column 'x' has {LARGE} at row 1, not torch.int64"):
        to_tensors(batch, integers=torch.int64, fill=0)
    write_prebatched(tmp_path / "f.arrow", [batch])
    assert PrebatchedDataset(tmp_path / "f.arrow", bits=True, fill=0).get_batch(0)["x"].tolist() == [7, bits[1], 0]

    examples = [{"x": x} for x in (LARGE, [7, LARGE], np.array([LARGE], np.uint64), np.array([-1]), UNSIGNED[:2])]
    made = KeyedJaggedCollate(["x"], bits=True)(examples)["features"].values()
    assert made.tolist() == [bits[1], 7, bits[1], bits[1], -1, 7, bits[1]] and made.dtype == torch.int64
    assert KeyedJaggedCollate(["x"], bits=True)([{"x": LARGE}])["features"].values().tolist() == [bits[1]]
    with pytest.raises(ValueError, match=f"'x' must be integers in the range of int64, of rank 0 or 1, got {LARGE} at"):
        KeyedJaggedCollate(["x"])(examples)
