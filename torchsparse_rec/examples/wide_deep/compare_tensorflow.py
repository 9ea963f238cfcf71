"""The same network in TensorFlow: same weights, same batches, side by side in one run."""

from __future__ import annotations

from collections.abc import Callable

from .._comparison import Comparison, compare_steps
from .._sources import SplitSource
from .columns import Columns
from .settings import Settings
from .steps import TorchStep, make_model
from .tensorflow_step import FORMS, Form, TensorflowStep

TOLERANCE = 1e-4


def compare(
    settings: Settings, source: SplitSource, columns: Columns, steps: int, print_line: Callable[[str], None] = print
) -> Comparison:
    """
    Compare as :func:`compare_steps` does. Columns are raw on both sides when a step begins.

    Args:
        settings: the run's settings; the optimizer is gradient descent.
        source: yields the batches, all of one size.
        columns: the features.
        steps: the number of steps.
        print_line: called with each line.

    Returns:
        Both sides' losses and times.
    """
    model, rate = make_model(columns, settings.mlp, settings.grad_mode, settings.seed), settings.learning_rate()
    ours = TorchStep(columns, model, settings.optimizer, rate)

    def theirs(form: Form) -> TensorflowStep:
        return TensorflowStep(columns, model, rate, settings.batch_size, form)

    return compare_steps(ours, theirs, FORMS, source, steps, TOLERANCE, print_line)
