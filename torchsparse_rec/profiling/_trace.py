"""
Read a torch profiler's trace: where the time of a step goes, which copies it makes, what waits for the device.

Everything here is a function of the trace (the JSON of ``export_chrome_trace``, as a dict). So a trace that was
recorded on another machine, with a GPU or without, can be read as well.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["COPIES", "LOADER", "PHASES", "PREFIX", "STEP", "Copies", "Profile", "read_profile"]

PREFIX = "torchsparse_rec.profiling: "
LOADER, STEP, LOOKUP, DENSE = (PREFIX + name for name in ("loader", "step", "lookup", "dense"))

#: The phases of a step, with the loader before it, in the order of the report.
PHASES = ("loader", "lookup", "dense", "lookup backward", "other backward", "optimizer", "other")

#: Operators that make another tensor of the same values.
COPIES = frozenset({"aten::clone", "aten::_to_copy", "aten::copy_"})
_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "mkldnn_linear", "convolution_backward")
) | {"aten::mkldnn_convolution", "aten::cudnn_convolution", "mkldnn::_linear_pointwise", "aten::_addmm_activation"}
# The beginnings of the names of fused operators that compute matrix products: recurrent layers and attention, forward
# and backward. Operators that call others for their products (plain attention) are not among them.
_FUSED_PRODUCTS = (
    *(f"aten::{name}" for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")),
    *(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn", "fused")),
)
_LOOKUPS = ("aten::embedding", "aten::_embedding_bag", "torchsparse_rec::embedding", "torchsparse_rec::row_optimizer")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_NODE = "autograd::engine::evaluate_function: "
_COPY_NODES = ("ToCopyBackward", "CloneBackward", "CopyBackwards", "CopySlices")
_READS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})
_BYTES = {"double": 8, "long int": 8, "c10::complex<float>": 8, "float": 4, "int": 4, "short": 2, "c10::Half": 2}
_BYTES |= {"c10::BFloat16": 2, "unsigned char": 1, "signed char": 1, "bool": 1}
# The least bytes of a copy that counts: a copy of a few numbers belongs to the cost of a call.
_LEAST_BYTES = 1024


@dataclass
class Copies:
    """Copies of one kind: how many, how many bytes, and their time."""

    count: int = 0
    bytes: int = 0
    ms: float = 0.0

    def add(self, bytes: int, ms: float) -> None:
        """Count one more copy."""
        self.count, self.bytes, self.ms = self.count + 1, self.bytes + bytes, self.ms + ms


@dataclass
class Profile:
    """The numbers that were read from a trace; times are in milliseconds, added up over all profiled steps."""

    steps: int = 0
    step_ms: float = 0.0
    host_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """The host's time by phase; the loader's is outside of the steps, the others add up to ``step_ms``."""
    device_ms: dict[str, float] = field(default_factory=dict)
    """The GPU's time by the phase that launched the work; empty without a GPU."""
    copies: dict[str, Copies] = field(default_factory=dict)
    """The copies on the host (``"step"``, ``"loader"``), and between host and device (``"HtoD"``, ``"DtoH"``)."""
    pageable: int = 0
    """The number of copies between host and device from or to memory that is not pinned."""
    waits: dict[str, int] = field(default_factory=dict)
    """The operators or calls that made the host wait for the device within steps, and how often."""
    reads: dict[str, int] = field(default_factory=dict)
    """
    The operators of steps, except the optimizer's, that read values back to the host, and how often.

    Each waits for the device if its tensors are on a GPU.
    """
    wait_ms: float = 0.0
    """How long the host waited for the device within steps."""
    product_ms: float = 0.0
    """The time of matrix products, on the device if there is one, else on the host."""
    forward_products: dict[str, float] = field(default_factory=dict)
    """The time of the forward's matrix products, within dense layers (``"dense"``) and elsewhere (``"other"``)."""
    step_times: list[float] = field(default_factory=list)
    """The time of each step, on the host."""
    step_products: list[float] = field(default_factory=list)
    """The time of the matrix products in each step, on the host."""
    step_copies: list[float] = field(default_factory=list)
    """The time of the copies in each step, on the host."""
    lookups: int = 0
    """The number of calls of lookup modules."""
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """``(phase, begin, end)`` for the timeline; the first span begins at 0."""

    def product_share(self, best_ms: float = math.inf) -> float:
        """
        Return the share of matrix products of a step's time, on the device if there is one, else on the host.

        On the host, the step's time is the shortest of the profiled steps' times and ``best_ms``, the time of the
        fastest step without a profiler.
        """
        if self.device_ms:
            return self.product_ms / sum(self.device_ms.values())
        return _ratio(self.step_products, self.step_times, best_ms)

    def products_elsewhere(self) -> float:
        """Return the share of the forward's matrix products that are outside of the dense layers' ranges, by time."""
        total = sum(self.forward_products.values())
        return self.forward_products.get("other", 0.0) / total if total else 0.0

    def copy_share(self, best_ms: float = math.inf) -> float:
        """Return the share of copies of a step's time on the host; ``best_ms`` is as for :meth:`product_share`."""
        return _ratio(self.step_copies, self.step_times, best_ms)

    def share(self, phase: str) -> float:
        """Return the share of a phase of a step's time, on the device if there is one, else on the host."""
        times = self.device_ms or {name: ms for name, ms in self.host_ms.items() if name != "loader"}
        total = sum(times.values())
        return times.get(phase, 0.0) / total if total else 0.0


@dataclass
class _Open:
    """An event that has begun and has not yet ended, while a thread's events are read in order."""

    event: dict[str, Any]
    end: float
    phase: str
    in_copy: bool
    in_read: bool
    in_product: bool
    node: _Node | None
    children: float = 0.0


@dataclass
class _Node:
    """
    A node of the backward graph, and its time by phase.

    Whether the time belongs to a lookup's backward is known only when the node ends.
    """

    is_lookup: bool = False
    is_copy: bool = False
    times: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def read_profile(trace: dict[str, Any]) -> Profile:
    """
    Read a trace in which this module's ranges (``STEP``, ``LOADER`` and so on) were recorded.

    Args:
        trace: the JSON of ``export_chrome_trace``. Events need names, times and, for bytes, shapes and types.

    Returns:
        The numbers that were read.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    steps = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if _is(e, STEP))
    reader = _Reader(steps)
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation", *_RUNTIME):
            by_thread[(event.get("pid"), event.get("tid"))].append(event)
    for thread in by_thread.values():
        own = any(_is(e, STEP) or _is(e, LOADER) for e in thread)
        reader.read_thread(thread, own)
    reader.read_device([e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")])
    return reader.finish()


def _is(event: dict[str, Any], name: str) -> bool:
    return event["name"] == name and event.get("cat") == "user_annotation"


class _Reader:
    def __init__(self, steps: list[tuple[float, float]]) -> None:
        self.profile = Profile(steps=len(steps), step_ms=sum(end - begin for begin, end in steps) / 1e3)
        self.profile.step_times = [(end - begin) / 1e3 for begin, end in steps]
        self.profile.step_products, self.profile.step_copies = [0.0] * len(steps), [0.0] * len(steps)
        self._steps = steps
        self._phase_of: dict[Any, tuple[str, str]] = {}  # by correlation id: phase and operator
        self._product_of: set[Any] = set()
        self._device_forward: dict[str, float] = {}

    def read_thread(self, events: list[dict[str, Any]], own: bool) -> None:
        """
        Read all events of a thread.

        ``own`` is whether the step runs in this thread. In other threads, such as the backward's for a GPU, only the
        events within steps count.
        """
        stack: list[_Open] = []
        for event in sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            begin = float(event["ts"])
            while stack and begin >= stack[-1].end:
                self._close(stack)
            if not stack and not own and not any(start <= begin < end for start, end in self._steps):
                continue
            self._open(stack, event, own)
        while stack:
            self._close(stack)

    def _open(self, stack: list[_Open], event: dict[str, Any], own: bool) -> None:
        parent = stack[-1] if stack else None
        phase, node = self._phase(event, parent, own)
        name = event["name"]
        in_copy, in_read = (parent.in_copy, parent.in_read) if parent is not None else (False, False)
        in_product = parent is not None and parent.in_product
        is_product = name in _PRODUCTS or name.startswith(_FUSED_PRODUCTS)
        if name in COPIES and not in_copy:
            self._see_copy(event, phase, node)
        if name in _READS and not in_read and phase not in ("", "loader", "optimizer"):
            _count(self.profile.reads, name)
        if node is not None and name.startswith(_LOOKUPS):
            node.is_lookup = True
        if event.get("cat") in _RUNTIME:
            self._see_runtime(event, phase, parent)
        elif is_product and not in_product and phase not in ("loader", ""):
            ms = float(event["dur"]) / 1e3
            self.profile.product_ms += ms
            _add_forward(self.profile.forward_products, phase, ms)
            self._charge(self.profile.step_products, event)
        end = float(event["ts"]) + float(event["dur"])
        in_copy, in_read = in_copy or name in COPIES, in_read or name in _READS
        stack.append(_Open(event, end, phase, in_copy, in_read, in_product or is_product, node))

    def _phase(self, event: dict[str, Any], parent: _Open | None, own: bool) -> tuple[str, _Node | None]:
        name, above = event["name"], parent.phase if parent is not None else ("" if own else "other")
        node = parent.node if parent is not None else None
        if event.get("cat") == "user_annotation":
            for marker, phase in ((LOADER, "loader"), (STEP, "other"), (LOOKUP, "lookup"), (DENSE, "dense")):
                if name == marker:
                    self.profile.lookups += phase == "lookup"
                    self._span(phase, event)
                    return phase, node
            if name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")) and above:
                self._span("optimizer", event)
                return "optimizer", node
        if name.startswith(_NODE) and above and node is None:
            return "backward", _Node(is_copy=name[len(_NODE) :].startswith(_COPY_NODES))
        return above, node

    def _span(self, phase: str, event: dict[str, Any]) -> None:
        begin = float(event["ts"]) / 1e3
        self.profile.spans.append((phase, begin, begin + float(event["dur"]) / 1e3))

    def _close(self, stack: list[_Open]) -> None:
        closed = stack.pop()
        duration = float(closed.event["dur"])
        own_ms = max(duration - closed.children, 0.0) / 1e3
        if stack:
            stack[-1].children += duration
        if closed.node is None:
            if closed.phase:
                self.profile.host_ms[closed.phase] += own_ms
            return
        closed.node.times[closed.phase] += own_ms
        if not stack or stack[-1].node is not closed.node:  # the event is that of the node itself
            phase = "lookup backward" if closed.node.is_lookup else "other backward"
            self._span(phase, closed.event)
            for inner, ms in closed.node.times.items():
                self.profile.host_ms["optimizer" if inner == "optimizer" else phase] += ms

    def _see_copy(self, event: dict[str, Any], phase: str, node: _Node | None) -> None:
        """Count a copy, unless lookups, dense layers, the optimizer or the backward need it for their work."""
        where = "loader" if phase == "loader" else "step"
        size = _bytes_of(event)
        if size >= _LEAST_BYTES and (phase in ("loader", "other") or (node is not None and node.is_copy)):
            self.profile.copies.setdefault(where, Copies()).add(size, float(event["dur"]) / 1e3)
            if where == "step":
                self._charge(self.profile.step_copies, event)

    def _charge(self, times: list[float], event: dict[str, Any]) -> None:
        """Add an event's time to the entry of its step in ``times``."""
        number = bisect.bisect_right(self._steps, (float(event["ts"]), math.inf)) - 1
        if number >= 0:
            times[number] += float(event["dur"]) / 1e3

    def _see_runtime(self, event: dict[str, Any], phase: str, parent: _Open | None) -> None:
        operator = parent.event["name"] if parent is not None else event["name"]
        correlation = event.get("args", {}).get("correlation")
        if correlation is not None:
            self._phase_of[correlation] = (phase, operator)
            if parent is not None and parent.in_product:
                self._product_of.add(correlation)
        if "Synchronize" in event["name"] and phase not in ("", "loader"):
            _count(self.profile.waits, operator)
            self.profile.wait_ms += float(event["dur"]) / 1e3

    def read_device(self, events: list[dict[str, Any]]) -> None:
        """Read the events of a GPU, and add their times to the phases that launched them."""
        profile, products = self.profile, 0.0
        for event in events:
            correlation = event.get("args", {}).get("correlation")
            phase, operator = self._phase_of.get(correlation, ("", ""))
            ms = float(event["dur"]) / 1e3
            for direction in ("HtoD", "DtoH"):
                if event.get("cat") == "gpu_memcpy" and direction in event["name"] and phase:
                    profile.copies.setdefault(direction, Copies()).add(int(event["args"].get("bytes", 0)), ms)
                    profile.pageable += "Pageable" in event["name"]
                    if direction == "DtoH" and phase != "loader" and operator not in profile.waits:
                        _count(profile.waits, operator)
            if phase and phase != "loader":
                phase = "other backward" if phase == "backward" else phase
                profile.device_ms[phase] = profile.device_ms.get(phase, 0.0) + ms
                if correlation in self._product_of:
                    products += ms
                    _add_forward(self._device_forward, phase, ms)
        if profile.device_ms:
            profile.product_ms, profile.forward_products = products, self._device_forward

    def finish(self) -> Profile:
        """
        Complete the profile and return it.

        The step waited for a backward in another thread, so the phase "other" is the step's time without all others.
        """
        profile = self.profile
        inside = sum(ms for phase, ms in profile.host_ms.items() if phase not in ("loader", "other"))
        profile.host_ms["other"] = max(profile.step_ms - inside, 0.0)
        first = min((begin for _, begin, _ in profile.spans), default=0.0)
        profile.spans = [(phase, begin - first, end - first) for phase, begin, end in sorted(profile.spans, key=_begin)]
        return profile


def _ratio(parts: list[float], wholes: list[float], best_ms: float) -> float:
    """
    Return the ratio of the lower quartile of ``parts`` to the least of ``wholes`` and ``best_ms``, 1 at most.

    Other processes on the machine make times longer, never shorter.
    """
    whole = min([best_ms, *wholes])
    return min(sorted(parts)[len(parts) // 4] / whole, 1.0) if parts and 0 < whole < math.inf else 0.0


def _add_forward(products: dict[str, float], phase: str, ms: float) -> None:
    if not phase.endswith("backward"):
        where = "dense" if phase == "dense" else "other"
        products[where] = products.get(where, 0.0) + ms


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _begin(span: tuple[str, float, float]) -> float:
    return span[1]


def _bytes_of(event: dict[str, Any]) -> int:
    """Return the bytes of a copy: of its first argument whose shape and type the trace has, or 0."""
    arguments = event.get("args", {})
    shapes, types = arguments.get("Input Dims") or [], arguments.get("Input type") or []
    sizes = list(_sizes(shapes, types))
    return sizes[0] if sizes else 0


def _sizes(shapes: list[Any], types: list[Any]) -> Iterator[int]:
    for shape, type_ in zip(shapes, types, strict=False):
        if type_ in _BYTES and all(isinstance(n, int) for n in shape):
            yield math.prod(shape) * _BYTES[type_]
