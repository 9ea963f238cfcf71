"""``sparse_apply_*``: what holds for every function of the table. The parity check compares their results."""

from __future__ import annotations

import inspect

import pytest
import torch

from torchsparse_rec.compat import tensorflow as tf


def test_leaves_its_arguments_as_they_are() -> None:
    var, accum, linear = torch.ones(3, 2, requires_grad=True), torch.ones(3, 2), torch.zeros(3, 2)
    result = tf.sparse_apply_ftrl(var, accum, linear, torch.ones(1, 2), torch.tensor([1]), 0.5, 0.0, 0.0, -0.5)
    assert result._fields == ("var", "accum", "linear") and not result.var.requires_grad
    assert torch.equal(var, torch.ones(3, 2)) and torch.equal(accum, torch.ones(3, 2)) and not linear.any()
    assert result.accum.tolist() == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]


def test_takes_any_layout() -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    result = tf.sparse_apply_momentum(wide.t(), torch.zeros(4, 3), 1.0, torch.ones(1, 3), [3], 0.5)
    assert torch.equal(result.var[:3], wide.t()[:3]) and torch.equal(result.var[3], wide[:, 3] - 1)


def test_rounds_hyperparameters_as_scalars_of_the_dtype() -> None:
    """Round 0.1 to 0.0999755859375, as in float16; a gradient of 1024 shows it."""
    var = torch.zeros(1, dtype=torch.float16)
    grad = torch.tensor([-1024.0], dtype=torch.float16)
    assert tf.sparse_apply_proximal_gradient_descent(var, 0.1, 0.0, 0.0, grad, [0]).item() == 1024 * 0.0999755859375


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"accum": torch.ones(2, 2)}, r"accum must have the shape and dtype of var, \[3, 2\] and torch.float32, got"),
        ({"accum": torch.ones(3, 2).double()}, "accum must have the shape and dtype of var"),
        ({"grad": torch.ones(1, 2).double()}, "grad must have the dtype of weight, Float, got Double"),
        ({"lr": torch.ones(1)}, r"lr must be a number or a scalar of the dtype of var, torch.float32, got .* \[1\]"),
        ({"lr": torch.tensor(1.0).double()}, "lr must be a number or a scalar of the dtype of var"),
        ({"lr": "0.1 or so"}, "lr must be a number, got '0.1 or so'"),
    ],
)
def test_errors(changed: dict[str, object], text: str) -> None:
    arguments = {
        "var": torch.ones(3, 2),
        "accum": torch.ones(3, 2),
        "lr": 0.1,
        "grad": torch.ones(1, 2),
        "indices": torch.tensor([1]),
    }
    with pytest.raises(ValueError, match=text):
        tf.sparse_apply_adagrad(**(arguments | changed))


def test_arguments_are_by_place_or_name() -> None:
    tables = torch.ones(3, 2), torch.ones(3, 2)
    result = tf.sparse_apply_adagrad(*tables, 0.1, torch.ones(1, 2), [1], False, update_slots=False, name="step")
    assert torch.equal(result.accum, tables[1]) and result.var[1, 0] == 0.9
    names = "var, accum, lr, grad, indices, use_locking=False, update_slots=True, name=None"
    assert str(inspect.signature(tf.sparse_apply_adagrad)) == f"({names})"
    with pytest.raises(TypeError, match="^sparse_apply_adagrad: missing a required argument: 'lr'"):
        tf.sparse_apply_adagrad(*tables)
    with pytest.raises(TypeError, match="^sparse_apply_adagrad: got an unexpected keyword argument 'momentum'"):
        tf.sparse_apply_adagrad(*tables, 0.1, torch.ones(1, 2), [1], momentum=0.5)


def test_a_step_is_one_compiled_graph() -> None:
    tables, ids = (torch.ones(3, 2), torch.ones(3, 2)), torch.tensor([1])
    step = torch.compile(lambda *given: tf.sparse_apply_adagrad(*given), backend="eager", fullgraph=True)
    result = step(*tables, 0.1, torch.ones(1, 2), ids)
    assert torch.equal(result.var, tf.sparse_apply_adagrad(*tables, 0.1, torch.ones(1, 2), ids).var)
