"""Damaged and foreign files of each format that load_tables reads: what was saved, or one error that names the file."""

import importlib
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchsparse_rec import nn, optim
from torchsparse_rec.compat import tensorflow, torchrec

from .test_torchrec_dumps import VALUES, dynamicemb, grown, sok

ROWS = {"users": 11, "cities": 7}


class Training:
    """A model of two tables, or of one that grows, and its optimizer."""

    def __init__(self, grows=False, seed=0):
        torch.manual_seed(seed)
        if grows:
            self.model, self.table, self.optimizer = grown(lambda p: optim.Adagrad(p, lr=0.1))
            return
        self.model = torch.nn.ModuleDict({name: nn.Embedding(n, 3, grad_mode="sparse") for name, n in ROWS.items()})
        self.optimizer = optim.Adam(self.model.parameters(), tensorflow_eps=True)
        for _ in range(2):
            sum(self.model[name](torch.randint(n, (4,))).square().sum() for name, n in ROWS.items()).backward()
            self.optimizer.step()

    def contents(self):
        """Return all numbers of the tables and their states, by name."""
        if hasattr(self, "table"):
            found = self.table.export()._asdict()
            state = self.optimizer.state.get(self.table.stored_weight(), {})
            return {name: x.clone() for name, x in {**found, **state}.items() if isinstance(x, torch.Tensor)}
        found = {name: x.detach() for name, x in self.model.state_dict().items() if isinstance(x, torch.Tensor)}
        for name, parameter in self.model.named_parameters():
            found |= {f"{name} {key}": x for key, x in self.optimizer.state.get(parameter, {}).items()}
        return {name: x.clone() for name, x in found.items()}


def are_equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


# ---- Formats: each writes its files to a folder, and returns the path to load and its loader ------------------------


def checkpoint(folder, name="model"):
    its = Training()
    tensorflow.save_tables(folder / name, its.model, optimizer=its.optimizer, partitions=2)
    return folder / name, tensorflow.load_tables


def checkpoint_folder(folder):
    checkpoint(folder)
    (folder / "checkpoint").write_text('model_checkpoint_path: "model"\n')
    return folder, tensorflow.load_tables


def weights_h5(folder):
    its = Training()
    path = folder / "model.weights.h5"
    tensorflow.save_tables(path, its.model, optimizer=its.optimizer)
    return path, tensorflow.load_tables


def keras_model():
    keras = importlib.import_module("keras")
    keras.utils.set_random_seed(0)
    inputs = [keras.Input((1,), name=f"{name}_id") for name in ROWS]
    rows = [keras.layers.Embedding(n, 3, name=name)(x) for x, (name, n) in zip(inputs, ROWS.items(), strict=True)]
    model = keras.Model(inputs, rows)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.train_on_batch([np.array([[1], [2]])] * 2, [np.ones((2, 1, 3))] * 2)
    return model


def keras_h5(folder):
    keras_model().save_weights(folder / "model.weights.h5")
    return folder / "model.weights.h5", tensorflow.load_tables


def keras_file(folder):
    keras_model().save(folder / "model.keras")
    return folder / "model.keras", tensorflow.load_tables


def saved_model(folder):
    importlib.import_module("tensorflow").saved_model.save(keras_model(), str(folder / "saved"))
    return folder / "saved", tensorflow.load_tables


def state():
    its = Training(seed=1)
    named = dict(its.model.named_parameters())
    states = {name: its.optimizer.state[parameter] for name, parameter in named.items()}
    return {"model": {name: x.detach() for name, x in named.items()}, "optimizer": {"state": states}}


def torch_file(folder):
    torch.save(state(), folder / "model.pt")
    return folder / "model.pt", torchrec.load_tables


def torch_folder(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), checkpoint_id=folder / "model", no_dist=True)
    return folder / "model", torchrec.load_tables


def dynamicemb_dump(folder):
    return dynamicemb(folder / "dump", "exact_adagrad", VALUES + 1), torchrec.load_tables


def sok_dump(folder):
    return sok(folder / "dump", slots={"accumulator": VALUES + 1}), torchrec.load_tables


TENSORFLOW = pytest.mark.tensorflow, pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
#: The formats without checksums of the numbers of tables: other ones may be loaded from damaged files.
WITHOUT_CHECKSUMS = "weights_h5", "keras_h5", "dynamicemb_dump", "sok_dump"
FORMATS = [
    checkpoint,
    checkpoint_folder,
    weights_h5,
    *(pytest.param(written, marks=TENSORFLOW) for written in (keras_h5, keras_file, saved_model)),
    torch_file,
    torch_folder,
    dynamicemb_dump,
    sok_dump,
]


# ---- Damage ---------------------------------------------------------------------------------------------------------


def damaged(data, draw):
    """Return what a file has after a damage, and a word for that."""
    kind = draw.choice(["flips", "flips", "flips", "cut", "zeros", "foreign"])
    data = bytearray(data)
    if kind == "flips":
        for _ in range(draw.choice([1, 1, 1, 4])):
            near = draw.random() < 0.5  # the ends of a file say what is in it
            at = draw.randrange(min(len(data), 400)) if near else draw.randrange(len(data))
            data[at if draw.random() < 0.5 else -1 - at] ^= draw.randrange(1, 256)
    elif kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind == "zeros":
        begin = draw.randrange(len(data))
        end = min(len(data), begin + draw.choice([1, 8, 64, 1000]))
        data[begin:end] = bytes(end - begin)
    else:
        others = (
            b"",
            b"hello",
            draw.randbytes(300),
            b"PK\5\6" + bytes(18),
            b"\x89HDF\r\n\x1a\n" + bytes(100),
            b"\x80\4N.",
        )
        data = draw.choice(others)
    return bytes(data), kind


class Damage:
    """
    A checkpoint of a format, files of which are damaged one at a time.

    Args:
        written: writes it.
        folder: an empty one.
    """

    def __init__(self, written, folder):
        self.name, self.folder = written.__name__, folder
        self.path, self.load = written(folder)
        self.grows = written in (dynamicemb_dump, sok_dump)
        self.options = {"variables": list(ROWS)} if written in (keras_h5, keras_file) else {}
        its = Training(self.grows, seed=2)
        self._load(its)
        self.wanted = its.contents()

    def _load(self, its):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.load(self.path, its.model, optimizer=its.optimizer, **self.options)

    def outcome(self, seed):
        """Load the checkpoint with one file damaged; check what comes of it, and say what that is."""
        draw = random.Random(f"{self.name} {seed}")
        files = sorted(file for file in self.folder.rglob("*") if file.is_file() and file.stat().st_size)
        file = draw.choice(files)
        good = file.read_bytes()
        bad, kind = damaged(good, draw)
        its = Training(self.grows, seed=2)
        before = its.contents()
        what = f"{self.name}, seed {seed}: {kind} in {file.name}"
        file.write_bytes(bad)
        try:
            self._load(its)
        except Exception as error:
            assert type(error) in (ValueError, FileNotFoundError), f"{what}: {type(error)}: {error}"
            assert str(self.path) in str(error), f"{what}: {error}"
            assert are_equal(its.contents(), before), f"{what}: changed, although {error}"
            return "refused"
        finally:
            file.write_bytes(good)
        found = its.contents()
        if are_equal(found, self.wanted):
            return "right"
        shapes = [{name: (x.shape, x.dtype) for name, x in numbers.items()} for numbers in (found, self.wanted)]
        assert shapes[0] == shapes[1] and self.name in WITHOUT_CHECKSUMS, f"{what}: other numbers"
        count = sum(int((x != self.wanted[name]).sum()) for name, x in found.items())
        return f"other numbers: {kind} in {file.name}, {count}"


@pytest.mark.full
@pytest.mark.parametrize("written", FORMATS)
def test_damaged_files(written, tmp_path, request):
    if request.node.get_closest_marker("tensorflow"):
        request.getfixturevalue("tensorflow")
    damage = Damage(written, tmp_path)
    outcomes = [damage.outcome(seed).partition(":")[0] for seed in range(50)]
    assert outcomes.count("refused") > 10 and set(outcomes) <= {"right", "refused", "other numbers"}
