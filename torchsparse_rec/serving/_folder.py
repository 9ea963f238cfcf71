"""
The folder of a served model: one file with the newest version, which readers map and a publisher replaces.

The file is never written in place. Whoever has mapped an old one keeps its pages until the last mapping ends, as the
operating system sees to; then its space is free. So there are no locks between readers and a publisher, and a process
that dies leaves nothing behind but, at most, a file that the next publisher removes.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Module

MODEL, VERSION, UNFINISHED = "model.pt", "version", ".unfinished.pt"


def save_for_serving(model: Module, folder: str | os.PathLike[str]) -> int:
    """
    Publish a model in a folder, as the next version for all processes that serve from it.

    The model is written beside the version that is there, then takes its place at once: readers see the one or the
    other, also if this process dies meanwhile. Publishers in several processes wait for each other. Tables are written
    from where they are, without a copy in memory; the training of the model may go on afterwards.

    Args:
        model: any module that ``torch.save`` can write: all of this library's can, but for tables with rows on disk.
            It is saved whole, with its code's names, so that readers need the same packages.
        folder: where; it is made if it is missing. Its disk needs room for two versions.

    Returns:
        The version's number, from 1.

    Raises:
        TypeError: if ``model`` is not a module, or cannot be pickled.

    >>> import tempfile
    >>> from torchsparse_rec import nn, serving
    >>> folder = tempfile.mkdtemp()
    >>> model = nn.EmbeddingBag(1000, 16)
    >>> serving.save_for_serving(model, folder)
    1
    >>> served = serving.load_for_serving(folder)
    >>> torch.equal(served(torch.tensor([[3, 4]])), model(torch.tensor([[3, 4]])))
    True
    """
    if not isinstance(model, Module):
        raise TypeError(f"save_for_serving: model must be a torch.nn.Module, got a {type(model).__name__}")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    with open(place / VERSION, "a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        version = int(counter.read() or 0) + 1
        unfinished = place / UNFINISHED
        try:
            with open(unfinished, "wb") as file:
                torch.save({"version": version, "model": model}, file)
                file.flush()
                os.fsync(file.fileno())
            # The number is taken before the model shows: two models never have the same.
            counter.truncate(0)
            counter.write(str(version))
            counter.flush()
            os.replace(unfinished, place / MODEL)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise TypeError(
                f"save_for_serving: model must be one that torch.save can write, got a {type(model).__name__}: {error}"
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)
    return version


class _Loaded(NamedTuple):
    """A version, and by what its file is told from others."""

    file: tuple[int, ...]
    version: int
    model: Module


class ServedModel:
    """
    The newest version of a model that :func:`load_for_serving` has mapped; to be called as the model is.

    Before each call it asks, in about 4 us, whether there is a newer version, and takes it. A call is wholly one
    version's. Threads may call it at once: one of them loads a new version, and the others use the old one meanwhile.
    Where a new version cannot be read, it warns once and goes on with the one that it has.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = os.path.join(folder, MODEL)
        self._lock = threading.Lock()
        self._refused: tuple[int, ...] | None = None
        self._loaded = self._load()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the newest version of the model."""
        return self.model(*args, **kwargs)

    @property
    def model(self) -> Module:
        """The newest version of the module, in eval mode, with parameters that require no gradient."""
        try:
            found = _file_at(self._path)
        except OSError as error:
            found = ()
            self._refuse(found, error)
        if found and found != self._loaded.file and found != self._refused and self._lock.acquire(blocking=False):
            try:
                self._loaded = self._load()
            except Exception as error:
                self._refuse(found, error)
            finally:
                self._lock.release()
        return self._loaded.model

    @property
    def version(self) -> int:
        """The number of the version that was called last."""
        return self._loaded.version

    def _refuse(self, file: tuple[int, ...], error: Exception) -> None:
        if self._refused != file:
            self._refused = file
            warnings.warn(f"{self._path} cannot be read, so version {self.version} is served on: {error}", stacklevel=4)

    def _load(self) -> _Loaded:
        while True:
            file = _file_at(self._path)
            try:
                found = torch.load(self._path, map_location="cpu", mmap=True, weights_only=False)
            except Exception:
                if _file_at(self._path) == file:
                    raise
                continue
            # torch opens the file twice, between which a newer one may have come.
            if _file_at(self._path) == file:
                return _Loaded(file, found["version"], found["model"].eval().requires_grad_(False))


def _file_at(path: str) -> tuple[int, ...]:
    """Return what tells the file at a path from all others that were or will be there while it is mapped."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def load_for_serving(folder: str | os.PathLike[str]) -> ServedModel:
    """
    Map the newest version of a model that :func:`save_for_serving` has published.

    Nothing is read but what lookups touch, and processes on one machine share one copy in its page cache. Tables that
    were on a GPU are mapped for the CPU. A write to a mapped table stays in the process that writes, which pays for a
    copy of each page.

    Args:
        folder: a folder that you trust as you trust code: the model is unpickled.

    Returns:
        A :class:`ServedModel`, which takes each newer version by itself.

    Raises:
        FileNotFoundError: if nothing was published in ``folder``.
    """
    if not (Path(folder) / MODEL).exists():
        raise FileNotFoundError(
            f"load_for_serving: folder must be one in which save_for_serving has published, got {str(folder)!r}, which "
            f"has no {MODEL}"
        )
    return ServedModel(folder)
