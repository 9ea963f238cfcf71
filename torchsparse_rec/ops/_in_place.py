"""Operators that write in place: no results, and no gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas


def without_result(*names: str) -> None:
    """Register the fake kernels of operators that return nothing."""
    for name in names:
        torch.library.register_fake(f"torchsparse_rec::{name}", _nothing)


def _nothing(*arguments: Any) -> None:
    pass


def refuse_gradients(tensors: Sequence[Tensor]) -> None:
    """Raise ``RuntimeError`` where a tensor requires grad and grad mode is enabled, as torch's optimizers do."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            "an update in place is not differentiable: call it under torch.no_grad(), or give it tensors that do not"
            " require grad"
        )
