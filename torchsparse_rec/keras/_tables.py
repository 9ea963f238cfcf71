"""Tables of Keras's layers: which layout a gradient has under the optimizer that takes it, and the lookups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import torch
from keras.src.backend.common.global_state import get_global_attribute
from torch import Tensor

from .. import nn, ops
from ..tables.stale import StaleParameter
from ..typing import GradMode
from ._by_rows import announced_optimizer, is_stored, steps_rows

__all__ = ["are_looked_up_by_us", "ids_of", "pooled", "rows_module"]

ModuleT = TypeVar("ModuleT", nn.Embedding, nn.EmbeddingBag, nn.EmbeddingBagCollection)

_IDS = (torch.int32, torch.int64)


def ids_of(inputs: Any) -> Tensor:
    """Return a layer's inputs as Keras reads them: other types than int32 and int64 become int32."""
    ids = keras.ops.convert_to_tensor(inputs)
    return ids if ids.dtype in _IDS else ids.to(torch.int32)


def are_looked_up_by_us(variables: Sequence[Any]) -> bool:
    """
    Say whether a lookup reads the tables' own storage: neither symbolic, stateless nor in a graph.

    Raises:
        RuntimeError: ``torch.export`` would read a table with rows that may be behind.
    """
    if torch.compiler.is_exporting() and any(isinstance(variable._value, StaleParameter) for variable in variables):
        raise RuntimeError(
            "torch.export cannot read a table that an optimizer of torchsparse_rec.keras has trained by rows: call "
            "torchsparse_rec.keras.revert(model) before"
        )
    return not torch.compiler.is_compiling() and all(map(is_stored, variables))


def pooled(table: Tensor, ids: Tensor, weights: Tensor | None, mode: str, padding_idx: int | None) -> Tensor:
    """Look up and pool bags, ``[B, L]``, in any tensor, which gets a dense gradient."""
    if ids.dim() == 1:
        ids = ids[:, None]
    ends = torch.arange(ids.shape[0] + 1, device=ids.device) * ids.shape[1]
    flat = None if weights is None else weights.reshape(-1)
    options = {"per_sample_weights": flat, "mode": mode, "padding_idx": padding_idx}
    return ops.embedding_bag(table, ids.reshape(-1), ends, **options)  # type: ignore[arg-type]


def rows_module(layer: Any, variables: Sequence[Any], make: Callable[[], ModuleT]) -> ModuleT:
    """
    Return the module that looks up rows of a layer's tables, in the gradient mode that the optimizer takes.

    Args:
        layer: the layer, which hides the module from Keras and torch: its parameters are the variables'.
        variables: the tables.
        make: a function that makes the module, on the device ``meta``.
    """
    weights = [variable._value for variable in variables]
    known: tuple[ModuleT, list[Any]] | None = layer.__dict__.get("_rows")
    if known is None or any(a is not b for a, b in zip(known[1], weights, strict=True)):
        module = make()
        for owner, weight in zip([x for x in module.modules() if "weight" in x._parameters], weights, strict=True):
            owner.register_parameter("weight", weight)
        module.grad_mode = "dense"  # it declares that this module owns the parameters
        layer.__dict__["_rows"] = known = module, weights
    module = known[0]
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        mode: GradMode = "sparse" if _are_sparse(variables) else "dense"
        if module.grad_mode != mode:
            module.grad_mode = mode
    return module


def _are_sparse(variables: Sequence[Any]) -> bool:
    """Say whether the gradients of the lookup that runs should have the batch's rows only."""
    if any(variable.regularizer is not None or variable.constraint is not None for variable in variables):
        return False  # Keras reads or writes the whole table in every step
    # Keras notes the outermost layer that is being called: of a model in training, the model itself.
    call = get_global_attribute("current_call_ctx")
    compiled = getattr(call.entry_layer, "optimizer", None) if call is not None else None
    for variable in variables:
        optimizer = announced_optimizer(variable) if compiled is None else compiled
        if optimizer is None or not steps_rows(optimizer, variable):
            return False
    return True
