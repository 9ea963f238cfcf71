"""Rows of the ``segment`` family: sparse segment reductions and their gradients in both forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchsparse_rec import ops

from .rows import Call, Case, Make, Options, Row, tensorflow

DIM = 64


@dataclass(frozen=True)
class Problem:
    """Random rows of a table, in segments of random length."""

    data: Tensor  # [V, DIM]
    indices: Tensor  # [N]
    segment_ids: Tensor  # [N]
    num_segments: int

    def offsets(self) -> Tensor:
        """``[S + 1]``: where each segment begins."""
        lengths = torch.bincount(self.segment_ids, minlength=self.num_segments)
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def problem(options: Options, rows_of_data: bool) -> Problem:
    """The reduction's operands, or with ``rows_of_data`` false its gradient's: ``data [S, DIM]`` is the gradient."""
    generator = torch.Generator().manual_seed(0)
    n, segments = options.size(1_000_000, 20_000), options.size(100_000, 2_000)
    data = torch.randn(n if rows_of_data else segments, DIM, generator=generator)
    indices = torch.randint(0, n, (n,), generator=generator)
    segment_ids = torch.randint(0, segments, (n,), generator=generator).sort().values
    return Problem(*(t.to(options.device) for t in (data, indices, segment_ids)), segments)


def reference_weights(p: Problem, mode: str) -> Tensor:
    """What each entry counts in its segment, ``[N, 1]`` float64."""
    lengths = torch.bincount(p.segment_ids, minlength=p.num_segments).double()
    weights = 1.0 / lengths[p.segment_ids] if mode == "mean" else torch.ones(len(p.indices), device=p.data.device)
    return weights.double().unsqueeze(1)


def forward_row(mode: str, targets: dict[str, float]) -> Row:
    """Sum or mean of each segment."""
    reduce = {"sum": ops.sparse_segment_sum, "mean": ops.sparse_segment_mean}[mode]

    def build(options: Options) -> Case:
        p = problem(options, rows_of_data=True)

        def ours() -> Call:
            return lambda: reduce(p.data, p.indices, p.segment_ids, p.num_segments)

        def tf_reduce() -> Call:
            tf = tensorflow(options)
            function = {"sum": tf.sparse.segment_sum, "mean": tf.sparse.segment_mean}[mode]
            operands = [tf.constant(t.numpy()) for t in (p.data, p.indices, p.segment_ids)]
            return lambda: function(*operands, num_segments=p.num_segments)

        def torch_bag() -> Call:
            offsets = p.offsets()[:-1]
            return lambda: torch.nn.functional.embedding_bag(p.indices, p.data, offsets, mode=mode)

        def check() -> None:
            gathered = p.data.double()[p.indices] * reference_weights(p, mode)
            expected = gathered.new_zeros(p.num_segments, DIM).index_add_(0, p.segment_ids, gathered)
            torch.testing.assert_close(ours()().double(), expected, rtol=1e-4, atol=1e-4)

        peers: dict[str, Make] = {"TensorFlow": tf_reduce, "torch embedding_bag": torch_bag}
        return Case(ours, peers, check, bytes_of(p, rows_written=p.num_segments))

    what = f"sparse_segment_{mode}, 1M x 64 float32, 1M random int64 indices, 100k segments"
    return Row(f"segment/{mode}", what, build, targets)


def bytes_of(p: Problem, rows_written: int) -> int:
    """One row of DIM float32 read per entry, ids read, and the result written."""
    return 4 * DIM * (len(p.indices) + rows_written) + 16 * len(p.indices)


def grad_row(mode: str, compact: bool, reuse: bool, target: float) -> Row:
    """The gradient: dense, or compact (V2: unique rows and their ids); fresh, or into a reused buffer."""
    name = {
        ("sum", False): ops.sparse_segment_sum_grad,
        ("mean", False): ops.sparse_segment_mean_grad,
        ("sum", True): ops.sparse_segment_sum_grad_v2,
        ("mean", True): ops.sparse_segment_mean_grad_v2,
    }
    grad = name[mode, compact]

    def build(options: Options) -> Case:
        p = problem(options, rows_of_data=False)
        operands = p.data, p.indices, p.segment_ids
        rows = len(p.indices)  # as many rows in the table as there are indices

        def ours() -> Call:
            if not reuse:
                return lambda: grad(*operands, rows)
            out = grad(*operands, rows)
            return lambda: grad(*operands, rows, out=out)

        def tf_grad() -> Call:
            tf = tensorflow(options)
            function = getattr(tf.raw_ops, f"SparseSegment{mode.capitalize()}Grad{'V2' if compact else ''}")
            size = {"dense_output_dim0" if compact else "output_dim0": tf.constant(rows, tf.int32)}
            given = dict(
                zip(("grad", "indices", "segment_ids"), (tf.constant(t.numpy()) for t in operands), strict=True)
            )
            return lambda: function(**given, **size)

        def check() -> None:
            scaled = p.data.double()[p.segment_ids] * reference_weights(p, mode)
            expected = scaled.new_zeros(rows, DIM).index_add_(0, p.indices, scaled)
            result = ours()()
            if compact:
                ids = torch.unique(p.indices)
                assert torch.equal(result[1], ids)
                result, expected = result[0], expected[ids]
            torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)

        written = len(torch.unique(p.indices)) if compact else rows
        return Case(ours, {"TensorFlow": tf_grad}, check, bytes_of(p, written))

    form = "compact (V2)" if compact else "dense"
    what = f"gradient of sparse_segment_{mode}, {form}, {'into a reused buffer' if reuse else 'fresh output'}"
    return Row(
        f"segment/{mode}-grad{'-v2' if compact else ''}{'-out' if reuse else ''}", what, build, {"TensorFlow": target}
    )


ROWS = [
    forward_row("sum", {"TensorFlow": 5.0, "torch embedding_bag": 1.0}),
    forward_row("mean", {"TensorFlow": 5.0}),
    *(
        grad_row(mode, compact, reuse, target)
        for mode in ("sum", "mean")
        for compact, reuse, target in ((False, False, 6.0), (True, False, 8.0), (False, True, 15.0), (True, True, 20.0))
    ),
]
