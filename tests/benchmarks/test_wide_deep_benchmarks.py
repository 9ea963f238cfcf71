"""The benchmark rows of Wide & Deep: they run, and a side that trains something else is not timed."""

import importlib.util

import pytest
import torch

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")
TARGETS = {"step-identity": 3.77, "step-hashed": 5.55, "whole-identity": 2.5, "whole-hashed": 2.7}
needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow")


def test_targets(benchmarks):
    rows = {row.name: row for row in benchmarks("__main__").ROWS}
    for name, ratio in TARGETS.items():
        assert rows[f"wide_deep/{name}"].targets == {
            "TensorFlow safe_embedding_lookup_sparse": ratio,
            "TensorFlow gather": ratio,
        }
    assert rows["wide_deep/from-prebatched"].targets == {"from memory": 0.95}


@needs_tensorflow
@pytest.mark.tensorflow
@pytest.mark.parametrize(("kind", "form"), [("identity", ("gather", "separate")), ("hashed", ("gather", "joined"))])
def test_tensorflows_tables_are_what_the_formula_says(benchmarks, kind, form):
    rows, options = benchmarks("wide_deep_training"), benchmarks("rows").Options()
    problem = rows.Problem(kind, "cpu", 50, 16)
    rows.check_tables(problem, {"TensorFlow": lambda given: rows.TheirTables(given, options, form)})


def test_a_side_that_trains_something_else_is_seen(benchmarks):
    rows = benchmarks("wide_deep_training")
    problem = rows.Problem("identity", "cpu", 50, 16)

    class Wrong(rows.OurTables):
        def step(self):
            super().step()
            with torch.no_grad():
                next(iter(self.bags.embedding_bags.values())).weight[3, 2] += 1e-4

    with pytest.raises(AssertionError, match="wrong"):
        rows.check_tables(problem, {"wrong": Wrong})

    def diverging(given):
        train, losses = rows.our_training(given), []

        def step(batch):
            losses.append(train(batch))
            return losses[-1] if len(losses) < 3 else torch.tensor(float("nan"))

        return step

    with pytest.raises(AssertionError, match="wrong: losses differ by nan in step 2"):
        rows.check_losses(problem, {"ours": rows.our_training, "wrong": diverging})
