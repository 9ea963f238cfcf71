"""Which functions of torch read a kept parameter's stale rows? A program that calls them all prints their names."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import torch
from nn.cases import beside, pair, train_beside
from torch import Tensor
from torch.utils import _pytree

from torchsparse_rec._torch import as_stored

Function = tuple[str, Callable[..., Any]]
_SECONDS = 20


def functions() -> list[Function]:
    """Return the functions that torch does not dispatch, as it says, and those of its modules in C, each once."""
    modules = {"torch._C": torch._C, "torch._C._functorch": torch._C._functorch, "torch._C._nested": torch._C._nested}
    ignored = [*torch.overrides.get_ignored_functions(), torch.Tensor.set_, torch.FloatTensor]
    found = {id(f): (getattr(f, "__qualname__", repr(f)), f) for f in ignored}
    for module, its in modules.items():
        found |= {id(f): (f"{module}.{name}", f) for name, f in vars(its).items() if id(f) not in found}
    return sorted(((name, f) for name, f in found.values() if callable(f)), key=lambda x: x[0])


def ways_to_call(weight: Tensor) -> list[tuple[Any, ...]]:
    """Return the arguments with which each function is tried."""
    rows, columns = weight.shape
    indices = torch.arange(rows)
    forms = [(weight,), ([weight],), (torch.zeros(1), weight), (torch.zeros(rows, columns), weight)]
    forms += [(weight, 1), (weight, 0, 1), (torch.Tensor, weight), (torch.nn.Parameter, weight, False)]
    return [*forms, (indices[None], weight, (rows, columns)), (weight, torch.Tensor)]


class Table:
    """A table, some rows of which lag behind whenever a function is called."""

    def __init__(self) -> None:
        self.sides = beside(*pair("sparse"))
        self.weight, self.current = (next(model.table.parameters()) for model, _ in self.sides)
        self.lagging: set[tuple[float, ...]] = set()
        train_beside(self.sides)
        self.lag()

    def lag(self) -> None:
        """Have rows lag, and note them, unless those of the last call still do."""
        if not self.lagging or not self.lagging <= self._rows().keys():
            train_beside(self.sides, steps=1)
            far = ((row, not torch.allclose(torch.tensor(row), self.current[k])) for row, k in self._rows().items())
            self.lagging = {row for row, lags in far if lags}

    def _rows(self) -> dict[tuple[float, ...], int]:
        with as_stored():
            return {tuple(row): k for k, row in enumerate(self.weight.detach().tolist())}

    def is_read(self, function: Callable[..., Any], number: int) -> bool:
        """Call a function in one of the ways, and say whether its result has a row that lags."""
        try:
            self.lag()
            result = function(*ways_to_call(self.weight)[number])
            kind = type(result).__name__  # here, as some functions return while an error is set
        except Exception:  # most functions do not take these arguments, and some leave torch as nobody can use it
            return False
        if kind == "PyCapsule" and "dltensor" in repr(result):
            result = torch.utils.dlpack.from_dlpack(result)
        return any(
            self.lagging & set(map(tuple, values.reshape(-1, values.shape[-1]).tolist()))
            for x in _pytree.tree_leaves(result)
            if isinstance(x, Tensor) and x is not self.weight
            for values in _plain(x)
        )


def _plain(x: Tensor) -> list[Tensor]:
    """Return a tensor's values as plain tensors of two or more dimensions."""
    with as_stored():
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return _plain(torch._C._functorch.get_unwrapped(x))
        if x.is_nested:
            return [y.detach() for y in x.unbind()]
        x = x.detach().to_dense()
        return [x] if x.dim() > 1 else []


def reads(table: Table, function: Callable[..., Any]) -> bool:
    """
    Say whether a function reads rows that lag. A process of its own calls it, which it may change, or end by a signal.

    Raises:
        RuntimeError: the process has come to another end, for instance as a result could not be looked at.
    """
    here, there = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(_SECONDS)
        for standard in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), standard)
        status = 1
        try:
            if any(table.is_read(function, k) for k in range(len(ways_to_call(table.weight)))):
                os.write(there, b"it does")
            status = 0
        finally:
            os._exit(status)
    os.close(there)
    with os.fdopen(here) as pipe:
        found = bool(pipe.read())
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"{function}: the process that called it has ended with {os.WEXITSTATUS(status)}")
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    its = Table()
    for its_name, its_function in functions():
        if reads(its, its_function):
            print(its_name, flush=True)
