"""Draw a picture of the profiled steps that shows what runs when."""

from __future__ import annotations

from pathlib import Path

from ..files import whole_file
from ._trace import PHASES, Profile

__all__ = ["draw_timeline"]


def draw_timeline(profile: Profile, path: Path, title: str = "") -> None:
    """
    Draw the spans of a profile, one row per phase, into a PNG.

    Args:
        profile: the profile of some steps.
        path: the file.
        title: the text above the picture.

    Raises:
        ImportError: matplotlib is not installed; the extra ``examples`` has it.

    Example:
        >>> import tempfile
        >>> spans = [("loader", 0.0, 2.0), ("other", 2.0, 5.0), ("lookup", 2.5, 3.0)]
        >>> path = Path(tempfile.mkdtemp()) / "timeline.png"
        >>> draw_timeline(Profile(steps=1, spans=spans), path)
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the timeline needs matplotlib: pip install 'torchsparse-rec[examples]'") from error
    figure = Figure(figsize=(11.0, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels = {"other": "step"}
    for row, phase in enumerate(reversed(PHASES)):
        spans = [(begin, end - begin) for name, begin, end in profile.spans if name == phase]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=f"C{PHASES.index(phase)}")
    axes.set_yticks(range(len(PHASES)), [labels.get(phase, phase) for phase in reversed(PHASES)])
    axes.set(xlabel="ms", title=title, ylim=(-0.6, len(PHASES) - 0.4))
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=110)
