"""Tables of fewer bytes for inference: the conversion of a whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch_modules import is_in_fsdp
from ..ops.quantized import check_rows, format_of, packed_rows
from ..tables.table import split_part
from ..typing import RowsFormat
from ._max_norm import clipped_rows
from ._owner import TableOwner
from .collection import Collection
from .convert import ModuleT, _change_all, _check_model
from .embedding import Embedding
from .embedding_bag import EmbeddingBag
from .embedding_collection import EmbeddingBagCollection, EmbeddingCollection
from .embedding_variable import EmbeddingVariable
from .grad_mode import GradModeMixin
from .quantized import (
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    QuantizedEmbeddingBagCollection,
    QuantizedEmbeddingCollection,
    QuantizedEmbeddingVariable,
    QuantizedTable,
    _QuantizedCollection,
)

__all__ = ["quantize"]

# Exactly these classes: one that extends them may do more than look rows up.
_QUANTIZED: dict[type, type[torch.nn.Module]] = {
    torch.nn.Embedding: QuantizedEmbedding,
    torch.nn.EmbeddingBag: QuantizedEmbeddingBag,
    Embedding: QuantizedEmbedding,
    EmbeddingBag: QuantizedEmbeddingBag,
    EmbeddingBagCollection: QuantizedEmbeddingBagCollection,
    EmbeddingCollection: QuantizedEmbeddingCollection,
    EmbeddingVariable: QuantizedEmbeddingVariable,
}
_LOOKUPS = (torch.nn.Embedding, torch.nn.EmbeddingBag, EmbeddingVariable, Collection, QuantizedTable)
# Attributes that only training uses, besides the ones that torch's and this package's classes share.
_OF_TRAINING = ("max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def quantize(model: ModuleT, rows: RowsFormat = "int8") -> ModuleT:
    """
    Turn the tables of a model into tables of fewer bytes, for inference, in place.

    These are :class:`Embedding`, :class:`EmbeddingBag` and torch's own two, :class:`EmbeddingBagCollection`,
    :class:`EmbeddingCollection` and :class:`EmbeddingVariable` (the rows of all its tiers then are in memory). All rows
    are brought up to date first, and clipped where there is a ``max_norm``. The module objects stay and change their
    class; they have buffers ``table`` instead of parameters ``weight``. Lookups take the same inputs with the same
    checks, decode rows in adding them up, and give float32. On the CPU their bits are those of a lookup in the decoded
    table (``dequantized()`` of a table). In ``train()``, where gradients are recorded, they raise.

    Modules of other classes stay unchanged, and a warning names them; a warning also says if nothing was changed. To
    keep the model, quantise ``copy.deepcopy(model)``. A model on ``meta`` becomes one whose tables can be loaded, by
    ``load_state_dict(..., assign=True)``.

    Args:
        model: the model, or a table itself.
        rows: the format of rows of D float32 elements, see :func:`ops.quantize_rows` for the bounds of errors.

            * ``"int8"`` (default): D + 8 bytes, as from ``torch.ops.quantized.embedding_bag_byte_prepack``;
            * ``"int4"``: D / 2 + 4 bytes, as from ``torch.ops.quantized.embedding_bag_4bit_prepack``;
            * ``"float16"``, ``"bfloat16"``: 2 D bytes.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: another format; a table with numbers that the format cannot hold, or of an odd D for int4. Nothing
            is changed then.

    Source: ``torch.ao.quantization``'s embeddings; ``torchrec.inference``'s quantised collections.

    Example:
        >>> model = quantize(torch.nn.Sequential(EmbeddingBag(1000, 64, mode="sum")).eval())
        >>> model[0]
        QuantizedEmbeddingBag(1000, 64, rows='int8', 72.00 kB, mode='sum')
        >>> model(torch.tensor([[3, 1, 4], [1, 5, 9]])).shape
        torch.Size([2, 64])
    """
    _check_model("quantize", model)
    format_of("quantize", rows)
    modules = dict(model.named_modules())
    inside = {
        id(child)
        for module in modules.values()
        if isinstance(module, Collection)
        for child in module.modules()
        if child is not module
    }
    found = [(name, x) for name, x in modules.items() if isinstance(x, _LOOKUPS) and id(x) not in inside]
    for name, module in found:
        if _why_not(module) is None:
            for title, weight in _weights(name or type(module).__name__, module):
                check_rows(f"quantize: {title}", weight, rows)
    _change_all("quantize", "tables", found, _why_not, lambda module: _change(module, rows))
    return model


def _why_not(module: Any) -> str | None:
    """Say why a module stays unchanged; None: it can change."""
    if isinstance(module, (QuantizedTable, _QuantizedCollection)):
        return "it is quantised already"
    if type(module) not in _QUANTIZED:
        return "a class of its own"
    if "forward" in module.__dict__:
        return "its forward has been replaced"
    if hasattr(module, "table"):
        return "it has an attribute called table"
    for table in module._tables if isinstance(module, Collection) else [module]:
        weight = table._parameters.get("weight")
        if weight is None:
            return "one of its weights is computed"
        if not weight.is_floating_point():
            return "it holds integers"
        if split_part(weight) is not None or is_in_fsdp(module):
            return "it is split over processes"
    return None


def _weights(name: str, module: Any) -> list[tuple[str, Tensor]]:
    """Return a module's tables with their names, all rows up to date."""
    if isinstance(module, Collection):
        tables = module._modules[module._children]._modules  # type: ignore[union-attr]
        return [pair for title, table in tables.items() for pair in _weights(f"{name}.{title}", table)]
    return [(name, module.export().values if isinstance(module, EmbeddingVariable) else module.weight.detach())]


def _change(module: Any, rows: str) -> None:
    if isinstance(module, EmbeddingVariable):
        hooks = {name: x for name, x in vars(module).items() if name.startswith("_forward_") and "hooks" in name}
        made: Any = QuantizedEmbeddingVariable(module, rows)
        module.__dict__.clear()
        module.__dict__.update(vars(made) | hooks)
        module.__class__ = type(made)
    elif isinstance(module, Collection):
        _change_collection(module, rows)
    else:
        weight = module.weight.detach()
        if module.max_norm is not None and not weight.is_meta:
            every = torch.arange(len(weight), device=weight.device)
            weight = torch.embedding_renorm_(weight.clone(), every, module.max_norm, module.norm_type)
        table = packed_rows(weight, rows)
        if isinstance(module, GradModeMixin):
            module._end_grad_mode()
        del module._parameters["weight"]
        for name in _OF_TRAINING:
            module.__dict__.pop(name, None)
        module.__class__ = _QUANTIZED[type(module)]
        module._hold(table, rows)


def _change_collection(collection: Collection, rows: str) -> None:
    collection.grad_mode = None  # which lets go of what is kept of past lookups
    children: Any = collection._modules[collection._children]
    for max_norm, (name, table) in zip(collection._max_norms, list(children._modules.items()), strict=True):
        if isinstance(table, EmbeddingVariable):
            made: QuantizedTable = QuantizedEmbeddingVariable(table, rows, max_norm)
        else:
            assert isinstance(table, TableOwner)
            weight = table.weight.detach()
            weight = weight if max_norm is None else clipped_rows(weight, max_norm)
            made = QuantizedTable(packed_rows(weight, rows), rows)
            made.train(table.training)
        children._modules[name] = made
    collection._end_fused()
    collection.__class__ = _QUANTIZED[type(collection)]  # type: ignore[assignment]
    growing = {k: x for k, x in enumerate(children._modules.values()) if isinstance(x, QuantizedEmbeddingVariable)}
    collection._growing = growing  # type: ignore[assignment]
    collection._plans = {}
