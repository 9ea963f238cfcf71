"""Runs of a case of the parity check, by compat.tensorflow and by the installed TensorFlow."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import check_errors
from .. import tensorflow as compat
from ..installed import tensorflow
from . import OPERATORS
from .case import Case, Operator, Outcome
from .convert import coalesced, flattened, from_tensorflow, leaves, mapped, to_tensorflow

# The errors that we may raise for bad input. A RuntimeError would be a fault of the library, no answer to the caller.
_OUR_ERRORS = (ValueError, IndexError, TypeError)


def run_ours(case: Case, device: str = "cpu") -> Outcome:
    """Run a case by compat.tensorflow, on a device; errors that a CUDA kernel records count as raised."""
    operator = OPERATORS[case.operator]
    call = _call(case.operator, compat, operator.run_ours)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Before 2.13 torch may give this warning, once in a process, for calls that do set whether to check.
            warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled", UserWarning)
            values = dict(flattened(call(mapped(case.arguments, lambda x: x.to(device)))))
            for label, further in operator.gradient_calls.items() if case.gradients else ():
                values |= _our_gradients(case, call, label, further, device)
            check_errors(device)
    except _OUR_ERRORS as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    return Outcome({name: _on_cpu(value) for name, value in values.items()})


def run_tensorflow(case: Case) -> Outcome:
    """Run a case by TensorFlow, eagerly, on copies."""
    tf = tensorflow()
    operator = OPERATORS[case.operator]
    call = _call(case.operator, tf, operator.run_tensorflow)
    try:
        values = dict(flattened(call(_their_arguments(operator, case))))
        for label, further in operator.gradient_calls.items() if case.gradients else ():
            values |= _their_gradients(case, operator, call, label, further)
    except (tf.errors.OpError, ValueError, TypeError, IndexError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    return Outcome({name: from_tensorflow(value) for name, value in values.items()})


def _call(operator: str, module: Any, own: Callable[..., Any] | None) -> Callable[[dict[str, Any]], Any]:
    """Return a function that calls the operator with a dict of arguments: ``own``, or the one of its dotted name."""
    if own is not None:
        return lambda arguments: own(module, arguments)
    function = module
    for part in operator.split(" ")[0].split("."):
        function = getattr(function, part)
    return lambda arguments: function(**arguments)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return mapped(value, lambda x: x.detach().cpu())


# ---- Gradients ------------------------------------------------------------------------------------------------------


def _our_gradients(
    case: Case, call: Callable[[dict[str, Any]], Any], label: str, further: Any, device: str
) -> dict[str, Any]:
    arguments = mapped(case.arguments, lambda x: x.to(device))
    arguments |= {name: mapped(arguments[name], _differentiable) for name in case.gradients}
    sources = dict(pair for name in case.gradients for pair in leaves(arguments[name], name))
    results = dict(flattened(call({**arguments, **further})))
    targets = [results[name] for name in case.upstream_names]
    pairs = zip(case.upstream_names, targets, strict=True)
    upstreams = [case.upstream_of(name, tuple(x.shape)).to(device, x.dtype) for name, x in pairs]
    connected = [pair for pair in zip(targets, upstreams, strict=True) if pair[0].requires_grad]
    if connected:
        torch.autograd.backward([target for target, _ in connected], [upstream for _, upstream in connected])
    return {f"{label} of {name}": _our_gradient(source) for name, source in sources.items()}


def _differentiable(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def _our_gradient(source: Tensor) -> Any:
    gradient = source.grad
    if gradient is None:
        return torch.zeros_like(source)
    if gradient.shape != source.shape:
        raise RuntimeError(f"a gradient must have the shape {list(source.shape)}, got {list(gradient.shape)}")
    if not gradient.is_sparse:
        return gradient
    return coalesced(gradient._indices()[0].cpu(), gradient._values().cpu(), tuple(source.shape))


def _their_arguments(operator: Operator, case: Case) -> dict[str, Any]:
    arguments = to_tensorflow(case.arguments)
    return arguments if operator.prepare_tensorflow is None else operator.prepare_tensorflow(tensorflow(), arguments)


def _their_gradients(
    case: Case, operator: Operator, call: Callable[[dict[str, Any]], Any], label: str, further: Any
) -> dict[str, Any]:
    tf = tensorflow()
    arguments = _their_arguments(operator, case)
    sources = dict(pair for name in case.gradients for pair in leaves(arguments[name], name))
    with tf.GradientTape() as tape:
        tape.watch(list(sources.values()))
        results = dict(flattened(call({**arguments, **further})))
    targets = [results[name] for name in case.upstream_names]
    pairs = zip(case.upstream_names, targets, strict=True)
    upstreams = [tf.cast(to_tensorflow(case.upstream_of(name, tuple(x.shape))), x.dtype) for name, x in pairs]
    gradients = tape.gradient(
        targets, list(sources.values()), output_gradients=upstreams, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    named = zip(sources.items(), gradients, strict=True)
    return {f"{label} of {name}": _their_gradient(source, gradient) for (name, source), gradient in named}


def _their_gradient(source: Any, gradient: Any) -> Any:
    if not hasattr(gradient, "indices"):
        return from_tensorflow(gradient)
    indices, values = from_tensorflow(gradient.indices), from_tensorflow(gradient.values)
    return coalesced(indices.reshape(-1), values, tuple(source.shape))


def tensorflow_version() -> str:
    """Return the version of the installed TensorFlow."""
    return importlib.import_module("tensorflow").__version__
