"""One training step, in three kinds: with our tables, in plain PyTorch and in TensorFlow, from the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchsparse_rec

from .model import NeuMF, table_factory

KINDS = ("ours", "torch", "tensorflow")
OPTIMIZERS = ("adam", "sgd", "adagrad")
GRAD_MODES = ("sparse", "dense", "fused", "auto")
LEARNING_RATES = {"adam": 1e-3, "sgd": 0.5, "adagrad": 0.02}
KERAS_EPS = 1e-7  # Keras's Adam adds this to sqrt(v), before the correction of the bias.

Batch = tuple[Any, Any, Any]


class Step(Protocol):
    """A function that trains on one batch: users and items int32 ``[B]``, labels float32 ``[B]``."""

    def prepare(self, batches: list[tuple[Tensor, Tensor, Tensor]]) -> list[Batch]:
        """Convert batches to the framework's own tensors."""

    def __call__(self, users: Any, items: Any, labels: Any) -> Any:
        """Update the weights, and return the batch's mean loss, a scalar that ``float()`` takes."""

    def network(self) -> NeuMF:
        """Return a network with the trained weights, to evaluate."""


class TorchStep:
    """
    Forward, backward and update in PyTorch.

    Args:
        model: the network; its tables may have gradients in any mode that the optimizer takes.
        optimizer: holds every parameter.
    """

    def __init__(self, model: NeuMF, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self._loss = nn.BCEWithLogitsLoss()

    def prepare(self, batches: list[tuple[Tensor, Tensor, Tensor]]) -> list[Batch]:
        """Return the batches themselves."""
        return list(batches)

    def __call__(self, users: Tensor, items: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch, and return its mean loss without a graph."""
        self.optimizer.zero_grad()
        loss = self._loss(self.model(users, items), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def network(self) -> NeuMF:
        """Return the trained network itself."""
        return self.model


def initial_weights(
    num_users: int, num_items: int, factors: int, layers: Sequence[int], seed: int
) -> dict[str, Tensor]:
    """Return the weights from which every kind of step starts. torch's global generator keeps its state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NeuMF(num_users, num_items, factors, layers).state_dict()


def make_optimizer(model: NeuMF, optimizer: str, lr: float, ours: bool, keras_rule: bool) -> Optimizer:
    """Return our optimizer, which takes gradients of every mode and updates as torch's does dense ones, or torch's."""
    library = torchsparse_rec.optim if ours else torch.optim
    parameters = list(model.parameters())
    options: dict[str, Any] = {"lr": lr, **({"in_backward": True} if ours else {})}
    if optimizer == "sgd":
        return library.SGD(parameters, **options)
    if optimizer == "adagrad":
        return library.Adagrad(parameters, **options)
    if keras_rule:
        return torchsparse_rec.optim.Adam(parameters, **options, eps=KERAS_EPS, fused=True, tensorflow_eps=True)
    return library.Adam(parameters, **options, fused=True)


def build_step(
    kind: str,
    num_users: int,
    num_items: int,
    *,
    factors: int = 8,
    layers: Sequence[int] = (32, 16, 8),
    grad_mode: str = "auto",
    optimizer: str = "adam",
    lr: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    keras_rule: bool = False,
) -> Step:
    """
    Return a training step of NeuMF. All kinds with the same seed start from the same weights.

    Args:
        kind: ``ours`` (tables of ``torchsparse_rec.nn``), ``torch`` (``torch.nn.Embedding``, dense gradients) or
            ``tensorflow`` (a ``tf.function``, gradients made dense; always Keras's Adam).
        num_users, num_items: rows of the tables.
        factors, layers: of :class:`NeuMF`.
        grad_mode: of our tables: ``sparse``, ``dense``, ``fused`` or ``auto``. All train alike.
        optimizer: ``adam``, ``sgd`` or ``adagrad``.
        lr: learning rate, default that of LEARNING_RATES.
        seed: of the initial weights.
        device: of the PyTorch kinds.
        keras_rule: whether Adam has Keras's place of eps.

    Returns:
        The step.

    Raises:
        ValueError: for an unknown kind, grad_mode or optimizer.

    Example:
        >>> step = build_step("torch", 4, 6, factors=2, layers=(4, 2))
        >>> users, items = torch.tensor([0, 1, 3]), torch.tensor([5, 2, 2])
        >>> f"{float(step(users, items, torch.tensor([1.0, 0.0, 0.0]))):.2f}"
        '0.69'
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if grad_mode not in GRAD_MODES:
        raise ValueError(f"grad_mode must be one of {', '.join(GRAD_MODES)}, got {grad_mode!r}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    lr = LEARNING_RATES[optimizer] if lr is None else lr
    make_table = table_factory(grad_mode) if kind == "ours" else nn.Embedding
    model = NeuMF(num_users, num_items, factors, layers, make_table)
    model.load_state_dict(initial_weights(num_users, num_items, factors, layers, seed))
    if kind == "tensorflow":
        from .tensorflow_step import TensorflowStep

        return TensorflowStep(model, optimizer, lr)
    model.to(device)
    return TorchStep(model, make_optimizer(model, optimizer, lr, kind == "ours", keras_rule))
