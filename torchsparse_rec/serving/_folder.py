"""
The folder of a served model: one file with the newest version, which readers map and a publisher replaces.

No file is written in place. A process that has mapped an old file keeps its pages until the last mapping ends: the
operating system guarantees it. Then the space is free. So there are no locks between readers and a publisher, and a
process that dies leaves nothing behind but, at most, files that the next publisher removes.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.nn import Module

from .. import files
from .._fork import tell_of_forks
from .._lock import release_lock, take_lock
from ._archive import Archive, content_of, naming, touch

MODEL, VERSION, LOCK = "model.pt", "version", ".lock"
# The names of the model and the version before they are complete.
UNFINISHED_MODEL, UNFINISHED_VERSION = ".unfinished.pt", ".unfinished"
# To map the pages of so large a file takes about as long as to load the rest of it: there is no need of a thread.
AT_ONCE = 2**22


def save_for_serving(model: Module, folder: str | os.PathLike[str]) -> int:
    """
    Publish a model in a folder, as the next version for all processes that serve from it.

    The model is written beside the present version, then takes its place at once. Readers see the one or the other,
    also if this process dies meanwhile. Publishers in several processes wait for each other. Tables are written from
    where they are, without a copy in memory; the training of the model may go on afterwards.

    Args:
        model: any module that ``torch.save`` can write: all of this library's, except tables with rows on disk. It is
            saved whole, with its code's names, so that readers need the same packages.
        folder: the folder of the versions; it is made if it is missing. Its disk needs room for two versions.

    Returns:
        The version's number, from 1.

    Raises:
        TypeError: if ``model`` is not a module, or cannot be pickled.
        ValueError: if the last version's number is unknown, as its file is damaged; the error names the file.
        OSError: if the disk is full, or forbids writing. The version that is there stays.

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
        raise TypeError(
            f"save_for_serving: model must be a torch.nn.Module, got a {type(model).__name__}: call "
            "save_for_serving(model, folder)"
        )
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    lock = take_lock(place / LOCK)
    try:
        version = _last_version(place) + 1
        _write(place / UNFINISHED_MODEL, lambda file: _save(content_of(version, model), file))
        _write(place / UNFINISHED_VERSION, lambda file: file.write(str(version).encode()))
        # The number is taken before the model shows: two models never have the same.
        os.replace(place / UNFINISHED_VERSION, place / VERSION)
        os.replace(place / UNFINISHED_MODEL, place / MODEL)
    finally:
        try:
            for name in (UNFINISHED_MODEL, UNFINISHED_VERSION, LOCK):
                (place / name).unlink(missing_ok=True)
        finally:
            release_lock(lock)
    return version


def _last_version(place: Path) -> int:
    """Return the number of the last version, 0 if there was none: the model's own where its file has none or less."""
    path, model = place / VERSION, place / MODEL
    # A link is none of ours, and is replaced. An older version of this function left an empty file if it was killed.
    text = path.read_bytes().strip() if path.is_file() and not path.is_symlink() else b""
    if text and not (text.isdigit() and len(text) < 20):
        raise ValueError(
            f"{path} must hold the number of the last version, got {text[:20]!r}: write it there, or remove the file "
            f"to use the number in {MODEL}"
        )
    taken = int(text or 0)
    try:
        with naming(str(model)), Archive(str(model)) as archive:
            return max(taken, archive.version())
    except FileNotFoundError:
        return taken
    except ValueError as error:
        if text:
            return taken
        raise ValueError(
            f"{path} must hold the number of the last version, got nothing: write it there, as {error}"
        ) from error


def _write(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a new file, and sync it to the disk; a link, or a killed publisher's file, is removed before."""
    path.unlink(missing_ok=True)
    with files.naming(path), files.new_file(path) as file:
        write(file)


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(content, file)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        way = ": define the function or class at the top of a module" if "<" in str(error) else ""
        raise TypeError(
            "save_for_serving: model must be one that torch.save can write, got a "
            f"{type(content['model']).__name__}: {error}{way}"
        ) from error
    except RuntimeError as error:
        # torch cannot close its archive after a failed write, and raises an error without the reason.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


class _Loaded(NamedTuple):
    """A version, and its file's identity."""

    file: tuple[int, ...]
    version: int
    model: Module


class ServedModel:
    """
    The newest version of a model that :func:`load_for_serving` has mapped; to be called as the model is.

    A call is wholly one version's, and never of an older one than a call before it. Threads may call it at once. Before
    each call it checks, in about 4 us, whether there is a newer version. A version of up to 4 MB is loaded by the call
    itself. A larger one is loaded by a thread, which maps its pages before they take the place of the old ones.
    Meanwhile other calls use the old version. Where a new one cannot be read, one call warns, and the version at hand
    is served on.
    """

    def __init__(self, folder: str | os.PathLike[str], verify: bool = False, poll: float | None = 0.02) -> None:
        self._path = os.path.join(folder, MODEL)
        self._verify, self._poll = verify, poll
        self._refused: tuple[int, ...] | None = None
        self._problem: Exception | None = None  # of the file that is refused, until a call has warned
        self._loaded = self._load()
        self.after_fork()
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Begin anew in a forked process, which has no thread but the one that forked: none follows, or loads."""
        self._lock = threading.Lock()
        self._follower: threading.Thread | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the newest version of the model."""
        return self.model(*args, **kwargs)

    def __repr__(self) -> str:
        return f"ServedModel({os.path.dirname(self._path)!r}, version={self.version})"

    @property
    def model(self) -> Module:
        """The newest version of the module, in eval mode, with parameters that require no gradient."""
        if self._follower is not None:
            self._follow(most_bytes=AT_ONCE)
        else:
            self._follow()
            if self._poll is not None:
                self._start(self._poll)
        if self._problem is not None:
            problem, self._problem = self._problem, None
            text = f"{self._path} cannot be read, so version {self.version} is served on: {problem}"
            warnings.warn(text, stacklevel=3)
        return self._loaded.model

    @property
    def version(self) -> int:
        """The number of the version in use."""
        return self._loaded.version

    def _start(self, poll: float) -> None:
        """Start the thread that follows, if no other thread has."""
        with self._lock:
            if self._follower is None:
                stop = threading.Event()
                # A daemon: else the interpreter would wait for it before it calls _end, which ends it.
                thread = threading.Thread(
                    target=_poll, args=(weakref.ref(self), poll, stop), daemon=True, name="ServedModel"
                )
                weakref.finalize(self, _end, os.getpid(), thread, stop)
                thread.start()
                self._follower = thread

    def _follow(self, more_bytes: int = 0, most_bytes: float = math.inf) -> None:
        """Take the newest version if it is newer, of such a size, and no other thread is taking it."""
        try:
            found = _file_at(self._path)
        except OSError as error:
            found = ()
            self._refuse(found, error)
        if not found or found in (self._loaded.file, self._refused) or not more_bytes < found[-1] <= most_bytes:
            return
        if self._lock.acquire(blocking=False):
            try:
                if found != self._loaded.file:  # again: another thread may have taken it
                    loaded = self._load()
                    touch(loaded.model)
                    self._loaded = loaded
            except Exception as error:
                self._refuse(found, error)
            finally:
                self._lock.release()

    def _refuse(self, file: tuple[int, ...], error: Exception) -> None:
        if self._refused != file:
            self._refused, self._problem = file, error

    def _load(self) -> _Loaded:
        while True:
            file = _file_at(self._path)
            try:
                loaded = _Loaded(file, *_read(self._path, self._verify))
            except Exception:
                if _file_at(self._path) == file:
                    raise
                continue
            # The file is opened several times, between which a newer one may have come.
            if _file_at(self._path) == file:
                return loaded


def _read(path: str, verify: bool) -> tuple[int, Module]:
    """Map a version; the parts that it needs at once are compared with their checksums, with ``verify`` all parts."""
    with naming(path), Archive(path) as archive:
        if verify:
            archive.compare()
        elif archive.has_checksums:
            archive.compare(archive.small())
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        if not isinstance(found, dict) or not isinstance(found.get("model"), Module):
            raise ValueError("it holds no version of a model")
        if archive.has_checksums and not verify:
            archive.compare(archive.dense(found))
        return int(found["version"]), found["model"].eval().requires_grad_(False)


def _poll(reference: weakref.ref[ServedModel], poll: float, stop: threading.Event) -> None:
    """Follow the newest version, as a thread's body, while somebody holds the served model."""
    while not stop.wait(poll):
        served = reference()
        if served is None:
            return
        # Kept until the next turn: the last call that uses it must not unmap its pages.
        kept = served._loaded  # noqa: F841
        served._follow(more_bytes=AT_ONCE)
        del served


def _end(process: int, thread: threading.Thread, stop: threading.Event) -> None:
    """End a thread that follows. Before the interpreter exits: one that it ends within torch crashes the process."""
    # A forked process does not have the thread, and its event may be locked for ever.
    if process == os.getpid():
        stop.set()
        if thread is not threading.current_thread():
            thread.join()


def _file_at(path: str) -> tuple[int, ...]:
    """Return the identity of the file at a path among all files that were or will be there while it is mapped."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def load_for_serving(folder: str | os.PathLike[str], *, verify: bool = False, poll: float | None = 0.02) -> ServedModel:
    """
    Map the newest version of a model that :func:`save_for_serving` has published.

    Nothing is read but the dense layers and what lookups touch, and processes on one machine share one copy in its page
    cache. Tables that were on a GPU are mapped for the CPU. A write to a mapped table stays in the process that writes,
    which pays for a copy of each page.

    Args:
        folder: a folder that you trust as you trust code: the model is unpickled.
        verify: whether to read the rows of all tables too, of this version and of each newer one, and to compare their
            checksums. The rest is always compared.
        poll: the seconds between two looks of a thread for a newer version, from the first call on. None: there is no
            thread, and a call loads the version that it finds, of any size.

    Returns:
        A :class:`ServedModel`, which takes each newer version by itself.

    Raises:
        FileNotFoundError: if nothing was published in ``folder``.
        ValueError: if the version is damaged, needs code that is not here, or has no checksums to ``verify``; the error
            names the file. Or if ``poll`` is not above 0.
    """
    if poll is not None and not poll > 0:
        raise ValueError(f"load_for_serving: poll must be None or above 0, got {poll!r}")
    if not (Path(folder) / MODEL).exists():
        has_checkpoints = any(Path(folder).glob("*/manifest.json"))
        way = ": its checkpoints are for checkpoint.load, then publish the model" if has_checkpoints else ""
        raise FileNotFoundError(
            f"load_for_serving: folder must be one in which save_for_serving has published, got {str(folder)!r}, which "
            f"has no {MODEL}{way}"
        )
    return ServedModel(folder, verify, poll)


def problems(folder: str | os.PathLike[str]) -> list[str]:
    """
    Compare the checksums of all that is published in a folder; nothing is unpickled.

    Args:
        folder: the folder of :func:`save_for_serving`.

    Returns:
        A line for each problem, with the file's name.
    """
    found, path = [], os.path.join(folder, MODEL)
    try:
        with naming(path), Archive(path) as archive:
            found += [f"{path} cannot be read: {problem}" for problem in archive.damages()]
            if not found:
                # torch's reader refuses lists of members that zipfile takes. This runs it, and unpickles nothing.
                torch.serialization.get_unsafe_globals_in_checkpoint(path)
        _last_version(Path(folder))
    except (OSError, ValueError) as error:
        found.append(str(error))
    return found
