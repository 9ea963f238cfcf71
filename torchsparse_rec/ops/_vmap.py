"""
Rules of ``torch.vmap`` for the operators.

Every operator has a rule. Unless its family declares more by :func:`elementwise` or :func:`columns`, the operator is
called once per element of the batch and the results are stacked. Tensors that it writes into must be batched. Results
whose sizes differ within the batch, because they depend on values, are an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas
from .._torch import arguments_of, operator_names
from .autograd import operator_of

_NAMESPACE, _OF_PYTHON = "torchsparse_rec", "torchsparse_rec_scores"
_Rule = Callable[..., tuple[Any, Any]]
_RULED: set[str] = set()


def elementwise(name: str) -> None:
    """Batch an operator in one call: the batch is one more dimension of argument 0, its only tensor."""

    def rule(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        return operator_of(name)(*arguments), in_dims[0]

    _register(name, rule)


def columns(name: str, results: tuple[bool, ...] | None = None) -> None:
    """
    Batch an operator in one call where only argument 0 is batched: as one more trailing column of each of its rows.

    Args:
        name: the name of the operator, which treats every column of ``[V, ...]`` alike.
        results: whether each of its results has those columns. Default: its one result has them.
    """

    def rule(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        data, dim = arguments[0], in_dims[0]
        if dim is None or any(other is not None for other in in_dims[1:]) or data.dim() < 2:
            return _one_by_one(name, info, in_dims, arguments)
        output = operator_of(name)(data.movedim(dim, -1).contiguous(), *arguments[1:])
        if results is None:
            return output, output.dim() - 1
        dims = tuple(x.dim() - 1 if has else None for x, has in zip(output, results, strict=True))
        return output, dims

    _register(name, rule)


def register_the_others() -> None:
    """Give the default rule to every operator that has tensors and none yet."""
    for qualified in operator_names():
        name = qualified.removeprefix(f"{_NAMESPACE}::")
        is_ours = name != qualified or name.startswith(f"{_OF_PYTHON}::")
        if is_ours and name not in _RULED and arguments_of(operator_of(name)):
            _register(name, _default(name))


def _default(name: str) -> _Rule:
    def rule(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        return _one_by_one(name, info, in_dims, arguments)

    return rule


def _register(name: str, rule: _Rule) -> None:
    _RULED.add(name)
    torch.library.register_vmap(name if "::" in name else f"{_NAMESPACE}::{name}", rule)


def _one_by_one(
    name: str, info: Any, in_dims: Sequence[int | None], arguments: Sequence[Any]
) -> tuple[Any, tuple[int, ...] | int | None]:
    """Call the operator once per element of the batch, and stack the results."""
    if info.batch_size == 0:
        raise ValueError(f"{name}: torch.vmap must have a batch of at least 1, got 0")
    written = _written(name, in_dims, arguments)
    calls = []
    for index in range(info.batch_size):
        mine = [_select(x, dim, index) for x, dim in zip(arguments, in_dims, strict=True)]
        before = [(argument, x, list(x.shape)) for place, argument in written.items() for x in _tensors(mine[place])]
        calls.append(operator_of(name)(*mine))
        for argument, x, shape in before:
            if list(x.shape) != shape:
                raise ValueError(
                    f"{name}: {argument} must have the shape {list(x.shape)} of the result before torch.vmap, got"
                    f" {shape}"
                )
    if calls[0] is None:
        return None, None
    return _joined(name, calls)


def _written(name: str, in_dims: Sequence[Any], arguments: Sequence[Any]) -> dict[int, str]:
    """Return the names of the tensors that the operator writes, by place; all must be batched."""
    result = {}
    for place, argument in enumerate(arguments_of(operator_of(name))):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and arguments[place] is not None:
            if any(dim is None for dim in _dims(in_dims[place], arguments[place])):
                raise ValueError(
                    f"{name}: {argument.name} is written to, so torch.vmap must batch it too (in_dims); got one tensor"
                )
            result[place] = argument.name
    return result


def _tensors(argument: Any) -> list[Tensor]:
    return list(argument) if isinstance(argument, (list, tuple)) else [argument]


def _dims(dim: Any, argument: Any) -> list[int | None]:
    """Return the batch's dimension in each of an argument's tensors."""
    return list(dim) if isinstance(dim, (list, tuple)) else [dim] * len(_tensors(argument))


def _select(value: Any, dim: Any, index: int) -> Any:
    """Return the part of an argument that belongs to one element of the batch."""
    if isinstance(value, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_select(x, d, index) for x, d in zip(value, dim, strict=True)]
    return value if dim is None else value.select(dim, index)


def _joined(name: str, calls: Sequence[Any]) -> tuple[Any, Any]:
    """Stack the calls' results, which are tensors or lists or tuples of such; return the batch's place in each too."""
    if isinstance(calls[0], Tensor):
        return _stacked(name, calls), 0
    joined = [_joined(name, results) for results in zip(*calls, strict=True)]
    kind = type(calls[0])
    return kind(results for results, _ in joined), kind(dims for _, dims in joined)


def _stacked(name: str, results: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(x.shape) for x in results}
    if len(shapes) > 1:
        raise ValueError(
            f"{name}: torch.vmap cannot stack results of the shapes {sorted(shapes)}, which depend on values: call it"
            " in a loop over the batch"
        )
    return torch.stack(list(results))
