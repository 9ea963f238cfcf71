"""Benchmark rows of the segment reductions without indices, sorted and unsorted, and of their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchsparse_rec import ops

from .rows import Call, Case, CudaTargets, Make, Options, Row, tensorflow

_TORCH_NAMES = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin", "prod": "prod"}


@dataclass(frozen=True)
class Problem:
    """Rows in segments of random length."""

    data: Tensor  # [N, D]
    segment_ids: Tensor  # [N]
    num_segments: int

    def sizes(self) -> str:
        """Return the sizes, as text for the report."""
        rows, columns = self.data.shape
        return f"{rows:,} x {columns} float32, {self.num_segments:,} segments"

    def bytes_moved(self) -> int:
        """Count the bytes: every row in, ids in, and the result out."""
        return 4 * self.data.shape[1] * (len(self.data) + self.num_segments) + 8 * len(self.segment_ids)


def problem(options: Options, unsorted: bool) -> Problem:
    """Make rows and segments. Only the order of the ids differs between sorted and unsorted ones."""
    generator = torch.Generator(options.device).manual_seed(0)
    rows, segments = options.size(1_000_000, 20_000, 4_194_304), options.size(100_000, 2_000, 419_430)
    data = torch.randn(rows, options.size(64, 64, 128), generator=generator, device=options.device)
    ids = torch.randint(0, segments, (rows,), generator=generator, device=options.device)
    return Problem(data, ids if unsorted else ids.sort().values, segments)


def torch_scatter(p: Problem, reduction: str) -> Tensor:
    """Reduce by torch's scatter_reduce_, which takes an id for every element."""
    ids = p.segment_ids[:, None].expand_as(p.data)
    # The derivative of scatter_reduce_ counts a start value that equals the maximum as one more tie.
    start = {"max": -torch.inf, "min": torch.inf}.get(reduction, 0.0)
    out = p.data.new_full((p.num_segments, p.data.shape[1]), start)
    return out.scatter_reduce_(0, ids, p.data, _TORCH_NAMES[reduction], include_self=False)


def check_values(p: Problem, reduction: str, result: Tensor) -> None:
    """Compare a result with torch's in float64."""
    wanted = torch_scatter(Problem(p.data.double(), p.segment_ids, p.num_segments), reduction)
    if reduction == "prod":
        wanted[torch.bincount(p.segment_ids, minlength=p.num_segments) == 0] = 1
    found = torch.bincount(p.segment_ids, minlength=p.num_segments) > 0
    torch.testing.assert_close(result[found].double(), wanted[found], rtol=1e-4, atol=1e-4)


def torch_peers(p: Problem, reduction: str, unsorted: bool) -> dict[str, Make]:
    """Return torch's own ways to compute the reduction."""

    def segment_reduce() -> Call:
        lengths = torch.bincount(p.segment_ids, minlength=p.num_segments)
        return lambda: torch.segment_reduce(p.data, reduction, lengths=lengths, unsafe=True)

    def index_add() -> Call:
        return lambda: p.data.new_zeros(p.num_segments, p.data.shape[1]).index_add_(0, p.segment_ids, p.data)

    peers: dict[str, Make] = {"torch scatter_reduce_": lambda: partial(torch_scatter, p, reduction)}
    if not unsorted:
        peers["torch segment_reduce"] = segment_reduce
    if reduction == "sum":
        peers["torch index_add_"] = index_add
    return peers


def forward_row(reduction: str, unsorted: bool, targets: dict[str, float]) -> Row:
    """Make a benchmark row for one reduction."""
    name = f"{'unsorted_' if unsorted else ''}segment_{reduction}"
    reduce = getattr(ops, name)

    def build(options: Options) -> Case:
        p = problem(options, unsorted)

        def ours() -> Call:
            return lambda: reduce(p.data, p.segment_ids, p.num_segments)

        def tf_reduce() -> Call:
            tf = tensorflow(options)
            operands: list[Any] = [tf.constant(p.data.numpy()), tf.constant(p.segment_ids.numpy())]
            operands += [p.num_segments] if unsorted else []
            return lambda: getattr(tf.math, name)(*operands)

        peers: dict[str, Make] = {"TensorFlow": tf_reduce, **torch_peers(p, reduction, unsorted)}
        return Case(
            ours, peers, lambda: check_values(p, reduction, ours()()), p.bytes_moved(), len(p.data), sizes=p.sizes()
        )

    return Row(f"segment/{name}", name, build, targets, CudaTargets())


def gradient_row(reduction: str, unsorted: bool, targets: dict[str, float]) -> Row:
    """Make a benchmark row for forward and backward of one reduction."""
    name = f"{'unsorted_' if unsorted else ''}segment_{reduction}"
    reduce = getattr(ops, name)

    def build(options: Options) -> Case:
        p = problem(options, unsorted)
        data = p.data.clone().requires_grad_()
        upstream = torch.ones(p.num_segments, p.data.shape[1], device=p.data.device)

        def step() -> Tensor:
            return torch.autograd.grad(reduce(data, p.segment_ids, p.num_segments), data, upstream)[0]

        def torch_step() -> Tensor:
            rows = Problem(data, p.segment_ids, p.num_segments)
            return torch.autograd.grad(torch_scatter(rows, reduction), data, upstream)[0]

        def tf_step() -> Call:
            tf = tensorflow(options)
            values, ids = tf.constant(p.data.numpy()), tf.constant(p.segment_ids.numpy())

            def call() -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(values)
                    result = getattr(tf.math, name)(values, ids, *([p.num_segments] if unsorted else []))
                return tape.gradient(result, values)

            return call

        peers: dict[str, Make] = {"TensorFlow": tf_step, "torch scatter_reduce_": lambda: torch_step}
        return Case(
            lambda: step,
            peers,
            lambda: torch.testing.assert_close(step(), torch_step(), rtol=1e-4, atol=1e-5),
            sizes=p.sizes(),
        )

    return Row(f"segment/{name}-grad", f"{name}, forward and backward", build, targets, CudaTargets())


_TARGETS = {"TensorFlow": 3.0, "torch scatter_reduce_": 1.0}
ROWS = [
    *(
        forward_row(reduction, unsorted, _TARGETS | ({} if unsorted else {"torch segment_reduce": 1.0}))
        for unsorted in (False, True)
        for reduction in ("sum", "mean", "max", "min", "prod")
    ),
    *(gradient_row(reduction, unsorted, _TARGETS) for unsorted in (False, True) for reduction in ("mean", "max")),
]
