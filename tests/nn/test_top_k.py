"""``nn.TopK``: the best rows of every kind of table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from nn.cases import trained
from torch import Tensor

from torchsparse_rec import nn, ops
from torchsparse_rec.jagged import JaggedTensor
from torchsparse_rec.tables.stale import StaleParameter

QUERY = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
ROWS = torch.tensor([[9.0, 9.0], [1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [1.0, -8.0]])
CONFIG = nn.EmbeddingBagConfig(name="items", num_embeddings=5, embedding_dim=2, feature_names=["f"])


def _assert_best(actual: tuple[Tensor, Tensor], values: list[list[float]], ids: list[list[int]]) -> None:
    assert actual[0].tolist() == values and actual[1].tolist() == ids and actual[1].dtype == torch.int64


def _variable(keys: list[int], **options: Any) -> nn.EmbeddingVariable:
    table = nn.EmbeddingVariable(2, capacity=64, **options)
    table.insert(keys, ROWS[: len(keys)])
    return table


# ---- Tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [nn.Embedding, nn.EmbeddingBag, torch.nn.Embedding, torch.nn.EmbeddingBag],
    ids=["ours", "our bag", "torch's", "torch's bag"],
)
@pytest.mark.parametrize("padding_idx", [None, 0, -2])
def test_modules(make: Any, padding_idx: int | None) -> None:
    """Find what is best of the weight, but for the padding."""
    table = make(5, 2, padding_idx=padding_idx, _weight=ROWS.clone())
    left = ROWS if padding_idx is None else ROWS.clone().index_fill_(0, torch.tensor(padding_idx % 5), math.nan)
    scores = QUERY @ left.T
    wanted = scores.masked_fill(scores.isnan(), -math.inf).sort(dim=1, descending=True, stable=True)
    values, ids = nn.TopK(5)(QUERY, table)
    assert torch.equal(values, wanted.values) and not values.requires_grad
    assert torch.equal(ids, wanted.indices.where(values != -math.inf, -1))
    assert nn.TopK(3)(QUERY[0], table)[1].tolist() == ids[0, :3].tolist()


def test_a_tensor_and_a_table_of_a_collection() -> None:
    collection = nn.EmbeddingBagCollection([CONFIG])
    with torch.no_grad():
        collection.embedding_bags["items"].weight.copy_(ROWS)
    for table in (ROWS, ROWS.double().float(), collection.embedding_bags["items"]):
        _assert_best(nn.TopK(1)(QUERY, table), [[9.0], [9.0], [7.0]], [[0], [0], [4]])


@pytest.mark.parametrize("form", ["matrix", "jagged"])
def test_excluded_beside_the_padding(form: str) -> None:
    table = nn.Embedding(5, 2, padding_idx=0, _weight=ROWS.clone())
    excluded: Any = torch.tensor([[3, 1, -1], [-1, -1, -1], [4, 1, 2]])
    if form == "jagged":
        excluded = JaggedTensor(torch.tensor([3, 1, 4, 1, 2]), lengths=torch.tensor([2, 0, 3]))
    _assert_best(
        nn.TopK(2)(QUERY, table, excluded=excluded),
        [[1.0, 0.0], [2.0, 1.0], [-4.0, -math.inf]],
        [[4, 2], [2, 3], [3, -1]],
    )


@pytest.mark.parametrize("grad_mode", ["sparse", "fused"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_stale_rows_are_brought_up_to_date(grad_mode: str, as_tensor: bool) -> None:
    model, _optimizer, want = trained(grad_mode)
    parameter = next(model.table.parameters())
    assert type(parameter) is StaleParameter
    query = torch.randn(3, want.shape[1], generator=torch.Generator().manual_seed(0))
    values, ids = nn.TopK(4)(query, parameter if as_tensor else model.table)
    wanted = (query @ want.T).topk(4)
    assert torch.equal(ids, wanted.indices)
    torch.testing.assert_close(values, wanted.values, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("key_dtype", [torch.int64, torch.int32])
def test_keys_of_a_table_that_grows(key_dtype: torch.dtype) -> None:
    table = _variable([70, -1, 5, 2**31 - 1, -9], key_dtype=key_dtype)
    best = nn.TopK(2)
    _assert_best(best(QUERY, table), [[9.0, 3.0], [9.0, 2.0], [7.0, -1.0]], [[70, 2**31 - 1], [70, 5], [-9, -1]])
    excluded = torch.tensor([[70, -1, 6], [5, 5, -1], [-9, 70, -(2**31)]])
    _assert_best(
        best(QUERY, table, excluded=excluded),
        [[3.0, 1.0], [9.0, 1.0], [-1.0, -2.0]],
        [[2**31 - 1, -1], [70, 2**31 - 1], [-1, 5]],
    )
    # The key -1 is left, and a place without a key.
    _assert_best(
        best(QUERY[:1], table, excluded=torch.tensor([[-9, 5, 2**31 - 1, 70]])), [[1.0, -math.inf]], [[-1, -1]]
    )
    jagged = JaggedTensor(torch.tensor([70, 5, -9]), lengths=torch.tensor([1, 1, 1]))
    assert best(QUERY, table, excluded=jagged)[1].tolist() == [[2**31 - 1, -1], [70, 2**31 - 1], [-1, 5]]


def test_keys_that_left_are_no_candidates() -> None:
    table = _variable([70, 7, 5])
    table.erase([70])
    assert nn.TopK(2)(QUERY[:1], table)[1].tolist() == [[7, 5]]


# ---- Compilers and the module ----------------------------------------------------------------------------------------


class Ranker(torch.nn.Module):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table, self.best = table, nn.TopK(2)

    def forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two best rows."""
        return self.best(query, self.table)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["module", "tensor", "sparse"])
def test_can_be_exported(kind: str) -> None:
    grad_mode = "sparse" if kind == "sparse" else None
    table = ROWS if kind == "tensor" else nn.Embedding(5, 2, padding_idx=0, _weight=ROWS, grad_mode=grad_mode)
    model = Ranker(table).eval()
    program = torch.export.export(model, (QUERY,), dynamic_shapes=[{0: torch.export.Dim("count", min=1)}])
    for query in (QUERY, QUERY[:1]):
        for x, y in zip(program.module()(query), model(query), strict=True):
            assert torch.equal(x, y)


def test_what_cannot_be_exported() -> None:
    with pytest.raises(
        RuntimeError, match=r"^TopK: Embedding cannot be exported in train\(\), as its rows may be stale"
    ):
        torch.export.export(Ranker(nn.Embedding(5, 2, grad_mode="sparse")), (QUERY,))
    with pytest.raises(RuntimeError, match="^TopK: EmbeddingVariable 'embedding_variable' grows, and cannot be"):
        torch.export.export(Ranker(_variable([1, 2, 3])).eval(), (QUERY,))


@pytest.mark.slow
def test_compiles() -> None:
    for table, whole in ((nn.Embedding(5, 2, _weight=ROWS), True), (_variable([70, 7, 5]), False)):
        model = Ranker(table)
        compiled = torch.compile(model, fullgraph=whole, backend="aot_eager")
        for x, y in zip(compiled(QUERY), model(QUERY), strict=True):
            assert torch.equal(x, y)


def test_a_state_dict_has_the_table_once() -> None:
    assert list(Ranker(nn.Embedding(5, 2)).state_dict()) == ["table.weight"]
    assert repr(nn.TopK(3)) == "TopK(k=3)"


# ---- Bad input -------------------------------------------------------------------------------------------------------


def test_other_tables_are_refused() -> None:
    kinds = "table must be Embedding, EmbeddingBag, EmbeddingVariable or a tensor"
    one_of = "give one of its tables, such as collection"
    for table, said in (
        (nn.EmbeddingBagCollection([CONFIG]), rf"EmbeddingBagCollection: {one_of}\.embedding_bags\['items'\]"),
        (torch.nn.Linear(2, 5), r"Linear: give a tensor \[V, D\] of its rows"),
        ([1, 2], r"list: give a tensor \[V, D\] of its rows"),
    ):
        with pytest.raises(TypeError, match=f"^TopK: {kinds}, got {said}$"):
            nn.TopK(1)(QUERY, table)  # type: ignore[arg-type]


def test_numbers_and_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="^TopK: k must be at least 1, got 0$"):
        nn.TopK(0)
    with pytest.raises(ValueError, match=r"^TopK: k must be in \[1, 5\], got 6$"):
        nn.TopK(6)(QUERY, ROWS)
    with pytest.raises(ValueError, match=r"^TopK: table must be \[V, 2\] of .*, got torch.float32 of shape \(5, 3\)$"):
        nn.TopK(1)(QUERY, torch.ones(5, 3))
    with pytest.raises(ValueError, match=r"^TopK: table must have at least one row, got shape \(0, 2\)$"):
        nn.TopK(1)(QUERY, nn.EmbeddingVariable(2))
    with pytest.raises(ValueError, match="^TopK: excluded must have a row of int32 or int64 ids for each of 3 queries"):
        nn.TopK(1)(QUERY, _variable([1, 2]), excluded=torch.ones(3, 1))
    with pytest.raises(IndexError, match=r"excluded\[1\] must be in \[0, 5\) or -1, got 5$"):
        nn.TopK(1)(QUERY, ROWS, excluded=torch.tensor([[0], [5], [0]]))


def test_half_tables_are_as_of_the_operator() -> None:
    table = nn.Embedding(5, 2, dtype=torch.bfloat16)
    for x, y in zip(nn.TopK(2)(QUERY, table), ops.top_k_rows(QUERY, table.weight, 2), strict=True):
        assert torch.equal(x, y)


def test_autocast_has_no_word_in_keys() -> None:
    """Copy a variable's half rows where autocast refuses ``torch.cat`` of them."""
    table = _variable([70, 7, 5], dtype=torch.float16)
    with torch.autocast("cpu"):
        found = nn.TopK(2)(QUERY, table)
    _assert_best(found, [[9.0, 1.0], [9.0, 2.0], [-1.0, -2.0]], [[70, 7], [70, 5], [7, 5]])
