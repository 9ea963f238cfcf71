"""Plans that a user may give: by their classes and by TorchRec's names."""

from __future__ import annotations

import pytest
import torch

from torchsparse_rec.distributed.plan import ColumnWise, Replicated, RowWise, TablePlan, TableWise, as_plan


@pytest.mark.parametrize(
    ("given", "plan"),
    [
        ("row_wise", RowWise()),
        ("ROW_WISE", RowWise()),
        ("table_wise", TableWise()),
        ("column_wise", ColumnWise((0, 1, 2, 3))),
        ("data_parallel", Replicated()),
        (RowWise(), RowWise()),
        (TableWise(3), TableWise(3)),
        (TableWise(torch.tensor(3)), TableWise(3)),  # type: ignore[arg-type]
        (ColumnWise([2, 0]), ColumnWise((2, 0))),
        (Replicated(), Replicated()),
    ],
    ids=str,
)
def test_a_plan_by_class_or_name(given: TablePlan | str, plan: TablePlan) -> None:
    assert as_plan("t", given, ranks=4, dim=16) == plan
    assert as_plan("t", plan, ranks=4, dim=16) == plan


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 6, 9, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_columns_are_those_of_chunk(dim: int, ranks: int) -> None:
    want = [len(part) for part in torch.arange(dim).chunk(ranks)]
    columns = ColumnWise.columns(dim, ranks)
    assert [end - begin for begin, end in columns if begin < end] == want
    assert [begin for begin, _ in columns[1:]] == [end for _, end in columns[:-1]]
    # By default no rank is named that would get none.
    assert as_plan("t", ColumnWise(), ranks, dim) == ColumnWise(range(len(want)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "diagonal",
            "plan of table 't' must be one of row_wise, table_wise, column_wise, data_parallel, got 'diagonal'",
        ),
        ("table_row_wise", r"'table_row_wise', is for a mesh of two dimensions.*use RowWise\(\) or TableWise\(rank\)"),
        ("table_column_wise", r"'table_column_wise', is for a mesh of two dimensions.*use ColumnWise\(ranks\)"),
        ("grid_shard", r"'grid_shard', is for a mesh of two dimensions.*use RowWise\(\) or ColumnWise\(ranks\)"),
        (TableWise(4), r"'t' must name ranks in \[0, 4\), got 4"),
        (TableWise(-1), r"'t' must name ranks in \[0, 4\), got -1"),
        (ColumnWise([0, 7]), r"'t' must name ranks in \[0, 4\), got 7"),
        (ColumnWise([]), r"'t' must name ranks, each once, .* its 5 columns .* got \[\]"),
        (ColumnWise([1, 1]), r"each once, .* got \[1, 1\]"),
        (ColumnWise([0, 1, 2, 3]), r"no more than get some of its 5 columns .* got \[0, 1, 2, 3\]"),
    ],
    ids=str,
)
def test_what_is_no_plan_here(given: TablePlan | str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^shard: .*{message}"):
        as_plan("t", given, ranks=4, dim=5)


@pytest.mark.parametrize("given", [None, RowWise, TableWise("a"), ColumnWise([0.0])], ids=str)  # type: ignore[arg-type,list-item]
def test_what_is_of_no_such_type(given: TablePlan) -> None:
    with pytest.raises(TypeError, match="^shard: the plan of table 't' must "):
        as_plan("t", given, ranks=4, dim=5)
