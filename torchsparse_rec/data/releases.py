"""MovieLens's releases in their original files: found in a folder, downloaded, and read whole."""

from __future__ import annotations

import hashlib
import http.client
import io
import queue
import threading
import time
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..files import whole_file
from .movielens import LAYOUTS, read_ratings

URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
MD5 = "6e47046882bad158b0efbb84cd5cb987"
MEMBER = "ml-100k/u.data"
CONNECT_SECONDS, TOTAL_SECONDS = 10.0, 60.0
# The archive has 5 MB and the file in it 2 MB. Anything larger is not the archive.
MOST_BYTES = 1 << 23


@dataclass(frozen=True)
class Release:
    """A MovieLens release: its file, and the number of its ratings."""

    file: str
    ratings: int


@dataclass(frozen=True)
class Interactions:
    """
    Interactions of users with items, in the file's order.

    Args:
        name: the data set's name.
        users, items: ids from 0 without gaps, int32 ``[N]``.
        times: Unix times in seconds, int64 ``[N]``.
        num_users, num_items: the bounds of the ids.
    """

    name: str
    users: np.ndarray
    items: np.ndarray
    times: np.ndarray
    num_users: int
    num_items: int

    def __str__(self) -> str:
        return f"{self.num_users:,} users, {self.num_items:,} items, {len(self.users):,} interactions"

    def fingerprint(self) -> str:
        """Return a text that differs between data sets."""
        value = zlib.crc32(f"{self.num_users} {self.num_items}".encode())
        for column in (self.users, self.items, self.times):
            value = zlib.crc32(np.ascontiguousarray(column).data, value)
        return f"{self.name} of checksum {value:08x}"


RELEASES = {
    "ml-100k": Release("u.data", 100_000),
    "ml-1m": Release("ratings.dat", 1_000_209),
    "ml-20m": Release("ratings.csv", 20_000_263),
}


def find(name: str, folder: Path, given_by: str) -> Path:
    """Return a release's file in ``folder/<name>`` or ``folder``, or raise FileNotFoundError that names both."""
    places = [folder / name / RELEASES[name].file, folder / RELEASES[name].file]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"{given_by} is {folder}, but neither {places[0]} nor {places[1]} exists")


def read(name: str, path: Path) -> Interactions:
    """
    Read a release's file.

    Args:
        name: one of :data:`RELEASES`.
        path: the file.

    Raises:
        DataError: a line is malformed; its number is named.
        ValueError: lines are missing.
        OSError: the file cannot be read.
    """
    release, layout = RELEASES[name], LAYOUTS[name]
    with path.open("rb") as stream:
        users, items, times = read_ratings(stream, str(path), layout)
    if len(users) != release.ratings:
        line = len(users) + (layout.header is not None)
        raise ValueError(
            f"{path} ends at line {line:,} with {len(users):,} ratings, "
            f"expected the {release.ratings:,} ratings of {name}"
        )
    return index_ids(name, users, items, times)


def index_ids(name: str, users: np.ndarray, items: np.ndarray, times: np.ndarray) -> Interactions:
    """Renumber the ids that occur from 0, in ascending order."""
    (all_users, users), (all_items, items) = (np.unique(ids, return_inverse=True) for ids in (users, items))
    return Interactions(name, users.astype(np.int32), items.astype(np.int32), times, len(all_users), len(all_items))


def cache_file() -> Path:
    """Return where the downloaded file is kept."""
    return Path.home() / ".cache" / "torchsparse_rec" / "ml-100k" / "u.data"


def download(url: str = URL, connect_seconds: float = CONNECT_SECONDS, total_seconds: float = TOTAL_SECONDS) -> Path:
    """
    Return the file of ml-100k in the cache. Download it unless it is there with the right checksum.

    Args:
        url: address of the archive that holds the file.
        connect_seconds: how long the first answer, and each part of it, may take.
        total_seconds: how long all of it may take.

    Raises:
        OSError: if it does not come in time, or the cache cannot be written.
        ValueError: if what came is not the file; no more than :data:`MOST_BYTES` are taken, and unpacked.
    """
    path = cache_file()
    if path.is_file() and path.stat().st_size <= MOST_BYTES:
        if hashlib.md5(path.read_bytes()).hexdigest() == MD5:
            return path
    content = _unpack(url, _fetch(url, connect_seconds, total_seconds))
    if hashlib.md5(content).hexdigest() != MD5:
        raise ValueError(f"{url}: wrong checksum of u.data, expected md5 {MD5}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(content)
    return path


def _unpack(url: str, archive: bytes) -> bytes:
    """Return the archive's file, uncompressed. Its declared size is not trusted: unpacked bytes are counted."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as members:
            member = members.getinfo(MEMBER)
            # zipfile unpacks other methods in blocks of any size.
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{url}: {MEMBER} must be stored or deflated, got method {member.compress_type}")
            if member.file_size > MOST_BYTES:
                raise ValueError(f"{url}: {MEMBER} declares {member.file_size:,} bytes, more than {MOST_BYTES:,}")
            with members.open(member) as stream:
                content = stream.read(MOST_BYTES + 1)
    except KeyError:
        raise ValueError(f"{url} holds no {MEMBER}") from None
    # RuntimeError is raised for an encrypted member.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{url} is no archive that can be unpacked: {error}") from error
    if len(content) > MOST_BYTES:
        raise ValueError(f"{url}: {MEMBER} unpacks to more than {MOST_BYTES:,} bytes")
    return content


def _fetch(url: str, connect_seconds: float, total_seconds: float) -> bytes:
    """
    Return the body of the answer to a request for ``url``.

    A thread requests it, because the lookup of a name has no time limit of its own, and neither has a server that sends
    byte after byte.
    """
    begun, answers, given_up = time.monotonic(), queue.Queue[Any](), threading.Event()

    def get() -> None:
        try:
            with urllib.request.urlopen(url, timeout=connect_seconds) as answer:
                answers.put(None)
                answers.put(_body(url, answer, given_up))
        except http.client.HTTPException as error:
            answers.put(OSError(f"{url}: no proper answer, {error!r}"))
        except Exception as error:  # The caller raises it.
            answers.put(error)

    def next_answer(seconds: float, problem: str) -> Any:
        try:
            answer = answers.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            raise TimeoutError(problem) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    threading.Thread(target=get, daemon=True).start()
    try:
        next_answer(connect_seconds, f"no answer from {url} within {connect_seconds:g} s")
        left = begun + total_seconds - time.monotonic()
        return next_answer(left, f"{url} was not complete within {total_seconds:g} s")  # type: ignore[no-any-return]
    finally:
        given_up.set()


def _body(url: str, answer: Any, given_up: threading.Event) -> bytes:
    """Read an answer until it ends or ``given_up`` is set, and return its bytes; ValueError if there are too many."""
    parts, size = [], 0
    while not given_up.is_set() and (part := answer.read1(1 << 16)):
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise ValueError(f"{url} sends more than {MOST_BYTES:,} bytes: it is not the archive")
    return b"".join(parts)
