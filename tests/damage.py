"""Damage to the files of a checkpoint, from a seed: it is loaded right or refused by name, and nothing changes."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchsparse_rec.checkpoint.manifest import _end, checksum

#: What an odd manifest has in place of a value.
ODD = [
    *(None, True, False, 0, 1, -1, 2, 1.5, 2**31, 2**40, 2**63, 2**70, -(2**70), float("inf"), float("nan")),
    *("", "x", "0", "int64", "float16", "weight", [], [1], [[0, 1]], [None], {}, {"x": 1}, {"$tensor": "x"}),
    *({"$number": "x", "dtype": "float32"}, {"$number": 1, "dtype": "x"}, {"$number": 1}, {"$tuple": 3}),
    *({"$float": "x"}, {"$tensor": []}, {"$float": [1]}, {"$number": 2**70, "dtype": "int64"}),
]


def damage(folder: Path, draw: random.Random) -> str:
    """Damage one file below a folder, or its place, and return what was done."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    file = draw.choice(files)
    kind = draw.choice([*_OF_BYTES, "gone", "swapped", "odd", "odd", "odd"])
    name = f"{kind} {file.relative_to(folder)}"
    if kind == "gone":
        file.unlink()
    elif kind == "swapped":
        other = draw.choice(files)
        one, two = file.read_bytes(), other.read_bytes()
        file.write_bytes(two)
        other.write_bytes(one)
        name += f" {other.relative_to(folder)}"
    elif kind == "odd":
        manifest = draw.choice([each for each in files if each.suffix == ".json"])
        name = f"odd {manifest.relative_to(folder)} {make_odd(manifest, draw)}"
    else:
        data = file.read_bytes()
        file.write_bytes(_OF_BYTES[kind](bytearray(data), draw))
    return name


def _flipped(data: bytearray, draw: random.Random) -> bytes:
    for _ in range(draw.choice([1, 1, 1, 8])):
        data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
    return bytes(data)


def _zeroed(data: bytearray, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.choice([1, 16, 4096]))
    data[begin:end] = bytes(end - begin)
    return bytes(data)


_OF_BYTES: dict[str, Callable[[bytearray, random.Random], bytes]] = {
    "flipped": _flipped,
    "zeroed": _zeroed,
    "truncated": lambda data, draw: bytes(data[: draw.randrange(len(data))]),
    "longer": lambda data, draw: bytes(data) + bytes(draw.randrange(1, 100)),
}


def make_odd(manifest: Path, draw: random.Random) -> str:
    """Change one thing in a manifest, with a right checksum, and return what it was."""
    fields = json.loads(manifest.read_bytes())
    del fields["crc32c"]
    nodes = list(nodes_of(fields, ""))
    where, holder, key = draw.choice(nodes)
    # The most of a manifest describes shards.
    if draw.random() < 0.5:
        where, holder, key = draw.choice([node for node in nodes if not node[0].startswith(".shards")])
    how = draw.choice(["removed", "replaced", "replaced", "moved", "doubled"])
    if how == "removed":
        del holder[key]
    elif how == "replaced":
        holder[key] = copy.deepcopy(draw.choice(ODD))
        how = f"is {holder[key]!r:.40}"
    elif how == "moved":
        _, other, place = draw.choice(nodes)
        holder[key] = copy.deepcopy(other[place])
        how = f"is {holder[key]!r:.40}"
    elif isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    else:
        holder[f"{key} again"] = copy.deepcopy(holder[key])
    content = json.dumps(fields)[:-1].encode()
    manifest.write_bytes(content + _end(checksum(content)))
    return f"{where} {how}"


def nodes_of(value: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each value in lists and mappings: where it is, what holds it, and its key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield f"{where}.{key}", value, key
        yield from nodes_of(value[key], f"{where}.{key}")


def content_of(x: Any) -> Any:
    """Return a copy of what states hold, in a form that compares by ``==``: of tensors the bytes."""
    if isinstance(x, Tensor):
        whole = x.detach().cpu().contiguous()
        return str(x.dtype), list(x.shape), whole.flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(x, dict):
        return {key: content_of(each) for key, each in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x), [content_of(each) for each in x]
    return repr(x) if isinstance(x, float) else copy.deepcopy(x)


def check_damaged(
    saved: Path, make: Callable[[], Any], load: Callable[..., Any], use: Callable[[Any], Any], seeds: Iterable[int]
) -> Counter[str]:
    """
    Load a checkpoint damaged in many ways; fail where an error names no file, or has changed something.

    Args:
        saved: the folder, with its versions, which stays as it is.
        make: returns an object that has a state of its own.
        load: loads a folder, or one of its versions, into such an object, and returns all that it has then; without a
            folder it returns what it has.
        use: goes on with an object that has loaded what an odd manifest says: it must be able to.
        seeds: one for each case.

    Returns:
        How many were refused, loaded as they should be, or loaded with what an odd manifest says.
    """
    folder, counts = saved.parent / "damaged", Counter[str]()
    right = [load(make(), saved, version) for version in (None, 1)]
    its = before = None
    for seed in seeds:
        draw = random.Random(seed)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved, folder)
        what = f"seed {seed}: {damage(folder, draw)}"
        if its is None:
            its = make()
            before = load(its)
        try:
            found = load(its, folder)
        except (ValueError, FileNotFoundError) as error:
            assert str(folder) in str(error), f"{what}: {error}"
            assert load(its) == before, f"{what}: changed, but {error}"
            counts["refused"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
        if found in right:
            counts["right"] += 1
        else:
            assert ": odd " in what, what
            try:
                use(its)
            except Exception as error:
                raise AssertionError(f"{what}: {error!r}") from error
            counts["as the manifest says"] += 1
        its = None
    return counts
