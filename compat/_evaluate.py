"""Runs a case of the parity check: by compat.tensorflow, and by the installed TensorFlow."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import check_errors
from . import tensorflow as ours
from ._cases import Case
from ._installed import tensorflow
from .converters import indexed_slices_to_torch, tensor_to_tensorflow, tensor_to_torch

# How bad input may end here. A RuntimeError would be a failure of the library, not an answer to the caller.
_OUR_ERRORS = (ValueError, IndexError, TypeError)


@dataclass
class Outcome:
    """What a call gave."""

    #: Tensors on the CPU, or lists of bytes, by name.
    values: dict[str, Any] = field(default_factory=dict)
    #: The error's class and text, or None.
    error: str | None = None


def run_ours(case: Case, device: str = "cpu") -> Outcome:
    """By compat.tensorflow, on a device; errors that a CUDA kernel records count as raised."""
    arguments = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.arguments.items()}
    function = _function(ours, case)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            values = _named(function(**arguments))
            if case.upstream is not None:
                values |= _our_gradients(function, arguments, case.upstream.to(device))
            check_errors(device)
    except _OUR_ERRORS as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    return Outcome({k: v.cpu() if isinstance(v, Tensor) else v.tolist() for k, v in values.items()})


def run_tensorflow(case: Case) -> Outcome:
    """By TensorFlow, eagerly, on copies."""
    tf = tensorflow()
    function = _function(tf, case)
    try:
        arguments = {k: _to_tensorflow(v) for k, v in case.arguments.items()}
        if case.operator.endswith("of integers"):
            arguments["input"] = tf.strings.as_string(arguments["input"])
        values = _named(function(**arguments))
        if case.upstream is not None:
            values |= _their_gradients(function, arguments, tensor_to_tensorflow(case.upstream, share=False))
    except (tf.errors.OpError, ValueError, TypeError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    return Outcome({k: _from_tensorflow(v) for k, v in values.items()})


def _function(module: Any, case: Case) -> Callable[..., Any]:
    """The operator by its dotted name, which may be followed by words."""
    result = module
    for part in case.operator.split(" ")[0].split("."):
        result = getattr(result, part)
    return result


def _named(result: Any) -> dict[str, Any]:
    """The fields of a named tuple, or the one result."""
    return result._asdict() if hasattr(result, "_asdict") else {"output": result}


def _our_gradients(function: Callable[..., Any], arguments: dict[str, Any], upstream: Tensor) -> dict[str, Tensor]:
    """The gradient of data, dense and sparse."""
    data = arguments["data"].clone().requires_grad_()
    function(**{**arguments, "data": data}).backward(upstream)
    dense, data.grad = data.grad, None
    function(**{**arguments, "data": data}, sparse_gradient=True).backward(upstream)
    sparse = data.grad
    if not sparse.is_coalesced() or sparse.shape != data.shape:
        raise RuntimeError(f"the sparse gradient must be coalesced and of shape {list(data.shape)}, got {sparse}")
    return {"gradient": dense, "gradient rows": sparse.indices()[0], "gradient values": sparse.values()}


def _their_gradients(function: Callable[..., Any], arguments: dict[str, Any], upstream: Any) -> dict[str, Any]:
    tf = tensorflow()
    data = arguments["data"]
    gradients = []
    for sparse in (False, True):
        with tf.GradientTape() as tape:
            tape.watch(data)
            result = function(**arguments, sparse_gradient=sparse)
        gradients.append(tape.gradient(result, data, output_gradients=upstream))
    dense, slices = gradients
    # Through the converter, as a user would; torch's indices are always int64.
    converted = indexed_slices_to_torch(slices)
    return {"gradient": dense, "gradient rows": converted._indices()[0], "gradient values": converted._values()}


def _to_tensorflow(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tensor_to_tensorflow(value, share=False)
    return getattr(tensorflow(), str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else value


def _from_tensorflow(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    return np.asarray(value.numpy()).tolist() if value.dtype.name == "string" else tensor_to_torch(value)


def tensorflow_version() -> str:
    """Of the installed TensorFlow."""
    return importlib.import_module("tensorflow").__version__
