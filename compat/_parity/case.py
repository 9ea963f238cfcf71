"""The parts of the parity check: a case, its outcome, a reference for its floats, and an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    """One call, with the same arguments on both sides."""

    #: A key of ``OPERATORS``: the dotted name in ``tf`` and in ``compat.tensorflow``, followed by words or not.
    operator: str
    #: Keyword arguments: torch tensors; SparseTensor, RaggedTensor and IndexedSlices of compat.tensorflow; numbers,
    #: dtypes, None; strings in a list or numpy array; lists, tuples and dicts of all these.
    arguments: dict[str, Any]
    #: A few words that distinguish this case from others.
    note: str
    #: The gradient of the result ``output``, or of several by name, where gradients are compared too. It is repeated or
    #: cut to the result's shape.
    upstream: Tensor | Mapping[str, Tensor] | None = None
    #: The arguments whose gradients are compared if there is an upstream; for a SparseTensor the gradient of its
    #: values.
    gradients: tuple[str, ...] = ()
    #: What our error message must contain, where the call fails; None: the name of one of the arguments.
    names: tuple[str, ...] | None = None

    @property
    def dtype(self) -> str:
        """The dtype that the table shows: the first tensor's, or ``string`` if there is no tensor."""
        return next(_dtypes(list(self.arguments.values())), "string")

    def upstream_of(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the gradient of the result ``name``, repeated or cut to the given shape."""
        given = self.upstream if isinstance(self.upstream, Tensor) else (self.upstream or {})[name]
        if given.shape == torch.Size(shape):
            return given
        flat = given.reshape(-1)
        positions = torch.arange(int(np.prod(shape))) % max(flat.shape[0], 1)
        return flat[positions].reshape(shape)

    @property
    def upstream_names(self) -> list[str]:
        """The names of the results that have a gradient."""
        return ["output"] if isinstance(self.upstream, Tensor) else list(self.upstream or {})


def _dtypes(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield str(value.dtype).removeprefix("torch.")
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _dtypes(item)
    elif hasattr(value, "values"):
        yield from _dtypes(value.values)


@dataclass
class Outcome:
    """The results of a call, or its error."""

    #: Tensors on the CPU, numbers, bytes or lists of bytes, by name; sparse gradients as IndexedSlices.
    values: dict[str, Any] = field(default_factory=dict)
    #: The error's class and text, or None.
    error: str | None = None


@dataclass
class Reference:
    """The right float result, and how far a good one may be off; for a sparse gradient both are dense."""

    value: np.ndarray
    #: 0 for a value that must be met exactly.
    tolerance: np.ndarray
    #: The tolerance of TensorFlow's result where that is wider.
    their_tolerance: np.ndarray | None = None
    #: Where TensorFlow's result is not compared: everywhere, or at some elements (broadcast).
    ours_only: bool | np.ndarray = False


def _no_references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    return {}


@dataclass(frozen=True)
class Operator:
    """One operator of the check. Everything but the cases has a default that serves most operators."""

    #: Draws a random call of up to ``elements`` numbers; ``(rng, operator, elements)``.
    random: Callable[[np.random.Generator, str, int], Case]
    #: Returns the cases at the edges, one per sentence of the contract.
    hand_picked: Callable[[str], list[Case]]
    #: Returns what float results should be, by name; results without a reference are compared bit by bit.
    references: Callable[[Case, Outcome], dict[str, Reference]] = _no_references
    #: The label of each way to take gradients, and the further arguments it takes.
    gradient_calls: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"gradient": {}})
    #: Changes TensorFlow's arguments before gradients are watched (into variables, say); ``(tf, arguments)``.
    prepare_tensorflow: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None
    #: Makes TensorFlow's call, if that is more than calling the function of that name; ``(tf, arguments)``.
    run_tensorflow: Callable[[Any, dict[str, Any]], Any] | None = None
    #: Makes our call, if that is more than calling the function of that name; ``(compat.tensorflow, arguments)``.
    run_ours: Callable[[Any, dict[str, Any]], Any] | None = None
