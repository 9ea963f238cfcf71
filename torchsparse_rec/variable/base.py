"""The attributes and methods of an EmbeddingVariable that each of its base classes may use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from .cold import ColdRows
    from .eviction import Eviction
    from .filters import CounterAdmission, SketchAdmission
    from .guard import Guard
    from .initial import InitialRows
    from .keys import KeyRows
    from .options import EmbeddingVariableOption

__all__ = ["VariablePart"]


class VariablePart(torch.nn.Module):
    """A base class of EmbeddingVariable; it declares, for type checkers, what the other base classes define."""

    if TYPE_CHECKING:
        name: str
        embedding_dim: int
        key_dtype: torch.dtype
        ev_option: EmbeddingVariableOption
        global_step: int
        keys: KeyRows
        initial: InitialRows
        admission: CounterAdmission | SketchAdmission | None
        cold: ColdRows | None
        _guard: Guard
        _eviction: Eviction
        _filtered: Tensor
        _looked_up: int
        _found_cold: int
        _evicted: int
        _inserted_before: int
        _newcomers: list[tuple[Tensor, Tensor]]

        def _stored_weight(self) -> Parameter: ...
        def _flush(self) -> None: ...
        def _as_keys(self, input: Tensor) -> Tensor: ...
        def _tend(self, weight: Parameter) -> None: ...
        def _find_room(self, wanted: int, protected: Tensor | None = None) -> None: ...
        def _grow_for(self, wanted: int) -> None: ...
        def _keep_capacity(self) -> None: ...
        def _erase(self, keys: Tensor) -> int: ...
        def _take_capacity(self, capacity: int) -> None: ...
        def insert(self, keys: Any, values: Any, frequencies: Any = None, versions: Any = None) -> None: ...
        def total_count(self) -> int: ...
        def _parts(self, since: int | None = None): ...
        def _put(self, part) -> None: ...
        def _let_in(self) -> None: ...
        def _note_written(self, keys: Tensor) -> None: ...
        def _note_erased(self, keys: Tensor) -> None: ...
        def _note_saved(self, saved: tuple[int, str, int] | None) -> None: ...
