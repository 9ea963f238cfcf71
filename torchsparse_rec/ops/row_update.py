"""
Family ``row_update``: an optimizer's step on the rows of a table that a batch names, in place.

Contract and formulas: csrc/row_update.h. Kernels: csrc/cpu/row_update.cpp, csrc/cuda/row_update.cu.
"""

from __future__ import annotations

import torch  # noqa: F401  (the examples use it)
from torch import Tensor

from ._row_rule import Rule, update

__all__ = [
    "sparse_apply_gradient_descent_",
    "sparse_apply_momentum_",
    "sparse_apply_keras_momentum_",
    "sparse_apply_adagrad_",
    "sparse_apply_adagrad_da_",
    "sparse_apply_adadelta_",
    "sparse_apply_ftrl_",
    "sparse_apply_proximal_adagrad_",
    "sparse_apply_proximal_gradient_descent_",
    "sparse_apply_rmsprop_",
    "sparse_apply_centered_rmsprop_",
]


def sparse_apply_gradient_descent_(weight: Tensor, grad: Tensor, indices: Tensor, *, lr: float) -> Tensor:
    """
    Update rows of a table by gradient descent, in place: ``w -= lr * g``.

    Items of one row are applied one after another, in the order of ``indices``; here, as for every function of this
    family, the result is that of one call per item, bit for bit. Rows that ``indices`` does not name stay as they are.

    Args:
        weight: ``[V, ...]``, float16, bfloat16, float32 or float64, written in place. Half types are computed in
            float32 and rounded when stored. Its rows may be any distance apart, but each must be contiguous.
        grad: ``[N, ...]``, a row of ``weight`` for each index, with its dtype.
        indices: ``[N]``, int32 or int64: rows of ``weight``; they may repeat.
        lr: the learning rate. (Under ``torch.compile`` each new value is compiled anew, as floats are.)

    Returns:
        ``weight``.

    Raises:
        IndexError: an index outside ``[0, V)``; then nothing has been written.
        ValueError: wrong shapes, dtypes, devices or memory layouts; tensors that share memory.
        RuntimeError: a tensor requires grad and grad mode is enabled.

    On CUDA nothing waits for the device and CUDA graphs can capture it; a bad index is skipped and recorded.

    Source: ``tf.compat.v1.train.GradientDescentOptimizer``, ``tf.raw_ops.ResourceScatterSub``.

    Example:
        >>> weight = torch.ones(3, 2)
        >>> sparse_apply_gradient_descent_(weight, torch.ones(2, 2), torch.tensor([0, 2]), lr=0.25)
        tensor([[0.7500, 0.7500],
                [1.0000, 1.0000],
                [0.7500, 0.7500]])
    """
    return update(Rule.GRADIENT_DESCENT, weight, (), grad, indices, [lr])


def sparse_apply_momentum_(
    weight: Tensor,
    momentum_buffer: Tensor,
    grad: Tensor,
    indices: Tensor,
    *,
    lr: float,
    momentum: float,
    nesterov: bool = False,
) -> Tensor:
    """
    Update rows of a table by momentum, in place: ``m = momentum * m + g``, ``w -= lr * m``.

    With ``nesterov``: ``w -= lr * g + lr * momentum * m``. The momentum of rows that ``indices`` does not name does not
    decay.

    Args:
        weight, grad, indices, lr: as for :func:`sparse_apply_gradient_descent_`.
        momentum_buffer: shape and dtype of ``weight``, written in place: ``m``.
        momentum: the share of ``m`` that stays.
        nesterov: whether to take Nesterov's step, by the second formula.

    Returns:
        ``weight``. On CUDA nothing waits for the device. Errors as of
        :func:`sparse_apply_gradient_descent_`.

    Source: ``tf.raw_ops.ResourceSparseApplyMomentum``.

    Example:
        >>> weight, buffer = torch.ones(2, 1), torch.zeros(2, 1)
        >>> sparse_apply_momentum_(weight, buffer, torch.ones(2, 1), torch.tensor([1, 1]), lr=0.125, momentum=0.5)
        tensor([[1.0000],
                [0.6875]])
    """
    rule = Rule.NESTEROV_MOMENTUM if nesterov else Rule.MOMENTUM
    return update(rule, weight, (momentum_buffer,), grad, indices, [lr, momentum])


def sparse_apply_keras_momentum_(
    weight: Tensor,
    momentum_buffer: Tensor,
    grad: Tensor,
    indices: Tensor,
    *,
    lr: float,
    momentum: float,
    nesterov: bool = False,
) -> Tensor:
    """
    Update rows of a table by Keras's momentum, in place: ``m = momentum * m - lr * g``, ``w += m``.

    With ``nesterov``: ``w += momentum * m - lr * g``.

    Args:
        weight, grad, indices, lr: as for :func:`sparse_apply_gradient_descent_`.
        momentum_buffer: shape and dtype of ``weight``, written in place: ``m``.
        momentum: the share of ``m`` that stays.
        nesterov: whether to take Nesterov's step, by the second formula.

    Returns:
        ``weight``. On CUDA nothing waits for the device. Errors as of
        :func:`sparse_apply_gradient_descent_`.

    Source: ``tf.raw_ops.ResourceSparseApplyKerasMomentum``.

    Example:
        >>> weight, buffer = torch.ones(2, 1), torch.zeros(2, 1)
        >>> sparse_apply_keras_momentum_(weight, buffer, torch.ones(1, 1), torch.tensor([1]), lr=0.125, momentum=0.5)
        tensor([[1.0000],
                [0.8750]])
        >>> buffer
        tensor([[ 0.0000],
                [-0.1250]])
    """
    rule = Rule.KERAS_NESTEROV_MOMENTUM if nesterov else Rule.KERAS_MOMENTUM
    return update(rule, weight, (momentum_buffer,), grad, indices, [lr, momentum])


def sparse_apply_adagrad_(
    weight: Tensor,
    accumulator: Tensor,
    grad: Tensor,
    indices: Tensor,
    *,
    lr: float,
    eps: float = 0.0,
    update_accumulator: bool = True,
) -> Tensor:
    """
    Update rows of a table by Adagrad, in place: ``a += g * g``, ``w -= lr * g / (sqrt(a) + eps)``.

    A row that occurs several times adds the square of each of its gradients, not of their sum.

    Args:
        weight, grad, indices, lr: as for :func:`sparse_apply_gradient_descent_`.
        accumulator: shape and dtype of ``weight``, written in place: ``a``.
        eps: added to the root.
        update_accumulator: whether ``a`` grows, or is only used.

    Returns:
        ``weight``. On CUDA nothing waits for the device. Errors as of
        :func:`sparse_apply_gradient_descent_`.

    Source: ``tf.raw_ops.ResourceSparseApplyAdagrad`` (``eps`` 0), ``tf.raw_ops.ResourceSparseApplyAdagradV2``.

    Example:
        >>> weight, accumulator = torch.ones(2, 1), torch.zeros(2, 1)
        >>> sparse_apply_adagrad_(weight, accumulator, torch.tensor([[2.0]]), torch.tensor([1]), lr=0.5)
        tensor([[1.0000],
                [0.5000]])
    """
    rule = Rule.ADAGRAD if update_accumulator else Rule.ADAGRAD_FROZEN
    return update(rule, weight, (accumulator,), grad, indices, [lr, eps])


def sparse_apply_adagrad_da_(
    weight: Tensor,
    grad_sum: Tensor,
    square_sum: Tensor,
    grad: Tensor,
    indices: Tensor,
    *,
    lr: float,
    step: int,
    l1: float = 0.0,
    l2: float = 0.0,
) -> Tensor:
    """
    Update rows of a table by Adagrad with dual averaging, in place: the sums of gradients determine the weight.

    ``s += g``, ``q += g * g``, ``w = -shrunk(s / step, l1) / (l2 + sqrt(q) / (step * lr))``, where ``shrunk(x, l1)``
    is ``x`` moved towards zero by ``l1``, and zero where it is not further away.

    Args:
        weight, grad, indices, lr: as for :func:`sparse_apply_gradient_descent_`.
        grad_sum: shape and dtype of ``weight``, written in place: ``s``.
        square_sum: shape and dtype of ``weight``, written in place: ``q``.
        step: the number of the training step, from 1.
        l1: strength of the l1 penalty; ``l2`` of the l2 penalty.

    Returns:
        ``weight``. On CUDA nothing waits for the device. Errors as of
        :func:`sparse_apply_gradient_descent_`.

    Source: ``tf.raw_ops.ResourceSparseApplyAdagradDA``.

    Example:
        >>> weight, grad_sum, square_sum = torch.ones(2, 1), torch.zeros(2, 1), torch.zeros(2, 1)
        >>> ids = torch.tensor([1])
        >>> sparse_apply_adagrad_da_(weight, grad_sum, square_sum, torch.tensor([[2.0]]), ids, lr=0.5, step=1)
        tensor([[ 1.0000],
                [-0.5000]])
    """
    hyperparameters = [lr, l1, l2, float(step)]
    return update(Rule.ADAGRAD_DUAL_AVERAGING, weight, (grad_sum, square_sum), grad, indices, hyperparameters)


def sparse_apply_adadelta_(
    weight: Tensor,
    square_avg: Tensor,
    acc_delta: Tensor,
    grad: Tensor,
    indices: Tensor,
    *,
    lr: float = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
) -> Tensor:
    """
    Update rows of a table by Adadelta, in place.

    ``v = rho * v + (1 - rho) * g * g``, ``d = sqrt(u + eps) / sqrt(v + eps) * g``, ``w -= lr * d``,
    ``u = rho * u + (1 - rho) * d * d``.

    Args:
        weight, grad, indices, lr: as for :func:`sparse_apply_gradient_descent_`.
        square_avg: shape and dtype of ``weight``, written in place: ``v``.
        acc_delta: shape and dtype of ``weight``, written in place: ``u``.
        rho: the share of the averages that stays. ``eps`` keeps their roots apart from zero.

    Returns:
        ``weight``. On CUDA nothing waits for the device. Errors as of
        :func:`sparse_apply_gradient_descent_`.

    Source: ``tf.raw_ops.ResourceSparseApplyAdadelta``.

    Example:
        >>> weight, square_avg, acc_delta = torch.ones(2, 1), torch.zeros(2, 1), torch.zeros(2, 1)
        >>> ids = torch.tensor([1])
        >>> sparse_apply_adadelta_(weight, square_avg, acc_delta, torch.tensor([[3.0]]), ids, rho=0.0, eps=1.0)
        tensor([[1.0000],
                [0.0513]])
    """
    return update(Rule.ADADELTA, weight, (square_avg, acc_delta), grad, indices, [lr, rho, eps])


def sparse_apply_ftrl_(
    weight: Tensor,
    accumulator: Tensor,
    linear: Tensor,
    grad: Tensor,
    indices: Tensor,
    *,
    lr: float,
    l1: float = 0.0,
    l2: float = 0.0,
    l2_shrinkage: float = 0.0,
    lr_power: float = -0.5,
    multiply_linear_by_lr: bool = False,
) -> Tensor:
    """
    Update rows of a table by FTRL-proximal (follow the regularized leader), in place.

    With ``p = -lr_power``: ``b = a + g * g``, ``z += g + 2 * l2_shrinkage * w - (b**p - a**p) / lr * w``,
    ``w = (clamp(z, -l1, l1) - z) / (b**p / lr + 2 * l2)``, ``a = b``.

    Args:
        weight, grad, indices: as for :func:`sparse_apply_gradient_descent_`.
        accumulator: shape and dtype of ``weight``, written in place: ``a``.
        linear: shape and dtype of ``weight``, written in place: ``z``.
        lr: the learning rate, > 0; with ``multiply_linear_by_lr`` >= 0.
        l1: strength of the l1 penalty, >= 0.
        l2: strength of the l2 penalty, >= 0.
        l2_shrinkage: strength of the l2 penalty that goes into the gradient alone, not into the accumulator, >= 0.
        lr_power: how the learning rate falls as the accumulator grows, <= 0.
        multiply_linear_by_lr: whether ``linear`` holds ``lr * z`` in place of ``z``.

    Returns:
        ``weight``. On CUDA nothing waits for the device. Errors as of
        :func:`sparse_apply_gradient_descent_`, and ValueError for hyperparameters outside their range.

    Source: ``tf.raw_ops.ResourceSparseApplyFtrl`` and ``ResourceSparseApplyFtrlV2``.

    Example:
        >>> weight, accumulator, linear = torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2, 1)
        >>> ids = torch.tensor([1])
        >>> sparse_apply_ftrl_(weight, accumulator, linear, torch.tensor([[2.0]]), ids, lr=0.5, l1=1.0)
        tensor([[ 0.0000],
                [-0.2500]])
    """
    rule = Rule.FTRL_SCALED_LINEAR if multiply_linear_by_lr else Rule.FTRL
    return update(rule, weight, (accumulator, linear), grad, indices, [lr, l1, l2, l2_shrinkage, lr_power])


def sparse_apply_proximal_adagrad_(
    weight: Tensor,
    accumulator: Tensor,
    grad: Tensor,
    indices: Tensor,
    *,
    lr: float,
    l1: float = 0.0,
    l2: float = 0.0,
) -> Tensor:
    """
    Update rows of a table by proximal Adagrad, in place.

    ``a += g * g``, ``r = lr / sqrt(a)``, ``w = shrunk(w - r * g, r * l1) / (1 + r * l2)``, where ``shrunk(x, y)`` is
    ``x`` moved towards zero by ``y``, and zero where it is not further away.

    Args:
        weight, grad, indices: as for :func:`sparse_apply_gradient_descent_`.
        accumulator: shape and dtype of ``weight``, written in place: ``a``.
        lr: the learning rate, > 0.
        l1: strength of the l1 penalty, >= 0.
        l2: strength of the l2 penalty, >= 0.

    Returns:
        ``weight``. On CUDA nothing waits for the device. Errors as of
        :func:`sparse_apply_gradient_descent_`, and ValueError for hyperparameters outside their range.

    Source: ``tf.raw_ops.ResourceSparseApplyProximalAdagrad``.

    Example:
        >>> weight, accumulator = torch.ones(2, 1), torch.zeros(2, 1)
        >>> ids = torch.tensor([1])
        >>> sparse_apply_proximal_adagrad_(weight, accumulator, torch.tensor([[2.0]]), ids, lr=0.5, l1=1.0)
        tensor([[1.0000],
                [0.2500]])
    """
    return update(Rule.PROXIMAL_ADAGRAD, weight, (accumulator,), grad, indices, [lr, l1, l2])


def sparse_apply_proximal_gradient_descent_(
    weight: Tensor, grad: Tensor, indices: Tensor, *, lr: float, l1: float = 0.0, l2: float = 0.0
) -> Tensor:
    """
    Update rows of a table by proximal gradient descent, with l1 and l2 penalties, in place.

    ``w = shrunk(w - lr * g, lr * l1) / (1 + lr * l2)``, where ``shrunk(x, y)`` is ``x`` moved towards
    zero by ``y``, and zero where it is not further away.

    Args:
        weight, grad, indices, lr: as for :func:`sparse_apply_gradient_descent_`.
        l1: strength of the l1 penalty; ``l2`` of the l2 penalty.

    Returns:
        ``weight``. On CUDA nothing waits for the device. Errors as of
        :func:`sparse_apply_gradient_descent_`.

    Source: ``tf.raw_ops.ResourceSparseApplyProximalGradientDescent``.

    Example:
        >>> weight = torch.ones(2, 1)
        >>> sparse_apply_proximal_gradient_descent_(weight, torch.ones(1, 1), torch.tensor([1]), lr=0.5, l1=0.5)
        tensor([[1.0000],
                [0.2500]])
    """
    return update(Rule.PROXIMAL_GRADIENT_DESCENT, weight, (), grad, indices, [lr, l1, l2])


def sparse_apply_rmsprop_(
    weight: Tensor,
    square_avg: Tensor,
    momentum_buffer: Tensor,
    grad: Tensor,
    indices: Tensor,
    *,
    lr: float,
    rho: float = 0.9,
    momentum: float = 0.0,
    eps: float = 1e-10,
) -> Tensor:
    """
    Update rows of a table by RMSProp with ``eps`` inside the root, in place.

    ``v = rho * v + (1 - rho) * g * g``, ``m = momentum * m + lr / sqrt(v + eps) * g``, ``w -= m``.

    Args:
        weight, grad, indices, lr: as for :func:`sparse_apply_gradient_descent_`.
        square_avg: shape and dtype of ``weight``, written in place: ``v``.
        momentum_buffer: shape and dtype of ``weight``, written in place: ``m``.
        rho: the share of the average that stays (torch calls it ``alpha``).
        momentum: the share of ``m`` that stays.
        eps: added to the average, under the root.

    Returns:
        ``weight``. On CUDA nothing waits for the device. Errors as of
        :func:`sparse_apply_gradient_descent_`.

    Source: ``tf.raw_ops.ResourceSparseApplyRMSProp``.

    Example:
        >>> weight, square_avg, buffer = torch.ones(2, 1), torch.zeros(2, 1), torch.zeros(2, 1)
        >>> ids = torch.tensor([1])
        >>> sparse_apply_rmsprop_(weight, square_avg, buffer, torch.tensor([[4.0]]), ids, lr=0.25, rho=0.75)
        tensor([[1.0000],
                [0.5000]])
    """
    return update(Rule.RMSPROP, weight, (square_avg, momentum_buffer), grad, indices, [lr, rho, momentum, eps])


def sparse_apply_centered_rmsprop_(
    weight: Tensor,
    grad_avg: Tensor,
    square_avg: Tensor,
    momentum_buffer: Tensor,
    grad: Tensor,
    indices: Tensor,
    *,
    lr: float,
    rho: float = 0.9,
    momentum: float = 0.0,
    eps: float = 1e-10,
) -> Tensor:
    """
    Update rows of a table by centered RMSProp, in place: it divides by the root of the estimated variance.

    ``v = rho * v + (1 - rho) * g * g``, ``a = rho * a + (1 - rho) * g``,
    ``m = momentum * m + lr / sqrt(v + eps - a * a) * g``, ``w -= m``.

    Args:
        weight, grad, indices, lr: as for :func:`sparse_apply_gradient_descent_`.
        grad_avg: shape and dtype of ``weight``, written in place: ``a``.
        square_avg: shape and dtype of ``weight``, written in place: ``v``.
        momentum_buffer: shape and dtype of ``weight``, written in place: ``m``.
        rho: the share of the averages that stays (torch calls it ``alpha``).
        momentum: the share of ``m`` that stays.
        eps: added to the variance, under the root.

    Returns:
        ``weight``. On CUDA nothing waits for the device. Errors as of
        :func:`sparse_apply_gradient_descent_`.

    Source: ``tf.raw_ops.ResourceSparseApplyCenteredRMSProp``.

    Example:
        >>> weight, states = torch.ones(2, 1), [torch.zeros(2, 1) for _ in range(3)]
        >>> sparse_apply_centered_rmsprop_(weight, *states, torch.tensor([[2.0]]), torch.tensor([1]), lr=0.25, rho=0.5)
        tensor([[1.0000],
                [0.5000]])
    """
    states = grad_avg, square_avg, momentum_buffer
    return update(Rule.CENTERED_RMSPROP, weight, states, grad, indices, [lr, rho, momentum, eps])
