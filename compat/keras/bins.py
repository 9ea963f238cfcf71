"""The layers of Keras that put numbers into bins and that make vectors of ids."""

from __future__ import annotations

from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...features.statistics import compressed, merged, summarized
from ...typing import Encoding
from ..tensorflow.tensors import as_values
from .arguments import is_stream
from .encode import ENCODINGS, as_inputs, encode, mapped_values
from .layer import Encoder


class Discretization(Encoder):
    """
    Put numbers into bins.

    Bin ``b`` is ``bin_boundaries[b - 1] <= x < bin_boundaries[b]``, with boundaries in float32; NaN falls into the last
    one. Floats are compared in float32, whatever the layer's dtype is.

    Args:
        bin_boundaries: the boundaries, ascending.
        num_bins: the number of bins, with about equally many numbers, that ``adapt`` finds, instead of boundaries.
        epsilon: the largest error of the boundaries, as a fraction of the numbers. Default 0.01.
        output_mode: ``"int"``: bins, int32; ``"one_hot"``, ``"multi_hot"``, ``"count"``: vectors, as of
            :class:`Hashing`.
        sparse: whether the vectors are given as a ``SparseTensor``.
        dtype: the dtype of the vectors; default: torch's default dtype.
        name: the layer's name.

    Shapes:
        As for :class:`Hashing`.

    Raises:
        ValueError: for arguments or inputs that Keras refuses too.

    Source: ``keras.layers.Discretization``.

    Example:
        >>> Discretization(bin_boundaries=[0.0, 1.0, 2.0])([[-1.5, 1.0, 3.4, 0.5], [0.0, 3.0, 1.3, 0.0]])
        tensor([[0, 2, 3, 1],
                [1, 3, 2, 1]], dtype=torch.int32)
    """

    _fields = ("bin_boundaries", "num_bins", "epsilon", "output_mode", "sparse", "name", "dtype")

    def __init__(
        self,
        bin_boundaries: Any = None,
        num_bins: int | None = None,
        epsilon: float = 0.01,
        output_mode: Encoding | Literal["int"] = "int",
        sparse: bool = False,
        dtype: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(output_mode, ("int", *ENCODINGS), sparse, name or "discretization", dtype, None)
        self._refuse_sparse_places()
        if num_bins is not None and num_bins < 0:
            raise ValueError(f"num_bins must not be negative, got {num_bins}")
        if (num_bins is None) == (bin_boundaries is None):
            raise ValueError(f"either num_bins or bin_boundaries must be given, got {num_bins} and {bin_boundaries}")
        self.bin_boundaries = None if bin_boundaries is None else _numbers(bin_boundaries)
        self.num_bins, self.epsilon = num_bins, epsilon
        self.summary = np.zeros((2, 0), np.float32)

    def adapt(self, data: Any, steps: int | None = None) -> None:
        """
        Find the boundaries: approximate quantiles, with Keras's numbers.

        Args:
            data: one array or tensor, or an iterable of such batches.
            steps: the most batches to take. Default: all.

        Raises:
            ValueError: for a layer that was given boundaries.
        """
        if self.num_bins is None:
            raise ValueError("adapt must not be called for a layer that was given bin_boundaries: give num_bins")
        self.reset_state()
        if is_stream(data) or isinstance(data, (list, tuple)):
            for batch in islice(data, steps):
                self.update_state(batch)
        else:
            self.update_state(data)
        self.finalize_state()

    def update_state(self, data: Any) -> None:
        """Add a batch of numbers to the summary."""
        given = data.detach().to("cpu", torch.float32).numpy() if isinstance(data, Tensor) else np.array(data)
        numbers = given.astype(np.float32)
        self.summary = merged(summarized(numbers, self.epsilon), self.summary, self.epsilon)

    def finalize_state(self) -> None:
        """Compute the boundaries from the summary."""
        if self.num_bins:
            self.bin_boundaries = compressed(self.summary, 1.0 / self.num_bins)[0, :-1].tolist()

    def reset_state(self) -> None:
        """Forget the summary."""
        if self.num_bins is not None:
            self.summary = np.zeros((2, 0), np.float32)

    def forward(self, inputs: Any) -> Any:
        """Return the bins of the inputs, or their encoding."""
        boundaries = self.bin_boundaries
        if boundaries is None:
            raise ValueError("bin_boundaries must be given, or found by adapt(), before the layer is called")
        bins = mapped_values(as_inputs(inputs), lambda values: _binned(values, boundaries))
        if self.output_mode == "int":
            return mapped_values(bins, lambda values: values.to(torch.int32))
        return encode(bins, self.output_mode, len(boundaries) + 1, self.dtype, self.sparse)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Discretization:
        """Make a layer from ``get_config()``, its own or Keras's."""
        boundaries = config.get("bin_boundaries")
        if boundaries is None or config.get("num_bins") is None:
            return cls(**config)
        made = cls(**{name: value for name, value in config.items() if name != "bin_boundaries"})
        made.bin_boundaries = _numbers(boundaries)
        return made

    def get_extra_state(self) -> dict[str, Any]:
        """Return the boundaries, for ``state_dict``."""
        return {"bin_boundaries": self.bin_boundaries}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the boundaries from what ``get_extra_state`` returned."""
        self.bin_boundaries = state["bin_boundaries"]


def _numbers(boundaries: Any) -> list[float]:
    numbers = boundaries.tolist() if hasattr(boundaries, "tolist") else list(boundaries)
    if any(isinstance(x, (str, bytes)) or not hasattr(x, "__float__") for x in numbers):
        raise ValueError(f"bin_boundaries must be numbers, got {boundaries!r}")
    return numbers


def _binned(values: Any, boundaries: list[float]) -> Tensor:
    """Return the bin of each number of any dtype; dtypes that TensorFlow widens first are widened in the same way."""
    if not isinstance(values, Tensor):
        raise ValueError("inputs must be numbers, got strings")
    if values.dtype in (torch.bool, torch.int8, torch.int16, torch.uint8, torch.uint16):
        values = values.to(torch.int32)
    elif values.dtype in (torch.uint32, torch.uint64):
        values = values.to(torch.int64)
    elif values.is_floating_point():
        values = values.to(torch.float32)  # Keras casts floats before the layer sees them
    limits = torch.tensor(boundaries, dtype=torch.float32, device=values.device)
    if bool((limits[:-1] > limits[1:]).any()):
        raise ValueError(f"bin_boundaries must be ascending, got {boundaries}")
    common = torch.promote_types(values.dtype, torch.float32)
    return torch.bucketize(values.detach().to(common), limits.to(common), right=True)


class CategoryEncoding(Encoder):
    """
    Make vectors of ids.

    Args:
        num_tokens: the length of the vectors. Ids that are not below it do not count.
        output_mode: ``"multi_hot"`` (default), ``"one_hot"`` or ``"count"``, as of :class:`Hashing`.
        sparse: whether the vectors are given as a ``SparseTensor``.
        name: the layer's name.
        dtype: the dtype of the vectors; default: torch's default dtype.
        trainable: an argument that is ignored.

    Shapes:
        Of ids as for :class:`Hashing`; floats are truncated. ``count_weights`` are of their shape, for ``"count"``.

    Raises:
        ValueError: for arguments or inputs that Keras refuses too, such as negative ids. If the inputs are a
            ``SparseTensor`` of rank 2 and the vectors strided, negative ids do not count instead.

    Source: ``keras.layers.CategoryEncoding``.

    Example:
        >>> CategoryEncoding(num_tokens=4)([[0, 1], [0, 0], [1, 2], [3, 1]])
        tensor([[1., 1., 0., 0.],
                [1., 0., 0., 0.],
                [0., 1., 1., 0.],
                [0., 1., 0., 1.]])
    """

    _fields = ("name", "trainable", "dtype", "num_tokens", "output_mode", "sparse")

    def __init__(
        self,
        num_tokens: int | None = None,
        output_mode: Encoding = "multi_hot",
        sparse: bool = False,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool = True,
    ) -> None:
        output_mode = "multi_hot" if output_mode == "binary" else output_mode
        super().__init__(output_mode, ENCODINGS, sparse, name or "category_encoding", dtype, None)
        if num_tokens is None or num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        self.num_tokens = num_tokens

    def forward(self, inputs: Any, count_weights: Any = None) -> Any:
        """Return the vectors of the inputs."""
        if count_weights is not None and self.output_mode != "count":
            raise ValueError(f"count_weights must be None for output_mode {self.output_mode!r}, got {count_weights!r}")
        ids = mapped_values(as_inputs(inputs), _ids)
        weights = None if count_weights is None else as_values("count_weights", count_weights)
        if isinstance(weights, np.ndarray):
            raise ValueError("count_weights must be numbers, got strings")
        weights = None if weights is None else weights.to(self.dtype)
        return encode(ids, self.output_mode, self.num_tokens, self.dtype, self.sparse, weights)


def _ids(values: Any) -> Tensor:
    if not isinstance(values, Tensor):
        raise ValueError("inputs must be integers, got strings")
    return values.to(torch.int64)
