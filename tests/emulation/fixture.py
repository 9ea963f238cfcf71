"""The emulated kernels: as a library of their own, and in the place of the production kernels of the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from calls import assert_same_bits
from samples.sample import map_tensors, tensors_of

from emulation.build import build

_NAMESPACE = "torchsparse_rec"
# This operator asks the host, and has no kernel.
_WITHOUT_KERNEL = {"cpu_level", "row_optimizer_rule"}
# Orders of threads and blocks: (kind, seed), see emulation.cpp.
_ORDERS = {"ascending": (0, 0), "descending": (1, 0), "random": (2, 20240607)}


@functools.cache
def library() -> ctypes.CDLL:
    """Build and load ``_C_emulated.so``: its operators are in ``torch.ops.torchsparse_rec_emulated``."""
    path = build()
    torch.ops.load_library(str(path))
    loaded = ctypes.CDLL(str(path))
    loaded.tsr_emulated_set_order.argtypes = [ctypes.c_int, ctypes.c_uint64]
    loaded.tsr_emulated_launches.restype = ctypes.c_int64
    loaded.tsr_emulated_fault.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    loaded.tsr_emulated_fault.restype = ctypes.c_char_p
    return loaded


@functools.cache
def operators() -> tuple[str, ...]:
    """Return the names of the operators that have a kernel."""
    prefix = f"{_NAMESPACE}::"
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(prefix)}
    return tuple(sorted({name.removeprefix(prefix) for name in names} - _WITHOUT_KERNEL))


def operator(name: str, namespace: str = f"{_NAMESPACE}_emulated") -> torch._ops.OpOverload:
    """Return one operator, by default the emulated one, to run in one order of threads; the next call raises errors."""
    library()
    return getattr(getattr(torch.ops, namespace), name).default


def check_errors() -> None:
    """Raise the error that the emulated kernels have recorded."""
    operator("check_errors")(torch.empty(0))


def set_order(name: str, seed: int = 0) -> None:
    """Run the next launches in ``ascending``, ``descending`` or ``random`` order of threads and blocks."""
    kind, default_seed = _ORDERS[name]
    library().tsr_emulated_set_order(kind, seed or default_seed)


def _outputs(result: Any) -> list[torch.Tensor]:
    if result is None:
        return []
    return tensors_of(result) if isinstance(result, torch.Tensor) else [x for part in result for x in _outputs(part)]


def _bits(x: torch.Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    """Return the shape, dtype and bytes of a tensor, to compare: NaN equals NaN, 0 differs from -0."""
    return x.shape, x.dtype, x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _clones(result: Any) -> Any:
    """Return copies of the results: the emulation's tensors lie inside larger ones, between guards."""
    if result is None or isinstance(result, torch.Tensor):
        return result if result is None else result.clone()
    return type(result)(_clones(x) for x in result)


def _copies(arguments: Sequence[Any], written: list[int]) -> list[Any]:
    """Return the arguments with copies of the written memory, in the same layout; shared memory stays shared."""
    memory = [x.untyped_storage() for i in written for x in tensors_of(arguments[i])]
    copied = {storage._cdata: storage.clone() for storage in memory}

    def copy(x: torch.Tensor) -> torch.Tensor:
        storage = copied.get(x.untyped_storage()._cdata)
        return x if storage is None else x.new_empty(0).set_(storage, x.storage_offset(), x.shape, x.stride())

    return [map_tensors(copy, x) for x in arguments]


def _attempt(name: str, arguments: list[Any]) -> tuple[Any, BaseException | None]:
    try:
        result = operator(name)(*arguments)
        check_errors()
    except (ValueError, IndexError) as error:
        return None, error
    return result, None


def run_in_every_order(name: str, *arguments: Any) -> Any:
    """Call an emulated operator once per order; check that all results agree to the bit, and raise recorded errors."""
    schema = operator(name)._schema
    written = [i for i, argument in enumerate(schema.arguments) if argument.alias_info is not None]
    seen = []
    for order in _ORDERS:
        set_order(order)
        # The last order writes to the caller's tensors.
        mine = list(arguments) if order == "random" else _copies(arguments, written)
        result, error = _attempt(name, mine)
        tensors = _outputs(result) + [x for i in written for x in tensors_of(mine[i])]
        seen.append((type(error), str(error)) if error else [_bits(x) for x in tensors])
        assert seen[-1] == seen[0], f"{name}: {order} order of threads gives another result than ascending order"
    set_order("ascending")
    if error is not None:
        raise error
    return _clones(result)


def check(name: str, *arguments: Any) -> Any:
    """Check that results and written arguments have the bits of the CPU's kernel, and return the results."""
    copies = [map_tensors(torch.clone, x) for x in arguments]
    wanted = getattr(getattr(torch.ops, _NAMESPACE), name).default(*copies)
    actual = run_in_every_order(name, *arguments)
    given = [([x], [y]) for x, y in zip(arguments, copies, strict=True) if isinstance(x, torch.Tensor)]
    for mine, theirs in [(_outputs(actual), _outputs(wanted)), *given]:
        for x, y in zip(mine, theirs, strict=True):
            assert_same_bits(x, y)
    return actual


class _Plans:
    """The operators on plans: a call that names one has the bits of the whole operator, in every order of threads."""

    def __init__(self) -> None:
        self._made: dict[int, Sequence[Any]] = {}

    def collection_plan(self, *arguments: Any) -> int:
        number: int = operator("collection_plan")(*arguments)
        self._made[number] = arguments
        return number

    def collection_plan_free(self, probe: torch.Tensor, number: int) -> None:
        operator("collection_plan_free")(probe, number)
        self._made.pop(number, None)

    def planned_collection(self, weights: Any, *rest: Any) -> Any:
        *bags, counts, side_by_side, number = rest
        _, _, _, tables, keys, modes, padding = self._made[number][:7]
        lists = (tables, keys, modes, counts, padding, side_by_side)
        results = run_in_every_order("embedding_collection", weights, *bags, *lists, False)
        return _same(results, operator("planned_collection")(weights, *rest))

    def planned_collection_current(self, weights: Any, history: Any, *rest: Any) -> Any:
        *bags, counts, side_by_side, rule, hyperparameters, step, base, number = rest
        _, states, last_steps, tables, keys, modes, padding = self._made[number][:7]
        lists = (tables, keys, modes, counts, padding, side_by_side, rule, hyperparameters, step, base)
        results = run_in_every_order(
            "embedding_collection_current", weights, states, last_steps, history, *bags, *lists
        )
        return _same(results, operator("planned_collection_current")(weights, history, *rest))

    def planned_collection_update_(self, weights: Any, history: Any, *rest: Any) -> None:
        *inputs, counts, side_by_side, rule, hyperparameters, step, base, number = rest
        _, states, last_steps, tables, keys, modes, padding, maximize, seeds, whole = self._made[number]
        written = [list(map(torch.clone, x)) for x in (weights, states, last_steps)]
        lists = (tables, keys, modes, counts, padding, side_by_side, [True] * len(weights), None)
        options = (rule, hyperparameters, step, base, maximize, seeds, whole)
        run_in_every_order("embedding_collection_update_", *written, history, *inputs, *lists, *options)
        operator("planned_collection_update_")(weights, history, *rest)
        _same(sum(written, []), [*weights, *states, *last_steps])

    def free_all(self) -> None:
        for number in [*self._made]:
            self.collection_plan_free(torch.empty(0), number)


def _same(expected: Any, actual: Any) -> Any:
    for x, y in zip(expected, actual, strict=True):
        assert_same_bits(x, y)
    return expected


@contextlib.contextmanager
def stand_in() -> Iterator[Callable[[], int]]:
    """
    Run emulated kernels in place of the CPU's in ``torch.ops.torchsparse_rec``, in every order of threads.

    Yield a function that returns how many kernels have been launched since. Refuse a test that called no operator.
    """
    library()
    called = []
    plans = _Plans()

    def kernel(name: str) -> Callable[..., Any]:
        call = getattr(plans, name, functools.partial(run_in_every_order, name))

        def run(*arguments: Any) -> Any:
            called.append(name)
            return call(*arguments)

        return run

    overrides = torch.library.Library(_NAMESPACE, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in operators():
            overrides.impl(name, kernel(name), "CPU", allow_override=True)
    before = library().tsr_emulated_launches()
    try:
        yield lambda: library().tsr_emulated_launches() - before
    finally:
        overrides._destroy()
        plans.free_all()
    assert called, "no operator was called: there is nothing that the emulated kernels could show"
