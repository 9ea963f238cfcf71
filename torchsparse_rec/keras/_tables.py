"""Tables of Keras's layers: which layout a gradient has under the optimizer that takes it, and the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras
import torch
from keras.src.backend.common.global_state import get_global_attribute

from .. import nn
from ._by_rows import announced_optimizer, is_stored, steps_rows

__all__ = ["ids_of", "is_lookup_of_ours", "rows_module"]

Rows = TypeVar("Rows", nn.Embedding, nn.EmbeddingBag)

_IDS = (torch.int32, torch.int64)


def ids_of(inputs: Any) -> torch.Tensor:
    """Return a layer's inputs as Keras reads them: what is not int32 or int64 becomes int32."""
    ids = keras.ops.convert_to_tensor(inputs)
    return ids if ids.dtype in _IDS else ids.to(torch.int32)


def is_lookup_of_ours(variable: Any) -> bool:
    """Say whether a lookup reads the table's own storage: not symbolic, not stateless, not in a compiled graph."""
    return is_stored(variable) and not torch.compiler.is_compiling()


def rows_module(layer: Any, variable: Any, make: Callable[[], Rows]) -> Rows:
    """
    Return the module that looks up rows of a layer's table, in the gradient mode that the optimizer takes.

    Args:
        layer: the layer, which keeps the module out of Keras's and torch's sight: its parameter is the variable's.
        variable: the table.
        make: makes the module, on the device ``meta``.
    """
    weight = variable.value
    module: Rows | None = layer.__dict__.get("_rows")
    if module is None or module._parameters["weight"] is not weight:
        module = make()
        module.register_parameter("weight", weight)
        module.grad_mode = "dense"  # it declares that this module owns the parameter
        layer.__dict__["_rows"] = module
    if torch.is_grad_enabled() and weight.requires_grad:
        mode = "sparse" if _is_sparse(variable) else "dense"
        if module.grad_mode != mode:
            module.grad_mode = mode
    return module


def _is_sparse(variable: Any) -> bool:
    """Say whether the gradient of the lookup that runs should have the batch's rows alone."""
    if variable.regularizer is not None or variable.constraint is not None:
        return False  # Keras reads or writes the whole table in every step
    # Keras notes the outermost layer that is being called: of a model in training, the model itself.
    call = get_global_attribute("current_call_ctx")
    optimizer = getattr(call.entry_layer, "optimizer", None) if call is not None else None
    if optimizer is None:
        optimizer = announced_optimizer(variable)
    return optimizer is not None and steps_rows(optimizer, variable)
