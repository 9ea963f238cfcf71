"""``find_nan``: say which column, table or module first makes a number that is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from .._torch import pytree
from ..features import FeatureTransform
from ..features.finite import first_not_finite
from ..nn import EmbeddingVariable
from ._modules import is_lookup, removing

__all__ = ["find_nan"]

# Rows of a tensor that are looked at together: a mask of a whole table may not fit beside it.
_ROWS = 1 << 16


def find_nan(model: Module, *inputs: Any, **named: Any) -> str | None:
    """
    Say what makes a model's output NaN or infinite: the first cause in the order of the forward.

    It runs the forward once, in evaluation mode and without gradients, and changes nothing. Give it the first batch
    whose loss is not finite, before its backward: the step after it spoils the weights.

    Args:
        model: the model, or the part of it that is suspected. A :class:`FeatureTransform` outside of the model is asked
            by itself.
        *inputs: the arguments of the model's forward.
        **named: the arguments of the forward that are given by name.

    Returns:
        The column of the batch, its example and its value, where a normalizer of a :class:`FeatureTransform` made no
        number of it; or the row of a table, or the place in another parameter; or the first module whose result is not
        finite, while all that it takes is. None: the output is finite. Then the loss makes it of the output and the
        labels, or the backward does, where ``torch.autograd.set_detect_anomaly(True)`` names the operation.

    Raises:
        TypeError: a model that is no module.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, numeric_column
        >>> transform = FeatureTransform([numeric_column("price")])
        >>> print(find_nan(transform, {"price": [3.0, float("inf")]}))
        column 'price': has inf in example 1: put Clip(low, high) into its normalizer_fn
    """
    if not isinstance(model, Module):
        raise TypeError(f"find_nan: model must be a torch.nn.Module, got {type(model).__name__}")
    search = _Search(model, inputs, named)
    training = [part for part in model.modules() if part.training]
    hooks = [part.register_forward_hook(search.see, with_kwargs=True) for part in model.modules()]
    try:
        model.eval()
        with removing(hooks), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            output = model(*inputs, **named)
    except Exception as error:
        if search.found is None:
            raise
        # Most likely the model refuses what it has made; if it is anything else, the error must be seen too.
        return f"{search.found}; then the forward raised {type(error).__name__}: {error}"
    finally:
        for part in training:
            part.training = True
    return None if _first(output) is None else search.found


class _Search:
    """Looks at what modules return, and keeps the first cause."""

    def __init__(self, model: Module, inputs: tuple, named: Mapping[str, Any]) -> None:
        self.found: str | None = None
        self._given = inputs, named
        self._names = {part: f"module {name!r}" if name else "the model" for name, part in model.named_modules()}

    def see(self, module: Module, inputs: tuple, named: Mapping[str, Any], output: Any) -> None:
        """Look at the result of one module: the modules within it come before it."""
        made = None if self.found else _first(output)
        if made is not None:
            self.found = self._cause(module, inputs, named, made)

    def _cause(self, module: Module, inputs: tuple, named: Mapping[str, Any], made: tuple[str, float]) -> str:
        if isinstance(module, FeatureTransform):
            said = first_not_finite(module, *inputs, **named)
            if said is not None:
                return said
        who = f"{self._names[module]} ({type(module).__name__})"
        given = _first(inputs) or _first(named)
        if given is not None:
            batch = _first(self._given[0]) or _first(self._given[1])
            source = "code between modules makes it"
            if batch is not None:
                source = f"the model is given {batch[1]:g} in inputs{batch[0]}"
            return f"{who}: is given {given[1]:g} in inputs{given[0]}, which no module before it has returned: {source}"
        stored = self._stored(module)
        if stored is not None:
            return (
                f"{stored}, which {who} reads: a step wrote it; ask again with the first batch whose loss is not finite"
            )
        return f"{who}: returns {made[1]:g} in output{made[0]}, and all that it takes is finite"

    def _stored(self, module: Module) -> str | None:
        """Return which parameter or buffer of a module is not finite, and where."""
        for part in module.modules():
            name = self._names[part].removeprefix("module ")
            if isinstance(part, EmbeddingVariable):
                rows = part.export()
                place = _place(rows.values)
                if place is not None:
                    key = int(rows.keys[place[0]])
                    return f"table {name}: has {float(rows.values[place]):g} in the row of key {key}"
                continue
            for inner, x in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                place = _place(x)
                if place is not None and is_lookup(part):
                    return f"table {name}: has {float(x[place]):g} in row {place[0]}"
                if place is not None:
                    return f"parameter {inner!r} of {self._names[part]}: has {float(x[place]):g} at {list(place)}"
        return None


def _first(tree: Any) -> tuple[str, float] | None:
    """Return where the first number that is not finite is in nested containers of tensors, and the number."""
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return pytree.keystr(path), leaf
        x = leaf
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            x = torch.from_numpy(leaf.astype(np.float64))
        elif isinstance(leaf, Tensor) and leaf.layout == torch.jagged:
            x = leaf.values()
        place = _place(x) if isinstance(x, Tensor) else None
        if place is not None:
            return pytree.keystr(path) + (str(list(place)) if place else ""), float(x[place])
    return None


def _place(x: Tensor) -> tuple[int, ...] | None:
    """Return the place of the first element that is not finite; None: all are, or it is no array of floats."""
    if not x.is_floating_point() or x.is_meta or x.layout != torch.strided:
        return None
    for number, part in enumerate(x.detach().unsqueeze(-1).split(_ROWS)):
        wrong = (~part.isfinite()).nonzero()
        if len(wrong):
            place = wrong[0].tolist()
            return (place[0] + number * _ROWS, *place[1 : x.dim()]) if x.dim() else ()
    return None
