"""Benchmark rows of the ``sparse_segment`` family: sparse segment reductions, and their gradients in both forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchsparse_rec import ops

from .ids import SPREADS
from .rows import Call, Case, CudaTargets, Make, Options, Row, tensorflow

# The share of the copy bandwidth that a mean and its gradients should reach on a GPU, with bytes by formula.
CUDA_SHARE = 0.75


@dataclass(frozen=True)
class Shape:
    """A row's number of columns, and the distribution of ids."""

    dim: int = 128
    spread: str = "uniform"

    def name(self) -> str:
        """Return the end of a benchmark row's name."""
        return "" if self == Shape() else f"-{self.dim}-{self.spread}"

    def columns(self, options: Options) -> int:
        """Return the number of columns on this device. The first shape has 64 on two cores."""
        return options.size(64, 64, self.dim) if self == Shape() else self.dim

    def table_rows(self, options: Options) -> int:
        """Return the number of the table's rows: on a GPU, 10.7 GB of them."""
        return options.size(1_000_000, 20_000, 2_684_354_560 // self.dim)


@dataclass(frozen=True)
class Problem:
    """Rows of a table, picked at random, in segments of random length."""

    data: Tensor  # [V, D]; for a gradient [S, D]
    indices: Tensor  # [N]
    segment_ids: Tensor  # [N]
    num_segments: int
    table_rows: int  # V

    def offsets(self) -> Tensor:
        """Return where each segment begins, ``[S + 1]``."""
        lengths = torch.bincount(self.segment_ids, minlength=self.num_segments)
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def weights(self, mode: str) -> Tensor:
        """Return the weight of each entry in its segment, ``[N, 1]`` float32."""
        if mode == "sum":
            return torch.ones(len(self.indices), 1, device=self.data.device)
        lengths = torch.bincount(self.segment_ids, minlength=self.num_segments).float()
        return (1.0 / lengths)[self.segment_ids].unsqueeze(1)

    def sizes(self) -> str:
        """Return the sizes, as text for the report."""
        table = f"{self.table_rows:,} x {self.data.shape[1]} float32"
        return f"{table}, {len(self.indices):,} int64 indices, {self.num_segments:,} segments"


def problem(options: Options, shape: Shape, rows_of_data: bool) -> Problem:
    """Make the reduction's operands, or with ``rows_of_data`` false its gradient's, whose ``data`` is ``[S, D]``."""
    device, rows, dim = options.device, shape.table_rows(options), shape.columns(options)
    generator = torch.Generator(device).manual_seed(0)
    n, segments = options.size(1_000_000, 20_000, 1_048_576), options.size(100_000, 2_000, 52_428)
    data = torch.randn(rows if rows_of_data else segments, dim, generator=generator, device=device)
    indices = SPREADS[shape.spread](n, rows, device)
    segment_ids = torch.randint(0, segments, (n,), generator=generator, device=device).sort().values
    return Problem(data, indices, segment_ids, segments, rows)


def bytes_of(p: Problem, rows_written: int) -> int:
    """Count the bytes of a reduction: a row of float32 in for each entry, its ids in, and the result out."""
    return 4 * p.data.shape[1] * (len(p.indices) + rows_written) + 16 * len(p.indices)


# ---- Reductions -----------------------------------------------------------------------------------------------------


def composed_reductions(p: Problem, mode: str) -> dict[str, Make]:
    """Return compositions of torch's operators for the reduction, beside embedding_bag."""

    def segment_reduce() -> Call:
        offsets = p.offsets()
        return lambda: torch.segment_reduce(p.data.index_select(0, p.indices), mode, offsets=offsets, unsafe=True)

    def index_add() -> Call:
        weights = p.weights(mode)

        def call() -> Tensor:
            rows = p.data.index_select(0, p.indices)
            rows = rows if mode == "sum" else rows.mul_(weights)
            return rows.new_zeros(p.num_segments, rows.shape[1]).index_add_(0, p.segment_ids, rows)

        return call

    return {"torch index_select + segment_reduce": segment_reduce, "torch index_select + index_add_": index_add}


def forward_row(mode: str, targets: dict[str, float], shape: Shape = Shape()) -> Row:
    """Make a benchmark row for the sum or mean of each segment."""
    reduce = {"sum": ops.sparse_segment_sum, "mean": ops.sparse_segment_mean}[mode]

    def build(options: Options) -> Case:
        p = problem(options, shape, rows_of_data=True)

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
            gathered = p.data[p.indices].double() * p.weights(mode)
            expected = gathered.new_zeros(p.num_segments, gathered.shape[1]).index_add_(0, p.segment_ids, gathered)
            torch.testing.assert_close(ours()().double(), expected, rtol=1e-4, atol=1e-4)

        peers: dict[str, Make] = {"TensorFlow": tf_reduce, "torch embedding_bag": torch_bag}
        if options.compositions():
            peers |= composed_reductions(p, mode)
        return Case(ours, peers, check, bytes_of(p, p.num_segments), ids=len(p.indices), sizes=p.sizes())

    what = f"sparse_segment_{mode}, {shape.spread} indices"
    return Row(f"sparse_segment/{mode}{shape.name()}", what, build, targets, CudaTargets(copy_share=CUDA_SHARE))


# ---- Gradients ------------------------------------------------------------------------------------------------------


def composed_gradients(p: Problem, mode: str, compact: bool) -> dict[str, Make]:
    """Return torch's compositions for the gradient: a row per entry, added up in an order that a GPU leaves open."""

    def rows_of(weights: Tensor) -> Tensor:
        rows = p.data.index_select(0, p.segment_ids)
        return rows if mode == "sum" else rows.mul_(weights)

    def dense() -> Call:
        weights = p.weights(mode)

        def call() -> Tensor:
            rows = rows_of(weights)
            return rows.new_zeros(p.table_rows, rows.shape[1]).index_add_(0, p.indices, rows)

        return call

    def by_unique() -> Call:
        weights = p.weights(mode)

        def call() -> tuple[Tensor, Tensor]:
            rows = rows_of(weights)
            ids, places = torch.unique(p.indices, return_inverse=True)
            return rows.new_zeros(len(ids), rows.shape[1]).index_add_(0, places, rows), ids

        return call

    return {"torch unique + index_add_": by_unique} if compact else {"torch zeros + index_add_": dense}


@dataclass(frozen=True)
class Form:
    """A form of the gradient: dense, or compact (V2: unique rows and their ids); fresh, or into a reused buffer."""

    mode: str
    compact: bool
    reuse: bool = False

    def function(self) -> Callable:
        """Return our function for this form."""
        return getattr(ops, f"sparse_segment_{self.mode}_grad{'_v2' if self.compact else ''}")

    def name(self) -> str:
        """Return the benchmark row's name."""
        return f"sparse_segment/{self.mode}-grad{'-v2' if self.compact else ''}{'-out' if self.reuse else ''}"

    def what(self) -> str:
        """Describe the form in words."""
        layout = "compact (V2)" if self.compact else "dense"
        memory = "into a reused buffer" if self.reuse else "fresh output"
        return f"gradient of sparse_segment_{self.mode}, {layout}, {memory}"


def check_gradient(p: Problem, form: Form, result: Tensor | tuple[Tensor, Tensor]) -> None:
    """Compare with sums in float64 of the rows that occur. The other rows of a dense gradient must be zero."""
    ids, places = torch.unique(p.indices, return_inverse=True)
    scaled = p.data[p.segment_ids].double() * p.weights(form.mode)
    expected = scaled.new_zeros(len(ids), scaled.shape[1]).index_add_(0, places, scaled)
    if isinstance(result, tuple):
        values, rows = result
        assert torch.equal(rows, ids)
    else:
        values = result[ids]
        assert int(result.any(1).sum()) == len(ids)
    # The error of float32 grows with the number of terms: the most popular id of a Zipf draw has tens of thousands.
    added_up = torch.zeros_like(expected).index_add_(0, places, scaled.abs())
    worst = ((values.double() - expected).abs() / (1e-5 + 1e-6 * added_up)).max().item()
    assert worst <= 1, f"off by {worst:.2g} times what rounding explains"


def grad_row(form: Form, targets: dict[str, float], shape: Shape = Shape()) -> Row:
    """Make a benchmark row for one form of the gradient."""
    grad = form.function()

    def build(options: Options) -> Case:
        p = problem(options, shape, rows_of_data=False)
        operands = p.data, p.indices, p.segment_ids

        def ours() -> Call:
            if not form.reuse:
                return lambda: grad(*operands, p.table_rows)
            out = grad(*operands, p.table_rows)
            return lambda: grad(*operands, p.table_rows, out=out)

        def tf_grad() -> Call:
            tf = tensorflow(options)
            function = getattr(tf.raw_ops, f"SparseSegment{form.mode.capitalize()}Grad{'V2' if form.compact else ''}")
            size = {"dense_output_dim0" if form.compact else "output_dim0": tf.constant(p.table_rows, tf.int32)}
            given = dict(
                zip(("grad", "indices", "segment_ids"), (tf.constant(t.numpy()) for t in operands), strict=True)
            )
            return lambda: function(**given, **size)

        peers: dict[str, Make] = {"TensorFlow": tf_grad}
        if options.compositions():
            peers |= composed_gradients(p, form.mode, form.compact)
        written = len(torch.unique(p.indices)) if form.compact else p.table_rows
        return Case(
            ours,
            peers,
            lambda: check_gradient(p, form, ours()()),
            bytes_of(p, written),
            ids=len(p.indices),
            sizes=p.sizes(),
        )

    name, what = f"{form.name()}{shape.name()}", f"{form.what()}, {shape.spread} indices"
    return Row(name, what, build, targets, CudaTargets(copy_share=CUDA_SHARE))


_TARGETS = {(False, False): 6.0, (True, False): 8.0, (False, True): 15.0, (True, True): 20.0}
_SHAPES = [Shape(128, "zipf"), Shape(16, "uniform"), Shape(16, "zipf")]
ROWS = [
    forward_row("sum", {"TensorFlow": 5.0, "torch embedding_bag": 1.0}),
    forward_row("mean", {"TensorFlow": 5.0}),
    *(
        grad_row(Form(mode, compact, reuse), {"TensorFlow": target})
        for mode in ("sum", "mean")
        for (compact, reuse), target in _TARGETS.items()
    ),
    *(forward_row("mean", {}, shape) for shape in _SHAPES),
    *(grad_row(Form("mean", compact), {}, shape) for compact in (False, True) for shape in _SHAPES),
]
