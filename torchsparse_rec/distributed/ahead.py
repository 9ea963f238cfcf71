"""Lookups whose ids travel before their step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..nn.plan import Ids
from .exchange import start
from .ranks import Call
from .shards import Request, Shards

__all__ = ["Ahead", "Turns"]


@dataclass
class Turns:
    """
    The position of an iterator of batches.

    Args:
        number: the iterator's number among its module's: ranks compare it to detect that they are in different
            iterators.
        given: the number of batches that it has given.
        looked_up: the number of these that have been looked up.
    """

    number: int
    given: int = 0
    looked_up: int = 0


class Ahead:
    """
    A lookup whose ids travel before its step: the argument of a sharded module's call, made by :func:`prefetch`.

    Args:
        shards: the shards of the module.
        module: the module that will be called.
        given: a function that returns the arguments of the call, or none if this rank has no batch any more; its errors
            are raised on all ranks.
        turns: the turns of the iterator.
        status: the status of this rank.
    """

    request: Request
    got: list[Tensor]

    def __init__(
        self, shards: Shards, module: Any, given: Callable[[], tuple[Any, ...]], turns: Turns, status: int
    ) -> None:
        ranks, mode = shards.ranks, "train" if module.training else "eval"
        self._shards, error, details = shards, None, ""
        self._turns, self._turn = turns, -1
        counts = torch.zeros(ranks.count, 0, dtype=torch.int64)
        try:
            arguments = given()
            if arguments:
                self.request = shards.request(module, *arguments)
                weights = self.request.ids.per_sample_weights
                if weights is not None and weights.requires_grad:
                    raise ValueError(
                        "prefetch: weights must not require a gradient, which comes back in the step alone: look such "
                        "batches up without prefetch"
                    )
                call, _ = shards.call_of(module, module.stored_weights(), self.request.ids)
                counts, details = self.request.counts, call.details
        except Exception as raised:
            error = raised
        self._call = Call(shards.name, f"prefetch {turns.number}", mode, details)
        self._headers = ranks.start_headers(ranks.ahead_headers, self._call, counts, error, status)

    def statuses(self) -> list[int]:
        """
        Wait for the other ranks' headers; return the status of each rank.

        Raises:
            The error of the first rank that has one, on all ranks.
        """
        self._told, statuses = self._headers()
        return statuses

    def send(self) -> None:
        """Begin to send this rank's request."""
        ranks = self._shards.ranks
        with ranks:
            self._came = self._shards.read(self._told)
            sizes = self._shards.payload_sizes(self.request, self._came)
            self._coming = start(ranks, ranks.ahead_ids, self._call, sizes, self.request.parts)

    def arrive(self) -> None:
        """Wait for the others' requests: this is the next batch to look up."""
        self.got = self._coming()
        self._turn = self._turns.given
        self._turns.given += 1

    def look_up(self, shards: Shards, module: Any, *others: Any, apart: bool = False) -> tuple[Any, Ids, Tensor]:
        """
        Do what :meth:`Shards.look_up` does.

        Args:
            shards: the shards of the module that is called.
            module: the module that owns the tables.
            others: the arguments of the call beside this one.
            apart: whether results lie end to end, though they may lie side by side.

        Raises:
            ValueError: it was made for another module; it is not the next to be looked up; there are other arguments.
        """
        if shards is not self._shards:
            raise ValueError(
                f"{shards.name}: the batch must have been prefetched for this module, got one for {self._shards.name}"
            )
        if any(other is not None for other in others):
            raise ValueError(
                f"{shards.name}: offsets and weights are part of a prefetched batch: what `features` returns must have "
                "them, in a tuple"
            )
        if self._turn != self._turns.looked_up:
            raise ValueError(
                f"{shards.name}: batches that are prefetched must be looked up once each, in turn, got number "
                f"{self._turn} where number {self._turns.looked_up} is next: other ranks wait for its results"
            )
        self._turns.looked_up += 1
        ids, weights = self.request.ids, module.stored_weights()
        request = self.request._replace(ids=ids._replace(side_by_side=ids.side_by_side and not apart))
        call, trained = shards.call_of(module, weights, ids)
        shards.check(module, weights, trained)
        return request.x, request.ids, shards.answered(module, call, request, self._came, trained, self.got)
