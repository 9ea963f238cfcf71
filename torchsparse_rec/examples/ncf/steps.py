"""One training step, in three kinds: with our tables, in plain PyTorch and in TensorFlow, from the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchsparse_rec

from .._job import ALONE, Job
from .._step import Step
from .model import NeuMF, table_factory
from .sampling import Batch
from .settings import Settings

KINDS = ("ours", "torch", "tensorflow")
KERAS_EPS = 1e-7  # Keras's Adam adds this to sqrt(v), before the correction of the bias.


class TorchStep(Step[Batch]):
    """Forward, backward and update in PyTorch."""

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of a batch's pairs."""
        return self.model(batch.users, batch.items)

    def prepare(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches themselves, which TensorFlow's step converts."""
        return batches

    def network(self) -> NeuMF:
        """Return the trained network itself, which TensorFlow's step makes."""
        return self.model


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
    settings: Settings,
    device: torch.device | str = "cpu",
    keras_rule: bool = False,
    job: Job = ALONE,
) -> Any:
    """
    Return a training step of NeuMF. All kinds with the same seed start from the same weights.

    Args:
        kind: ``ours`` (tables of ``torchsparse_rec.nn``), ``torch`` (``torch.nn.Embedding``, dense gradients) or
            ``tensorflow`` (a ``tf.function``, gradients made dense; always Keras's Adam).
        num_users, num_items: rows of the tables.
        settings: of network, optimizer and seed.
        device: of the PyTorch kinds.
        keras_rule: whether Adam has Keras's place of eps.
        job: over whose ranks the tables of ``ours`` are split.

    Returns:
        A :class:`TorchStep`, or a ``TensorflowStep`` of the same methods.

    Raises:
        ValueError: for an unknown kind.

    Example:
        >>> step = build_step("torch", 4, 6, Settings(factors=2, layers=(4, 2)))
        >>> batch = Batch(torch.tensor([0, 1, 3]), torch.tensor([5, 2, 2]), torch.tensor([1.0, 0.0, 0.0]))
        >>> f"{float(step(batch)):.2f}"
        '0.69'
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    sizes, lr = (num_users, num_items, settings.factors, settings.layers), settings.learning_rate()
    with torch.random.fork_rng(devices=[]):  # torch's global generator keeps its state.
        model = NeuMF(*sizes, table_factory(settings.grad_mode) if kind == "ours" else nn.Embedding)
        torch.manual_seed(settings.seed)
        model.load_state_dict(NeuMF(*sizes).state_dict())
    if kind == "tensorflow":
        from .tensorflow_step import TensorflowStep

        return TensorflowStep(model, settings.optimizer, lr)
    job.split(model.to(device))
    return TorchStep(model, make_optimizer(model, settings.optimizer, lr, kind == "ours", keras_rule), job=job)
