"""Tables on the CPU that go the ways of CUDA, and a count of what would wait for the device there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

# Methods of tensors whose results only the host can have.
_READ = ("__bool__", "__int__", "__float__", "item", "nonzero", "tolist", "unique")


class LikeCuda:
    """
    Has tensors of the CPU say that they are on CUDA, and counts the waits by name.

    Args:
        monkeypatch: undoes it.
        arrives: says, when a table asks, whether a copy has come that nobody waits for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arrives: Callable[[], bool] = lambda: True) -> None:
        self.waits: Counter[str] = Counter()
        sent: list[Tensor] = []
        waits, to, index = self.waits, Tensor.to, Tensor.__getitem__

        def counted(name: str, read: Any) -> Any:
            def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                if not any(tensor is copy for copy in sent):
                    waits[name] += 1
                return read(tensor, *args, **kwargs)

            return call

        def copied(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args[:1] != ("cpu",):
                return to(tensor, *args, **kwargs)
            sent.append(tensor.clone())
            waits["to"] += not kwargs.get("non_blocking")
            return sent[-1]

        def indexed(tensor: Tensor, at: Any) -> Tensor:
            waits["mask"] += isinstance(at, Tensor) and at.dtype == torch.bool
            return index(tensor, at)

        class Event:
            has_come = False

            def record(self, stream: object) -> None:
                """Begin to copy."""

            def query(self) -> bool:
                self.has_come = self.has_come or arrives()
                return self.has_come

            def synchronize(self) -> None:
                waits["synchronize"] += not self.has_come

        for name in _READ:
            monkeypatch.setattr(Tensor, name, counted(name, getattr(Tensor, name)))
        monkeypatch.setattr(Tensor, "__getitem__", indexed)
        monkeypatch.setattr(Tensor, "to", copied)
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)

    def count(self) -> int:
        """Return how often the host has waited since the last call."""
        count = self.waits.total()
        self.waits.clear()
        return count
