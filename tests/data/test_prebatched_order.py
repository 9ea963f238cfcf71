"""The order of prebatched batches: shuffles, other sizes, ranks, workers, and resuming where a run stopped."""

import json
from collections import namedtuple

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from torchsparse_rec import JaggedTensor
from torchsparse_rec.data import DataError, PrebatchedDataset, _index, write_prebatched

SIZES = [5, 7, 1, 0, 9, 4, 4, 4]


def write(path, sizes, **keywords):
    """Write rows numbered from 0 in batches of these sizes; row i has a list of i % 3 items i."""

    def batches():
        begin = 0
        for size in sizes:
            row = torch.arange(begin, begin + size)
            lists = JaggedTensor(row.repeat_interleave(row % 3), lengths=row % 3)
            yield {
                "row": row,
                "pair": torch.stack([row, -row], 1),
                "list": lists,
                "text": [str(int(i)) for i in row] or pa.array([], pa.string()),
            }
            begin += size

    write_prebatched(path, batches(), **keywords)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("order")
    return {name: write(folder / str(name), SIZES, compression=name) for name in (None, "zstd")}


def rows(batches):
    """Return the row numbers of each batch, after checking that its columns belong to the same rows."""
    found = []
    for batch in batches:
        row = batch["row"]
        assert torch.equal(batch["pair"].long(), torch.stack([row.long(), -row.long()], 1))
        assert batch["text"].to_pylist() == [str(i) for i in row.tolist()]
        assert batch["list"].lengths().tolist() == [i % 3 for i in row.tolist()]
        assert batch["list"].values().tolist() == [i for i in row.tolist() for _ in range(i % 3)]
        found.append(row.tolist())
    return found


settings_of_datasets = st.fixed_dictionaries(
    {
        "batch_size": st.none() | st.integers(1, 40),
        "shuffle": st.booleans(),
        "shuffle_rows_window": st.integers(0, 4),
        "seed": st.integers(0, 3),
        "drop_last": st.booleans(),
    }
)


@settings(max_examples=60)
@given(keywords=settings_of_datasets, compression=st.sampled_from([None, "zstd"]), data=st.data())
def test_an_epoch_has_each_row_once_and_goes_on_anywhere(keywords, compression, data, files):
    dataset = PrebatchedDataset(files[compression], **keywords)
    found = rows(dataset)
    assert len(found) == len(dataset)
    flat = [row for batch in found for row in batch]
    size = keywords["batch_size"]
    if size is not None:
        assert all(len(batch) == size for batch in found[:-1])
    kept = 34 // size * size if size is not None and keywords["drop_last"] else 34
    assert len(flat) == len(set(flat)) == kept and set(flat) <= set(range(34))
    assert rows(dataset.get_batch(i) for i in range(len(dataset))) == found
    assert rows(PrebatchedDataset(files[compression], **keywords)) == found

    cut = data.draw(st.integers(0, len(found)))
    batches = iter(dataset)
    begun = rows(next(batches) for _ in range(cut))
    other = PrebatchedDataset(files[compression], **keywords)
    other.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert begun + rows(other) == found
    assert rows(other) == found


@settings(max_examples=60)
@given(keywords=settings_of_datasets, world=st.integers(1, 5))
def test_ranks_share_an_epoch_evenly(keywords, world, files):
    everything = rows(PrebatchedDataset(files[None], **keywords))
    shares = [rows(PrebatchedDataset(files[None], **keywords, rank=rank, world_size=world)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    together = [batch for share in shares for batch in share]
    count = len(everything)
    if keywords["drop_last"]:
        assert together == everything[: count // world * world]
    else:
        assert together == [everything[i % count] for i in range(-(-count // world) * world)]


def test_first_batches_by_hand(files):
    assert rows(PrebatchedDataset(files[None]))[:3] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [12]]
    found = rows(PrebatchedDataset(files[None], batch_size=6))
    assert found[:3] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17]]
    shuffled = rows(PrebatchedDataset(files[None], shuffle=True))
    stored = rows(PrebatchedDataset(files[None]))
    assert shuffled != stored and sorted(shuffled) == sorted(stored)


def test_rows_stay_within_their_window(files):
    window = PrebatchedDataset(files[None], shuffle_rows_window=2, batch_size=12)
    found = rows(window)
    assert sorted(found[0]) == list(range(12)) and found[0] != list(range(12))
    assert set(found[1]) <= set(range(12, 26))


def test_epochs_differ_and_repeat(files):
    dataset = PrebatchedDataset(files[None], shuffle=True, shuffle_rows_window=3, batch_size=5)
    first = rows(dataset)
    dataset.set_epoch(1)
    second = rows(dataset)
    dataset.set_epoch(0)
    assert rows(dataset) == first != second
    assert rows(PrebatchedDataset(files[None], shuffle=True, shuffle_rows_window=3, batch_size=5, seed=1)) != first


def test_large_batches_come_without_copies(tmp_path):
    path = write(tmp_path / "f.arrow", [1000, 1000])
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()
    dataset = PrebatchedDataset(path, batch_size=250)
    batches = list(dataset)
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(str(path))]
    for batch in batches:
        place = batch["row"].data_ptr()
        assert any(int(low, 16) <= place < int(high, 16) for low, high in ranges)


def test_windows_of_many_batches_are_copied_in_parts(files, monkeypatch):
    expected = rows(PrebatchedDataset(files[None], shuffle_rows_window=7))
    monkeypatch.setattr("torchsparse_rec.data.prebatched._MOST_KEPT", 3)
    assert rows(PrebatchedDataset(files[None], shuffle_rows_window=7)) == expected


def test_a_state_of_a_complete_epoch_does_not_repeat_it(files):
    dataset = PrebatchedDataset(files[None], batch_size=4, shuffle=True)
    expected = rows(dataset)
    state = dataset.state_dict()
    again = PrebatchedDataset(files[None], batch_size=4, shuffle=True)
    again.load_state_dict(state)
    assert rows(again) == [] and again.state_dict() == state
    assert rows(again) == expected
    again.load_state_dict(state)
    again.set_epoch(1)
    assert len(rows(again)) == len(expected)
    # An iteration that has only begun, or a chosen next epoch, does not count as a complete epoch.
    begun = iter(dataset)
    assert dataset.state_dict()["position"] == 0
    assert rows([*begun]) == expected
    dataset.set_epoch(0)
    assert dataset.state_dict()["position"] == 0


# ---- Workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_batches_in_the_same_order(workers, files):
    dataset = PrebatchedDataset(files["zstd"], batch_size=4, shuffle=True, shuffle_rows_window=2)
    expected = rows(dataset)
    assert rows(DataLoader(dataset, batch_size=None, num_workers=workers)) == expected


def test_a_run_with_workers_goes_on_where_it_stopped(files):
    dataset = PrebatchedDataset(files[None], batch_size=4, shuffle=True)
    dataset.set_epoch(3)
    expected = rows(dataset)
    loader = iter(DataLoader(dataset, batch_size=None, num_workers=2))
    begun = rows(next(loader) for _ in range(3))
    del loader
    state = dataset.state_dict(delivered=3)
    again = PrebatchedDataset(files[None], batch_size=4, shuffle=True)
    again.load_state_dict(state)
    assert begun + rows(DataLoader(again, batch_size=None, num_workers=2)) == expected
    again.set_epoch(4)
    dataset.set_epoch(4)
    assert rows(DataLoader(again, batch_size=None, num_workers=2)) == rows(dataset)


def test_workers_that_stay_see_the_next_epoch(files):
    dataset = PrebatchedDataset(files[None], shuffle=True)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    first = rows(loader)
    dataset.set_epoch(1)
    second = rows(loader)
    assert first != second and second == rows(dataset)
    del loader


# What torch tells a dataset in a worker process.
WorkerInfo = namedtuple("WorkerInfo", "id num_workers")


def test_each_workers_own_state_goes_on(files, monkeypatch):
    """Resume each worker from its own state, as torchdata's StatefulDataLoader saves and loads them."""
    expected = rows(PrebatchedDataset(files[None], batch_size=4))
    states, taken = [], {}
    for worker, count in ((0, 2), (1, 1)):
        monkeypatch.setattr("torchsparse_rec.data.prebatched.get_worker_info", lambda w=worker: WorkerInfo(w, 2))
        dataset = PrebatchedDataset(files[None], batch_size=4)
        batches = iter(dataset)
        taken[worker] = rows(next(batches) for _ in range(count))
        states.append(dataset.state_dict())
    for worker, state in enumerate(states):
        monkeypatch.setattr("torchsparse_rec.data.prebatched.get_worker_info", lambda w=worker: WorkerInfo(w, 2))
        dataset = PrebatchedDataset(files[None], batch_size=4)
        dataset.load_state_dict(state)
        assert taken[worker] + rows(dataset) == expected[worker::2]
    monkeypatch.setattr("torchsparse_rec.data.prebatched.get_worker_info", lambda: WorkerInfo(0, 3))
    dataset.load_state_dict(states[0])
    with pytest.raises(ValueError, match="the state is from one of 2 workers, and there are 3"):
        next(iter(dataset))


# ---- Several files --------------------------------------------------------------------------------------------------


def test_several_files_are_one(tmp_path):
    write_prebatched(tmp_path / "a", [{"x": [1, 2], "y": [0.5, 1.5]}, {"x": [3], "y": [2.5]}])
    write_prebatched(tmp_path / "b", [{"y": [3.5], "x": [400]}], compression="zstd")
    dataset = PrebatchedDataset([tmp_path / "a", tmp_path / "b"], batch_size=3)
    assert [batch["x"].tolist() for batch in dataset] == [[1, 2, 3], [400]]
    assert {batch["x"].dtype for batch in dataset} == {torch.int16} and dataset.num_rows() == 4
    assert [batch["x"].dtype for batch in PrebatchedDataset([tmp_path / "a"])] == [torch.int8, torch.int8]


def test_negatives_beside_integers_that_need_64_bits(tmp_path):
    write_prebatched(tmp_path / "a", [{"x": [1]}, {"x": [-1]}])
    write_prebatched(tmp_path / "b", [{"x": pa.array([2**63], pa.uint64())}])
    batches = iter(PrebatchedDataset([tmp_path / "b", tmp_path / "a"]))
    assert [next(batches)["x"].tolist(), next(batches)["x"].tolist()] == [[2**63], [1]]
    with pytest.raises(DataError, match="a: column 'x' of batch 1 must be uint64 as in other files: uint64 has no -1"):
        next(batches)


def test_each_file_is_opened_once(tmp_path, monkeypatch):
    for name in "abc":
        write_prebatched(tmp_path / name, [{"x": [1], "y": [2]}])
    opened = []
    read = _index.read_index
    monkeypatch.setattr(_index, "read_index", lambda fd, path, size: (opened.append(path), read(fd, path, size))[1])
    dataset = PrebatchedDataset([tmp_path / name for name in "abc"], columns=["y"])
    assert len(opened) == 3 and [list(batch) for batch in dataset] == [["y"]] * 3


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"x": [1.5]}, r"b: column 'x' is double, expected int8 as in .*a"),
        ({"y": [1]}, r"b: column 'x' is missing, unlike in .*a"),
        ({"x": [1], "z": [1]}, r"b: column 'z' is not in .*a"),
    ],
)
def test_files_that_do_not_fit_name_file_and_column(other, text, tmp_path):
    write_prebatched(tmp_path / "a", [{"x": [1]}])
    write_prebatched(tmp_path / "b", [other])
    with pytest.raises(DataError, match=text):
        PrebatchedDataset([tmp_path / "a", tmp_path / "b"])


# ---- Arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"shuffle_rows_window": -1}, "shuffle_rows_window must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"batch_size": 1.5}, "batch_size must be an integer, got 1.5"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"columns": []}, r"columns must be distinct names, at least one, got \[\]"),
        ({"columns": "row"}, "columns must be distinct names, at least one, got 'row'"),
        ({"columns": ["row", "row"]}, r"columns must be distinct names, at least one, got \['row', 'row'\]"),
        ({"fill": "x"}, "PrebatchedDataset: fill must be a number, or numbers by column, got 'x'"),
        ({"integers": torch.float32}, "PrebatchedDataset: integers must be an integer dtype, got torch.float32"),
        ({"rank": 2, "world_size": 2}, r"rank must be in \[0, world_size = 2\), got 2"),
        ({"rank": 1}, "rank and world_size must be given together, got 1 and None"),
        ({"columns": ["nothing"]}, "columns must be among .*, got 'nothing'"),
    ],
)
def test_wrong_arguments(keywords, text, files):
    with pytest.raises(ValueError, match=text):
        PrebatchedDataset(files[None], **keywords)


def test_wrong_calls(files):
    dataset = PrebatchedDataset(files[None])
    with pytest.raises(IndexError, match=r"i must be in \[0, 8\), got 8"):
        dataset.get_batch(8)
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        dataset.set_epoch(-1)
    with pytest.raises(ValueError, match="paths must have at least one file, got none"):
        PrebatchedDataset([])
    with pytest.raises(ValueError, match="the state has batch_size=None, this dataset has 3"):
        PrebatchedDataset(files[None], batch_size=3).load_state_dict(dataset.state_dict())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"position": -5}, r"state\['position'\] must be at least 0, got -5"),
        ({"start": 0.5}, r"state\['start'\] must be an integer, got 0.5"),
        ({"workers": 0}, r"state\['workers'\] must be at least 1, got 0"),
        ({"epoch": "x"}, r"state\['epoch'\] must be an integer, got 'x'"),
        ({"of": 1}, r"state must be one of state_dict\(\), got"),
    ],
    ids=lambda x: "",
)
def test_states_that_are_none(changes, text, files):
    dataset = PrebatchedDataset(files[None])
    with pytest.raises(ValueError, match=text):
        dataset.load_state_dict({**dataset.state_dict(), **changes})
    for nothing in ({}, None, {"of": dataset.state_dict()["of"]}):
        with pytest.raises(ValueError, match=r"state must be one of state_dict\(\), got"):
            dataset.load_state_dict(nothing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_pinning_needs_cuda(files):
    with pytest.raises(ValueError, match="pin_memory needs CUDA, which this machine lacks"):
        PrebatchedDataset(files[None], pin_memory=True)


@pytest.mark.cuda
def test_pinned_batches(files):
    for batch in PrebatchedDataset(files[None], pin_memory=True):
        for values in (batch["row"], batch["list"].values()):
            assert values.is_pinned() or values.numel() == 0  # nothing is in no memory
