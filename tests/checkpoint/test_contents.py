"""Checkpoints with right checksums that no variable wrote: the error names the file, and nothing has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.cases import rewrite
from torch import Tensor
from variable.cases import on_disk, rows_of, step

from torchsparse_rec import optim
from torchsparse_rec.checkpoint import CheckpointError, CheckpointStore
from torchsparse_rec.checkpoint.manifest import _end, checksum
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import CBFFilter, CounterFilter, EmbeddingVariableOption

torch_files = pytest.importorskip("safetensors.torch")


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fsync, because no test takes the power away."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def _made(filtering: Any = None, **options: Any) -> tuple[EmbeddingVariable, optim.Adagrad]:
    table = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(filter_option=filtering, **options))
    return table, optim.Adagrad(table.parameters(), lr=0.1)


def _saved(folder: Path, filtering: Any = None) -> None:
    table, optimizer = _made(filtering)
    for _ in range(3):
        step(table, optimizer, [1, 2, 3])
    if filtering is not None:
        table(torch.tensor([4]))  # key 4 waits in the filter
    table.save(folder)


def _rewrite(folder: Path, metadata: Callable | None, tensors: Callable | None, shard: int = 0) -> None:
    """Change a version's metadata, or the tensors of a shard, and correct all checksums."""

    def change(fields: dict) -> None:
        if tensors is not None:
            its = fields["shards"][shard]
            file = folder / "000001" / its["file"]
            changed = tensors(torch_files.load(file.read_bytes()))
            data = torch_files.save({name: x.contiguous() for name, x in changed.items()})
            file.write_bytes(data)
            described = {name: [str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in changed.items()}
            its.update(nbytes=len(data), crc32c=checksum(data), tensors=described)
        if metadata is not None:
            metadata(fields)

    rewrite(folder / "000001" / "manifest.json", change)


def _refuses(folder: Path, file: str, problem: str, filtering: Any = None, **options: Any) -> None:
    table, optimizer = _made(filtering, **options)
    step(table, optimizer, [7, 8, 7, 8])
    before = rows_of(table), table.global_step, table.total_count(), optimizer.state_dict()["state"][0]["sum"].clone()
    with pytest.raises(CheckpointError, match=problem) as raised:
        table.restore(folder)
    assert raised.value.path == str(folder / "000001" / file)
    assert (rows_of(table), table.global_step, table.total_count()) == before[:3]
    assert optimizer.state_dict()["state"][0]["sum"].equal(before[3])
    step(table, optimizer, [7, 9])


BIG = 2**70


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("global_step", ["x", None, True, -5, BIG, 1.5, float("inf"), float("nan")]),
        ("evicted", ["a", None, -1]),
        ("optimizer_steps", ["a", None, -1, BIG, float("nan")]),
        ("seen", ["a", -1, 10**9]),
        ("states", [None, 3, [3], {"sum": 1}]),
        ("optimizer", [7, ["Adagrad"]]),
    ],
)
def test_metadata_that_no_variable_writes(name: str, values: list, tmp_path: Path) -> None:
    _saved(tmp_path)
    for value in values:
        _rewrite(tmp_path, lambda fields, value=value: fields["metadata"].update({name: value}), None)
        _refuses(tmp_path, "manifest.json", f"{name} must be ")
    _rewrite(tmp_path, lambda fields: fields["metadata"].pop(name), None)
    if name in ("seen", "optimizer"):  # older versions, and tables without an optimizer, write none
        table, _ = _made()
        table.restore(tmp_path)
    else:
        _refuses(tmp_path, "manifest.json", f"{name} must be ")


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable:
    return lambda tensors: {**tensors, name: change(tensors[name])}


NUMBERS = ("frequencies", "versions")


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        *(
            (
                lambda x, name=name: {k: v for k, v in x.items() if k != name},
                "shard 'rows' must hold keys, values, freq",
            )
            for name in ("keys", "values", *NUMBERS)
        ),
        *((_changed(name, lambda x: x[:-1]), r" must be .*\[(3|2)") for name in ("keys", "values", *NUMBERS)),
        *((_changed(name, lambda x: x.flatten()[0]), "must be ") for name in ("keys", "values", *NUMBERS)),
        *((_changed(name, lambda x: x.bool()), "must be ") for name in ("keys", "values", *NUMBERS)),
        *((_changed(name, lambda x: x + 0.5), "must be int64") for name in ("keys", *NUMBERS)),
        (_changed("keys", torch.zeros_like), "keys of shard 'rows' must be distinct"),
        (
            _changed("values", lambda x: torch.cat([x, x], 1)),
            r"values must be of floats \[3, 2\], got float32 \[3, 4\]",
        ),
        (_changed("states.sum", lambda x: x[:, :1]), r"states.sum must be of floats \[3, 2\], got float32 \[3, 1\]"),
        (_changed("states.sum", lambda x: x[:, 0]), r"states.sum must be of floats \[3, 2\], got float32 \[3\]"),
        (_changed("frequencies", lambda x: x - 100), r"frequencies must be in \[0, 2147483647\], got -9"),
        (_changed("frequencies", lambda x: x + 2**40), r"frequencies must be in .*, got 10995"),
        (_changed("versions", lambda x: x - 100), r"versions must be in \[-1, 2147483646\], got -9"),
        (_changed("versions", lambda x: x + 2**62), r"versions must be in "),
        (lambda x: {**x, "more": torch.zeros(3)}, "shard 'rows' must hold"),
    ],
)
def test_rows_that_no_variable_writes(tensors: Callable, problem: str, tmp_path: Path) -> None:
    _saved(tmp_path)
    _rewrite(tmp_path, None, tensors)
    _refuses(tmp_path, "shard-00000.safetensors", problem)


@pytest.mark.parametrize(
    ("filtering", "tensors", "problem"),
    [
        (CounterFilter(2), _changed("frequencies", lambda x: x - 100), "frequencies must be in"),
        (CounterFilter(2), lambda x: {"keys": x["keys"]}, "shard 'candidates' must hold keys, frequencies, versions"),
        (CBFFilter(2, 10, 0.1), _changed("sketch", lambda x: x - 100), "sketch must be counts"),
        (CBFFilter(2, 10, 0.1), _changed("sketch", lambda x: x.float()), "sketch must be counts"),
    ],
)
def test_filters_that_no_variable_writes(filtering: Any, tensors: Callable, problem: str, tmp_path: Path) -> None:
    _saved(tmp_path, filtering)
    _rewrite(tmp_path, None, tensors, shard=1)
    _refuses(tmp_path, "shard-00001.safetensors", problem, filtering)


@pytest.mark.parametrize("name", ["erased", "candidates", "sketch", "zzz"])
def test_shards_of_other_names(name: str, tmp_path: Path) -> None:
    _saved(tmp_path)
    _rewrite(tmp_path, lambda fields: fields["shards"][0].update(name=name), None)
    _refuses(tmp_path, "shard-00000.safetensors", "a shard must be one of" if name == "zzz" else f"shard '{name}' must")


def test_a_variable_with_tiers_is_as_it_was(tmp_path: Path) -> None:
    _saved(tmp_path / "saved")
    _rewrite(tmp_path / "saved", None, _changed("frequencies", lambda x: x - 100))
    _refuses(tmp_path / "saved", "shard-00000.safetensors", "frequencies", storage_option=on_disk(tmp_path / "rows"))


def test_keys_of_another_range(tmp_path: Path) -> None:
    table = EmbeddingVariable(2, key_dtype=torch.int32)
    table.insert([1, 2], torch.ones(2, 2))
    table.save(tmp_path)
    _rewrite(tmp_path, None, _changed("keys", lambda x: x + 2**40))
    with pytest.raises(CheckpointError, match="keys must be int32, got 10995"):
        table.restore(tmp_path)
    assert table.total_count() == 2


def test_a_warning_that_is_an_error_changes_nothing(tmp_path: Path) -> None:
    """Restore a checkpoint with states into a table that no optimizer holds, with warnings as errors."""
    _saved(tmp_path)
    table = EmbeddingVariable(2)
    table.insert([1, 2], torch.ones(2, 2))
    with pytest.warns(UserWarning, match="the checkpoint has states of Adagrad"):
        EmbeddingVariable(2).restore(tmp_path)
    with pytest.raises(UserWarning):  # the settings of these tests make warnings errors
        table.restore(tmp_path)
    assert rows_of(table) == {1: [1.0, 1.0], 2: [1.0, 1.0]}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000, "too many lists in lists"),
        (b'{"format": ' + b"9" * 100_000, "is no manifest"),
        (b'{"format": []', "is no manifest"),
    ],
)
def test_manifests_that_are_no_objects(content: bytes, problem: str, tmp_path: Path) -> None:
    _saved(tmp_path)
    (tmp_path / "000001" / "manifest.json").write_bytes(content + _end(checksum(content)))
    _refuses(tmp_path, "manifest.json", problem)
    with pytest.raises(CheckpointError, match=problem):
        CheckpointStore(tmp_path).latest()


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.update(number="1"),
        lambda f: f.update(metadata=[1]),
        lambda f: f["shards"][0].update(nbytes="12"),
        lambda f: f["shards"][0].update(nbytes=1e3),
        lambda f: f["shards"][0].update(nbytes=True),
        lambda f: f["shards"][0].update(tensors=[1]),
        lambda f: f["shards"][0].update(tensors={"keys": 3}),
        lambda f: f["shards"][0].update(name=3),
        lambda f: f["shards"][0].update(crc32c=3),
    ],
)
def test_manifests_of_other_types(change: Callable, tmp_path: Path) -> None:
    _saved(tmp_path)
    _rewrite(tmp_path, change, None)
    _refuses(tmp_path, "manifest.json", "is no manifest of a checkpoint")
