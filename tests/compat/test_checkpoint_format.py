"""V2 checkpoints, read and written without TensorFlow, beside TensorFlow itself."""

import struct

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from torchsparse_rec.compat.checkpoints import format as form
from torchsparse_rec.compat.checkpoints import wire
from torchsparse_rec.compat.checkpoints.format import CheckpointReader
from torchsparse_rec.compat.checkpoints.writer import CheckpointWriter

DTYPES = sorted(form.DTYPES.values(), key=str)
# Those of which TensorFlow's reader joins slices.
CUT = (torch.float32, torch.float64, torch.int32, torch.int64)
names = st.text("abz/_-.0é", min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 7), max_size=3)


def drawn(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(tuple(shape), generator=generator) * 100).to(dtype)


def write(path, **tensors):
    with CheckpointWriter(str(path)) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return CheckpointReader(str(path))


@pytest.mark.tensorflow
@hypothesis.settings(max_examples=40)
@hypothesis.given(st.dictionaries(names, st.tuples(shapes, st.sampled_from(DTYPES), st.integers(1, 9)), max_size=12))
def test_tensorflow_reads_what_is_written(tensorflow, tmp_path_factory, tensors):
    prefix = str(tmp_path_factory.mktemp("checkpoint") / "model")
    wanted = {}
    with CheckpointWriter(prefix) as writer:
        for seed, (name, (shape, dtype, parts)) in enumerate(tensors.items()):
            wanted[name] = drawn(shape, dtype, seed)
            is_cut = shape and shape[0] >= parts and dtype in CUT
            writer.add(name, wanted[name], parts if is_cut else 1)
    theirs, ours = tensorflow.train.load_checkpoint(prefix), CheckpointReader(prefix)
    assert theirs.get_variable_to_shape_map() == {name: list(x.shape) for name, x in wanted.items()}
    for name, x in wanted.items():
        assert ours.read(name).dtype == x.dtype
        assert torch.equal(ours.read(name).double(), x.double())
        assert np.array_equal(np.asarray(theirs.get_tensor(name)).astype(np.float64), x.double().numpy())


@pytest.mark.tensorflow
@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_tensorflow(tensorflow, tmp_path, axis):
    v1, wanted = tensorflow.compat.v1, np.arange(77, dtype=np.float32).reshape(11, 7)
    with tensorflow.Graph().as_default(), v1.Session() as session:
        v1.get_variable("a/b", wanted.shape, partitioner=v1.fixed_size_partitioner(3, axis))
        session.run(v1.global_variables_initializer())
        for part, values in zip(v1.global_variables(), np.array_split(wanted, 3, axis), strict=True):
            part.load(values, session)
        v1.train.Saver().save(session, str(tmp_path / "model"))
    reader = CheckpointReader(str(tmp_path / "model"))
    assert len(reader.pieces("a/b")) == 3
    assert np.array_equal(reader.read("a/b").numpy(), wanted)


@pytest.mark.tensorflow
def test_checkpoint_of_tensorflow(tensorflow, tmp_path):
    variables = {f"v{k}": tensorflow.Variable(np.full((k, 3), k), dtype=d) for k, d in enumerate(("int64", "half"), 1)}
    variables |= {f"many{k:04d}": tensorflow.Variable(k) for k in range(800)}  # more than one block
    path = tensorflow.train.Checkpoint(**variables).save(str(tmp_path / "model"))
    reader, theirs = CheckpointReader(path), tensorflow.train.load_checkpoint(path)
    assert sorted(reader.entries) == sorted(theirs.get_variable_to_shape_map())
    for name in reader.entries:
        if reader.dtype(name) is None:
            assert reader.text(name) == theirs.get_tensor(name)
        else:
            assert np.array_equal(reader.read(name).numpy(), theirs.get_tensor(name))


def test_numbers_in_names_of_slices_keep_their_order():
    numbers = sorted(sign * (2**power + more) for sign in (1, -1) for power in range(63) for more in (-1, 0, 1))
    encoded = [wire._ordered_signed(number) for number in numbers]
    assert encoded == sorted(encoded)


def test_writing_fails_whole(tmp_path):
    write(tmp_path / "model", a=torch.ones(2))
    with pytest.raises(ValueError, match="names must differ and not be empty, got 'a' again"):
        with CheckpointWriter(str(tmp_path / "model")) as writer:
            writer.add("a", torch.zeros(2))
            writer.add("a", torch.zeros(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.data-00000-of-00001", "model.index"]
    assert CheckpointReader(str(tmp_path / "model")).read("a").tolist() == [1, 1]


def test_writing_follows_no_link_beside_the_names(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    links = [tmp_path / f"model{end}.tmp" for end in (".data-00000-of-00001", ".index")]
    for link in links:
        link.symlink_to(precious)
    assert write(tmp_path / "model", a=torch.ones(2)).read("a").tolist() == [1, 1]
    assert precious.read_text() == "precious" and all(link.is_symlink() for link in links)


def test_writing_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"'a' must have a dtype that TensorFlow has, got torch.float8_e4m3fn"):
        write(tmp_path / "model", a=torch.ones(2).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"'a' of shape \[2\] must have rows for 3 parts"):
        with CheckpointWriter(str(tmp_path / "model")) as writer:
            writer.add("a", torch.ones(2), 3)


def test_other_layouts_and_factors(tmp_path):
    x = torch.randn(3000, 50)
    with CheckpointWriter(str(tmp_path / "model")) as writer:
        writer.add("turned", x.T)
        writer.add("twice", x, 7, factor=2.0)
        writer.add("spread", torch.tensor(2.0).expand(70_000, 70))
    reader = CheckpointReader(str(tmp_path / "model"))
    assert torch.equal(reader.read("turned"), x.T)
    assert torch.equal(reader.read("twice"), x * 2)
    assert torch.equal(reader.read("spread"), torch.full((70_000, 70), 2.0))


def first_block(index):
    """Return the size of the first block of an index."""
    return next(
        k for k in range(len(index)) if index[k + 1 : k + 5] == struct.pack("<I", wire.masked_crc(index[: k + 1]))
    )


# ---- What is damaged -------------------------------------------------------------------------------------------------


def test_damaged_data(tmp_path):
    reader = write(tmp_path / "model", a=torch.ones(5), b=torch.ones(5))
    path = tmp_path / "model.data-00000-of-00001"
    data = bytearray(path.read_bytes())
    data[22] ^= 1
    path.write_bytes(data)
    reader = CheckpointReader(str(tmp_path / "model"))
    assert reader.read("a").tolist() == [1] * 5
    with pytest.raises(ValueError, match=r"data-00000-of-00001 is damaged: 'b' must have the CRC 0x\w+ there, got 0x"):
        reader.read("b")


def test_missing_and_short_shards(tmp_path):
    write(tmp_path / "model", a=torch.ones(5))
    path = tmp_path / "model.data-00000-of-00001"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="must have the bytes 0 to 20 of 'a', but ends at 19"):
        CheckpointReader(str(tmp_path / "model")).read("a")
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="must have the bytes 0 to 20 of 'a', but ends at 0"):
        CheckpointReader(str(tmp_path / "model")).read("a")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"data-00000-of-00001 is missing: .*\.index says that 'a' lies there"):
        CheckpointReader(str(tmp_path / "model")).read("a")


def index_with(path, records):
    """Write an index of some records, by the pieces of the writer."""
    handle, block = wire.written_block(0, records)
    meta, empty = wire.written_block(len(block), [])
    index, last = wire.written_block(len(block + empty), [(b"z", handle)])
    footer = (meta + index).ljust(40, b"\0") + struct.pack("<Q", form.MAGIC)
    path.write_bytes(block + empty + last + footer)
    return str(path).removesuffix(".index")


HEADER = (b"", wire.field(1, 1))
SHAPE = wire.field(2, wire.written_shape((2,)))


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "must begin with a header"),
        ([(b"", wire.field(1, 1) + wire.field(2, 1))], "must be little endian, got big endian"),
        ([HEADER, (b"a", wire.field(1, 8) + SHAPE)], "torch has no dtype for 'a', whose TensorFlow number is 8"),
        (
            [HEADER, (b"a", wire.field(1, 1) + SHAPE + wire.field(5, 9))],
            r"'a' of shape \(2,\) must take 8 bytes, got 9",
        ),
        ([HEADER, (b"a", wire.field(1, 1) + SHAPE + wire.field(3, 4) + wire.field(5, 8))], "one of 1 shards, got 4"),
        ([HEADER, (b"a", wire.field(1, 1) + SHAPE + wire.field(4, -8))], "numbers of at least 0"),
        ([HEADER, (b"a", wire.field(2, wire.field(2, wire.field(1, -3))))], r"sizes of at least 0, got \(-3,\)"),
        ([HEADER, (b"a", SHAPE + wire.field(7, wire.written_slices(((1, 2),))))], r"within the shape \(2,\), got"),
        ([HEADER, (b"a", SHAPE + wire.field(7, wire.written_slices(((0, 2),))))], r"has no slice \[\(0, 2\)\] of 'a'"),
        ([HEADER, (b"a", b"\x0a\x7f")], "is damaged: field 1 of kind 2 must end within its message"),
        ([HEADER, (b"a", b"\x0b\x7f")], "is damaged: field 1 of kind 3 must end"),
        ([HEADER, (b"a", b"\x08" + b"\xff" * 11)], "is damaged: a number must end within 10 bytes"),
        ([HEADER, (b"a", wire.field(1, b"x"))], "numbers of at least 0"),
        ([HEADER, (b"a", wire.field(2, 1))], "a shape must be a message, got 1"),
        ([HEADER, (b"a", wire.field(7, 1))], "a slice must be a message, got 1"),
    ],
)
def test_indexes_that_are_refused(tmp_path, records, message):
    prefix = index_with(tmp_path / "model.index", records)
    (tmp_path / "model.data-00000-of-00001").write_bytes(bytes(16))
    with pytest.raises(ValueError, match=message):
        CheckpointReader(prefix).read("a")


def test_slices_that_do_not_make_up_a_tensor(tmp_path):
    (tmp_path / "model.data-00000-of-00001").write_bytes(bytes(16))
    for slices in ([((0, 1),)], [((0, 1),), ((0, 1),)], [((0, 2),), ((1, 1),)]):
        records = [HEADER]
        for its in sorted(set(slices)):
            length = its[0][1]
            entry = wire.field(1, 1) + wire.field(2, wire.written_shape((length,))) + wire.field(5, 4 * length)
            records.append((wire.slice_key("a", its), entry))
        whole = wire.field(1, 1) + SHAPE + b"".join(wire.field(7, wire.written_slices(its)) for its in slices)
        prefix = index_with(tmp_path / "model.index", [*records, (b"a", whole)])
        with pytest.raises(ValueError, match="the slices of 'a' must make up its 2 elements, each once"):
            CheckpointReader(prefix).pieces("a")


def test_index_files_that_are_refused(tmp_path):
    write(tmp_path / "model", a=torch.ones(5))
    path = tmp_path / "model.index"
    good = path.read_bytes()
    for data, message in (
        (b"", "must be the index of a V2 checkpoint"),
        (good[:-1], "must be the index of a V2 checkpoint"),
        (good[40:], "must lie within the"),
        (bytes([good[0] ^ 1]) + good[1:], "is damaged: the block at byte 0 must have the CRC"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            CheckpointReader(str(tmp_path / "model"))
    size = first_block(good)
    snappy = good[:size] + b"\1"
    path.write_bytes(snappy + struct.pack("<I", wire.masked_crc(snappy)) + good[size + 5 :])
    with pytest.raises(ValueError, match=r"the block at byte 0 is compressed \(kind 1; snappy is 1\)"):
        CheckpointReader(str(tmp_path / "model"))


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.data())
def test_any_other_bytes_are_an_error_or_read(tmp_path_factory, data):
    """A writer's mistake that its checksum covers: no error but these, and no memory that is not the file's."""
    folder = tmp_path_factory.mktemp("checkpoint")
    with CheckpointWriter(str(folder / "model")) as writer:
        writer.add("a", torch.ones(4, 2), 2)
        writer.add("b/c", torch.ones(3))
    good = (folder / "model.index").read_bytes()
    size = first_block(good)
    block = bytearray(good[:size])
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.index").write_bytes(
        bytes(block) + b"\0" + struct.pack("<I", wire.masked_crc(bytes(block) + b"\0")) + good[size + 5 :]
    )
    try:
        reader = CheckpointReader(str(folder / "model"))
    except ValueError:
        return
    for name in reader.entries:
        try:
            reader.read(name)
        except (ValueError, FileNotFoundError):
            continue
