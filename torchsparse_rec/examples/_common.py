"""What the examples share: settings that a checkpoint keeps, how far a run has come, metrics of clicks, and curves."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from torchsparse_rec import checkpoint, distributed, optim
from torchsparse_rec._extras import extra_module, module_of_repository
from torchsparse_rec._interrupt import command_line
from torchsparse_rec._progress import progress_bar
from torchsparse_rec.data import DeviceLoader
from torchsparse_rec.distributed.torchrun import Ranks, is_under_torchrun, join
from torchsparse_rec.files import whole_file

GRAD_MODES = ("fused", "sparse", "dense", "auto")
#: Optimizers that treat the elements of a row one by one, and their learning rates.
RATES = {"sgd": 0.1, "adagrad": 0.05, "adam": 1e-3, "adamw": 1e-3, "rmsprop": 1e-3, "adadelta": 1.0, "ftrl": 0.05}
_CLASSES = (optim.SGD, optim.Adagrad, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adadelta, optim.Ftrl)
OPTIMIZERS = {kind.__name__.lower(): kind for kind in _CLASSES}


def compare(name: str, arguments: argparse.Namespace, *given: Any) -> int:
    """Train beside TensorFlow, as benchmarks/ of the repository does; return 1 if the losses differ, else 0."""
    if arguments.device.type != "cpu" or is_under_torchrun():
        raise ValueError("--compare runs in one process on the CPU: it goes neither with torchrun nor with cuda")
    extra_module("tensorflow", "tensorflow", "--compare tensorflow")
    return int(not module_of_repository(f"benchmarks.{name}", "--compare").compare(*given).agrees())


def begin(arguments: argparse.Namespace, *packages: str) -> Ranks:
    """Let the ranks that torchrun has started meet, each with its device, and return them; check what the run needs."""
    for package in packages:
        extra_module(package, "examples", "the example")
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    if is_under_torchrun():
        arguments.device = join(arguments.device)
    elif arguments.plan is not None:
        raise ValueError("--plan is of tables over ranks: start the command under torchrun")
    return Ranks()


# ---- Steps -----------------------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: Any, logits: Tensor, labels: Tensor, ranks: Ranks) -> Tensor:
    """Train on this rank's part of a batch; return the whole batch's mean loss, without waiting for it."""
    if ranks.group is None:
        loss = binary_cross_entropy_with_logits(logits, labels)
    else:  # its mean over ranks is that of all examples
        loss = distributed.global_mean(binary_cross_entropy_with_logits(logits, labels, reduction="none"))
    return step(model, optimizer, loss, ranks)


def step(model: nn.Module, optimizer: Any, loss: Tensor, ranks: Ranks) -> Tensor:
    """Go backward and update; return the loss, the mean over ranks, without waiting for it."""
    optimizer.zero_grad()
    loss.backward()
    ranks.average_gradients(model)
    optimizer.step()
    mean = loss.detach().clone()
    ranks.average([mean])
    return mean


@torch.no_grad()
def metrics_of_clicks(model: nn.Module, logits: Callable[[Any], Tensor], batches: Iterable[Any], ranks: Ranks) -> Any:
    """Return AUC (None if all labels are equal) and mean log loss of batches, whose parts ``logits`` maps to logits."""
    metrics = extra_module("torchmetrics", "examples", "AUC")
    device = next(model.parameters()).device
    auc, log_loss, classes = metrics.classification.BinaryAUROC().to(device), metrics.MeanMetric().to(device), set()
    model.eval()
    for batch in batches:
        labels = batch.labels.to(device)
        classes.update((labels > 0.5).unique().tolist())
        found = ranks.joined(logits(batch.rows(ranks.span(batch.size))))
        # torchmetrics takes a batch for logits only where one lies outside [0, 1], so they become probabilities.
        auc.update(found.sigmoid(), labels.int())
        log_loss.update(binary_cross_entropy_with_logits(found, labels, reduction="none"))
    model.train()
    # Where all labels are of one class torchmetrics returns 0, as if everything were in the wrong order.
    return {"auc": float(auc.compute()) if len(classes) == 2 else None, "log_loss": float(log_loss.compute())}


# ---- Runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Examples:
    """Examples: their name, an epoch's batches from a number on, how many there are if known, and those held out."""

    name: str
    batches: Callable[[int], Iterable[Any]]
    length: int | None = None
    held_out: Sequence[Any] = ()


@dataclass
class Run:
    """How far a run has come: finished epochs, batches of the next, steps, records, and the losses since the last."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._began = time.perf_counter() - self.seconds
        #: The folder and the step of the newest checkpoint.
        self.saved: tuple[Path, int] | None = None

    def batches(self, examples: Examples, ranks: Ranks, device: torch.device) -> Iterator[tuple[Any, int, Any]]:
        """Yield this rank's parts of an epoch's batches, each with the batch's size and the part that follows it."""
        parts: Iterable[Any] = ((x.rows(ranks.span(x.size)), x.size) for x in examples.batches(self.batch))
        parts = parts if device.type == "cpu" else DeviceLoader(parts, device)
        left = None if examples.length is None else examples.length - self.batch
        show = None if ranks.rank == 0 else False
        bar = progress_bar(parts, f"epoch {self.epoch + 1}", "batches", show, total=left, leave=False)
        if (this := next(bar, None)) is None:
            raise ValueError(f"{examples.name}: there is no batch {self.batch} any more")
        while this is not None:
            following = next(bar, None)
            yield *this, following and following[0]
            this = following

    def add(self, loss: Tensor, size: int, is_last: bool) -> None:
        """Count a step, perhaps the last of an epoch, with its batch's mean loss and size."""
        self.losses.append(loss)
        self.sizes.append(size)
        self.step += 1
        self.epoch, self.batch = (self.epoch + 1, 0) if is_last else (self.epoch, self.batch + 1)

    def is_at(self, every: int | None) -> bool:
        """Say whether the number of steps can be divided by one, if it is given."""
        return every is not None and self.step % every == 0

    def is_over(self, epochs: int, steps: int | None = None) -> bool:
        """Say whether as many epochs or steps have been made."""
        return self.epoch >= epochs or (steps is not None and self.step >= steps)

    def record(self, evaluate: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return, and keep, the mean loss and the speed of the steps since the last record, and metrics at its end."""
        losses, samples = [float(loss) for loss in self.losses], sum(self.sizes)  # waits for the losses
        speed = samples / (time.perf_counter() - self._began)
        loss = sum(loss * size for loss, size in zip(losses, self.sizes, strict=True)) / samples
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss up to step {self.step} is {loss}: a smaller learning rate may help, and "
                "torchsparse_rec.profiling.find_nan(model, batch) names the column, table or module that begins it"
            )
        place = {"epoch": self.epoch + (self.batch > 0), "step": self.step}
        self.history.append({**place, "loss": loss, "samples_per_second": speed, **evaluate()})
        self.losses, self.sizes, self._began = [], [], time.perf_counter()
        return self.history[-1]

    def save(self, folder: Path, model: nn.Module, optimizer: Any, delta: bool = False, **more: Any) -> None:
        """Write a checkpoint of the model, its optimizer, the run, and what else is given."""
        began = time.perf_counter()
        run = {"epoch": self.epoch, "batch": self.batch, "step": self.step, "history": self.history}
        run.update(losses=[float(loss) for loss in self.losses], sizes=self.sizes, seconds=began - self._began)
        checkpoint.save(folder, model, optimizer, {**more, "run": run}, delta=delta, keep=2)
        self.saved = folder, self.step
        self._began += time.perf_counter() - began

    def when_interrupted(self, ranks: Ranks, draw: Callable[[], str] | None, resume: str | None = None) -> str:
        """Draw the curves so far; return where they are, and the command that goes on, by the flag ``resume``."""
        if ranks.rank != 0:
            return ""
        curves = f"{draw()}; " if draw and self.history else ""
        if self.saved is None:
            return f"{curves}no checkpoint has been written from which to go on"
        folder, step = self.saved
        if ranks.group is None:
            again = command_line(resume, folder)
        else:  # what torchrun was called with is not known here
            again = f"the same command with {resume} {folder}" if resume else "the same command"
        return f"{curves}to go on from step {step:,}: {again}"


def about(program: str, settings: Any, examples: Examples, device: torch.device) -> dict[str, Any]:
    """Return what a checkpoint says beside its run; with other values it cannot go on."""
    return {"program": program, "settings": vars(settings), "data": examples.name, "device": device.type}


def folder_of(arguments: argparse.Namespace, default: str) -> Path:
    """Return the folder in which a run writes."""
    if arguments.output_dir is None and isinstance(arguments.resume, Path):
        return arguments.resume.parent
    return arguments.output_dir or Path(default)


def saved_of(arguments: argparse.Namespace, own: Path, program: str, ranks: Ranks) -> dict[str, Any] | None:
    """Return what the newest checkpoint of --resume says, or under torchrun that of the run's own folder, if any."""
    if arguments.resume is None and ranks.group is None:
        return None
    folder = arguments.resume if isinstance(arguments.resume, Path) else own
    saved = ranks.from_first(lambda: newest(folder, program))
    if saved is None and arguments.resume is not None:
        raise FileNotFoundError(f"there is no checkpoint {folder}")
    return saved


def newest(folder: Path, program: str) -> dict[str, Any] | None:
    """Return what the newest checkpoint in a folder says of its run; None if there is none."""
    version = checkpoint.CheckpointStore(folder).latest()
    if version is None:
        return None
    said = version.metadata.get("extra")
    if not isinstance(said, dict) or said.get("program") != program:
        raise ValueError(f"{folder} is not a checkpoint of {program}")
    return {**said, "folder": folder, "number": version.number}


def load(
    saved: dict[str, Any], model: nn.Module, optimizer: Any, arguments: argparse.Namespace, ranks: Ranks, **now: Any
) -> tuple[Run, dict[str, Any]]:
    """Load a checkpoint; return the run that goes on, and all that the checkpoint says of it."""
    folder = saved["folder"]
    for name, value in now.items():
        if saved[name] != value:
            raise ValueError(f"{folder} was trained on other {name}, {saved[name]}, got {value}")
    said = checkpoint.load(folder, model, optimizer, version=saved["number"])
    run, steps = Run(**said["run"]), getattr(arguments, "steps", None)
    run.saved = folder, run.step
    if ranks.group is None and run.is_over(arguments.epochs, steps):  # a job that torchrun has started anew just ends
        raise ValueError(f"{folder} has {run.epoch} epochs and {run.step} steps already: more must be asked for")
    ranks.print(f"going on from step {run.step:,} of {folder}")
    return run, said


def text_of_clicks(record: Mapping[str, Any]) -> str:
    """Return a record's metrics of held-out examples."""
    auc = "n/a" if record["auc"] is None else f"{record['auc']:.4f}"
    return f"AUC {auc} log loss {record['log_loss']:.4f}"


def line_of_clicks(record: Mapping[str, Any], epochs: int) -> str:
    """Return the line that is printed of a record."""
    place = f"epoch {record['epoch']:>{len(str(epochs))}}/{epochs} step {record['step']:,}  loss {record['loss']:.4f}"
    return f"{place}  held out: {text_of_clicks(record)}  {record['samples_per_second']:,.0f} samples/s"


def curves_of_clicks(history: Sequence[Mapping[str, Any]], folder: Path, title: str) -> Callable[[], str]:
    """Return a function that draws a run's curves."""
    panels = {"log loss": {"training": "loss", "held out": "log_loss"}, "AUC of held-out examples": {"AUC": "auc"}}
    return lambda: draw(history, folder, title, "step", panels)


def finish_clicks(history: Sequence[Mapping[str, Any]], curves: Callable[[], str] | None, checkpoint: Any) -> None:
    """Draw a run's curves; print where they and its checkpoint are, and the last record and the best."""
    last = history[-1]
    best = max(history, key=lambda record: -record["log_loss"] if last["auc"] is None else record["auc"])
    if curves is not None:
        print(f"checkpoint: {checkpoint}, {curves()}")
    of_best = f"best step {best['step']:,}: {text_of_clicks(best)}"
    print(f"last step {last['step']:,}: {text_of_clicks(last)}, {of_best}")


def draw(history: Sequence[Mapping[str, Any]], folder: Path, title: str, x: str, panels: Mapping[str, Any]) -> str:
    """Draw figures of the records into ``curves.png``, a panel by title, a line by label; return what was done."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no curves: they need matplotlib ({error})"
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (heading, lines) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for label, name in lines.items():
            values = [math.nan if record[name] is None else record[name] for record in history]
            axes.plot([record[x] for record in history], values, marker=".", label=label)
        axes.set(xlabel=x, title=heading)
        axes.legend()
    figure.suptitle(title)
    with whole_file(folder / "curves.png") as file:
        figure.savefig(file, format="png", dpi=120)
    return f"curves: {folder / 'curves.png'}"
