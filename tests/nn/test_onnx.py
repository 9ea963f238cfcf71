"""Lookups and segment reductions in ONNX, run by onnxruntime, beside our operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn.exported import IDS, MODES, trained
from torch import Tensor

from torchsparse_rec import KeyedJaggedTensor, nn, ops

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from torchsparse_rec.onnx import translations  # noqa: E402


class Function(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        """Return the function's results."""
        return self.function(*inputs)


def exported(model: torch.nn.Module, inputs: tuple[Tensor, ...], dynamic_shapes: Any = None) -> Callable[..., Any]:
    program = torch.onnx.export(
        model.eval(),
        inputs,
        dynamo=True,
        verbose=False,
        dynamic_shapes=dynamic_shapes,
        custom_translation_table=translations(),
        opset_version=18,
    )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [each.name for each in session.get_inputs()]
    return lambda *values: [
        torch.from_numpy(result)
        for result in session.run(None, {name: x.numpy() for name, x in zip(names, values, strict=True)})
    ]


def check(function: Callable[..., Any], *inputs: Tensor) -> None:
    model = function if isinstance(function, torch.nn.Module) else Function(function)
    want = model(*inputs)
    want = [want] if isinstance(want, Tensor) else list(want)
    got = exported(model, inputs)(*inputs)
    for k, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.dtype == other.dtype, k
        half = one.dtype == torch.float16
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if half else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(one, other.detach(), **tolerance, msg=lambda text, k=k: f"result {k}: {text}")


# ---- Lookups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["table", "bag", "collection"])
@pytest.mark.parametrize("grad_mode", MODES)
def test_modules_with_any_batch_size(kind: str, grad_mode: str | None) -> None:
    model, _ = trained(kind, grad_mode)
    run = exported(model.eval(), (IDS,), [{0: torch.export.Dim("B", min=1)}])
    for ids in (IDS, torch.tensor([[0, 1], [2, 3], [19, 19]])):
        torch.testing.assert_close(run(ids)[0], model(ids).detach(), rtol=1e-6, atol=1e-7)


def test_a_table_that_grows_is_refused_by_the_name_of_its_operator() -> None:
    model, optimizer = trained("variable", "sparse")
    optimizer.flush()
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match="(?s)table_lookup"):
        exported(model.eval(), (IDS,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn", "max", "min"])
def test_bags(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tables = [
        nn.EmbeddingBag(30, 4, mode=mode, dtype=dtype, padding_idx=padding, include_last_offset=last).eval()
        for padding, last in ((None, False), (3, False), (-1, True))
    ]
    ids = torch.randint(0, 30, (40,))
    ids[:6] = 3  # a bag of padding alone
    starts = torch.tensor([0, 6, 6, 9, 30])  # an empty bag
    ends = torch.cat([starts, torch.tensor([40])])
    weights = torch.randn(40).to(dtype)
    weights[6:9] = torch.tensor([1.0, -1.0, 0.0]).to(dtype)  # a sum of weights of 0, by which nothing is divided

    def function(ids: Tensor, starts: Tensor, ends: Tensor, weights: Tensor) -> list[Tensor]:
        given = [None] if mode in ("max", "min") else [None, weights]
        results = [table(ids, ends if table.include_last_offset else starts, one) for table in tables for one in given]
        return [*results, tables[0](ids.view(4, 10)), tables[1](ids.int(), starts.int())]

    model = Function(function)
    model.tables = torch.nn.ModuleList(tables)
    check(model, ids, starts, ends, weights)


CONFIGS = [
    {"num_embeddings": 20, "embedding_dim": 4, "name": "a", "feature_names": ["x", "y"]},
    {"num_embeddings": 10, "embedding_dim": 2, "name": "b", "feature_names": ["y"]},
    {"num_embeddings": 10, "embedding_dim": 3, "name": "c", "feature_names": ["z"], "padding_idx": 1},
]
VALUES, LENGTHS = torch.tensor([1, 19, 3, 3, 0, 9, 1, 5, 1, 1]), torch.tensor([2, 0, 1, 1, 0, 2, 3, 1, 0])


class OfFeatures(torch.nn.Module):
    """A collection that is called with the parts of a KeyedJaggedTensor."""

    def __init__(self, collection: torch.nn.Module, keys: str = "xyz") -> None:
        super().__init__()
        self.collection, self.keys = collection, list(keys)

    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Any:
        """Return the collection's results."""
        result = self.collection(KeyedJaggedTensor(self.keys, values, weights, lengths=lengths))
        return (
            result.values()
            if hasattr(result, "values") and callable(result.values) and not isinstance(result, dict)
            else [part.values() for part in result.values()]
        )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("keys", ["xyz", "zxy"])
def test_collections_of_bags(keys: str, weighted: bool) -> None:
    poolings = ["sum", "mean", "mean"]
    configs = [nn.EmbeddingBagConfig(**c, pooling=p) for c, p in zip(CONFIGS, poolings, strict=True)]  # type: ignore[arg-type]
    values, lengths = (VALUES.clamp_max(9), LENGTHS) if keys == "zxy" else (VALUES, LENGTHS)
    model = OfFeatures(nn.EmbeddingBagCollection(configs, is_weighted=weighted), keys).eval()
    check(model, values, lengths, *([torch.rand(10) + 0.1] if weighted else []))


def test_collections_of_rows() -> None:
    model = OfFeatures(nn.EmbeddingCollection([nn.EmbeddingConfig(**c) for c in CONFIGS])).eval()  # type: ignore[arg-type]
    check(model, VALUES, LENGTHS)


# ---- Segments --------------------------------------------------------------------------------------------------------

NAMES = ("sum", "mean", "max", "min", "prod", "sqrt_n")
SORTED = torch.tensor([0, 0, 2, 2, 2, 5])


def reductions(prefix: str, dtype: torch.dtype) -> list[Callable[..., Tensor]]:
    names = NAMES if dtype.is_floating_point else NAMES[:-1]
    return [getattr(ops, f"{prefix}_{name}") for name in names]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(shape) * 3
    return x.to(dtype) if dtype.is_floating_point else x.round().to(dtype)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 2)])
def test_segments(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def function(data: Tensor, ids: Tensor, offsets: Tensor) -> list[Tensor]:
        results = []
        for reduce in reductions("segment", dtype):
            results += [reduce(data, ids), reduce(data, ids.int(), num_segments=8), reduce(data, offsets=offsets)]
        return results

    check(function, numbers(shape, dtype), SORTED, torch.tensor([0, 0, 1, 6, 6]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unsorted_segments(dtype: torch.dtype) -> None:
    def function(data: Tensor, ids: Tensor, of_pairs: Tensor) -> list[Tensor]:
        results = []
        for reduce in reductions("unsorted_segment", dtype):
            results += [reduce(data, ids, 5), reduce(data, of_pairs, 4)]
        return results

    check(
        function, numbers((6, 2, 3), dtype), torch.tensor([3, -1, 0, 3, -7, 2]), torch.tensor([[1, 0]] * 5 + [[-1, 3]])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_sparse_segments(dtype: torch.dtype) -> None:
    def function(data: Tensor, indices: Tensor, ids: Tensor) -> list[Tensor]:
        names = ("sum", "mean", "sqrt_n")
        made = [getattr(ops, f"sparse_segment_{name}") for name in names]
        return [reduce(data, indices, ids, **given) for reduce in made for given in ({}, {"num_segments": 7})]

    check(function, numbers((4, 3), dtype), torch.tensor([3, 0, 1, 1, 2, 0]), SORTED)


def test_nothing_to_reduce() -> None:
    def function(data: Tensor, ids: Tensor, offsets: Tensor) -> list[Tensor]:
        unsorted = [reduce(data, ids, 2) for reduce in reductions("unsorted_segment", torch.float32)]
        return [
            *unsorted,
            *(reduce(data, ids, num_segments=2) for reduce in reductions("segment", torch.float32)),
            ops.segment_max(data, offsets=offsets),
        ]

    check(function, torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))


def test_infinities_and_large_sums() -> None:
    def function(data: Tensor, ids: Tensor) -> list[Tensor]:
        return [
            ops.unsorted_segment_max(data, ids, 3),
            ops.unsorted_segment_min(data, ids, 3),
            ops.unsorted_segment_mean(data, ids, 3),
        ]

    data = torch.tensor([[-torch.inf], [-torch.inf], [torch.inf], [1.0]])
    check(function, data, torch.tensor([0, 0, 1, 1]))
    many = torch.rand(200_000, 4, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 3, (200_000,), generator=torch.Generator().manual_seed(1))
    run = exported(Function(lambda x, i: ops.unsorted_segment_mean(x, i, 3)), (many, ids))
    torch.testing.assert_close(run(many, ids)[0], ops.unsorted_segment_mean(many, ids, 3), rtol=1e-3, atol=1e-3)
