"""
The rows of a table that grows, in foreign code, which knows nothing of keys.

Which row a key has changes as keys come and go. Code that computes with rows of two moments, as an average of a model
does, would mix the rows of different keys: it gets an error that names the table.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import as_stored
from .part import passed_on

__all__ = ["GrowingRows", "Places", "by_place", "is_stepping", "marked", "plain_rows", "refuse_states_by_row"]

# Functions that set tensors beside each other: none of their rows meets a row of another tensor.
_BESIDE = {"cat", "concat", "concatenate", "hstack", "row_stack", "vstack"}
# Functions that give each row of their second matrix a score.
_SCORES = {"linear", "matmul", "__matmul__", "mm"}
# Functions whose results have no rows of the table, or rows of ids that their caller has chosen.
_OTHERS = {"backward", "embedding", "embedding_bag", "grad", "index_select"}


class Places:
    """
    The rows of the keys of a table that grows, at one moment.

    Args:
        name: the table's, for errors.
        keys: the key of each row, ``[R]`` int64.
        taken: whether each row has a key, ``[R]`` bool.
    """

    __slots__ = ("name", "keys", "taken")

    def __init__(self, name: str, keys: Tensor, taken: Tensor) -> None:
        self.name, self.keys, self.taken = name, keys * taken, taken

    def are(self, others: Places) -> bool:
        """Say whether each row has the same key in both."""
        if self is others:
            return True
        if len(self.keys) != len(others.keys):
            return False
        taken, keys = (x.to(self.keys.device) for x in (others.taken, others.keys))
        return torch.equal(self.taken, taken) and torch.equal(self.keys, keys)

    def check(self, others: Places) -> None:
        """Raise ``RuntimeError`` if a row has not the same key in both."""
        if not self.are(others):
            raise RuntimeError(
                f"EmbeddingVariable {self.name!r}: rows of a table that grows meet rows taken when other ids had them, "
                "so that the values of different ids would be mixed. To average a model take "
                "torch.optim.swa_utils.AveragedModel, whose copy of the table goes by ids, or average by export(), "
                "lookup() and insert(), as docs/embedding_variable.md shows"
            )


class GrowingRows(Tensor):
    """Rows by place, of a table that grows: what code of others has made of a parameter or a ``state_dict``."""

    places: tuple[Places, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` as for plain tensors, unless it would mix rows of different keys."""
        for other in types:
            if other not in (cls, Tensor, Parameter):  # a parameter's class finds its places first
                return other.__torch_function__(func, types, args, kwargs)
        kwargs = {} if kwargs is None else kwargs
        if is_stepping(sys._getframe(1)):
            return passed_on(cls, func, (), args, kwargs)
        if func is Tensor.detach and sys._getframe(1).f_code is Parameter.__new__.__code__:
            args[0].__class__ = Tensor  # a Parameter of the rows is one of its own
        return by_place(cls, func, types, args, kwargs, {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the rows for a file: as a plain tensor."""
        return plain_rows(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Return a deep copy, of rows of the same keys."""
        if id(self) not in memo:
            memo[id(self)] = marked(copy.deepcopy(plain_rows(self), memo), self.places)
        return memo[id(self)]  # type: ignore[no-any-return]


def plain_rows(x: Tensor) -> Tensor:
    """Return a plain tensor in the same memory."""
    if type(x) is not GrowingRows:
        return x
    with as_stored():
        return x.detach()


def is_stepping(reader: FrameType) -> bool:
    """Say whether code is of torch's optimizers: they have no ids, so their states go by place."""
    name = reader.f_globals.get("__name__", "")
    return name.startswith("torch.optim.") and name != "torch.optim.swa_utils"


def refuse_states_by_row(name: str, reader: FrameType) -> None:
    """
    Raise ``RuntimeError`` if an optimizer of torch's that keeps states reads the gradient of a table that grows.

    It keeps them by row, and a row may have another key later, or the table more rows.

    Args:
        name: the table's.
        reader: the code that reads the gradient.
    """
    module, found = reader.f_globals.get("__name__", ""), reader.f_locals
    if not is_stepping(reader) or module in ("torch.optim.optimizer", "torch.optim.lr_scheduler"):
        return
    if module == "torch.optim.sgd" and not found.get("group", {}).get("momentum"):
        return
    optimizer = type(found.get("self")).__name__
    raise RuntimeError(
        f"EmbeddingVariable {name!r}: torch.optim.{optimizer} keeps its states by row, and the rows of a table that "
        "grows change their keys: take the optimizer of this name in torchsparse_rec.optim, whose states go with the "
        "keys (for SparseAdam: Adam with lazy=True)"
    )


def marked(x: Any, places: tuple[Places, ...], most: int = 0) -> Any:
    """Make a plain tensor ``GrowingRows`` if it has as many rows as the table, or at least ``most`` elements."""
    if type(x) is Tensor and (x.numel() >= most or any(len(each.keys) in x.shape for each in places)):
        x.__class__ = GrowingRows  # type: ignore[assignment]
    if type(x) is GrowingRows:
        x.places = places
    return x


def by_place(cls: type, func: Any, types: Any, args: Any, kwargs: Any, known: dict[int, Places]) -> Any:
    """
    Call a function of torch for code of others, and mark the rows that it returns.

    Args:
        cls: the class whose ``__torch_function__`` torch has called.
        func: the function, as are ``types``, ``args`` and ``kwargs``.
        types: the classes among the arguments.
        args: the arguments of the function.
        kwargs: the arguments of the function by name.
        known: the places of the tables' parameters among the arguments, by ``id``.

    Raises:
        RuntimeError: rows of different keys would be mixed.
    """
    others = tuple(other for other in types if other not in (cls, GrowingRows))
    given = [*args, *kwargs.values()]
    name = getattr(func, "__name__", "")
    if name in _OTHERS or name.endswith("_like") or (name == "__getitem__" and isinstance(given[1], Tensor)):
        return passed_on(cls, func, others, args, kwargs)
    if name.startswith("_foreach_"):
        lists = [x for x in given if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
        columns = [_together(column, known) for column in zip(*lists, strict=False)]
        result = passed_on(cls, func, others, args, kwargs)
        targets = lists[0] if name.endswith("_") else result if isinstance(result, (list, tuple)) else []
        for x, places in zip(targets, columns, strict=False):
            if places:
                marked(x, places, x.numel())
        return result
    if name in _BESIDE:
        places = tuple(each for x in _tensors(given) for each in _places_of(x, known))
    else:
        places = _together(_tensors(given), known)
    if name in _SCORES and torch.is_grad_enabled() and places and not _places_of(given[0], known):
        raise RuntimeError(
            f"EmbeddingVariable {places[0].name!r}: its weight is also that of another layer (tied weights), which "
            "takes rows by their number, but ids of a table that grows have no fixed one: give the layer the rows that "
            "a lookup of its ids returns"
        )
    result = passed_on(cls, func, others, args, kwargs)
    if places:
        with as_stored():
            most = max(x.numel() for x in _tensors(given) if _places_of(x, known))
        for x in _tensors([result]):
            if id(x) not in known:
                marked(x, places, most)
    return result


def _together(tensors: Iterable[Any], known: dict[int, Places]) -> tuple[Places, ...]:
    """Return the places of the rows of tensors that a function takes together, if they are the same."""
    found: tuple[Places, ...] = ()
    for x in tensors:
        its = _places_of(x, known)
        if found and its:
            if len(found) != len(its):
                return found
            for mine, other in zip(found, its, strict=True):
                mine.check(other)
        found = found or its
    return found


def _places_of(x: Any, known: dict[int, Places]) -> tuple[Places, ...]:
    if type(x) is GrowingRows:
        return x.places
    return (known[id(x)],) if id(x) in known else ()


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [each for item in x for each in _tensors(item)] if isinstance(x, (list, tuple)) else []
