"""Progress bars on long writes, and on training."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

ItemT = TypeVar("ItemT")


def progress_bar(
    items: Iterable[ItemT],
    title: str,
    unit: str,
    show: bool | None = None,
    total: int | None = None,
    leave: bool = True,
) -> Iterator[ItemT]:
    """
    Return an iterator over items that shows a progress bar while they are consumed.

    Args:
        items: any iterable; if it has a length, the bar shows how long the rest will take.
        title: the text before the bar.
        unit: the name of one item.
        show: True: always show a bar, by tqdm. False: never. None (default): if tqdm is installed and stderr is a
            terminal.
        total: how many items there are. Default: the length of ``items``, if it has one.
        leave: whether the bar stays when all items are consumed. Default True.

    Raises:
        ImportError: ``show`` is True and tqdm is not installed; the message names the extra.
    """
    if show is False or (show is None and not sys.stderr.isatty()):
        return iter(items)
    try:
        from tqdm import tqdm
    except ImportError:
        if show:
            raise ImportError("progress=True needs tqdm: pip install 'torchsparse_rec[examples]'") from None
        return iter(items)
    if total is None and isinstance(items, Sized):
        total = len(items)
    return iter(tqdm(items, desc=title, unit=unit, total=total, leave=leave, mininterval=0.2))
