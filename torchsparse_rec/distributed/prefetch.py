"""Batches whose ids travel to other ranks while the step before them is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.nn import Module

from .ahead import Ahead, Turns
from .ranks import ENDED, ENDED_WITHOUT_EMPTY, FINE
from .sharded import Sharded

__all__ = ["prefetch"]

Batch = TypeVar("Batch")


def prefetch(
    batches: Iterable[Batch],
    module: Module,
    features: Callable[[Batch], Any],
    empty: Batch | None = None,
) -> Iterator[tuple[Batch, Any]]:
    """
    Send the ids of batches to the ranks that have their rows while the step before is computed.

    The results and gradients have the same bits as without. All ranks call it, each with its own loader, take its items
    in turn, and look each of them up once.

    Args:
        batches: the batches of this rank. The iterator runs two batches ahead.
        module: the module that :func:`shard` split, or a part of such a module: one collection or one table.
        features: a function from a batch to the arguments of ``module``; several are a tuple.
        empty: a batch without examples, which this rank yields when its own batches have ended and another rank's have
            not. All ranks end together. None: all ranks have as many batches.

    Yields:
        A batch, and the argument for ``module`` instead of the batch's features.

    Raises:
        TypeError: ``module`` is not split over ranks.
        ValueError: the batches of a rank without ``empty`` end before the other ranks'; weights that require a
            gradient. Errors of one rank's loader, ``features``, ids, offsets and weights are raised on all ranks, in
            the turn of the batch that has them. The next batch may be taken after that.

    Example:
        >>> from torch.distributed import TCPStore, destroy_process_group, init_process_group
        >>> from torchsparse_rec.distributed import shard
        >>> from torchsparse_rec.nn import Embedding
        >>> init_process_group("gloo", store=TCPStore("localhost", 0, 1, is_master=True), rank=0, world_size=1)
        >>> model = shard(torch.nn.ModuleDict({"users": Embedding(100, 2)}), plan="row_wise")
        >>> batches = [{"user": torch.tensor([3, 1, 4]), "label": torch.ones(3)} for _ in range(2)]
        >>> for batch, ids in prefetch(batches, model["users"], lambda batch: batch["user"]):
        ...     print(list(batch), model["users"](ids).shape)
        ['user', 'label'] torch.Size([3, 2])
        ['user', 'label'] torch.Size([3, 2])
        >>> destroy_process_group()
    """
    if not isinstance(module, Sharded):
        raise TypeError(
            f"prefetch: module must be a collection or a table that shard() has split, got a {type(module).__name__}"
        )
    return _Prefetch(iter(batches), module, features, empty)


class _Prefetch(Generic[Batch]):
    """What :func:`prefetch` returns: meanwhile the ids of the next batch travel, and the header of the one after."""

    def __init__(
        self, batches: Iterator[Batch], module: Sharded, features: Callable[[Batch], Any], empty: Batch | None
    ) -> None:
        self._batches, self._module, self._features, self._empty = batches, module, features, empty
        self._ranks = module.shards.ranks
        self._begun = self._ended = False
        module.shards.prefetched += 1
        self._turns = Turns(module.shards.prefetched)
        # The next turn: a batch whose ids are on their way, or the error of that turn. None: there is none.
        self._sent: tuple[Batch | None, Ahead | Exception] | None = None
        # The batch whose header is on its way.
        self._asked: tuple[Batch | None, Ahead] | None = None
        device = self._ranks.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> _Prefetch[Batch]:
        return self

    def __next__(self) -> tuple[Any, Any]:
        """Return the next batch, whose ids have arrived; send the ids of the batches after it."""
        with self._beside():
            if not self._begun:
                self._begun, self._asked = True, self._take()
                self._sent = self._send()
            now = self._sent
            if now is not None and isinstance(now[1], Ahead):
                now[1].arrive()
            self._sent = self._send()
        if now is None:
            raise StopIteration
        batch, ahead = now
        if isinstance(ahead, Exception):
            raise ahead
        if self._stream is not None:
            for x in ahead.got:
                x.record_stream(torch.cuda.current_stream())
        return batch, ahead

    def _take(self) -> tuple[Batch | None, Ahead]:
        """Take a batch of this rank, and begin to send the size of its request."""
        batch, failed = self._empty, None
        if not self._ended:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._ended = True
            except Exception as error:
                failed = error

        def given() -> tuple[Any, ...]:
            if failed is not None:
                raise failed
            if batch is None:
                return ()
            features = self._features(batch)
            return features if isinstance(features, tuple) else (features,)

        status = FINE if not self._ended else ENDED if self._empty is not None else ENDED_WITHOUT_EMPTY
        return batch, Ahead(self._module.shards, self._module, given, self._turns, status)

    def _send(self) -> tuple[Batch | None, Ahead | Exception] | None:
        """Begin to send the ids of the batch whose header has come, and take another; return None at the end."""
        if self._asked is None:
            return None
        batch, ahead = self._asked
        result: Ahead | Exception = ahead
        try:
            statuses = ahead.statuses()
            if FINE not in statuses:
                self._asked = None
                return None
            if ENDED_WITHOUT_EMPTY in statuses:
                raise ValueError(
                    f"prefetch: the batches of rank {statuses.index(ENDED_WITHOUT_EMPTY)} have ended before those of "
                    f"rank {statuses.index(FINE)}: give `empty`, a batch without examples, which ranks take meanwhile"
                )
            ahead.send()
        except Exception as error:
            if self._ranks.is_broken:
                raise
            result = error
        self._asked = self._take()
        return batch, result

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On CUDA, work on a stream of its own."""
        if self._stream is None:
            yield
            return
        now = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            yield
        now.wait_stream(self._stream)
