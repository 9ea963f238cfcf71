"""
The messages between ranks: headers of one length, then messages whose sizes are in the headers.

Only ``all_to_all_single`` is used, which moves and does not add, so that bits depend on no backend. The header
announces ranks that call something else, or found an error, on all ranks, before anything is written.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .._agreed import agreed
from .._torch_modules import default_store

__all__ = ["ENDED", "ENDED_WITHOUT_EMPTY", "FINE", "Call", "Ranks", "known_call"]

# The words of a header before its counts: sequence, signature, status.
_WORDS = 3
FINE, _FAILED, ENDED, ENDED_WITHOUT_EMPTY = range(4)
# Seconds after which a rank that waits publishes for what, and reads what the others wait for.
_PATIENCE = 5.0
# Further seconds that a rank which has waited too long gives the others to publish theirs.
_GRACE = 1.0


class Call:
    """
    A rank's action: ranks compare them to detect that they do different things.

    Args:
        module: the name of the module.
        what: the action: ``"lookup"``, ``"gradients"`` or ``"prefetch"`` with a number.
        mode: ``"train"`` or ``"eval"``.
        details: everything else that must agree.
    """

    def __init__(self, module: str, what: str, mode: str, details: str = "") -> None:
        self.module, self.what, self.mode, self.details = module, what, mode, details
        digest = hashlib.blake2b(str(self).encode(), digest_size=8).digest()
        self.signature = int.from_bytes(digest, "little", signed=True)

    def __str__(self) -> str:
        return f"{self.what} of {self.module} in {self.mode}()" + (f", {self.details}" if self.details else "")


# Calls are few, and digests take a while.
known_call: Callable[[str, str, str, str], Call] = lru_cache(maxsize=256)(Call)


class Ranks:
    """
    The ranks that share tables, and the exchanges between them.

    Args:
        group: their process group. Groups of the same ranks are made of it. Gradients have a separate one, so that a
            rank that skips a backward meets no message of another size. The three messages of batches that are
            prefetched have separate ones too.
        device: the device of the vectors that are sent.
        timeout: the seconds after which a rank that waits for others gives up.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        ranks = dist.get_process_group_ranks(group)
        # Longer than a rank waits, so that the error comes from this class, which names the missing ranks.
        limit = datetime.timedelta(seconds=timeout + 2 * _PATIENCE)
        self.group, self._backward_group, self.ahead_headers, self.ahead_ids, self.ahead_results = (
            dist.new_group(ranks, timeout=limit, backend=dist.get_backend(group), use_local_synchronization=True)
            for _ in range(5)
        )
        self.device, self.timeout, self._counts = device, timeout, 0
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.sequence = self._messages = 0
        self._place = f"torchsparse_rec/{self.group.group_name}/"
        self.open = 0  # lookups whose backward may still come
        self._broken: BaseException | None = None

    def reserve(self, counts: int) -> None:
        """Make headers have so many counts for each rank, or more: all modules' headers have one length."""
        self._counts = max(self._counts, counts)

    @property
    def is_broken(self) -> bool:
        """Whether this rank has raised where others may wait for it."""
        return self._broken is not None

    # ---- Exchanges ---------------------------------------------------------------------------------------------------

    def headers(self, call: Call, counts: Tensor, error: Exception | None = None) -> Tensor:
        """
        Exchange counts, and find out whether all ranks are well and do the same.

        Args:
            call: the description of this rank's action.
            counts: ``[W, K]`` int64 on the host, for each rank; K is the same on all ranks.
            error: the error of this rank, which all ranks raise.

        Returns:
            ``[W, K]`` int64 on the host, from each rank.

        Raises:
            The error of the first rank that has one; RuntimeError: ranks do different things, or one does not come.
        """
        return self.start_headers(self.group, call, counts, error)()[0]

    def announce(self, name: str, what: str, training: bool, error: Exception | None = None) -> Call:
        """
        Announce this rank's next action to the others, as :meth:`headers` does; return it.

        Args:
            name: the name of the module that does it.
            what: the action.
            training: whether the module trains.
            error: the error of this rank, which all ranks raise.
        """
        call = Call(name, what, "train" if training else "eval")
        self.headers(call, torch.zeros(self.count, 0, dtype=torch.int64), error)
        return call

    def start_headers(
        self, group: dist.ProcessGroup, call: Call, counts: Tensor, error: Exception | None = None, status: int = FINE
    ) -> Callable[[], tuple[Tensor, list[int]]]:
        """
        Begin what :meth:`headers` does; return the function that ends it.

        Args:
            group: the group in which messages of the same kind follow each other.
            call: the argument of :meth:`headers`.
            counts: the argument of :meth:`headers`.
            error: the argument of :meth:`headers`.
            status: the status of this rank if it has no error.

        Returns:
            A function that returns the counts from each rank, and each rank's status.
        """
        if self._broken is not None:
            raise RuntimeError(
                f"{call}: this rank raised in the middle of an exchange before, and the others may wait for it: end "
                "the job and start it again from a checkpoint"
            ) from self._broken
        if self.count == 1:
            if error is not None:
                return lambda: _raise(error)
            return lambda: (counts, [status])
        self.sequence += 1
        width = counts.shape[1]
        out = torch.zeros(self.count, _WORDS + self._counts, dtype=torch.int64)
        out[:, :_WORDS] = torch.tensor([self.sequence, call.signature, status if error is None else _FAILED])
        out[:, _WORDS : _WORDS + width] = counts
        number, coming = self.sequence, self._start(group, call, out.to(self.device), None, None)

        def end() -> tuple[Tensor, list[int]]:
            came = coming().to("cpu")
            said = came[:, :_WORDS].tolist()
            statuses = [status for _, _, status in said]
            if _FAILED in statuses:
                agreed(self.group, None, error)
            # A rank without a batch does not know the details of its call.
            if ENDED_WITHOUT_EMPTY not in statuses and any([x[:2] != said[self.rank][:2] for x in said]):
                self.raise_different(call, number)
            return came[:, _WORDS : _WORDS + width], statuses

        return end

    def __enter__(self) -> None:
        """Begin the messages after a header, up to the last one that belongs to it."""

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Mark this rank as of no more use if it has raised meanwhile: the others may wait for it."""
        if error is not None:
            self._broken = error

    def start(
        self,
        group: dist.ProcessGroup,
        call: Call,
        parts: Sequence[Tensor],
        sent: Sequence[Sequence[int]],
        came: Sequence[Sequence[int]],
    ) -> Callable[[], list[Tensor]]:
        """
        Send vectors in one message to each rank.

        Args:
            group: the group in which messages of the same kind follow each other.
            call: the description of this rank's action.
            parts: the vectors, each with the elements for rank 0, then for rank 1, ...
            sent: the number of elements of each vector that go to each rank.
            came: the number of elements of each vector that come from each rank.

        Returns:
            A function that waits for the received vectors, and returns them, in the order of ranks.
        """
        if self.count == 1 or not parts:
            return lambda: list(parts)
        sizes = [part.element_size() for part in parts]
        flat = [part.contiguous().view(torch.uint8) for part in parts]
        to = [[n * size for n in ns] for ns, size in zip(sent, sizes, strict=True)]
        from_ = [[n * size for n in ns] for ns, size in zip(came, sizes, strict=True)]
        if len(parts) == 1:
            one = self._start(group, call, flat[0], to[0], from_[0])
            return lambda: [one().view(parts[0].dtype)]
        pieces = [part.split(ns) for part, ns in zip(flat, to, strict=True)]
        out = torch.cat([piece[rank] for rank in range(self.count) for piece in pieces])
        coming = self._start(group, call, out, _sums(to), _sums(from_))

        def end() -> list[Tensor]:
            each = coming().split([ns[rank] for rank in range(self.count) for ns in from_])
            return [torch.cat(each[k :: len(parts)]).view(part.dtype) for k, part in enumerate(parts)]

        return end

    # ---- Backward ----------------------------------------------------------------------------------------------------

    def expect_backward(self) -> None:
        """Count a lookup whose backward may come."""
        self.open += 1

    def send_back(
        self, call: Call, parts: Sequence[Tensor], sent: Sequence[Sequence[int]], came: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Send vectors as :meth:`start` does, in a backward; return what came."""
        with self:
            if self.open > 1:  # which backward comes is not certain: sizes that differ would end the process
                self.start_headers(self._backward_group, call, torch.zeros(self.count, 0, dtype=torch.int64))()
            self.open -= 1
            return self.start(self._backward_group, call, parts, sent, came)()

    # ---- Errors ------------------------------------------------------------------------------------------------------

    def _start(
        self, group: dist.ProcessGroup, call: Call, x: Tensor, sent: list[int] | None, came: list[int] | None
    ) -> Callable[[], Tensor]:
        out = torch.empty_like(x) if came is None else x.new_empty(sum(came))
        self._messages += 1
        number = self._messages
        try:
            work = dist.all_to_all_single(out, x, came, sent, group=group, async_op=True)
        except RuntimeError as error:
            self._broken = error
            raise
        assert work is not None

        def end() -> Tensor:
            try:
                self._wait(work, call, number)
            except RuntimeError as error:
                self._broken = error
                raise
            return out

        return end

    def _wait(self, work: dist.Work, call: Call, number: int) -> None:
        """Wait for a message; if that takes long, compare it with the messages that the others wait for."""
        began, seen = time.monotonic(), None
        while True:
            try:
                work.wait(datetime.timedelta(seconds=min(_PATIENCE, self.timeout / 4)))
                break
            except RuntimeError as error:
                if work.is_completed():
                    raise RuntimeError(f"{call}: rank {self.rank} has lost another, which ended: {error}") from error
                is_over = time.monotonic() - began >= self.timeout
                if is_over:
                    self._posts(call, number)
                    time.sleep(_GRACE)  # for the others to say what they wait for
                before, seen = seen, self._posts(call, number)
                # A rank that still waits for something else after a while will not come any more.
                others = [rank for rank in range(self.count) if seen[rank] not in (None, seen[self.rank])]
                stuck = [rank for rank in others if is_over or (before is not None and before[rank] == seen[rank])]
                if stuck:
                    raise RuntimeError(self._different(call, seen, stuck[0])) from error
                if is_over:
                    late = [rank for rank in range(self.count) if seen[rank] is None]
                    raise RuntimeError(
                        f"{call}: rank {self.rank} has waited {self.timeout:g} s for {_listed(late)}, which did not "
                        "make this call: every rank must look up, and go backward, as often as the others, with an "
                        "empty batch if it has no other"
                    ) from error
        if seen is not None:
            default_store().delete_key(f"{self._place}{self.rank}")

    def _posts(self, call: Call, number: int) -> list[str | None]:
        """Publish what this rank waits for; return what each rank has published, or None."""
        store = default_store()
        store.set(f"{self._place}{self.rank}", f"{call} (message {number})")
        places = [f"{self._place}{rank}" for rank in range(self.count)]
        return [store.get(place).decode() if store.check([place]) else None for place in places]

    def _different(self, call: Call, said: Sequence[str | None], other: int) -> str:
        first, second = sorted((self.rank, other))
        return (
            f"{call.module}: all ranks must make the same calls, got on rank {first}: {said[first]}; on rank {second}: "
            f"{said[second]}"
        )

    def raise_different(self, call: Call, number: int) -> NoReturn:
        """
        Raise ``RuntimeError``, on all ranks, for calls that differ.

        Args:
            call: the description of this rank's action.
            number: the number of the header.
        """
        said = agreed(self.group, f"{call} (call {number})")
        raise RuntimeError(
            self._different(call, said, next(rank for rank, text in enumerate(said) if text != said[self.rank]))
        )


def _raise(error: Exception) -> NoReturn:
    raise error


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(ns) for ns in zip(*counts, strict=True)]


def _listed(ranks: list[int]) -> str:
    if not ranks:
        return "another rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
