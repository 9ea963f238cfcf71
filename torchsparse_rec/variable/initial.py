"""Initial values of the rows of new keys: functions of the seed and the key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..initializers import Constant, Normal, TruncatedNormal, Uniform
from .options import InitializerOption

__all__ = ["InitialRows"]


_KINDS = {Constant: "constant", Uniform: "uniform", Normal: "normal", TruncatedNormal: "truncated_normal"}


class InitialRows(torch.nn.Module):
    """
    Writes the initial values of rows.

    Args:
        initializer: an object of :mod:`torchsparse_rec.initializers`; a number; a tensor or list of rows ``[P, D]`` or
            one row ``[D]``. It may also be a function that fills such a tensor in place, as in ``torch.nn.init``. None:
            the option's initializer, or else :class:`TruncatedNormal`.
        option: an option with the default initializer, and the number of rows that a function fills.
        embedding_dim: the dimension of the rows, D.
        seed: the seed of random values.
        dtype: the dtype of the rows.
        device: the device of the rows.
    """

    values: Tensor | None

    def __init__(
        self,
        initializer: Any,
        option: InitializerOption,
        embedding_dim: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        chosen = option.initializer if initializer is None else initializer
        chosen = TruncatedNormal() if chosen is None else chosen
        if isinstance(chosen, (int, float)) and not isinstance(chosen, bool):
            chosen = Constant(float(chosen))
        self.seed, self.kind = seed, "constant"
        self.numbers: tuple[float, ...] = (0.0,)
        values = None
        if type(chosen) in _KINDS:
            self.kind = _KINDS[type(chosen)]
            self.numbers = tuple(float(x) for x in vars(chosen).values())
        elif callable(chosen):
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the devices' generators
                values = torch.zeros(option.default_value_dim, embedding_dim, dtype=dtype)
                made = chosen(values)
            if isinstance(made, Tensor) and made is not values:
                raise ValueError(
                    "EmbeddingVariable: initializer must fill the tensor that it is given in place, as those of "
                    "torch.nn.init do, got one that returns another tensor"
                )
        elif isinstance(chosen, (Tensor, list, tuple)) or hasattr(chosen, "__array__"):
            values = torch.as_tensor(chosen, dtype=dtype).detach()
            values = values.reshape(1, -1) if values.dim() == 1 else values
            if values.dim() != 2 or values.shape[1] != embedding_dim or not len(values):
                raise ValueError(
                    f"EmbeddingVariable: initializer must be rows [P, {embedding_dim}], got {list(values.shape)}"
                )
        else:
            raise TypeError(
                "EmbeddingVariable: initializer must be a number, rows, a function that fills a tensor, Constant, "
                f"Uniform, Normal or TruncatedNormal, got {type(chosen).__name__}"
            )
        # A copy, since the caller may change the tensor.
        self.register_buffer("values", None if values is None else values.clone().to(device))

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the keyword arguments with which ``table`` operators initialise rows of ``dtype``."""
        values = None if self.values is None else self.values.to(dtype)
        return {"values": values, "kind": self.kind, "parameters": self.numbers, "seed": self.seed}

    def write(self, weight: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Write the initial values of keys to rows of ``weight``; negative rows are left out."""
        ops.table_initialize_(weight, rows, keys, **self.options(weight.dtype))

    def rows_of(self, keys: Tensor, like: Tensor, wanted: Tensor) -> Tensor:
        """Return the initial rows of keys, ``[N, D]``; where the mask ``wanted`` is false, values are undefined."""
        count = keys.shape[0]  # not len(), which compilers take for a constant
        made = like.new_empty(count, like.shape[1])
        self.write(made, torch.where(wanted, torch.arange(count, device=keys.device), -1), keys)
        return made
