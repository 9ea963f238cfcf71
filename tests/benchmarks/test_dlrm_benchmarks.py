"""The benchmark rows of DLRM: they run, and a side that trains something else is not timed."""

import pytest
import torch

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")


def small(rows):
    return rows.Problem("cpu", 50, 16, distinct=True)


def test_targets(benchmarks):
    rows = {row.name: row for row in benchmarks("__main__").ROWS}
    assert rows["dlrm/sparse"].targets == {"torch sparse EmbeddingBags, hashed ids": 3.0}
    assert rows["dlrm/whole"].targets == {}


def test_a_side_that_trains_something_else_is_seen(benchmarks):
    rows = benchmarks("dlrm")

    class Wrong(rows.TorchTables):
        def update(self):
            super().update()
            with torch.no_grad():
                self.bags[3].weight[:, 2] += 1e-4

    with pytest.raises(AssertionError, match="wrong"):
        rows.check_rows(small(rows), {"wrong": Wrong})

    class Diverging(rows.TorchTables):
        def look_up(self, ids):
            return [found * float("nan") for found in super().look_up(ids)]

    with pytest.raises(AssertionError, match="wrong: losses differ by nan in step 0"):
        rows.check_losses(small(rows), {"torch": rows.TorchTables, "wrong": Diverging})


def test_what_is_timed_has_seen_every_batch(benchmarks):
    rows, options = benchmarks("dlrm"), benchmarks("rows").Options(quick=True)
    counted = []

    def counting(tables, problem):
        return lambda: counted.append(problem)

    case = rows.row("x", "x", counting, rows.check_rows, {}).build(options)
    call = case.ours()
    assert len(counted) == len(counted[0].batches) == 4
    call()
    assert len(counted) == 5
