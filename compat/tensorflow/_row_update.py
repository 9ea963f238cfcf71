"""
``tf.raw_ops.ResourceSparseApply*`` as functions: an optimizer's step on the rows that a gradient names.

TensorFlow's operators write into variables; these functions leave their arguments as they are and return new tensors.
:mod:`torchsparse_rec.ops` has the functions that write in place. All share these rules:

* ``grad`` ``[N, ...]`` and ``indices`` ``[N]`` (int32 or int64) are the slices of an IndexedSlices; ``var`` and its
  slots ``[V, ...]`` have one shape and dtype: float16, bfloat16, float32 or float64.
* Slices of one row are applied one after another, in their order. Rows that ``indices`` does not name stay as they are.
* Hyperparameters are numbers or scalar tensors of the dtype of ``var``. (On CUDA tensors of them are read back.)
* ``use_locking`` and ``name`` are ignored.
* Errors are ValueError, and IndexError for an index outside ``[0, V)``.
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  (the examples use it)
from torch import Tensor

from ... import ops
from ._arguments import as_size
from ._row_step import WithAccumulator, WithAdadelta, WithAdagradDA, WithCenteredRMSProp, WithFtrl, WithRMSProp, step


def sparse_apply_adagrad(
    var: Any,
    accum: Any,
    lr: Any,
    grad: Any,
    indices: Any,
    use_locking: bool = False,
    update_slots: bool = True,
    name: str | None = None,
) -> WithAccumulator:
    """
    Take a step of Adagrad: ``accum += grad * grad``, ``var -= lr * grad / sqrt(accum)``.

    Source: ``tf.raw_ops.ResourceSparseApplyAdagrad``.

    Example:
        >>> sparse_apply_adagrad([1.0, 1.0], [0.0, 0.0], 0.5, [2.0], [1])
        WithAccumulator(var=tensor([1.0000, 0.5000]), accum=tensor([0., 4.]))
    """
    numbers = {"lr": ("lr", lr)}
    return step(
        ops.sparse_apply_adagrad_,
        WithAccumulator,
        var,
        {"accum": accum},
        grad,
        indices,
        numbers,
        update_accumulator=update_slots,
    )


def sparse_apply_adagrad_v2(
    var: Any,
    accum: Any,
    lr: Any,
    epsilon: Any,
    grad: Any,
    indices: Any,
    use_locking: bool = False,
    update_slots: bool = True,
    name: str | None = None,
) -> WithAccumulator:
    """
    Take a step of Adagrad with ``epsilon`` outside the root: ``var -= lr * grad / (sqrt(accum) + epsilon)``.

    Source: ``tf.raw_ops.ResourceSparseApplyAdagradV2``.

    Example:
        >>> sparse_apply_adagrad_v2([1.0, 1.0], [0.0, 0.0], 0.5, 2.0, [2.0], [1])
        WithAccumulator(var=tensor([1.0000, 0.7500]), accum=tensor([0., 4.]))
    """
    numbers = {"lr": ("lr", lr), "eps": ("epsilon", epsilon)}
    return step(
        ops.sparse_apply_adagrad_,
        WithAccumulator,
        var,
        {"accum": accum},
        grad,
        indices,
        numbers,
        update_accumulator=update_slots,
    )


def sparse_apply_adagrad_da(
    var: Any,
    gradient_accumulator: Any,
    gradient_squared_accumulator: Any,
    grad: Any,
    indices: Any,
    lr: Any,
    l1: Any,
    l2: Any,
    global_step: Any,
    use_locking: bool = False,
    name: str | None = None,
) -> WithAdagradDA:
    """
    Take a step of Adagrad with dual averaging: ``var`` follows from sums of gradients and of their squares.

    Source: ``tf.raw_ops.ResourceSparseApplyAdagradDA``.

    Example:
        >>> sparse_apply_adagrad_da([1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [2.0], [1], 0.5, 0.0, 0.0, 1).var
        tensor([ 1.0000, -0.5000])
    """
    numbers = {"lr": ("lr", lr), "l1": ("l1", l1), "l2": ("l2", l2)}
    slots = {
        "gradient_accumulator": gradient_accumulator,
        "gradient_squared_accumulator": gradient_squared_accumulator,
    }
    number = as_size("global_step", global_step)
    return step(ops.sparse_apply_adagrad_da_, WithAdagradDA, var, slots, grad, indices, numbers, step=number)


def sparse_apply_adadelta(
    var: Any,
    accum: Any,
    accum_update: Any,
    lr: Any,
    rho: Any,
    epsilon: Any,
    grad: Any,
    indices: Any,
    use_locking: bool = False,
    name: str | None = None,
) -> WithAdadelta:
    """
    Take a step of Adadelta by the formulas of :func:`torchsparse_rec.ops.sparse_apply_adadelta_`.

    Source: ``tf.raw_ops.ResourceSparseApplyAdadelta``.

    Example:
        >>> sparse_apply_adadelta([1.0, 1.0], [0.0, 0.0], [0.0, 0.0], 1.0, 0.0, 0.0, [2.0], [1]).var
        tensor([1., 1.])
    """
    numbers = {"lr": ("lr", lr), "rho": ("rho", rho), "eps": ("epsilon", epsilon)}
    return step(
        ops.sparse_apply_adadelta_,
        WithAdadelta,
        var,
        {"accum": accum, "accum_update": accum_update},
        grad,
        indices,
        numbers,
    )


def sparse_apply_ftrl(
    var: Any,
    accum: Any,
    linear: Any,
    grad: Any,
    indices: Any,
    lr: Any,
    l1: Any,
    l2: Any,
    lr_power: Any,
    use_locking: bool = False,
    multiply_linear_by_lr: bool = False,
    name: str | None = None,
) -> WithFtrl:
    """
    Take a step of FTRL-proximal by the formulas of :func:`torchsparse_rec.ops.sparse_apply_ftrl_`.

    Source: ``tf.raw_ops.ResourceSparseApplyFtrl``.

    Example:
        >>> sparse_apply_ftrl([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [2.0], [1], 0.5, 1.0, 0.0, -0.5).var
        tensor([ 0.0000, -0.2500])
    """
    return sparse_apply_ftrl_v2(
        var, accum, linear, grad, indices, lr, l1, l2, 0.0, lr_power, multiply_linear_by_lr=multiply_linear_by_lr
    )


def sparse_apply_ftrl_v2(
    var: Any,
    accum: Any,
    linear: Any,
    grad: Any,
    indices: Any,
    lr: Any,
    l1: Any,
    l2: Any,
    l2_shrinkage: Any,
    lr_power: Any,
    use_locking: bool = False,
    multiply_linear_by_lr: bool = False,
    name: str | None = None,
) -> WithFtrl:
    """
    Take a step of FTRL-proximal with ``l2_shrinkage``, which goes only into the linear term.

    Source: ``tf.raw_ops.ResourceSparseApplyFtrlV2``.

    Example:
        >>> sparse_apply_ftrl_v2([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [2.0], [1], 0.5, 1.0, 0.0, 0.0, -0.5).var
        tensor([ 0.0000, -0.2500])
    """
    numbers = {
        "lr": ("lr", lr),
        "l1": ("l1", l1),
        "l2": ("l2", l2),
        "l2_shrinkage": ("l2_shrinkage", l2_shrinkage),
        "lr_power": ("lr_power", lr_power),
    }
    slots = {"accum": accum, "linear": linear}
    return step(
        ops.sparse_apply_ftrl_,
        WithFtrl,
        var,
        slots,
        grad,
        indices,
        numbers,
        multiply_linear_by_lr=multiply_linear_by_lr,
    )


def sparse_apply_proximal_adagrad(
    var: Any,
    accum: Any,
    lr: Any,
    l1: Any,
    l2: Any,
    grad: Any,
    indices: Any,
    use_locking: bool = False,
    name: str | None = None,
) -> WithAccumulator:
    """
    Take a step of proximal Adagrad: a step of size ``lr / sqrt(accum)``, then towards zero.

    Source: ``tf.raw_ops.ResourceSparseApplyProximalAdagrad``.

    Example:
        >>> sparse_apply_proximal_adagrad([1.0, 1.0], [0.0, 0.0], 0.5, 1.0, 0.0, [2.0], [1])
        WithAccumulator(var=tensor([1.0000, 0.2500]), accum=tensor([0., 4.]))
    """
    numbers = {"lr": ("lr", lr), "l1": ("l1", l1), "l2": ("l2", l2)}
    return step(ops.sparse_apply_proximal_adagrad_, WithAccumulator, var, {"accum": accum}, grad, indices, numbers)


def sparse_apply_proximal_gradient_descent(
    var: Any, alpha: Any, l1: Any, l2: Any, grad: Any, indices: Any, use_locking: bool = False, name: str | None = None
) -> Tensor:
    """
    Take a step of proximal gradient descent, of size ``alpha``, then towards zero; return the new ``var``.

    Source: ``tf.raw_ops.ResourceSparseApplyProximalGradientDescent``.

    Example:
        >>> sparse_apply_proximal_gradient_descent([1.0, 1.0], 0.5, 0.5, 0.0, [1.0], [1])
        tensor([1.0000, 0.2500])
    """
    numbers = {"lr": ("alpha", alpha), "l1": ("l1", l1), "l2": ("l2", l2)}
    update = ops.sparse_apply_proximal_gradient_descent_
    (result,) = step(update, lambda *tables: tables, var, {}, grad, indices, numbers)
    return result


def sparse_apply_rms_prop(
    var: Any,
    ms: Any,
    mom: Any,
    lr: Any,
    rho: Any,
    momentum: Any,
    epsilon: Any,
    grad: Any,
    indices: Any,
    use_locking: bool = False,
    name: str | None = None,
) -> WithRMSProp:
    """
    Take a step of RMSProp, with ``epsilon`` inside the root.

    Source: ``tf.raw_ops.ResourceSparseApplyRMSProp``.

    Example:
        >>> sparse_apply_rms_prop([1.0, 1.0], [0.0, 0.0], [0.0, 0.0], 0.25, 0.75, 0.0, 0.0, [4.0], [1]).var
        tensor([1.0000, 0.5000])
    """
    numbers = {"lr": ("lr", lr), "rho": ("rho", rho), "momentum": ("momentum", momentum), "eps": ("epsilon", epsilon)}
    return step(ops.sparse_apply_rmsprop_, WithRMSProp, var, {"ms": ms, "mom": mom}, grad, indices, numbers)


def sparse_apply_centered_rms_prop(
    var: Any,
    mg: Any,
    ms: Any,
    mom: Any,
    lr: Any,
    rho: Any,
    momentum: Any,
    epsilon: Any,
    grad: Any,
    indices: Any,
    use_locking: bool = False,
    name: str | None = None,
) -> WithCenteredRMSProp:
    """
    Take a step of RMSProp that divides by the root of an estimated variance, not of the average square.

    Source: ``tf.raw_ops.ResourceSparseApplyCenteredRMSProp``.

    Example:
        >>> zeros = [0.0, 0.0]
        >>> sparse_apply_centered_rms_prop([1.0, 1.0], zeros, zeros, zeros, 0.25, 0.5, 0.0, 0.0, [2.0], [1]).var
        tensor([1.0000, 0.5000])
    """
    numbers = {"lr": ("lr", lr), "rho": ("rho", rho), "momentum": ("momentum", momentum), "eps": ("epsilon", epsilon)}
    return step(
        ops.sparse_apply_centered_rmsprop_,
        WithCenteredRMSProp,
        var,
        {"mg": mg, "ms": ms, "mom": mom},
        grad,
        indices,
        numbers,
    )


def sparse_apply_momentum(
    var: Any,
    accum: Any,
    lr: Any,
    grad: Any,
    indices: Any,
    momentum: Any,
    use_locking: bool = False,
    use_nesterov: bool = False,
    name: str | None = None,
) -> WithAccumulator:
    """
    Take a step of momentum: ``accum = momentum * accum + grad``, ``var -= lr * accum``.

    Source: ``tf.raw_ops.ResourceSparseApplyMomentum``.

    Example:
        >>> sparse_apply_momentum([1.0, 1.0], [0.0, 0.0], 0.125, [1.0], [1], 0.5)
        WithAccumulator(var=tensor([1.0000, 0.8750]), accum=tensor([0., 1.]))
    """
    numbers = {"lr": ("lr", lr), "momentum": ("momentum", momentum)}
    return step(
        ops.sparse_apply_momentum_,
        WithAccumulator,
        var,
        {"accum": accum},
        grad,
        indices,
        numbers,
        nesterov=use_nesterov,
    )


def sparse_apply_keras_momentum(
    var: Any,
    accum: Any,
    lr: Any,
    grad: Any,
    indices: Any,
    momentum: Any,
    use_locking: bool = False,
    use_nesterov: bool = False,
    name: str | None = None,
) -> WithAccumulator:
    """
    Take a step of Keras's momentum: ``accum = momentum * accum - lr * grad``, ``var += accum``.

    Source: ``tf.raw_ops.ResourceSparseApplyKerasMomentum``.

    Example:
        >>> sparse_apply_keras_momentum([1.0, 1.0], [0.0, 0.0], 0.125, [1.0], [1], 0.5)
        WithAccumulator(var=tensor([1.0000, 0.8750]), accum=tensor([ 0.0000, -0.1250]))
    """
    numbers = {"lr": ("lr", lr), "momentum": ("momentum", momentum)}
    return step(
        ops.sparse_apply_keras_momentum_,
        WithAccumulator,
        var,
        {"accum": accum},
        grad,
        indices,
        numbers,
        nesterov=use_nesterov,
    )
