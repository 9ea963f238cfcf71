"""Checkpoints of TorchRec into models: whole, and split by rows, by columns and by tables; states; what is refused."""

import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchsparse_rec import KeyedJaggedTensor, nn, optim, serving
from torchsparse_rec.compat.torchrec import load_tables

from .test_tables import MOST

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "torchrec"
ROWS, DIM = {"t_user": 23, "t_item": 14, "t_cart": 17}, 8
KEYS = ["user", "item", "cart"]
NAME = "sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"
CASES = ["adagrad", "row_wise_adagrad", "both_styles"]


class DLRM(torch.nn.Module):
    """TorchRec's DLRM, of modules of torch and of ours, with the names that its parameters have there."""

    def __init__(self, rows=ROWS, grad_mode="sparse", dtype="FP32"):
        super().__init__()
        configs = [
            nn.EmbeddingBagConfig(num_embeddings=n, embedding_dim=DIM, name=t, feature_names=[t[2:]], data_type=dtype)
            for t, n in rows.items()
        ]
        self.sparse_arch = torch.nn.ModuleDict(
            {"embedding_bag_collection": nn.EmbeddingBagCollection(configs, grad_mode=grad_mode)}
        )
        self.bottom, self.hidden, self.top = torch.nn.Linear(3, DIM), torch.nn.Linear(DIM + 6, 4), torch.nn.Linear(4, 1)

    def forward(self, numbers, features):
        dense = self.bottom(numbers).relu()
        pooled = self.sparse_arch["embedding_bag_collection"](features)
        together = torch.stack([dense, *(pooled[key] for key in KEYS)], 1)
        i, j = torch.triu_indices(4, 4, offset=1)
        products = (together @ together.transpose(1, 2))[:, i, j]
        return self.top(self.hidden(torch.cat([dense, products], 1)).relu()).squeeze(-1)


DENSE = {
    "bottom": "dense_arch.model._mlp.0._linear",
    "hidden": "over_arch.model.0._mlp.0._linear",
    "top": "over_arch.model.1",
}


def names():
    """Return the names of all parameters here and in the checkpoints."""
    tables = {NAME.format(t): NAME.format(t) for t in ROWS}
    return tables | {f"{ours}.{x}": f"{its}.{x}" for ours, its in DENSE.items() for x in ("weight", "bias")}


def optimizer_of(case, parameters, lr=0.1):
    its = list(parameters)
    if case == "adagrad":
        return optim.Adagrad(its, lr=lr, eps=1e-8)
    return optim.RowWiseAdagrad(its, lr=lr, eps=1e-8) if case != "both_styles" else optim.Adam(its, lr=lr)


def tables_of(model):
    return [NAME.format(t) for t in ROWS], [model.get_parameter(NAME.format(t)) for t in ROWS]


def whole(folder, tmp_path):
    """Return a checkpoint with whole tensors, as torch itself reads it, by flat names."""
    path = tmp_path / "whole.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, path)
    return torch.load(path, weights_only=True)


def save(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    return str(folder)


# ---- What TorchRec has saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_tables_and_states_of_two_ranks_in_one_process(case, tmp_path):
    model = DLRM()
    optimizer = optimizer_of(case, model.sparse_arch.parameters())
    moves = load_tables(GOLDENS / case, model, optimizer=optimizer, average_shards=case == "row_wise_adagrad")
    found = whole(GOLDENS / case, tmp_path)
    states = found["optimizer"]["state"]
    assert len(moves) == 3 * (3 if case == "both_styles" else 2)
    for name, weight in zip(*tables_of(model), strict=True):
        table = name.split(".")[-2]
        assert torch.equal(weight, found["model"][name])
        its = optimizer.state[weight]
        if case == "both_styles":
            assert its["step"] == states[name]["step"] == 4
            assert all(torch.equal(its[x], states[name][x]) for x in ("exp_avg", "exp_avg_sq"))
            continue
        sums = states[name][f"{table}.momentum1"]
        if sums.shape == (2 * ROWS[table],):  # a sum for each row of both shards, which are of the same width
            sums = sums.view(2, -1).mean(0)
            torch.testing.assert_close(its["sum"], sums)
        else:
            assert torch.equal(its["sum"], sums)


def test_tables_split_by_rows(tmp_path):
    """As TorchRec splits them over ranks with GPUs; its own class and ranges, made by hand."""
    model = DLRM({"t_user": 23, "t_item": 14})
    optimizer = optimizer_of("row_wise_adagrad", model.sparse_arch.parameters())
    load_tables(GOLDENS / "by_rows", model, optimizer=optimizer)
    found = whole(GOLDENS / "row_wise_adagrad", tmp_path)
    for t in ("t_user", "t_item"):
        name = NAME.format(t)
        weight = model.get_parameter(name)
        assert torch.equal(weight, found["model"][name])
        assert torch.equal(optimizer.state[weight]["sum"], found["optimizer"]["state"][name][f"{t}.momentum1"])


@pytest.mark.parametrize("case", CASES)
def test_the_model_goes_on_as_torchrec_does(case):
    """Logits and losses, and tables and layers one step later, but for a table whose sums were averaged."""
    model, expected = DLRM(), torch.load(GOLDENS / f"{case}.pt", weights_only=True)
    dense = [p for name, p in model.named_parameters() if not name.startswith("sparse_arch")]
    tables, layers = optimizer_of(case, model.sparse_arch.parameters()), optim.Adam(dense, lr=0.1)
    averaged = case == "row_wise_adagrad"
    load_tables(GOLDENS / case, model, names(), optimizer=tables, average_shards=averaged)
    load_tables(GOLDENS / case, model, names(), optimizer=layers)
    numbers, ids, lengths, labels = expected["batch"]
    logits = model(numbers, KeyedJaggedTensor(KEYS, ids, lengths=lengths))
    torch.testing.assert_close(logits, expected["logits"])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    loss.backward()
    tables.step()
    layers.step()
    torch.testing.assert_close(loss, expected["losses"][4])
    for ours, its in names().items():
        if not (averaged and "t_cart" in ours):
            torch.testing.assert_close(model.get_parameter(ours), expected["after"][its], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("from_file", [True, False])
def test_a_whole_state(from_file):
    model = DLRM()
    state = torch.load(GOLDENS / "whole.pt", weights_only=True)
    load_tables(GOLDENS / "whole.pt" if from_file else {"module": {"model": state}}, model, names())
    for ours, its in names().items():
        assert torch.equal(model.get_parameter(ours), state[its])


def test_a_serving_folder(tmp_path):
    model = DLRM()
    load_tables(GOLDENS / "adagrad", model, names())
    serving.save_for_serving(model, tmp_path / "served")
    served = serving.load_for_serving(tmp_path / "served")
    found = whole(GOLDENS / "adagrad", tmp_path)["model"]
    assert all(torch.equal(served.model.get_parameter(ours), found[its]) for ours, its in names().items())
    numbers, ids, lengths, _ = torch.load(GOLDENS / "adagrad.pt", weights_only=True)["batch"]
    features = KeyedJaggedTensor(KEYS, ids, lengths=lengths)
    assert torch.equal(served(numbers, features), model(numbers, features))


# ---- Names -----------------------------------------------------------------------------------------------------------

WEIGHT, SUMS = torch.arange(6.0).view(3, 2), torch.arange(3.0) + 0.5


def small(name="t", grows=False):
    config = nn.EmbeddingBagConfig(num_embeddings=3, embedding_dim=2, name=name, feature_names=[name])
    model = torch.nn.ModuleDict({"ebc": nn.EmbeddingBagCollection([config], grad_mode="sparse")})
    return model, model["ebc"].embedding_bags[name].weight


@pytest.mark.parametrize(
    ("before", "tables"),
    [
        ("", None),
        ("model.", None),
        ("module.model.", "{}"),
        ("my.", "my.ebc.embedding_bags.{}.weight"),
        ("my.", {"t": "my.*"}),
        ("my.", {"ebc.embedding_bags.t.weight": "ebc.embedding_bags.t"}),
        ("combined.", None),
    ],
)
@pytest.mark.parametrize("style", ["t.momentum1", "sum"])
@pytest.mark.parametrize("nested", [True, False])
def test_names(before, tables, style, nested, capsys):
    key = "ebc.embedding_bags.t.weight"
    # A CombinedOptimizer may put a key of its own before the name, which the table then does not have.
    states = {before * (before in ("my.", "combined.")) + key: {style: SUMS}}
    if not nested:
        states = {f"{name}.{style}": SUMS for name in states}
    before = before if before != "combined." else ""
    state = {f"{before}{key}": WEIGHT, "other.t.weight": torch.ones(3), "optimizer": {"state": states}}
    model, weight = small()
    optimizer = optim.RowWiseAdagrad(model.parameters())
    load_tables(state, model, tables, optimizer=optimizer, dry_run=True)
    assert capsys.readouterr().out.splitlines() == [
        f"{before}{key} -> {key}  [3, 2] float32",
        f"optimizer.state.{next(iter(states)).removesuffix('.' + style)}.{style} -> state of {key}: sum  [3] float32",
    ]
    assert not optimizer.state[weight]
    load_tables(state, model, tables, optimizer=optimizer)
    assert torch.equal(weight, WEIGHT) and torch.equal(optimizer.state[weight]["sum"], SUMS)


def test_the_second_moment_has_had_two_names(tmp_path):
    for second in ("exp_avg_sq", "momentum2"):
        model, weight = small()
        optimizer = optim.Adam(model.parameters(), lazy=True)
        states = {"t.momentum1": WEIGHT + 1, f"t.{second}": WEIGHT + 2}
        state = {"ebc.embedding_bags.t.weight": WEIGHT, "state": {"ebc.embedding_bags.t.weight": states}}
        with pytest.raises(ValueError, match="how many steps Adam has taken, by step or iter, or steps of load_tables"):
            load_tables(state, model, optimizer=optimizer)
        load_tables(state, model, optimizer=optimizer, steps=9)
        its = optimizer.state[weight]
        assert its["step"] == 9 and torch.equal(its["exp_avg"], WEIGHT + 1)
        assert torch.equal(its["exp_avg_sq"], WEIGHT + 2)
        states["t.iter"] = torch.tensor([7.0, 7.0])
        load_tables(state, model, optimizer=optimizer)
        assert optimizer.state[weight]["step"] == 7
        with pytest.raises(ValueError, match="steps must be None, or 7 as the state says"):
            load_tables(state, model, optimizer=optimizer, steps=9)
        states["t.iter"] = torch.tensor([7.0, 8.0])
        with pytest.raises(ValueError, match="must be one number of steps for all shards"):
            load_tables(state, model, optimizer=optimizer)


def test_folders_in_a_folder(tmp_path):
    save({"ebc.embedding_bags.t.weight": WEIGHT}, tmp_path / "model")
    save({"state": {"ebc.embedding_bags.t.weight": {"t.momentum1": SUMS}}}, tmp_path / "optimizer")
    model, weight = small()
    optimizer = optim.RowWiseAdagrad(model.parameters())
    load_tables(tmp_path, model, optimizer=optimizer)
    assert torch.equal(weight, WEIGHT) and torch.equal(optimizer.state[weight]["sum"], SUMS)


def test_a_table_that_grows():
    table = nn.EmbeddingVariable(2, name="t")
    model = torch.nn.ModuleDict({"t": table})
    optimizer = optim.RowWiseAdagrad(model.parameters())
    state = {"x.t.weight": WEIGHT, "optimizer": {"state": {"x.t.weight": {"t.momentum1": SUMS}}}}
    load_tables(state, model, optimizer=optimizer)
    keys, values, *_ = table.export()
    assert keys.tolist() == [0, 1, 2] and torch.equal(values, WEIGHT)


# ---- The forms of tensors in files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weight",
    [
        WEIGHT,
        WEIGHT.half(),
        WEIGHT.bfloat16(),
        torch.arange(6.0).view(2, 3).t(),  # stored as it lies in memory
        torch.arange(24.0).view(6, 4)[::2, 1:3],
    ],
    ids=["plain", "half", "bfloat16", "transposed", "strided"],
)
def test_forms(weight, tmp_path):
    path = save({"ebc.embedding_bags.t.weight": weight}, tmp_path / "checkpoint")
    model, ours = small()
    load_tables(path, model)
    assert torch.equal(ours, weight.float())


def test_checksums_may_be_left_out(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"ebc.embedding_bags.t.weight": WEIGHT}, tmp_path / "checkpoint")
    finally:
        torch.serialization.set_crc32_options(True)
    model, ours = small()
    load_tables(path, model)
    assert torch.equal(ours, WEIGHT)


MEMORY = (
    MOST
    + """
import warnings
import torch.distributed.checkpoint as dcp
from torchsparse_rec.compat.torchrec import load_tables

rows, folder = int(sys.argv[1]), sys.argv[2]
table, name = rows * 64 * 4 // 2**20, "users.weight"
weight, sums = torch.randn(rows, 64), torch.rand(rows, 64)
warnings.simplefilter("ignore")
dcp.save({name: weight, "state": {name: {"users.momentum1": sums}}}, checkpoint_id=folder)
model = torch.nn.ModuleDict({"users": torch.nn.Embedding(1, 64)})
model["users"].weight = torch.nn.Parameter(torch.zeros(rows, 64))
optimizer = optim.Adagrad(model.parameters())
print(most(load_tables, folder, model, optimizer=optimizer) - 2 * table)
assert torch.equal(model["users"].weight, weight)
assert torch.equal(optimizer.state[model["users"].weight]["sum"], sums)
"""
)


def test_memory(tmp_path):
    """A table of 400,000 x 64, 98 MB, with a state, each in one piece: no piece is in memory beside its table."""
    command = [sys.executable, "-c", MEMORY, "400000", str(tmp_path / "checkpoint")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) <= 64


# ---- What is refused -------------------------------------------------------------------------------------------------


def refused(state, message, optimizer=optim.RowWiseAdagrad, error=ValueError, **options):
    model, weight = small()
    before = weight.detach().clone()
    its = None if optimizer is None else optimizer(model.parameters())
    states = None if its is None else dict(its.state.get(weight, {}))
    with pytest.raises(error, match=message):
        load_tables(state, model, optimizer=its, **options)
    assert torch.equal(weight, before)
    assert states is None or all(x is states[name] and not x.any() for name, x in its.state[weight].items())


@pytest.mark.parametrize(
    ("states", "optimizer", "message"),
    [
        ({}, optim.Adagrad, "the states of Adagrad .* 'sum', the first perhaps .* it has none"),
        ({"t.momentum1": WEIGHT}, optim.RowWiseAdagrad, r"must have the shape of .*, \[3\], got \[3, 2\]"),
        ({"t.momentum1": SUMS}, optim.Adagrad, r"must have the shape of .*, \[3, 2\], got \[3\]"),
        ({"t.momentum1": SUMS.int()}, optim.RowWiseAdagrad, "must be of torch.float32, or of floats that it holds"),
        ({"t.momentum1": SUMS, "t.prev_iter": SUMS}, optim.RowWiseAdagrad, "it has 't.momentum1', 't.prev_iter'"),
        ({"t.momentum1": WEIGHT}, lambda its: optim.SGD(its, momentum=0.9), "states of a fused optimizer, .* got SGD"),
        ({"sum": WEIGHT}, optim.SGD, "the states of SGD .* none, .* it has 'sum'"),
        ({"t.momentum1": WEIGHT, "t.x": WEIGHT}, optim.Ftrl, "states of a fused optimizer, .* are known of Adam, "),
        ({"exp_avg": WEIGHT, "exp_avg_sq": WEIGHT, "max_exp_avg_sq": WEIGHT}, optim.Adam, "it has .*'max_exp_avg_sq'"),
    ],
)
def test_states_without_a_counterpart(states, optimizer, message):
    key = "ebc.embedding_bags.t.weight"
    refused({key: WEIGHT, "state": {key: states}}, message, optimizer)


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        ({}, {}, "the state has no 't', for 'ebc.embedding_bags.t.weight'; it has $"),
        ({"a.t.weight": WEIGHT, "b.t.weight": WEIGHT}, {}, "'t', for .*, must name one tensor, got 'a.t.weight', 'b"),
        ({"t": WEIGHT}, {"tables": {"u": "t"}}, "the model has no table 'u'"),
        ({"t": WEIGHT[:2]}, {}, r"'t' must have the shape of .*, \[3, 2\], got \[2, 2\]"),
        ({"t": WEIGHT.double()}, {}, "'t' must be of torch.float32, or of floats that it holds, .* got torch.float64"),
        ({"t": WEIGHT}, {"steps": -1}, "steps must be None or an integer of at least 0, got -1"),
    ],
)
def test_names_and_shapes(state, options, message):
    refused(state, message, None, **options)


def test_two_tables_of_one_name():
    model = torch.nn.ModuleDict({"t": nn.Embedding(3, 2), "u": nn.Embedding(3, 2)})
    with pytest.raises(ValueError, match="'t' must be the variable of one table, got 't.weight' and 'u.weight'"):
        load_tables({"t": WEIGHT}, model, {"t": "t", "u": "t"})
    with pytest.raises(TypeError, match="optimizer must be one of torchsparse_rec.optim, got Adagrad"):
        load_tables({"t": WEIGHT}, model, optimizer=torch.optim.Adagrad(model.parameters()))


def test_sums_of_shards_are_averaged_on_demand_alone(tmp_path):
    case, model = GOLDENS / "row_wise_adagrad", DLRM()
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = optimizer_of("row_wise_adagrad", model.sparse_arch.parameters())
    with pytest.raises(ValueError, match="'model.*t_cart.weight' is split by columns, .* with average_shards=True"):
        load_tables(case, model, optimizer=optimizer)
    assert all(map(torch.equal, before, model.parameters()))


class Code:
    def __reduce__(self):
        return (print, ("code of a file has run",))


def test_files(tmp_path, capsys):
    model, _ = small()

    def check(path, message, error=ValueError):
        refused(path, message, None, error)

    check(tmp_path / "none", "none is missing", FileNotFoundError)
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty", "must be a folder of torch.distributed.checkpoint, .* it has nothing")
    (tmp_path / "state.pt").write_bytes(pickle.dumps({"t": Code()}))
    check(tmp_path / "state.pt", "must be a state that torch.load.weights_only=True. loads")
    torch.save([WEIGHT], tmp_path / "list.pt")
    check(tmp_path / "list.pt", "must be a state, a mapping from names to tensors, got a list")
    assert "code" not in capsys.readouterr().out
    path = Path(save({"ebc.embedding_bags.t.weight": WEIGHT}, tmp_path / "checkpoint"))
    (file,) = path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    at = content.index(WEIGHT.numpy().tobytes())
    content[at + 5] ^= 1
    file.write_bytes(content)
    check(path, re.escape(f"{file} is damaged: 'ebc.embedding_bags.t.weight' must have the CRC"))
    file.write_bytes(content[:at])
    check(path, "must have the bytes 0 to .* but ends at")
    file.write_bytes(b"x" * len(content))
    check(path, "is damaged, or of another kind than its name says")
    file.unlink()
    check(path, "is missing: .metadata says that", FileNotFoundError)
    (path / ".metadata").write_bytes(b"no pickle")
    check(path, "must be what torch.distributed.checkpoint writes")


def test_pieces_must_make_up_the_tensor(tmp_path):
    path = Path(save({"ebc.embedding_bags.t.weight": WEIGHT}, tmp_path / "checkpoint"))
    metadata = dcp.FileSystemReader(path).read_metadata()
    its = metadata.state_dict_metadata["ebc.embedding_bags.t.weight"]
    its.size = torch.Size([4, 2])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    model = torch.nn.ModuleDict({"t": nn.Embedding(4, 2)})
    with pytest.raises(ValueError, match=r"the pieces of 'ebc.* must make up its \[4, 2\], each element once, got"):
        load_tables(path, model)
    its.chunks = its.chunks * 2
    its.size = torch.Size([6, 2])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    model = torch.nn.ModuleDict({"t": nn.Embedding(6, 2)})
    with pytest.raises(ValueError, match=r"the pieces of 'ebc.* must make up its \[6, 2\], each element once, got"):
        load_tables(path, model)
