"""What lookups of tables refuse by nature, each with the way out: TorchScript, torch.ao, exports, ``fully_shard``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import is_watched, untraced
from .._torch_modules import is_in_fsdp
from ..jagged import KeyedJaggedTensor
from ..jagged.checks import check_contents, place_of

NO_TORCHSCRIPT = (
    "{}: torch.jit cannot compile this lookup: use torch.export with the model in eval(), or first turn its tables "
    "into torch's by torchsparse_rec.nn.revert(model)"
)
WHY_UNTRACED = (
    "torch.compile cannot trace sparse gradients, nor max_norm with sparse or fused gradients: use grad_mode='dense', "
    "or compile without fullgraph, which leaves this lookup out of the graph"
)


@untraced(
    reason="a table that grows cannot be part of a graph: compile without fullgraph, which leaves this lookup out of it"
)
def growing_untraced(look_up: Callable[..., Any], *arguments: Any) -> Any:
    """Call a lookup in tables that grow outside of the compiled graph."""
    return look_up(*arguments)


@untraced(reason=WHY_UNTRACED)
def lookup_untraced(look_up: Callable[..., Any], *arguments: Any) -> Any:
    """Call a lookup outside of the compiled graph."""
    return look_up(*arguments)


def refused(error: Exception, owner: str, given: Any, x: Any, name: Callable[[int, int], tuple[str, str]]) -> Exception:
    """
    Return the error of an operator that looks up many tables in the words of what was given.

    Args:
        error: the operator's error, which has an id's position in ``x.values()``, or a row's in ``x.offsets()``.
        owner: the beginning of errors.
        given: the features as they were given, by lengths or offsets if they are a ``KeyedJaggedTensor``.
        x: the ``KeyedJaggedTensor`` that was looked up.
        name: a function that is given the number of a key and the rows of its table, and names the two.

    Returns:
        An error; the given one if it is about something else, or may be of an earlier lookup, as on CUDA.
    """
    if x.values().device.type != "cpu" or is_watched():
        return error
    try:
        check_contents(owner, given if isinstance(given, KeyedJaggedTensor) else x)
    except ValueError as found:
        return found
    bad = re.search(r"indices\[(\d+)\] must be in \[0, (\d+)\), got (-?\d+)$", str(error))
    if bad is None or x.values()[int(bad[1]) :][:1].tolist() != [int(bad[3])]:
        return error
    key, example = place_of(x, int(torch.searchsorted(x.offsets(), int(bad[1]), right=True)) - 1)
    feature, table = name(key, int(bad[2]))
    return IndexError(f"{error}: an id of {feature}, example {example}, outside the {bad[2]} rows{table}")


def check_export(module: torch.nn.Module, kind: str) -> None:
    """Raise ``RuntimeError`` if a module in ``train()``, whose tables' gradients are of this kind, is exported."""
    if module.training and kind != "dense":
        raise RuntimeError(
            f"{type(module).__name__}: grad_mode={kind!r} cannot be exported in train(): an exported program "
            "cannot have its gradients. Call eval() on the model before torch.export, or use grad_mode='dense'"
        )


def refuse_clipped(owner: str, argument: str, table: Any) -> None:
    """Raise ``ValueError`` if a table has a ``max_norm``, with which only lookups by its own module read rows."""
    clip = getattr(table, "max_norm", None)
    clip = getattr(table, "_clip", None) if clip is None else clip
    if clip is not None:
        raise ValueError(
            f"{owner}: {argument}.max_norm must be None, got {clip}: only lookups by the module that has it clip rows, "
            "so look rows up by that, or give the rows that it returns"
        )


def check_shards(module: torch.nn.Module, kinds: Sequence[str]) -> None:
    """Raise ``RuntimeError`` if a gradient is not dense, and ``fully_shard`` holds the module's tables."""
    if kinds.count("dense") < len(kinds) and not torch.compiler.is_compiling() and is_in_fsdp(module):
        kind = next(kind for kind in kinds if kind != "dense")
        raise RuntimeError(
            f"grad_mode={kind!r}: the table is in fully_shard, which can add up only strided gradients over "
            "processes: choose grad_mode='dense' or 'auto' for the table, or leave it out by ignored_params"
        )


class Refusals(torch.nn.Module):
    """A module that ``torch.jit`` and ``torch.ao.quantization`` cannot take unchanged."""

    def __prepare_scriptable__(self) -> None:
        """Raise ``RuntimeError``: ``torch.jit.script``, which calls this method, cannot compile the lookups."""
        raise RuntimeError(NO_TORCHSCRIPT.format(type(self).__name__))

    def _refuse_tracing(self) -> None:
        if torch.jit.is_tracing():
            raise RuntimeError(NO_TORCHSCRIPT.format(type(self).__name__))

    @property
    def qconfig(self) -> Any:
        """The value that ``torch.ao.quantization`` sets in every module of a model; to set it warns."""
        if "_qconfig" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'qconfig'")
        return self.__dict__["_qconfig"]

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        if "_qconfig" not in self.__dict__:
            warnings.warn(
                f"{type(self).__name__}: torch.ao.quantization converts only torch's own classes and does not "
                "change this table: to quantise tables, call torchsparse_rec.nn.revert(model) first",
                stacklevel=2,
            )
        self.__dict__["_qconfig"] = value

    @qconfig.deleter
    def qconfig(self) -> None:
        self.__dict__.pop("_qconfig", None)
