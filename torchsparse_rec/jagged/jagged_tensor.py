"""``JaggedTensor``: rows of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.jagged import jagged_to_padded
from ._node import register
from ._rows import JaggedRows, rows_of
from .checks import as_no_rows, check_rows, check_tensor, lengths_beside


@register
class JaggedTensor(JaggedRows):
    """
    Rows of different lengths, with all values in one tensor, optionally weighted.

    Names and argument order are TorchRec's. The lengths and the offsets are computed from one another when asked for,
    without waiting for a device. A pytree node: it can be an argument and a result of compiled and exported functions.
    Under ``torch.compile`` and ``torch.export`` nothing is checked.

    Args:
        values: ``[N, ...]``, any dtype: ids, or vectors.
        weights: ``[N, ...]``, any dtype: one for each value. Default: none.
        lengths: ``[S]``, int32 or int64: the number of values in each row; they add up to N.
        offsets: ``[S + 1]``, int32 or int64: row ``r`` is ``values[offsets[r] : offsets[r + 1]]``. Lengths or offsets
            must be given. That they fit N values is not checked here: on CUDA it would wait for the device. The
            operators check it. Without values, tensors without elements mean no rows, whatever their dtype.

    ``str()`` is TorchRec's. Where there are many values, or they are not on the CPU, it shows shapes, as ``repr()``.

    Raises:
        TypeError: an argument that is no tensor.
        ValueError: neither lengths nor offsets; on the CPU, lengths that do not fit the offsets (on CUDA the offsets
            count); wrong dtypes, ranks, sizes or devices.

    Source: ``torchrec.sparse.jagged_tensor.JaggedTensor``.

    Example:
        >>> x = JaggedTensor(torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 0, 1]))
        >>> x
        JaggedTensor([[3, 1], [], [4]])
        >>> x.offsets()
        tensor([0, 2, 2, 3])
        >>> x.to_padded_dense(padding_value=-1)
        tensor([[ 3,  1],
                [-1, -1],
                [ 4, -1]])
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        # In a graph sizes are symbols: a check would make conditions of the graph.
        if not torch.compiler.is_compiling():
            lengths, offsets = as_no_rows(values, lengths, offsets)
            check_rows("JaggedTensor", values, weights, lengths, offsets)
            if lengths is not None and offsets is not None:
                lengths = lengths_beside("JaggedTensor", lengths, offsets)
        self._set_rows(values, weights, lengths, offsets)

    # ---- From other forms -------------------------------------------------------------------------------------------

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """
        Make a ``JaggedTensor`` without rows.

        Args:
            is_weighted: whether the object has weights, which are empty too. Default False.
            device: the device of its tensors. Default: torch's default device.
            values_dtype: the dtype of the values. Default: torch's default dtype.
            weights_dtype: the dtype of the weights. Default: torch's default dtype.
            lengths_dtype: int32 (default) or int64.

        Its offsets are one 0, as for any object without rows; TorchRec's have no element.
        """
        return JaggedTensor(
            torch.empty(0, dtype=values_dtype, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
        """
        Make a ``JaggedTensor`` of rows that are given one by one.

        Args:
            values: a list of at least one tensor ``[length, ...]``, of one device and dtype.
            weights: a list of as many tensors of the same lengths. Default: none.

        Raises:
            ValueError: no rows; weights of other lengths.

        Lengths are int32. On CUDA they are copied there.

        Example:
            >>> JaggedTensor.from_dense([torch.tensor([3, 1]), torch.tensor([4])])
            JaggedTensor([[3, 1], [4]])
        """
        if len(values) == 0:
            raise ValueError("JaggedTensor.from_dense: values must have at least one row, got none")
        for i, row in enumerate(values):
            check_tensor("JaggedTensor.from_dense", f"values[{i}]", row)
        sizes = [x.shape[0] for x in values]
        if weights is not None and [x.shape[0] for x in weights] != sizes:
            raise ValueError(
                f"JaggedTensor.from_dense: weights must have rows of the lengths of values, {sizes}, got "
                f"{[x.shape[0] for x in weights]}"
            )
        return JaggedTensor(
            torch.cat(values),
            None if weights is None else torch.cat(weights),
            lengths=torch.tensor(sizes, dtype=torch.int32, device=values[0].device),
        )

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """
        Make a ``JaggedTensor`` of the first elements of each row of a matrix.

        Args:
            values: ``[S, L, ...]``, any dtype.
            lengths: ``[S]``, int32 or int64, at most L: how many elements of each row are kept.
            weights: ``[S, L]``, any dtype. Default: none.

        Raises:
            ValueError: wrong ranks or sizes.

        Differentiable in values and weights. On CUDA the number of values is read back, so it waits for the device.

        Example:
            >>> JaggedTensor.from_dense_lengths(torch.tensor([[3, 1], [0, 0], [4, 0]]), torch.tensor([2, 0, 1]))
            JaggedTensor([[3, 1], [], [4]])
        """
        owner = "JaggedTensor.from_dense_lengths"
        check_tensor(owner, "values", values)
        check_tensor(owner, "lengths", lengths)
        if values.dim() < 2 or lengths.dim() != 1 or lengths.shape[0] != values.shape[0]:
            raise ValueError(
                f"{owner}: values must be [S, L, ...] and lengths [S], got shapes {list(values.shape)} and "
                f"{list(lengths.shape)}"
            )
        if weights is not None and weights.shape[:2] != values.shape[:2]:
            raise ValueError(
                f"{owner}: weights must have the first two sizes of values, {list(values.shape[:2])}, got shape "
                f"{list(weights.shape)}"
            )
        kept = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        return JaggedTensor(values[kept], None if weights is None else weights[kept], lengths=lengths)

    # ---- To other forms ---------------------------------------------------------------------------------------------

    def to_dense(self) -> list[Tensor]:
        """
        Return the values of each row, as views.

        On CUDA the offsets are read back, so it waits for the device.

        Example:
            >>> JaggedTensor(torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1])).to_dense()
            [tensor([3, 1]), tensor([4])]
        """
        return self._unbind(self._values)

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return the weights of each row, as :meth:`to_dense`; None if there are none."""
        return None if self._weights is None else self._unbind(self._weights)

    def _unbind(self, x: Tensor) -> list[Tensor]:
        bounds = self.offsets().tolist()
        return [x[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """
        Return the values as a matrix, shorter rows padded.

        Args:
            desired_length: the number of columns, L; longer rows are cut. Default: the length of the longest row, which
                on CUDA is read back. With ``desired_length`` nothing waits for the device.
            padding_value: the value of the other elements. Default 0.

        Returns:
            ``[S, L, ...]``, with the dtype of the values. Differentiable.
        """
        return jagged_to_padded(self._values, self.offsets(), desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """Return the weights as a padded matrix, as :meth:`to_padded_dense`; None if there are none."""
        if self._weights is None:
            return None
        return jagged_to_padded(self._weights, self.offsets(), desired_length, padding_value)

    # ---- As a node --------------------------------------------------------------------------------------------------

    def _context(self) -> tuple:
        return ()

    def __repr__(self) -> str:
        if not self._is_shown():
            return f"JaggedTensor({self._summary()})"
        bounds = self.offsets().tolist()
        weights = "" if self._weights is None else f", weights={rows_of(self._weights, bounds)}"
        return f"JaggedTensor({rows_of(self._values, bounds)}{weights})"

    def __str__(self) -> str:
        if not self._is_shown():
            return repr(self)
        bounds = self.offsets().tolist()
        values = rows_of(self._values, bounds)
        if self._weights is None:
            return self._in_lines([str(values)])
        return self._in_lines([f'"values": {values}', f'"weights": {rows_of(self._weights, bounds)}'])
