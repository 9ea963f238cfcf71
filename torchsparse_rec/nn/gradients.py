"""Treatment of tables' gradients after autograd: keeping sparse ones marked as coalesced, and making them dense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle, unserializable_hook

from .._torch import as_stored, backward_number, below_autograd, grad_of
from .._torch_modules import all_hooks, gradient_hooks, mark_coalesced
from ..tables.table import table_if_any

__all__ = ["sparse_to_dense_grads"]

_PACKAGE = f"{__name__.partition('.')[0]}."


class CoalescedMark:
    """
    A hook that marks a table's accumulated gradient as coalesced when it is.

    Autograd moves the rows and values of a gradient into ``.grad``, but not the mark that they are unique and sorted;
    an optimizer would then sort them again. A lookup's backward notes how many rows its gradient has, unique and
    sorted. If ``.grad`` has as many after the same backward, nothing else was added to it but the same rows, and the
    mark still holds. The sum of two lookups has more, and other hooks' results may have more. Then, from the next
    backward on, another hook looks at the gradient before it is added, after all others. It finds sums marked where
    torch merges sorted rows (CPU), but not where it appends them (CUDA).

    On CUDA the mark is only for optimizers of this package. Torch's SGD adds marked gradients by one thread a row: for
    a million ids this is 1.3 to 3.2 times slower than without the mark (H200). Its SparseAdam and Adagrad would save a
    tenth.
    """

    __slots__ = ("noted", "is_shared", "watching")

    def __init__(self) -> None:
        # A backward, and the rows that arrive in it; -1: they are not unique and sorted.
        self.noted: tuple[object, int] = -1, -1
        self.is_shared = False  # whether gradients of several lookups have arrived in one backward
        self.watching: RemovableHandle | None = None

    def arrives(self, grad: Tensor, backward: object) -> None:
        """Take note of a COO gradient with unique and sorted rows, in the backward of this number, which runs."""
        self.is_shared |= self.noted[0] == backward
        self.noted = (backward, grad._nnz())

    @unserializable_hook  # copies of the tensor go without it, and need no warning
    def before(self, grad: Tensor) -> None:
        """Take note of all that arrives, in the backward that runs."""
        is_coalesced = grad.layout is torch.sparse_coo and grad.is_coalesced()
        self.noted = (backward_number(), grad._nnz() if is_coalesced else -1)

    def watch(self, weight: Tensor) -> None:
        """Look at each gradient of the table before it is added, as the last of its hooks."""
        if not self._is_last(gradient_hooks(weight)[0]):
            if self.watching is not None:
                self.watching.remove()
            self.watching = weight.register_hook(self.before)

    def _is_last(self, hooks: Mapping[int, Any] | None) -> bool:
        return hooks is not None and len(hooks) > 0 and [*hooks.values()][-1] == self.before

    def __call__(self, parameter: Tensor) -> None:
        """Mark the stored gradient as coalesced, if it has as many rows as have arrived."""
        with as_stored(), below_autograd():
            grad = grad_of(parameter)
            if grad is None or not grad.is_sparse:
                return
            hooks = gradient_hooks(parameter)[0]
            is_whole = self.noted == (backward_number(), grad._nnz()) and (not hooks or self._is_last(hooks))
            if is_whole and (grad.is_cpu or _has_optimizer(parameter)):
                mark_coalesced(grad, True)
        if hooks or self.is_shared:
            self.watch(parameter)


def _has_optimizer(parameter: Tensor) -> bool:
    """Say whether an optimizer of this package holds a table."""
    table = table_if_any(parameter)
    return table is not None and table.optimizer is not None


def coalesced_mark(weight: Tensor) -> CoalescedMark | None:
    """
    Give a table its :class:`CoalescedMark`, once, and return it: a lookup reports to it which gradients arrive.

    The hook lives on the tensor only: modules that share the tensor share the hook. A copy (deepcopy, pickle,
    ``.to()``) starts without a hook and gets its own at its next lookup. None for a table that has no ``.grad``: it is
    computed, or frozen.
    """
    if not (weight.is_leaf and weight.requires_grad):
        return None
    before, after = gradient_hooks(weight)
    for mark in (after or {}).values():
        if type(mark) is CoalescedMark:
            break
    else:
        mark = CoalescedMark()
        weight.register_post_accumulate_grad_hook(mark)
    if before:
        mark.watch(weight)
    return mark


def have_hooks(weights: Iterable[Tensor]) -> bool:
    """Say whether the gradient of one of the tables has hooks from outside this package."""
    found = all_hooks(weights)
    return bool(found) and not all([str(getattr(hook, "__module__", "")).startswith(_PACKAGE) for hook in found])


def sparse_to_dense_grads(x: Any) -> Any:
    """
    Make sparse gradients dense, as TensorFlow's NCF does before it hands them to Adam.

    It serves training loops of one's own with optimizers that refuse sparse gradients, such as ``torch.optim.Adam``.
    Rows that occur more than once are merged.

    Args:
        x: the objects to convert, in a list, tuple, mapping or other iterable (``model.parameters()``), nested or not:

            * parameters: ``.grad`` is replaced in place, and the parameters are returned;
            * gradients: tensors of any layout;
            * ``(gradient, parameter)`` pairs: the gradient is converted, the parameter is not;
            * None, for a gradient that is missing: it stays None.

    Returns:
        The same structure: lists as lists, tuples as tuples, mappings as dicts, other iterables as lists.

    Raises:
        TypeError: something else than parameters, gradients or containers of them.

    Source: ``tf.convert_to_tensor`` on ``tf.IndexedSlices`` in TensorFlow's official NCF.

    Example:
        >>> gradient = torch.sparse_coo_tensor([[2, 0, 2]], [[1.0], [2.0], [3.0]], (3, 1), check_invariants=True)
        >>> sparse_to_dense_grads([gradient, None])
        [tensor([[2.],
                [0.],
                [4.]]), None]
    """
    if x is None:
        return None
    if isinstance(x, Tensor):
        if _is_parameter(x):
            if x.grad is not None and x.grad.layout is not torch.strided:
                x.grad = x.grad.to_dense()
            return x
        return x if x.layout is torch.strided else x.to_dense()
    if isinstance(x, Mapping):
        return {key: sparse_to_dense_grads(value) for key, value in x.items()}
    if _is_pair(x):
        return _like(x, [sparse_to_dense_grads(x[0]), x[1]])
    if isinstance(x, str) or not hasattr(x, "__iter__"):
        raise TypeError(f"sparse_to_dense_grads: x must hold parameters, gradients or pairs, got {type(x).__name__}")
    return _like(x, [sparse_to_dense_grads(item) for item in x])


def _is_parameter(x: Any) -> bool:
    return isinstance(x, Parameter) or (isinstance(x, Tensor) and x.is_leaf and x.requires_grad)


def _is_pair(x: Any) -> bool:
    """Say whether ``x`` is ``(gradient, parameter)``, and not two parameters or two gradients."""
    if not isinstance(x, tuple) or len(x) != 2 or not _is_parameter(x[1]):
        return False
    return x[0] is None or (isinstance(x[0], Tensor) and not _is_parameter(x[0]))


def _like(container: Any, items: list) -> Any:
    """Return ``items`` as a container of the same kind."""
    if isinstance(container, tuple):
        return type(container)(*items) if hasattr(container, "_fields") else tuple(items)
    return items
