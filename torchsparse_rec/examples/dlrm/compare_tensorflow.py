"""The same network in TensorFlow: same weights, same batches, side by side in one run."""

from __future__ import annotations

from collections.abc import Callable

from .._comparison import Comparison, compare_steps
from .._sources import SplitSource
from .settings import Settings
from .steps import TorchStep
from .tables import Placement
from .tensorflow_step import FORMS, TensorflowStep

TOLERANCE = 1e-4


def compare(
    settings: Settings, source: SplitSource, steps: int, print_line: Callable[[str], None] = print
) -> Comparison:
    """
    Compare as :func:`compare_steps` does. Ids are raw on both sides when a step begins.

    Args:
        settings: the run's settings; tables are hashed, the optimizer is Adagrad by Keras's rule or gradient descent.
        source: yields the batches, all of one size.
        steps: the number of steps.
        print_line: called with each line.

    Returns:
        Both sides' losses and times.
    """
    ours = TorchStep(settings, Placement(), keras_rule=True)
    return compare_steps(
        ours, lambda form: TensorflowStep(settings, ours.model, form), FORMS, source, steps, TOLERANCE, print_line
    )
