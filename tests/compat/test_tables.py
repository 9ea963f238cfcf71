"""Tables and slots between files and models: names, shapes, partitions, tables that grow, and what is refused."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from torchsparse_rec import nn, optim
from torchsparse_rec.compat.checkpoints.writer import CheckpointWriter
from torchsparse_rec.compat.tensorflow import load_tables, save_tables

ROWS, WIDTH = 11, 3


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.tables = torch.nn.ModuleDict({"users": nn.Embedding(ROWS, WIDTH, grad_mode="sparse", dtype=dtype)})

    @property
    def weight(self):
        return self.tables["users"].weight


def step(model, optimizer, seed):
    ids = torch.from_numpy(np.random.default_rng(seed).permutation(ROWS)[:4])
    optimizer.zero_grad()
    model.tables["users"](ids).square().sum().backward()
    optimizer.step()


# ---- Names ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """Return the path of a checkpoint of two tables with slots of Adagrad, and what is in it."""
    tensors = {}
    for k, name in enumerate(("model/users/embeddings", "model/cities/embeddings")):
        tensors[name], tensors[f"{name}/Adagrad"] = torch.full((4 + k, 2), k + 0.5), torch.full((4 + k, 2), k + 0.25)
    tensors |= {"model/users/bias": torch.ones(4), "global_step": torch.tensor(7)}
    path = str(tmp_path / "model.ckpt")
    with CheckpointWriter(path) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return path


@pytest.mark.parametrize(
    "tables",
    [
        None,
        "{}",
        "model/{}/embeddings",
        "*/{}/emb*",
        {"users": "model/users/embeddings", "cities": "cities"},
        {"bags.embedding_bags.users": "users/embeddings", "bags.embedding_bags.cities.weight": "cities"},
    ],
)
def test_names(checkpoint, tables, capsys):
    configs = [
        nn.EmbeddingBagConfig(name=name, num_embeddings=4 + k, embedding_dim=2, feature_names=[name])
        for k, name in enumerate(("users", "cities"))
    ]
    model = torch.nn.ModuleDict({"bags": nn.EmbeddingBagCollection(configs)})
    before = {name: x.clone() for name, x in model.state_dict().items()}
    optimizer = optim.Adagrad(model.parameters())
    moves = load_tables(checkpoint, model, tables, optimizer=optimizer, dry_run=True)
    assert capsys.readouterr().out.splitlines() == [
        "model/users/embeddings -> bags.embedding_bags.users.weight  [4, 2] float32",
        "model/users/embeddings/Adagrad -> state of bags.embedding_bags.users.weight: sum  [4, 2] float32",
        "model/cities/embeddings -> bags.embedding_bags.cities.weight  [5, 2] float32",
        "model/cities/embeddings/Adagrad -> state of bags.embedding_bags.cities.weight: sum  [5, 2] float32",
    ]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert load_tables(checkpoint, model, tables, optimizer=optimizer) == moves
    for k, weight in enumerate(model.parameters()):
        assert torch.equal(weight, torch.full((4 + k, 2), k + 0.5))
        assert torch.equal(optimizer.state[weight]["sum"], torch.full((4 + k, 2), k + 0.25))
        assert optimizer.state[weight]["step"] == 7


def test_any_parameter_by_name(checkpoint):
    model = torch.nn.ModuleDict({"users": torch.nn.EmbeddingBag(4, 2), "norm": torch.nn.LayerNorm(4)})
    load_tables(checkpoint, model, {"norm.bias": "users/bias"})
    assert model["norm"].bias.tolist() == [1] * 4
    table = torch.nn.Embedding(4, 2)
    load_tables(checkpoint, table, "users/embeddings")
    assert table.weight[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"users": "cities"},
            r"'model/cities/embeddings' must have the shape of 'users.weight', \[4, 2\], got \[5, 2\]",
        ),
        ({"users": "nobody"}, "has no variable 'nobody', for users.weight; it has 'global_step', 'model/cities/embed"),
        ({"users": "model/*/embeddings"}, "must name one variable, got 'model/cities/embeddings', 'model/users/emb"),
        ({"nobody": "users"}, "the model has no table 'nobody'; it has 'more.users.weight', 'users.weight'"),
        ({"users.weight": "users", "more.users": "users"}, "must be the variable of one table, got 'users.weight' and"),
        ("users", "must be the variable of one table"),
    ],
)
def test_names_that_are_refused(checkpoint, tables, message):
    users, more = nn.Embedding(4, 2), torch.nn.ModuleDict({"users": nn.Embedding(4, 2)})
    model = torch.nn.ModuleDict({"users": users, "more": more})
    if tables == {"users": "cities"}:
        del model["more"]
    elif tables != "users" and "nobody" not in tables and "more.users" not in tables:
        del model["more"]
    with pytest.raises(ValueError, match=message):
        load_tables(checkpoint, model, tables)


def test_one_name_of_two_tables(checkpoint):
    tables = [torch.nn.ModuleDict({"users": nn.Embedding(4, 2)}) for _ in range(2)]
    with pytest.raises(
        ValueError, match="'users' must be the name of one table, got that of '0.users.weight', '1.users"
    ):
        load_tables(checkpoint, torch.nn.ModuleList(tables), {"users": "users"})


def test_arguments_that_are_refused(checkpoint, tmp_path):
    model = torch.nn.ModuleDict({"users": nn.Embedding(4, 2)})
    with pytest.raises(ValueError, match="partition_strategy must be 'div' or 'mod', got 'range'"):
        load_tables(checkpoint, model, partition_strategy="range")
    with pytest.raises(TypeError, match=r"optimizer must be one of torchsparse_rec.optim, got Adagrad"):
        load_tables(checkpoint, model, optimizer=torch.optim.Adagrad(model.parameters()))
    with pytest.raises(TypeError, match="tables must be a pattern or a mapping of names, got list"):
        load_tables(checkpoint, model, ["users"])
    with pytest.raises(ValueError, match="model must have tables, such as torch.nn.Embedding; Linear has none"):
        load_tables(checkpoint, torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="slots are known of optim.Adam, .*, got LAMB"):
        load_tables(checkpoint, model, optimizer=optim.LAMB(model.parameters()))
    with pytest.raises(ValueError, match="TensorFlow has no dampening: it must be 0, got 0.5"):
        load_tables(checkpoint, model, optimizer=optim.SGD(model.parameters(), momentum=0.5, dampening=0.5))
    with pytest.raises(FileNotFoundError, match="nothing.index is missing: path must be a checkpoint's"):
        load_tables(tmp_path / "nothing", model)
    with pytest.raises(
        FileNotFoundError, match="must be a SavedModel or have a file 'checkpoint'; it has 'model.ckpt.da"
    ):
        load_tables(tmp_path, model)
    with pytest.raises(FileNotFoundError, match="nothing.h5 is missing"):
        load_tables(tmp_path / "nothing.h5", model)
    (tmp_path / "old").write_bytes(b"")
    with pytest.raises(ValueError, match="old must be the prefix of a V2 checkpoint, .* first format are not read"):
        load_tables(tmp_path / "old", model)
    for number in (-1, 1.5, True):
        with pytest.raises(ValueError, match="partitions must be an integer of at least 1, got"):
            save_tables(tmp_path / "new", model, partitions=number)
        with pytest.raises(ValueError, match="global_step must be an integer of at least 0, got"):
            save_tables(tmp_path / "new", model, global_step=number)
    for tables in ("*", {"users": ""}):
        with pytest.raises(ValueError, match="must give each table a name of its own in the file, got"):
            save_tables(tmp_path / "new", model, tables)
    with pytest.raises(ValueError, match="a .weights.h5 has neither partitions nor tables that grow"):
        save_tables(tmp_path / "new.weights.h5", model, partitions=2)


# ---- Slots ----------------------------------------------------------------------------------------------------------


def test_slots_that_are_missing(checkpoint):
    model = torch.nn.ModuleDict({"users": nn.Embedding(4, 2)})
    with pytest.raises(
        ValueError, match="must have the slots 'Adam', 'Adam_1' of 'model/users/embeddings', as Adam keeps"
    ):
        load_tables(checkpoint, model, optimizer=optim.Adam(model.parameters()))


def test_slots_of_another_optimizer(tmp_path):
    """In a checkpoint of objects, whose slots have no optimizer's name."""
    path, end = str(tmp_path / "model"), "/.ATTRIBUTES/VARIABLE_VALUE"
    with CheckpointWriter(path) as writer:
        for name in ("users", *(f"users/.OPTIMIZER_SLOT/opt/{slot}" for slot in ("accumulator", "linear"))):
            writer.add(f"{name}{end}", torch.ones(4, 2))
    model = torch.nn.ModuleDict({"users": nn.Embedding(4, 2)})
    load_tables(path, model, optimizer=optim.Ftrl(model.parameters()))
    with pytest.raises(
        ValueError, match="must have slots of Adagrad for 'users', .*: 'sum'; it has 'accumulator', 'li"
    ):
        load_tables(path, model, optimizer=optim.Adagrad(model.parameters()))


def test_amsgrad(tmp_path):
    model = torch.nn.ModuleDict({"users": nn.Embedding(4, 2)})
    optimizer = optim.Adam(model.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="tf.compat.v1's Adam has no amsgrad: amsgrad must be False"):
        save_tables(tmp_path / "model", model, optimizer=optimizer)
    pytest.importorskip("h5py")
    moves = save_tables(tmp_path / "model.weights.h5", model, optimizer=optimizer)
    assert [move.target for move in moves] == ["layers/embedding/vars/0", *(f"optimizer/vars/{k}" for k in range(5))]
    load_tables(tmp_path / "model.weights.h5", model, optimizer=optimizer)
    assert set(optimizer.state[model["users"].weight]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def adam_checkpoint(path, power):
    with CheckpointWriter(str(path)) as writer:
        for name in ("users", "users/Adam", "users/Adam_1"):
            writer.add(name, torch.ones(4, 2))
        for name, value in power.items():
            writer.add(name, torch.tensor(value))
    return path


@pytest.mark.parametrize("steps", [0, 1, 100, 1_000, 20_000])
def test_steps_of_powers(tmp_path, steps):
    """TensorFlow's powers are products in float32; where the first has vanished, the second says nearly how many."""
    model = torch.nn.ModuleDict({"users": nn.Embedding(4, 2)})
    optimizer = optim.Adam(model.parameters())
    powers = {f"beta{k}_power": np.float32(beta) for k, beta in ((1, 0.9), (2, 0.999))}
    for name, beta in list(powers.items()):
        for _ in range(steps):
            powers[name] = np.float32(powers[name] * beta)
    for more in ({}, {"global_step": steps}):
        load_tables(adam_checkpoint(tmp_path / "model", powers | more), model, optimizer=optimizer)
        error = 1e-4 * steps if steps > 600 and not more else 0
        assert abs(float(optimizer.state[model["users"].weight]["step"]) - steps) <= error


def test_steps_that_are_refused(tmp_path):
    model = torch.nn.ModuleDict({"users": nn.Embedding(4, 2)})
    optimizer = optim.Adam(model.parameters())
    with pytest.raises(
        ValueError, match="must say how many steps Adam has taken, by beta1_power, iterations or global"
    ):
        load_tables(adam_checkpoint(tmp_path / "model", {}), model, optimizer=optimizer)
    with pytest.raises(ValueError, match="'beta1_power' must be a power of the optimizer's beta 0.9, got 0.5"):
        load_tables(adam_checkpoint(tmp_path / "model", {"beta1_power": 0.5}), model, optimizer=optimizer)


def test_tables_that_no_optimizer_holds(checkpoint):
    model = torch.nn.ModuleDict({"users": nn.Embedding(4, 2), "cities": nn.Embedding(5, 2)})
    optimizer = optim.Adagrad(model["users"].parameters())
    moves = load_tables(checkpoint, model, optimizer=optimizer)
    assert [move.target for move in moves] == ["users.weight", "state of users.weight: sum", "cities.weight"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(tmp_path, dtype):
    model = Model(dtype)
    optimizer = optim.Adam(model.parameters())
    step(model, optimizer, 0)
    path = tmp_path / "model"
    save_tables(path, model, optimizer=optimizer)
    wanted = {name: x.clone() for name, x in optimizer.state[model.weight].items()}
    other = Model(dtype)
    its = optim.Adam(other.parameters())
    load_tables(path, other, optimizer=its)
    assert torch.equal(other.weight, model.weight)
    assert all(torch.equal(x, wanted[name]) for name, x in its.state[other.weight].items())
    step(model, optimizer, 1)
    step(other, its, 1)
    assert torch.equal(other.weight, model.weight)
    if dtype != torch.float64:
        with pytest.raises(
            ValueError, match=rf"'users' must be of {dtype}, or of floats that it holds, .*, got torch.f"
        ):
            save_tables(path, Model())
            load_tables(path, other)


def test_nothing_changes_where_a_file_is_damaged(checkpoint):
    path = f"{checkpoint}.data-00000-of-00001"
    with open(path, "r+b") as file:
        file.seek(110)  # in the last of the slots
        file.write(b"\xff")
    model = torch.nn.ModuleDict({"users": nn.Embedding(4, 2), "cities": nn.Embedding(5, 2)})
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"data-00000-of-00001 is damaged: .*cities/embeddings/Adagrad.* the CRC"):
        load_tables(checkpoint, model, optimizer=optim.Adagrad(model.parameters()))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


# ---- Files that are damaged, foreign or elsewhere -----------------------------------------------------------------


def refused(path, message, error=ValueError):
    model = Model()
    before = model.weight.detach().clone()
    with pytest.raises(error, match=message) as raised:
        load_tables(path, model, optimizer=optim.Adam(model.parameters()))
    assert type(raised.value) is error and str(path) in str(raised.value)
    assert torch.equal(model.weight, before)


def keras_file(folder):
    """Write a ``.keras`` file of a model of one table, as Keras does; return its path and the table's bytes."""
    pytest.importorskip("h5py")
    model = Model()
    save_tables(folder / "model.weights.h5", model, optimizer=optim.Adam(model.parameters()))
    with zipfile.ZipFile(folder / "model.keras", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.write(folder / "model.weights.h5", "model.weights.h5")
    return folder / "model.keras", model.weight.detach().numpy().tobytes()


def test_the_checksum_of_a_keras_file(tmp_path):
    path, table = keras_file(tmp_path)
    load_tables(path, Model())
    content = bytearray(path.read_bytes())
    content[content.index(table) + 5] ^= 0x41
    path.write_bytes(content)
    refused(path, "model.keras is damaged: 'model.weights.h5' must have the CRC 0x.* there, got 0x")


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize("damage", ["cut", "foreign", "empty", "folder", "other", "heap"])
def test_files_of_keras_that_are_damaged(tmp_path, name, damage):
    good = keras_file(tmp_path)[0].with_name(name).read_bytes()
    path = tmp_path / f"bad {name}"
    heap = good.index(b"GCOL") + 16
    bad = {
        "cut": good[: len(good) // 2],
        "foreign": b"hello",
        "empty": b"",
        # An archive without the weights, and a file without the tables.
        "other": b"PK\5\6" + bytes(18) if name == "model.keras" else good.replace(b"embedding", b"\xff" * 9),
        # An object of no size, over which HDF5 never gets.
        "heap": good[:heap] + bytes(16) + good[heap + 16 :],
    }
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(bad[damage])
    refused(path, "damaged|must have model.weights.h5|has no variable")


def test_datasets_that_share_bytes(tmp_path):
    """An address in HDF5 that has changed; it has no checksums."""
    h5py = pytest.importorskip("h5py")
    path, _ = keras_file(tmp_path)
    path = path.with_name("model.weights.h5")
    with h5py.File(path) as file:
        states = [file[f"optimizer/vars/{k}"].id.get_offset().to_bytes(8, "little") for k in (2, 3)]
    path.write_bytes(path.read_bytes().replace(states[1], states[0]))
    refused(path, "'optimizer/vars/2' and 'optimizer/vars/3' must lie apart, got one byte")


def test_a_folder_that_was_copied(tmp_path):
    save_tables(tmp_path / "model.ckpt", Model())
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/home/trainer/model.ckpt"\n')
    message = "/checkpoint says that the last checkpoint is /home/trainer/model.ckpt, which is missing: .* 'model.ckpt'"
    refused(tmp_path, message, FileNotFoundError)
    (tmp_path / "checkpoint").write_bytes(b'model_checkpoint_path: "\xff\xfe"\n')
    refused(tmp_path, "damaged|must be|codec")


def test_the_callers_path_is_named(tmp_path):
    """Whichever it is: of the index, or of a folder whose checkpoint is elsewhere."""
    model, there = Model(), tmp_path / "there"
    there.mkdir()
    save_tables(there / "model", model, optimizer=optim.Adam(model.parameters()))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "checkpoint").write_text(f'model_checkpoint_path: "{there}/model"\n')
    (there / "model.data-00000-of-00001").write_bytes(bytes(4000))
    for path in (there / "model", there / "model.index", tmp_path / "here"):
        refused(path, "must have the CRC")
    (there / "model.data-00000-of-00001").unlink()
    for path in (there / "model", there / "model.index", tmp_path / "here"):
        refused(path, "is missing: .* says that .* lies there", FileNotFoundError)


@pytest.mark.parametrize("step", [-1, 2.5, float("nan"), float("inf"), 2.0**60])
def test_counts_of_steps_that_are_refused(tmp_path, step):
    with CheckpointWriter(str(tmp_path / "model")) as writer:
        for name in ("users", "users/Adam", "users/Adam_1"):
            writer.add(name, torch.ones(ROWS, WIDTH))
        writer.add("global_step", torch.tensor(step))
    refused(tmp_path / "model", "'global_step' must be a number of steps, an integer of at least 0, got")


# ---- Rules ----------------------------------------------------------------------------------------------------------


def test_rules_that_no_optimizer_here_has(tmp_path):
    pytest.importorskip("h5py")
    model = Model()
    for optimizer, steps, options, message in (
        (optim.RMSprop, 1, {"eps": 1e-7}, "adds eps to the root, and TensorFlow below it: eps must be 0, got 1e-07"),
        (optim.Ftrl, 1, {"l2_shrinkage": 0.5}, "under l2_shrinkage: it must be 0, got 0.5"),
        (optim.Ftrl, 0, {}, "in the first step, which the file is before"),
    ):
        its, path = optimizer(model.parameters(), **options), tmp_path / f"{optimizer.__name__}.weights.h5"
        save_tables(path, model, optimizer=its, global_step=steps)
        with pytest.raises(
            ValueError, match=f"{message}.* by import_slots into that of compat.tensorflow.optimizers.keras"
        ):
            load_tables(path, model, optimizer=its)
        load_tables(path, model)
    its = optim.RMSprop(model.parameters(), eps=1e-10, lazy=True)
    save_tables(tmp_path / "model", model, optimizer=its)
    with pytest.raises(ValueError, match="eps must be 0, got 1e-10.* by import_slots into .*.optimizers.v1"):
        load_tables(tmp_path / "model", model, optimizer=its)


# ---- Partitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_partition_strategies(tmp_path, strategy):
    whole = torch.randn(11, 3)
    parts = [whole[k::4] for k in range(4)] if strategy == "mod" else list(whole.tensor_split(4))
    path = str(tmp_path / "model")
    with CheckpointWriter(path) as writer:
        for k, part in enumerate(parts):
            writer.add(f"users/part_{k}", part)
    model = Model()
    load_tables(path, model, partition_strategy=strategy)
    assert torch.equal(model.weight, whole)
    table = nn.EmbeddingVariable(WIDTH)
    load_tables(path, table, "users", partition_strategy=strategy)
    assert torch.equal(table.lookup(torch.arange(11)), whole)


def test_partitions_that_are_refused(tmp_path):
    def message(sizes, strategy="div", numbers=range(9), width=WIDTH):
        path = str(tmp_path / "model")
        with CheckpointWriter(path) as writer:
            for k, size in zip(numbers, sizes, strict=False):
                writer.add(f"users/part_{k}", torch.ones(size, width if k else WIDTH))
        with pytest.raises(ValueError, match="users") as error:
            load_tables(path, Model(), partition_strategy=strategy)
        return str(error.value)

    assert "'users' must have parts 0 to 1, got [0, 2]" in message([6, 5], numbers=[0, 2])
    assert "parts of 'users' must agree, got (5, 4)" in message([6, 5], width=4)
    assert "part 0 of 'users' must have 6 of 11 rows where partition_strategy is 'mod', got 5" in message([5, 6], "mod")
    assert "must have the shape of 'tables.users.weight', [11, 3], got [10, 3]" in message([5, 5])


# A function that returns how many megabytes more a call takes at its peak.
MOST = """
import sys, threading, torch
from torchsparse_rec import nn, optim

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) // 1024

def most(call, *args, **kwargs):
    peak, done = [anonymous()], threading.Event()
    def watch():
        while not done.wait(0.001):
            peak.append(anonymous())
    thread = threading.Thread(target=watch)
    before = anonymous()
    thread.start()
    call(*args, **kwargs)
    done.set()
    thread.join()
    return max(peak) - before
"""
MEMORY = (
    MOST
    + """
from torchsparse_rec.compat.tensorflow import load_tables, save_tables

rows, folder = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = torch.nn.ModuleDict({"users": nn.Embedding(rows, 64)})
optimizer = optim.Adam(model.parameters())
state = {name: torch.randn(rows, 64).abs_() for name in ("exp_avg", "exp_avg_sq")}
optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"step": torch.tensor(3.0), **state}}})
table = rows * 64 * 4 // 2**20
print("save", most(save_tables, folder + "/model", model, optimizer=optimizer, partitions=8))
other = torch.nn.ModuleDict({"users": torch.nn.Embedding(1, 64)})
other["users"].weight = torch.nn.Parameter(torch.zeros(rows, 64))
its = optim.Adam(other.parameters())
print("load", most(load_tables, folder + "/model", other, optimizer=its) - 2 * table)
assert torch.equal(other["users"].weight, model["users"].weight)
assert all(torch.equal(its.state[other["users"].weight][name], x) for name, x in state.items())
"""
)


def test_memory(tmp_path):
    """A table of 100,000 x 64 with slots of Adam, in 8 partitions, there and back: 1 % of the wanted figure's."""
    command = [sys.executable, "-c", MEMORY, "100000", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    figures = dict(line.split() for line in result.stdout.splitlines())
    assert all(int(number) <= 64 for number in figures.values()), figures


# ---- Files of Keras -------------------------------------------------------------------------------------------------


def test_h5py_is_asked_for_when_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "model.weights.h5").write_bytes(b"")
    with pytest.raises(ImportError, match="files of Keras need h5py: pip install h5py"):
        load_tables(tmp_path / "model.weights.h5", Model())
    with pytest.raises(ImportError, match="files of Keras need h5py"):
        save_tables(tmp_path / "new.weights.h5", Model())


def test_files_of_keras_that_are_refused(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "model.weights.h5"

    def message(**dataset):
        with h5py.File(path, "w") as file:
            file.create_dataset("layers/users/vars/0", **dataset)
        with pytest.raises(ValueError, match="users") as error:
            load_tables(path, Model())
        return str(error.value)

    assert "must be of torch.float32, or of floats that it holds" in message(data=np.zeros((ROWS, WIDTH), ">f4"))
    assert "must lie in one run of bytes" in message(data=np.zeros((ROWS, WIDTH), "f4"), chunks=(2, 2))
    with zipfile.ZipFile(tmp_path / "model.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "model.weights.h5")
    with pytest.raises(ValueError, match="model.weights.h5 is compressed, which Keras does not do"):
        load_tables(tmp_path / "model.keras", Model())
    with pytest.raises(ValueError, match="is of bfloat16, which HDF5 does not have: save a checkpoint"):
        save_tables(tmp_path / "new.weights.h5", Model(torch.bfloat16))
