"""The MovieLens data sets: from a folder, from the network, or a generated stand-in of the same shape."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
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

from ...data.movielens import LAYOUTS, read_ratings
from ...files import whole_file

ENVIRONMENT_VARIABLE = "TORCHSPARSE_REC_DATA"
URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
MD5 = "6e47046882bad158b0efbb84cd5cb987"
MEMBER = "ml-100k/u.data"
CONNECT_SECONDS, TOTAL_SECONDS = 10.0, 60.0
# The archive has 5 MB and the file in it 2 MB. Anything larger is not the archive.
MOST_BYTES = 1 << 23


@dataclass(frozen=True)
class Source:
    """A MovieLens release: its file, and the number of its ratings."""

    file: str
    ratings: int


SOURCES = {
    "ml-100k": Source("u.data", 100_000),
    "ml-1m": Source("ratings.dat", 1_000_209),
    "ml-20m": Source("ratings.csv", 20_000_263),
}


@dataclass(frozen=True)
class Interactions:
    """
    Interactions of users with items, in the file's order.

    Args:
        name: the data set's.
        users, items: 0-based ids without gaps, int32 ``[N]``.
        timestamps: Unix times in seconds, int64 ``[N]``.
        num_users, num_items: bounds of the ids.
    """

    name: str
    users: np.ndarray
    items: np.ndarray
    timestamps: np.ndarray
    num_users: int
    num_items: int

    def checksum(self) -> int:
        """Return a number that tells two data sets apart."""
        value = zlib.crc32(f"{self.num_users} {self.num_items}".encode())
        for column in (self.users, self.items, self.timestamps):
            value = zlib.crc32(np.ascontiguousarray(column).data, value)
        return value


def load(dataset: str = "ml-100k", data_dir: str | Path | None = None) -> tuple[Interactions, str]:
    """
    Return the interactions of a MovieLens release.

    With ``data_dir``, or ``$TORCHSPARSE_REC_DATA``, the original file is read from there. Without either, ml-100k is
    taken from the cache or downloaded, and where that fails a generated data set of its shape takes its place.

    Args:
        dataset: ``ml-100k``, ``ml-1m``, ``ml-20m`` or ``generated``.
        data_dir: the folder of the file, or one that holds it as ``<dataset>/<file>``.

    Returns:
        The interactions, and one line that says where they come from.

    Raises:
        FileNotFoundError: if the folder does not hold the file.
        ValueError: if the file is truncated or garbled, or the data set can only be read from a folder.
    """
    if dataset == "generated":
        return generate(), "a generated data set of ml-100k's shape"
    if dataset not in SOURCES:
        raise ValueError(f"dataset must be one of {', '.join(SOURCES)} or generated, got {dataset!r}")
    folder = data_dir if data_dir is not None else os.environ.get(ENVIRONMENT_VARIABLE) or None
    if folder is not None:
        given_by = "--data-dir" if data_dir is not None else f"${ENVIRONMENT_VARIABLE}"
        path = find(dataset, Path(folder), given_by)
        return read(dataset, path), f"{dataset} from {path}"
    if dataset != "ml-100k":
        raise ValueError(f"{dataset} is not downloaded: give its folder by --data-dir or ${ENVIRONMENT_VARIABLE}")
    try:
        path = download()
    except (OSError, ValueError) as error:
        return generate(), (
            f"ml-100k could not be downloaded ({error}): this run trains on GENERATED data of the same shape; "
            f"give the real file by --data-dir or ${ENVIRONMENT_VARIABLE}"
        )
    return read(dataset, path), f"ml-100k from {path}"


def find(dataset: str, folder: Path, given_by: str) -> Path:
    """Return the data set's file in ``folder/<dataset>`` or ``folder``, or raise FileNotFoundError with both names."""
    places = [folder / dataset / SOURCES[dataset].file, folder / SOURCES[dataset].file]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"{given_by} is {folder}, but neither {places[0]} nor {places[1]} exists")


def read(dataset: str, path: Path) -> Interactions:
    """Read a release's file. Raise ``ValueError`` with the line's number if it is garbled or lines are missing."""
    source, layout = SOURCES[dataset], LAYOUTS[dataset]
    with path.open("rb") as stream:
        columns = read_ratings(stream, str(path), layout)
    if columns.shape[1] != source.ratings:
        line = columns.shape[1] + (layout.header is not None)
        raise ValueError(
            f"{path} ends at line {line:,} with {columns.shape[1]:,} ratings, "
            f"expected the {source.ratings:,} ratings of {dataset}"
        )
    return index_ids(dataset, *columns)


def index_ids(name: str, users: np.ndarray, items: np.ndarray, timestamps: np.ndarray) -> Interactions:
    """Renumber the ids that occur from 0, in ascending order."""
    users, num_users = _without_gaps(users)
    items, num_items = _without_gaps(items)
    return Interactions(name, users, items, timestamps, num_users, num_items)


def _without_gaps(ids: np.ndarray) -> tuple[np.ndarray, int]:
    present = np.zeros(int(ids.max()) + 1, dtype=bool)
    present[ids] = True
    number = np.cumsum(present, dtype=np.int32) - np.int32(1)
    return number[ids], int(present.sum())


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


def generate(
    num_users: int = 943, num_items: int = 1682, num_interactions: int = 100_000, seed: int = 0
) -> Interactions:
    """
    Generate interactions that can be learned: popular and rare items, and users of different tastes.

    A user of taste ``t`` prefers item ``i`` of qualities ``q_i`` by ``log popularity_i + 2.5 <t, q_i>``; ``<t, q_i>``
    is about standard normal and popularity falls with an item's rank; the items a user touches are a draw without
    replacement by these preferences, in random order of time.

    Raises:
        ValueError: if a user would have to touch more than half of the items.

    Example:
        >>> data = generate(10, 200, 500)
        >>> len(data.users), data.num_users, data.num_items
        (500, 10, 200)
    """
    random = np.random.default_rng(seed)
    counts = _activity(random, num_users, num_interactions, num_items // 2)
    log_popularity = random.permutation(-np.log(np.arange(num_items) + 11.0))
    rank = 8
    tastes = random.standard_normal((num_users, rank)) / rank**0.5
    qualities = random.standard_normal((num_items, rank))
    preference = log_popularity + 2.5 * tastes @ qualities.T
    # The largest values of preference + Gumbel noise are a draw without replacement with weights exp(preference).
    order = np.argsort(-(preference + random.gumbel(size=preference.shape)), axis=1)
    users = np.repeat(np.arange(num_users), counts)
    items = np.concatenate([order[user, :count] for user, count in enumerate(counts)])
    timestamps = random.integers(874_000_000, 894_000_000, num_interactions)
    shuffled = random.permutation(num_interactions)
    return Interactions(
        "generated",
        users[shuffled].astype(np.int32),
        items[shuffled].astype(np.int32),
        timestamps[shuffled].astype(np.int64),
        num_users,
        num_items,
    )


def _activity(random: np.random.Generator, num_users: int, total: int, most: int) -> np.ndarray:
    """Draw the number of items per user: log-normal, at least a fifth of the mean, at most ``most``; sum ``total``."""
    if total > num_users * most:
        raise ValueError(
            f"num_interactions must be at most {num_users * most}: {num_users} users with at most {most} items each, "
            f"got {total}"
        )
    least = min(total // num_users // 5, most)
    wish = random.lognormal(sigma=1.0, size=num_users)
    counts = np.clip(least + (total - least * num_users) * wish / wish.sum(), least, most).astype(np.int64)
    while (missing := total - int(counts.sum())) > 0:
        room = np.flatnonzero(counts < most)
        counts[random.choice(room, size=min(missing, len(room)), replace=False)] += 1
    return counts
