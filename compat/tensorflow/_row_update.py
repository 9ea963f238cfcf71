"""
``tf.raw_ops.ResourceSparseApply*`` as functions: an optimizer's step on the rows that a gradient names.

TensorFlow's operators write into variables; these functions do not change their arguments and return new tensors. All
share these rules:

* ``grad`` ``[N, ...]`` and ``indices`` ``[N]`` (int32 or int64) are the slices of an IndexedSlices. ``var`` and its
  slots ``[V, ...]`` have one shape and dtype: float16, bfloat16, float32 or float64.
* Slices of one row are applied one by one, in their order. Rows that ``indices`` does not name stay unchanged.
* Hyperparameters are numbers or scalar tensors of the dtype of ``var``. (On CUDA tensors of them are read back.)
* ``use_locking`` and ``name`` are ignored.
* Errors are ValueError, and IndexError for an index outside ``[0, V)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...ops.row_update import RowRule, row_update_
from .arguments import as_size, as_tensor

_Result = TypeVar("_Result")


class WithAccumulator(NamedTuple):
    """A variable and its slot, after the step."""

    var: Tensor
    accum: Tensor


class WithAdagradDA(NamedTuple):
    """A variable and its slots of Adagrad with dual averaging, after the step."""

    var: Tensor
    gradient_accumulator: Tensor
    gradient_squared_accumulator: Tensor


class WithAdadelta(NamedTuple):
    """A variable and its slots of Adadelta, after the step."""

    var: Tensor
    accum: Tensor
    accum_update: Tensor


class WithFtrl(NamedTuple):
    """A variable and its slots of FTRL, after the step."""

    var: Tensor
    accum: Tensor
    linear: Tensor


class WithRMSProp(NamedTuple):
    """A variable and its slots of RMSProp, after the step."""

    var: Tensor
    ms: Tensor
    mom: Tensor


class WithCenteredRMSProp(NamedTuple):
    """A variable and its slots of centered RMSProp, after the step."""

    var: Tensor
    mg: Tensor
    ms: Tensor
    mom: Tensor


# ---- Arguments ------------------------------------------------------------------------------------------------------


def _number(argument: str, value: Any, var: Tensor) -> float:
    """Return a hyperparameter rounded to the dtype of ``var``, as TensorFlow's scalars are."""
    if argument == "global_step":
        return float(as_size(argument, value))
    if isinstance(value, Tensor) and (value.dim() != 0 or value.dtype != var.dtype):
        raise ValueError(
            f"{argument} must be a number or a scalar of the dtype of var, {var.dtype}, got {value.dtype} of shape"
            f" {list(value.shape)}"
        )
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument} must be a number, got {value!r}") from error
    half = var.dtype in (torch.float16, torch.bfloat16)
    return torch.tensor(number, dtype=var.dtype).item() if half else number


def _as_var(argument: str, value: Any, var: Tensor) -> Tensor:
    """Convert a value to a tensor on the device of ``var``; a value without a dtype takes the dtype of ``var``."""
    tensor = as_tensor(argument, value, device=var.device).detach()
    return tensor if isinstance(value, (Tensor, np.ndarray)) else tensor.to(var.dtype)


def _slot(argument: str, value: Any, var: Tensor) -> Tensor:
    """Return a copy of a slot, checked to have the shape and dtype of ``var``."""
    slot = _as_var(argument, value, var)
    if slot.shape != var.shape or slot.dtype != var.dtype:
        raise ValueError(
            f"{argument} must have the shape and dtype of var, {list(var.shape)} and {var.dtype}, got"
            f" {list(slot.shape)} and {slot.dtype}"
        )
    return slot.clone(memory_format=torch.contiguous_format)


# Arguments that choose between two rules, with their defaults.
_FLAGS = {"update_slots": True, "multiply_linear_by_lr": False, "use_nesterov": False}


def _step(
    result: Callable[..., _Result], arguments: str, *rules: RowRule
) -> Callable[[Callable], Callable[..., _Result]]:
    """
    Make the function of one of TensorFlow's operators from its name and docstring.

    Args:
        result: the maker of the result of ``var`` and the slots: a class with their names as fields, or a function.
        arguments: the names of the arguments in TensorFlow's order, and the flag. The names beside ``var``, slots,
            ``grad`` and ``indices`` are the rule's hyperparameters, in its order; one in parentheses is no argument,
            and is 0.
        rules: the kernel's rule; with a flag, the rules where it is False and where it is True.
    """
    flags = {x: _FLAGS[x] for x in arguments.split() if x in _FLAGS}
    required = [x for x in arguments.split() if x not in _FLAGS and not x.startswith("(")]
    defaults: dict[str, Any] = {"use_locking": False, **flags, "name": None}
    parameters = [(x, Parameter.empty) for x in required] + list(defaults.items())
    signature = Signature([Parameter(x, Parameter.POSITIONAL_OR_KEYWORD, default=value) for x, value in parameters])
    slots = getattr(result, "_fields", ("var",))[1:]
    others = {"var", *slots, "grad", "indices", *flags}
    hyperparameters = [x for x in arguments.split() if x not in others]

    def decorate(function: Callable) -> Callable[..., _Result]:
        @wraps(function)
        def step(*args: Any, **kwargs: Any) -> _Result:
            try:
                given = defaults | signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}: {error}") from None
            var = as_tensor("var", given["var"]).detach().clone(memory_format=torch.contiguous_format)
            tables = [var, *(_slot(x, given[x], var) for x in slots)]
            indices = as_tensor("indices", given["indices"], empty=torch.int32, device=var.device)
            numbers = [_number(x, given.get(x, 0.0), var) for x in hyperparameters]
            rule = rules[any(given[x] for x in flags)]
            row_update_(rule, tables, _as_var("grad", given["grad"], var), indices, numbers)
            return result(*tables)

        vars(step)["__signature__"] = signature
        return step

    return decorate


# ---- TensorFlow's operators -----------------------------------------------------------------------------------------


@_step(WithAccumulator, "var accum lr (epsilon) grad indices update_slots", RowRule.ADAGRAD_FROZEN, RowRule.ADAGRAD)
def sparse_apply_adagrad(*args: Any) -> Any:
    """
    Take a step of Adagrad: ``accum += grad * grad``, ``var -= lr * grad / sqrt(accum)``.

    A row that occurs several times adds the square of each of its gradients, not of their sum. Without
    ``update_slots``, ``accum`` is only used.

    Source: ``tf.raw_ops.ResourceSparseApplyAdagrad``.

    Example:
        >>> sparse_apply_adagrad([1.0, 1.0], [0.0, 0.0], 0.5, [2.0], [1])
        WithAccumulator(var=tensor([1.0000, 0.5000]), accum=tensor([0., 4.]))
    """


@_step(WithAccumulator, "var accum lr epsilon grad indices update_slots", RowRule.ADAGRAD_FROZEN, RowRule.ADAGRAD)
def sparse_apply_adagrad_v2(*args: Any) -> Any:
    """
    Take a step of Adagrad with ``epsilon`` outside the root: ``var -= lr * grad / (sqrt(accum) + epsilon)``.

    Source: ``tf.raw_ops.ResourceSparseApplyAdagradV2``.

    Example:
        >>> sparse_apply_adagrad_v2([1.0, 1.0], [0.0, 0.0], 0.5, 2.0, [2.0], [1])
        WithAccumulator(var=tensor([1.0000, 0.7500]), accum=tensor([0., 4.]))
    """


@_step(
    WithAdagradDA,
    "var gradient_accumulator gradient_squared_accumulator grad indices lr l1 l2 global_step",
    RowRule.ADAGRAD_DUAL_AVERAGING,
)
def sparse_apply_adagrad_da(*args: Any) -> Any:
    """
    Take a step of Adagrad with dual averaging: ``var`` follows from sums of gradients and of their squares.

    ``s += grad``, ``q += grad * grad``, ``var = -shrunk(s / global_step, l1) / (l2 + sqrt(q) / (global_step * lr))``.
    Here ``s`` and ``q`` are the slots, in their order, and ``shrunk(x, y)`` is ``x`` moved towards zero by ``y``, and
    zero where it is not further away. Steps count from 1.

    Source: ``tf.raw_ops.ResourceSparseApplyAdagradDA``.

    Example:
        >>> sparse_apply_adagrad_da([1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [2.0], [1], 0.5, 0.0, 0.0, 1).var
        tensor([ 1.0000, -0.5000])
    """


@_step(WithAdadelta, "var accum accum_update lr rho epsilon grad indices", RowRule.ADADELTA)
def sparse_apply_adadelta(*args: Any) -> Any:
    """
    Take a step of Adadelta, which scales each step by the average size of the steps before.

    ``accum = rho * accum + (1 - rho) * grad * grad`` and ``d = sqrt(accum_update + epsilon) / sqrt(accum + epsilon) *
    grad``. Then ``var -= lr * d`` and ``accum_update = rho * accum_update + (1 - rho) * d * d``.

    Source: ``tf.raw_ops.ResourceSparseApplyAdadelta``.

    Example:
        >>> sparse_apply_adadelta([1.0, 1.0], [0.0, 0.0], [0.0, 0.0], 1.0, 0.0, 1.0, [3.0], [1]).var
        tensor([1.0000, 0.0513])
    """


@_step(
    WithFtrl,
    "var accum linear grad indices lr l1 l2 (l2_shrinkage) lr_power multiply_linear_by_lr",
    RowRule.FTRL,
    RowRule.FTRL_SCALED_LINEAR,
)
def sparse_apply_ftrl(*args: Any) -> Any:
    """
    Take a step of FTRL-proximal (follow the regularized leader): :func:`sparse_apply_ftrl_v2` without a shrinkage.

    Source: ``tf.raw_ops.ResourceSparseApplyFtrl``.

    Example:
        >>> sparse_apply_ftrl([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [2.0], [1], 0.5, 1.0, 0.0, -0.5).var
        tensor([ 0.0000, -0.2500])
    """


@_step(
    WithFtrl,
    "var accum linear grad indices lr l1 l2 l2_shrinkage lr_power multiply_linear_by_lr",
    RowRule.FTRL,
    RowRule.FTRL_SCALED_LINEAR,
)
def sparse_apply_ftrl_v2(*args: Any) -> Any:
    """
    Take a step of FTRL-proximal with ``l2_shrinkage``, which goes only into the linear term.

    With ``p = -lr_power``: ``b = accum + grad * grad``, ``linear += grad + 2 * l2_shrinkage * var - (b**p - accum**p) /
    lr * var``. Then ``var = (clamp(linear, -l1, l1) - linear) / (b**p / lr + 2 * l2)`` and ``accum = b``. With
    ``multiply_linear_by_lr`` the slot holds ``lr * linear``. ``lr`` must be positive, with ``multiply_linear_by_lr``
    not negative; the penalties must not be negative, ``lr_power`` not positive.

    Source: ``tf.raw_ops.ResourceSparseApplyFtrlV2``.

    Example:
        >>> sparse_apply_ftrl_v2([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [2.0], [1], 0.5, 1.0, 0.0, 0.0, -0.5).var
        tensor([ 0.0000, -0.2500])
    """


@_step(WithAccumulator, "var accum lr l1 l2 grad indices", RowRule.PROXIMAL_ADAGRAD)
def sparse_apply_proximal_adagrad(*args: Any) -> Any:
    """
    Take a step of proximal Adagrad: of size ``r = lr / sqrt(accum)``, then towards zero.

    ``accum += grad * grad``, ``var = shrunk(var - r * grad, r * l1) / (1 + r * l2)``. Here ``shrunk(x, y)`` is ``x``
    moved towards zero by ``y``, and zero where it is not further away. ``lr`` must be positive, ``l1`` and ``l2`` not
    negative.

    Source: ``tf.raw_ops.ResourceSparseApplyProximalAdagrad``.

    Example:
        >>> sparse_apply_proximal_adagrad([1.0, 1.0], [0.0, 0.0], 0.5, 1.0, 0.0, [2.0], [1])
        WithAccumulator(var=tensor([1.0000, 0.2500]), accum=tensor([0., 4.]))
    """


@_step(lambda var: var, "var alpha l1 l2 grad indices", RowRule.PROXIMAL_GRADIENT_DESCENT)
def sparse_apply_proximal_gradient_descent(*args: Any) -> Any:
    """
    Take a step of proximal gradient descent, of size ``alpha``, then towards zero; return the new ``var``.

    ``var = shrunk(var - alpha * grad, alpha * l1) / (1 + alpha * l2)``. Here ``shrunk(x, y)`` is ``x`` moved towards
    zero by ``y``, and zero where it is not further away.

    Source: ``tf.raw_ops.ResourceSparseApplyProximalGradientDescent``.

    Example:
        >>> sparse_apply_proximal_gradient_descent([1.0, 1.0], 0.5, 0.5, 0.0, [1.0], [1])
        tensor([1.0000, 0.2500])
    """


@_step(WithRMSProp, "var ms mom lr rho momentum epsilon grad indices", RowRule.RMSPROP)
def sparse_apply_rms_prop(*args: Any) -> Any:
    """
    Take a step of RMSProp, with ``epsilon`` inside the root.

    ``ms = rho * ms + (1 - rho) * grad * grad``, ``mom = momentum * mom + lr / sqrt(ms + epsilon) * grad``,
    ``var -= mom``.

    Source: ``tf.raw_ops.ResourceSparseApplyRMSProp``.

    Example:
        >>> sparse_apply_rms_prop([1.0, 1.0], [0.0, 0.0], [0.0, 0.0], 0.25, 0.75, 0.0, 0.0, [4.0], [1]).var
        tensor([1.0000, 0.5000])
    """


@_step(WithCenteredRMSProp, "var mg ms mom lr rho momentum epsilon grad indices", RowRule.CENTERED_RMSPROP)
def sparse_apply_centered_rms_prop(*args: Any) -> Any:
    """
    Take a step of RMSProp that divides by the root of an estimated variance, not of the average square.

    As :func:`sparse_apply_rms_prop`, with ``mg = rho * mg + (1 - rho) * grad`` and ``ms + epsilon - mg * mg`` under the
    root.

    Source: ``tf.raw_ops.ResourceSparseApplyCenteredRMSProp``.

    Example:
        >>> zeros = [0.0, 0.0]
        >>> sparse_apply_centered_rms_prop([1.0, 1.0], zeros, zeros, zeros, 0.25, 0.5, 0.0, 0.0, [2.0], [1]).var
        tensor([1.0000, 0.5000])
    """


@_step(WithAccumulator, "var accum lr grad indices momentum use_nesterov", RowRule.MOMENTUM, RowRule.NESTEROV_MOMENTUM)
def sparse_apply_momentum(*args: Any) -> Any:
    """
    Take a step of momentum: ``accum = momentum * accum + grad``, ``var -= lr * accum``.

    With ``use_nesterov``: ``var -= lr * grad + lr * momentum * accum``.

    Source: ``tf.raw_ops.ResourceSparseApplyMomentum``.

    Example:
        >>> sparse_apply_momentum([1.0, 1.0], [0.0, 0.0], 0.125, [1.0], [1], 0.5)
        WithAccumulator(var=tensor([1.0000, 0.8750]), accum=tensor([0., 1.]))
    """


@_step(
    WithAccumulator,
    "var accum lr grad indices momentum use_nesterov",
    RowRule.KERAS_MOMENTUM,
    RowRule.KERAS_NESTEROV_MOMENTUM,
)
def sparse_apply_keras_momentum(*args: Any) -> Any:
    """
    Take a step of Keras's momentum: ``accum = momentum * accum - lr * grad``, ``var += accum``.

    With ``use_nesterov``: ``var += momentum * accum - lr * grad``.

    Source: ``tf.raw_ops.ResourceSparseApplyKerasMomentum``.

    Example:
        >>> sparse_apply_keras_momentum([1.0, 1.0], [0.0, 0.0], 0.125, [1.0], [1], 0.5)
        WithAccumulator(var=tensor([1.0000, 0.8750]), accum=tensor([ 0.0000, -0.1250]))
    """
