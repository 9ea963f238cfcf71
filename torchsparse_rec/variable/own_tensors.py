"""Modules whose tensors are no buffers, since others would average or broadcast them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["OwnTensors", "leave_inference_mode"]


class OwnTensors(torch.nn.Module):
    """
    A module whose tensors are no buffers: others average and broadcast buffers, which would make nonsense of keys.

    A ``state_dict`` has copies of them, since other code's writes there must not come here.
    """

    #: The attributes that move with the module, and which of them a ``state_dict`` has.
    tensors: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what ``__getstate__`` has returned; in older versions the tensors were buffers."""
        super().__setstate__(state)
        for name in self.tensors:
            if name in self._buffers:
                self.__dict__[name] = self._buffers.pop(name)
                self._non_persistent_buffers_set.discard(name)

    def _apply(self, fn: Any, recurse: bool = True):
        super()._apply(fn, recurse)
        for name in self.tensors:
            setattr(self, name, fn(getattr(self, name)))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.saved:
            destination[prefix + name] = getattr(self, name).clone()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing: list[str], *lists: list[str]
    ) -> None:
        rest = {name: x for name, x in state_dict.items() if name not in {prefix + own for own in self.saved}}
        missing += [prefix + name for name in self.saved if strict and prefix + name not in state_dict]
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing, *lists)


def leave_inference_mode(table: torch.nn.Module) -> None:
    """Replace a table's tensors that were made in inference mode: no other mode may write them."""
    for module in table.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_inference():
                module._buffers[name] = buffer.clone()
        if isinstance(module, OwnTensors):
            module._apply(torch.clone)
