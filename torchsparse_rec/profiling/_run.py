"""``diagnose``: run the experiments in order, and make a diagnosis of their numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.utils.data import DataLoader

from .._flags import checked_device
from ._arguments import check_numbers, check_training
from ._batches import Batches, Exhausted, TrainingStep, moved, prefetched
from ._copy import Optimizers, as_list, copied_training, spared
from ._experiments import Loop, Side, run_loop, run_sides, wait
from ._modules import Shapes, dense_layers, has_compiled, lookups, recording_shapes, without_dense, without_gradients
from ._output import bandwidth, table_lines, write
from ._profiler import profile_steps
from ._rows import find_row_work
from ._tables import TableUse, Watch
from ._trace import Copies, Profile
from .causes import Measured, find_causes, wasteful
from .diagnosis import Diagnosis
from .thresholds import DENSE_GRADIENT_SHARE, HEAVY_DENSE_SHARE, LOADER_SHARE, MATRIX_PRODUCT_SHARE

__all__ = ["diagnose"]

# By default an experiment has as many steps as take _SECONDS, but at least _FEWEST and at most _MOST.
_SECONDS = 0.4
_FEWEST, _MOST = 10, 100
# How often experiments are repeated at most, while their rounds disagree about a threshold.
_REPEATS = 3
_PROFILED_STEPS = 8
# The share of the forward's matrix products outside of the layers that are taken out at which a note is written.
_NOTED_PRODUCTS = 0.1


def diagnose(
    step: Callable[[Any, Any, Any], Any],
    loader: Iterable[Any],
    # Both must be given. They have defaults so that a call without them gets the error that explains the call.
    model: Module = None,  # type: ignore[assignment]
    optimizer: Optimizers = None,  # type: ignore[assignment]
    *,
    in_place: bool = False,
    step_without_dense: Callable[[Any, Any, Any], Any] | None = None,
    device: torch.device | str | None = None,
    steps: int | None = None,
    warmup: int = 3,
    out: str | Path | None = None,
) -> Diagnosis:
    """
    Find out why a training loop is slow: measure it, measure it without its parts, profile it, and name the causes.

    The experiments measure how long steps wait for the loader, and how long they take with one batch again and again.
    They also measure steps without the dense layers, and without the dense gradients of big tables. Then torch.profiler
    measures copies, waits and the phases of a step. ``docs/profiling.md`` has the rules and their thresholds.

    The steps train a deep copy: the model, the optimizer and torch's global random numbers stay unchanged. All else
    that ``step`` and ``loader`` write moves on, such as schedulers, gradient scalers and metrics. With
    ``in_place=True`` the steps train the model itself, some of them without a part of it, and training goes on from a
    changed state. That is for tables too large for a copy, in a run that you throw away.

    Args:
        step: a training step: a function ``step(model, optimizer, batch)`` that runs forward, backward and optimizer
            with the model and the optimizer that it is called with.
        loader: an iterable of at least two batches. If it ends and can be iterated again, it is.
        model: the model to analyse.
        optimizer: the model's optimizer, or a list of its optimizers, which ``step`` then gets.
        in_place: whether the steps train ``model`` itself. Default False: they train a copy, at the cost of as much
            memory as the parameters and the optimizer's state take.
        step_without_dense: a step that leaves out the dense layers. Default: ``step`` with a stand-in for every layer
            that has parameters and no table; a stand-in gives a tensor of the right shape through which gradients pass.
        device: the device on which the step computes, ``cpu`` or ``cuda``. Default: the device of the model's
            parameters, else the CPU.
        steps: the timed steps of each experiment, at least 2. Default: as many as take 0.4 s, between 10 and 100.
        warmup: the steps before all that is timed, at least 1. Default 3.
        out: a folder, made if there is none, for ``trace.json`` (chrome://tracing, Perfetto), ``timeline.png`` (needs
            matplotlib: the extra ``examples``), ``report.txt`` and ``diagnosis.json``. Default: nothing is written.

    Returns:
        The diagnosis: ``verdict``, ``findings``, ``report()``, ``to_json()``.

    Raises:
        RuntimeError: ``model`` or ``optimizer`` cannot be copied, or ``step`` uses them and not the copies.
        ValueError: fewer than two batches; ``steps`` below 2; ``warmup`` below 1; no such device; ``out`` is a file.
        OSError: ``out`` cannot be made, or cannot be written to.
        TypeError: a step that does not take three arguments, a loader that cannot be iterated, or a ``model``,
            ``optimizer``, ``steps`` or ``warmup`` of another type.

    An error that ``step`` raises passes through.

    Source:
        "Training a recommendation model with dynamic embeddings" and the Wide & Deep walk-through on TensorFlow's blog
        (2021), whose experiments these are.

    Example:
        >>> import time, torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(model, optimizer, batch):
        ...     optimizer.zero_grad()
        ...     model(batch).square().mean().backward()
        ...     optimizer.step()
        >>> def loader():
        ...     while True:
        ...         time.sleep(0.01)
        ...         yield torch.ones(16, 4)
        >>> diagnose(step, loader(), model, optimizer, steps=5).verdict
        'slow_loader'
    """
    check_training(step, loader, model, optimizer, step_without_dense)
    check_numbers(steps, warmup)
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise ValueError(f"diagnose: out must be a folder, got the file {out}")
    chosen = checked_device(device) if device is not None else None
    folder = Path(out) if out is not None else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)  # first: a diagnosis that cannot be written is not worth its time
    device = chosen or next((p.device for p in model.parameters()), torch.device("cpu"))
    with ExitStack() as stack:
        if not in_place:
            copies = copied_training(model, optimizer)
            stack.enter_context(spared(model, as_list(optimizer)))
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            model, optimizer = copies
        run = _Run(step, loader, model, optimizer, step_without_dense, device, steps, warmup)
        stack.callback(run.batches.close)
        return run.diagnosis(folder)


class _Run:
    """The state of one diagnosis: its inputs and findings, the times of the experiments, and the notes."""

    def __init__(
        self,
        step: Callable[[Any, Any, Any], Any],
        loader: Iterable[Any],
        model: Module,
        optimizer: Optimizers,
        step_without_dense: Callable[[Any, Any, Any], Any] | None,
        device: torch.device,
        steps: int | None,
        warmup: int,
    ) -> None:
        self.model, self.optimizers, self.loader, self.device = model, as_list(optimizer), loader, device
        self.step = TrainingStep(partial(step, model, optimizer))
        self.step_without_dense: TrainingStep | None = None
        if step_without_dense is not None:
            self.step_without_dense = TrainingStep(partial(step_without_dense, model, optimizer))
        self.steps, self.warmup = steps, warmup
        self.batches = Batches(loader)
        self.compiled = has_compiled(model)
        self.shapes: dict[Module, Shapes] = {}
        self.layers: list[Module] = []
        self.notes: list[str] = []
        self.loop = Loop()
        self.sides: dict[str, Side] = {}

    def diagnosis(self, out: Path | None) -> Diagnosis:
        """Run the experiments and the profiler, and return the diagnosis."""
        try:
            first, _ = self.batches.next()
        except Exhausted:
            raise ValueError("diagnose: loader must give at least 2 batches, got none") from None
        uses, tables = self._prepare(first)
        constant = self._constant(first)
        self._experiment(constant, tables)
        try:
            row_work = find_row_work(self.batches, self.loader, first)
        except Exception as error:  # some loaders cannot run under a tracer, or outside of their workers
            row_work = None
            self.notes.append(f"the loader's lines could not be watched: {_first_line(error)}")
        ranges = {} if self.compiled else {"lookup": list(lookups(self.model).values()), "dense": self.layers}
        trace = out / "trace.json" if out is not None else None
        count = min(_PROFILED_STEPS, self.steps or _PROFILED_STEPS)
        profile = profile_steps(self.step, self.batches, first, count, self.device, ranges, trace)
        self._note_products(profile)
        loop = self.loop.seconds()
        measured = Measured(
            loader_share=self._loader_share(),
            wait_ms=1e3 * self.loop.wait_seconds(),
            step_share=self.loop.step_seconds() / loop if loop else 1.0,
            best_step_ms=1e3 * min([*self.sides["step"].rounds, *(step for _, step in self.loop.rounds)]),
            dense_share=self._share("without_dense"),
            table_gradient_share=self._share("without_table_gradients"),
            row_work=row_work,
            workers=self.loader.num_workers if isinstance(self.loader, DataLoader) else None,
            tables=uses,
            parameters=sum(len(group["params"]) for each in self.optimizers for group in each.param_groups),
            profile=profile,
        )
        return self._result(measured, out, trace)

    # ---- Before what is timed ----------------------------------------------------------------------------------------

    def _prepare(self, first: Any) -> tuple[list[TableUse], list[Parameter]]:
        """
        Warm up, choose the number of steps, and watch one step.

        Returns the use of each table in that step, and the tables whose dense gradients are an experiment.
        """
        self.step.try_on(first)
        if self.step_without_dense is not None:
            self.step_without_dense.try_on(first)
        for _ in range(self.warmup - 1):
            self.step(self.step.ready(first))
        wait(self.device)
        start = perf_counter()
        self.step(self.step.ready(first))
        wait(self.device)
        seconds = perf_counter() - start
        if self.steps is None:
            self.steps = max(_FEWEST, min(_MOST, int(_SECONDS / max(seconds, 1e-9))))
        if self.compiled:
            self.notes.append("the model is compiled: its parts were neither examined nor taken out")
            return [], []
        watch = Watch(self.model, self.optimizers)
        with watch.watching(), recording_shapes(self.model) as shapes:
            self.step(self.step.ready(first))
        self.shapes, self.layers = shapes, list(dense_layers(self.model, shapes))
        uses = watch.uses()
        chosen = {id(use) for use in wasteful(uses)}
        return uses, [parameter for use, parameter in watch.tables("dense") if id(use) in chosen]

    def _constant(self, first: Any) -> Any:
        """Return the batch of the experiments with constant inputs: on the device, if the step takes it there."""
        if self.device.type == "cpu":
            return first
        try:
            batch = moved(first, self.device)
            self.step(self.step.ready(batch))
        except Exception as error:
            self.notes.append(f"the step takes no batch that is on the device already: {_first_line(error)}")
            return first
        return batch

    # ---- Experiments -------------------------------------------------------------------------------------------------

    def _experiment(self, constant: Any, tables: list[Parameter]) -> None:
        assert self.steps is not None
        for _ in range(1 + _REPEATS):
            drop = 1 + prefetched(self.loader)
            run_loop(self.loop, self.step, self.batches, self.steps, drop, self.device)
            if not self.loop.rounds:
                raise ValueError(f"diagnose: loader must give at least 2 batches, got {self.batches.taken}")
            if not self.sides:
                self._choose_sides(constant, tables)
            run_sides(list(self.sides.values()), self.steps, self.device, self._end_step)
            if self._is_decided():
                break
        for name, side in self.sides.items():
            if side.problem is not None:
                self.notes.append(f"{name} could not be measured: {_first_line(side.problem)}")

    def _end_step(self) -> None:
        """End a step that raised before its optimizers' steps: without these our tables take no other backward."""
        for optimizer in self.optimizers:
            if getattr(optimizer, "in_backward", False):
                optimizer.step()

    def _choose_sides(self, constant: Any, tables: list[Parameter]) -> None:
        self.sides["step"] = Side(self.step, self.loop.kept, may_fail=False)
        self.sides["constant_inputs"] = Side(self.step, [constant], may_fail=False)
        if self.step_without_dense is not None:
            self.sides["without_dense"] = Side(self.step_without_dense, [constant], may_fail=False)
        elif self.layers:
            self.sides["without_dense"] = Side(self.step, [constant], lambda: without_dense(self.layers, self.shapes))
        if tables:
            side = Side(self.step, [constant], lambda: without_gradients(self.model, tables))
            self.sides["without_table_gradients"] = side

    def _saved(self, name: str) -> list[float]:
        """Return for each round the share of the loop's time that a side saves over constant inputs."""
        side, constant = self.sides.get(name), self.sides["constant_inputs"]
        if side is None or side.problem is not None:
            return []
        whole, step_share = self.sides["step"].rounds, 1.0 - statistics.median(self.loop.shares() or [0.0])
        return [step_share * (a - b) / c for a, b, c in zip(constant.rounds, side.rounds, whole, strict=False)]

    def _share(self, name: str) -> float | None:
        saved = self._saved(name)
        return min(max(statistics.median(saved), 0.0), 1.0) if saved else None

    def _inputs_share(self) -> float:
        """Return the share of the loop's time that constant inputs save."""
        constant = self.sides["constant_inputs"].seconds()
        return max(1.0 - (constant or 0.0) / max(self.loop.seconds(), 1e-12), 0.0)

    def _loader_share(self) -> float:
        share = statistics.median(self.loop.shares() or [0.0])
        # A CUDA device may still have work while the host waits for a batch: then the wait costs nothing.
        return share if self.device.type == "cpu" else min(share, self._inputs_share())

    def _is_decided(self) -> bool:
        """Say whether the middle half of the rounds' values is on one side of every threshold."""
        decisions = (
            (self.loop.shares(), LOADER_SHARE),
            (self._saved("without_dense"), HEAVY_DENSE_SHARE),
            (self._saved("without_table_gradients"), DENSE_GRADIENT_SHARE),
        )
        return not any(_straddles(values, threshold) for values, threshold in decisions)

    # ---- What is made of them ----------------------------------------------------------------------------------------

    def _result(self, measured: Measured, out: Path | None, trace: Path | None) -> Diagnosis:
        profile = measured.profile
        times: dict[str, float | None] = {
            "loop": 1e3 * self.loop.seconds(),
            "wait": 1e3 * self.loop.wait_seconds(),
            "step": 1e3 * self.loop.step_seconds(),
        }
        for name in ("constant_inputs", "without_dense", "without_table_gradients"):
            side = self.sides.get(name)
            seconds = side.seconds() if side is not None else None
            times[name] = None if seconds is None else 1e3 * seconds
        count = max(profile.steps, 1)
        diagnosis = Diagnosis(
            findings=find_causes(measured),
            times_ms=times,
            shares={
                "loader": measured.loader_share,
                "inputs": self._inputs_share(),
                "dense": measured.dense_share,
                "table_gradients": measured.table_gradient_share,
                "copies": measured.step_share * profile.copy_share(measured.best_step_ms),
            },
            phases_ms={phase: ms / count for phase, ms in (profile.device_ms or profile.host_ms).items()},
            copies={k: Copies(c.count // count, c.bytes // count, c.ms / count) for k, c in profile.copies.items()},
            waits={name: number / count for name, number in profile.waits.items()},
            reads={name: number / count for name, number in profile.reads.items()},
            bandwidth=bandwidth(measured.tables, profile, self.device),
            tables=table_lines(measured.tables, self.model),
            notes=self.notes,
            device=str(self.device),
            steps=self.loop.steps,
            trace=trace,
        )
        if out is not None:
            write(diagnosis, profile, out)
        return diagnosis

    def _note_products(self, profile: Profile) -> None:
        elsewhere, matter = profile.products_elsewhere(), profile.product_share() >= MATRIX_PRODUCT_SHARE
        if "without_dense" in self.sides and not self.step_without_dense and matter and elsewhere >= _NOTED_PRODUCTS:
            self.notes.append(
                f"{elsewhere:.0%} of the forward's matrix products are outside of the layers that were taken out "
                "(functions of parameters, layers of several inputs or outputs): the profile shows their share"
            )


def _straddles(values: list[float], threshold: float) -> bool:
    if len(values) < 4:
        return False
    low, _, high = statistics.quantiles(values, n=4)
    return low < threshold < high


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
