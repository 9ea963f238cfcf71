"""Numbered versions of checkpoints: contents that come back, chains, pruning, and errors of wrong use."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchsparse_rec.checkpoint import CheckpointStore, VersionInfo, _shards
from torchsparse_rec.checkpoint.manifest import checksum

pytest.importorskip("safetensors")

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.fixture(scope="module", autouse=True)
def no_fsync():
    """Replace fsync, which the thousands of saves of the random chains need not wait for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def bits(tensors):
    """Return tensors' bits in a form that can be compared, NaN included."""
    return {
        name: (t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).tolist()) for name, t in tensors.items()
    }


def write(store, *arguments, **options):
    """Write a version without shards, and return its number."""
    with store.writer(*arguments, **options) as writer:
        return writer.number


def read(chain):
    return [(info.number, name, bits(tensors)) for info, name, tensors in chain]


# ---- What is written comes back -------------------------------------------------------------------------------------


@st.composite
def tensor(draw):
    """Draw a tensor of random bits."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    high = 2 if dtype == torch.bool else 256
    width = torch.empty(0, dtype=dtype).element_size()
    size = torch.Size(shape).numel()
    return torch.randint(high, (size * width,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


shards = st.lists(
    st.tuples(st.text(max_size=5), st.dictionaries(st.text(min_size=1, max_size=5), tensor(), max_size=3)), max_size=3
)
programs = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2**20), shards, st.sampled_from([None, None, 1, 2, 3])), max_size=8
)


@settings(max_examples=60)
@given(programs)
def test_random_chains(program):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "run"
        bases, contents = {}, {}
        for number, (full, choice, given_shards, keep) in enumerate(program, start=1):
            store = CheckpointStore(path, keep=keep)
            base = None if full or not bases else sorted(bases)[choice % len(bases)]
            kind = "full" if base is None else "delta"
            with store.writer(kind, {"number": number}, base=base) as writer:
                for name, tensors in given_shards:
                    writer.write(name, tensors)
            bases[number], contents[number] = base, [(number, n, bits(t)) for n, t in given_shards]
            needed = set(sorted(bases)[-(keep or len(bases)) :])
            for older in sorted(bases, reverse=True):
                if older in needed and bases[older] is not None:
                    needed.add(bases[older])
            bases = {n: b for n, b in bases.items() if n in needed}

            assert [(info.number, info.base) for info in store.versions()] == sorted(bases.items())
            assert all(info.problem is None for info in store.versions())
            assert store.latest().metadata == {"number": number}
            assert sorted(p.name for p in path.iterdir()) == [".lock", *(f"{n:06d}" for n in sorted(bases))]
            for asked in bases:
                chain, expected, below = store.open(asked), [], asked
                while below is not None:
                    expected, below = contents[below] + expected, bases[below]
                assert read(chain) == expected
                assert len(chain) == len(expected)
                chain.verify()


def test_views_and_tensors_that_share_memory(tmp_path):
    table = torch.arange(24.0).view(4, 6).requires_grad_()
    tensors = {"rows": table[1:3], "same": table[1:3], "columns": table[:, ::2], "turned": table.T, "all": table}
    with CheckpointStore(tmp_path).writer() as writer:
        writer.write("s", tensors)
    ((_, _, found),) = CheckpointStore(tmp_path).open()
    assert bits(found) == bits({name: t.detach() for name, t in tensors.items()})
    assert list(found) == list(tensors)
    found["rows"].zero_()
    assert found["same"].any()


@pytest.mark.cuda
def test_tensors_on_a_device(tmp_path):
    tensors = {"x": torch.rand(5, device="cuda", dtype=torch.float16), "k": torch.arange(3, device="cuda")}
    with CheckpointStore(tmp_path).writer() as writer:
        writer.write("s", tensors)
    ((_, _, found),) = CheckpointStore(tmp_path).open()
    assert bits(found) == bits({name: t.cpu() for name, t in tensors.items()})


def test_other_programs_read_the_shards(tmp_path):
    from safetensors import safe_open

    with CheckpointStore(tmp_path).writer() as writer:
        writer.write("s", {"x": torch.arange(3)})
    with safe_open(tmp_path / "000001" / "shard-00000.safetensors", "pt") as file:
        assert file.get_tensor("x").tolist() == [0, 1, 2]


def test_checksum():
    assert checksum(b"") == "00000000"
    assert checksum(b"123456789") == "e3069283"


# ---- What versions say of themselves --------------------------------------------------------------------------------


def test_versions(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    assert store.versions() == [] and store.latest() is None
    metadata = {"step": 3, "names": ["a", "ü\ud800"], "rate": 0.1, "inner": {"none": None}, "limit": float("inf")}
    with store.writer(metadata=metadata) as writer:
        writer.write("a", {"x": torch.zeros(2)})
        writer.write("a", {"y": torch.zeros(3)})
        info = writer.commit()
    write(store, "delta")
    nbytes = sum(file.stat().st_size for file in (tmp_path / "run" / "000001").glob("shard-*"))
    assert info == VersionInfo(1, "full", None, metadata, 2, nbytes)
    assert store.versions() == [info, VersionInfo(2, "delta", 1)]
    assert store.latest() == store.open().version == store.versions()[-1]
    assert store.open(1).versions == [info]
    assert repr(store) == f"CheckpointStore({str(tmp_path / 'run')!r}, keep=None)"


def test_a_reader_sees_the_version_only_once_it_is_committed(tmp_path):
    store, phases = CheckpointStore(tmp_path, keep=1), []
    with store.writer(on_phase=lambda phase: phases.append((phase, len(store.versions())))) as writer:
        writer.write("a", {"x": torch.zeros(2)})
        writer.write("b", {"x": torch.zeros(2)})
    before = ["sweep", "write shard 0", "write shard 1", "fsync", "rename manifest"]
    assert phases == [*((phase, 0) for phase in before), ("committed", 1), ("prune", 1)]


def test_a_reader_goes_on_while_versions_are_written(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for value in (1, 2):
        with store.writer() as writer:
            writer.write("a", {"x": torch.tensor(value)})
        chain = store.open()
    write(store, "delta")
    assert [tensors["x"].item() for _, _, tensors in chain] == [2]
    write(store)
    with pytest.raises(ValueError, match=r"000002/shard-00000.safetensors: the file is missing"):
        list(chain)


def test_versions_that_go_while_they_are_listed_are_not_there(tmp_path, monkeypatch):
    store, read_file = CheckpointStore(tmp_path), _shards.read_file
    for kind in ("full", "delta", "full"):
        write(store, kind)

    def prune(path):
        for number in ("000002", "000001"):
            (tmp_path / number / "manifest.json").unlink(missing_ok=True)
        return read_file(path)

    monkeypatch.setattr(_shards, "read_file", prune)
    assert store.versions() == [VersionInfo(3, "full")]


# ---- Pruning and sweeping -------------------------------------------------------------------------------------------


def test_damaged_versions_do_not_count_among_those_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)

    def save():
        write(store)
        return [info.number for info in store.versions()]

    assert [save(), save(), save()] == [[1], [1, 2], [2, 3]]
    (tmp_path / "000003" / "manifest.json").write_text("")
    assert save() == [2, 3, 4]
    assert [info.problem is None for info in store.versions()] == [True, False, True]
    assert save() == [4, 5]


def test_folders_of_others_are_left_alone(tmp_path):
    """Leave other people's folders alone, as the path may have been given by mistake."""
    for name in ("202401", "000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard-00000.safetensors").write_text("mine")
        (tmp_path / name / "photo.jpg").write_text("mine")
    (tmp_path / "000012").write_text("a file")
    (tmp_path / "7").mkdir()
    before = sorted(tmp_path.rglob("*"))
    store = CheckpointStore(tmp_path, keep=1)
    for number in (202402, 202403):
        assert write(store) == number
    assert [info.number for info in store.versions()] == [202403]
    assert sorted(set(tmp_path.rglob("*")) & set(before)) == before


def test_an_old_version_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    write(store)

    def refuse(path, **options):
        raise PermissionError(13, "no", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.warns(RuntimeWarning, match="version 2 is saved, but an older one could not be removed: .*000001"):
        write(store)
    assert [info.number for info in store.versions()] == [1, 2]


# ---- Errors ---------------------------------------------------------------------------------------------------------


def test_arguments(tmp_path):
    for keep in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="CheckpointStore: keep must be None or at least 1, got"):
            CheckpointStore(tmp_path, keep=keep)
    with pytest.raises(ValueError, match="path must name a folder, got an empty name"):
        CheckpointStore("")
    store = CheckpointStore(tmp_path / "run")
    with pytest.raises(ValueError, match="kind must be one of full, delta, got 'half'"):
        store.writer("half")
    with pytest.raises(ValueError, match="base is for kind='delta', got 1 for a full version"):
        store.writer("full", base=1)
    with pytest.raises(ValueError, match="metadata must be what JSON can hold: .*Tensor"):
        store.writer(metadata={"x": torch.zeros(1)})
    for metadata in ({"x": (1, 2)}, {1: 2}, {"x": float("nan")}):
        with pytest.raises(ValueError, match="metadata must be as JSON gives it back"):
            store.writer(metadata=metadata)
    with pytest.raises(FileNotFoundError, match="there is no complete checkpoint: '.*run'"):
        store.open()
    assert not (tmp_path / "run").exists()


def test_bases(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(ValueError, match=f"base needs a full version to be on top of in {tmp_path}, got None"):
        write(store, "delta")
    write(store)
    with pytest.raises(ValueError, match=r"base must be one of \[1\] in .*, got 7"):
        write(store, "delta", base=7)
    with pytest.raises(ValueError, match=r"version must be one of \[1\] of .*, got 2"):
        store.open(2)
    # After such errors the lock is free.
    assert write(store, "delta", base=1) == 2


def test_what_cannot_be_stored(tmp_path):
    store = CheckpointStore(tmp_path)
    for key, value, message in [
        ("x", torch.zeros(1, dtype=torch.complex64), r"tensor 'x' of shard 's' must be dense and of one of the dtypes "
         r"float64, .*uint8, got torch.complex64, torch.strided"),
        ("x", torch.zeros(1).to_sparse(), "got torch.float32, torch.sparse_coo"),
        ("x", [1.0], "got list"),
        ("", torch.zeros(1), "shard 's' must name its tensors by strings, got ''"),
        ("__metadata__", torch.zeros(1), "shard 's' must name its tensors by strings, got '__metadata__'"),
        (3, torch.zeros(1), "shard 's' must name its tensors by strings, got 3"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            with store.writer() as writer:
                writer.write("s", {key: value})
    assert store.versions() == []


def test_an_error_in_the_block_publishes_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        with store.writer() as writer:
            writer.write("s", {"x": torch.zeros(1)})
            raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="version 1 was not written, since an error came before"):
        with store.writer() as writer:
            with pytest.raises(ValueError, match="must be dense"):
                writer.write("s", {"x": None})
    assert store.versions() == [] and os.listdir(tmp_path) == [".lock"]


def test_an_error_after_the_commit_takes_nothing_back(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        with store.writer() as writer:
            writer.commit()
            raise KeyboardInterrupt
    assert store.latest().number == 1


def test_a_writer_serves_one_block(tmp_path):
    writer = CheckpointStore(tmp_path).writer()
    with pytest.raises(RuntimeError, match=r"must be open, as in its block before commit\(\), but is new"):
        writer.write("s", {})
    with writer:
        writer.commit()
        with pytest.raises(RuntimeError, match="but is committed"):
            writer.write("s", {})
        with pytest.raises(RuntimeError, match="but is committed"):
            writer.commit()
    with pytest.raises(RuntimeError, match="must be entered once, but is closed"):
        writer.__enter__()
    assert len(CheckpointStore(tmp_path).versions()) == 1


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"CheckpointStore.writer needs .* 'torchsparse_rec\[checkpoint\]'"):
        CheckpointStore(tmp_path).writer()
    with pytest.raises(ImportError, match=r"CheckpointStore.open needs .* 'torchsparse_rec\[checkpoint\]'"):
        CheckpointStore(tmp_path).open()
