"""Dumps of dynamicemb and SOK, written by their own Python and as their sources say, into tables that grow."""

import json
import string
from pathlib import Path

import pytest
import torch

from torchsparse_rec import nn, optim
from torchsparse_rec.compat.torchrec import load_tables

from . import dump_goldens as theirs

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "dumps"
KEYS = torch.tensor([7, 2**40, -3, 11, 12])
VALUES = torch.arange(10.0).view(5, 2)


def grown(optimizer=None, name="goods"):
    table = nn.EmbeddingVariable(2, name=name)
    model = torch.nn.ModuleDict({name: table})
    return model, table, None if optimizer is None else optimizer(model.parameters())


def rows_of(table, keys=KEYS):
    return table.lookup(keys).detach()


def states_of(table, optimizer, keys=KEYS):
    where = table.keys.find(keys)
    state = optimizer.state[table.stored_weight()]
    return {name: x[where] for name, x in state.items() if x.dim()}, state.get("step")


def write(path, x):
    path.write_bytes(x.contiguous().numpy().tobytes())


# ---- dynamicemb -----------------------------------------------------------------------------------------------------


def dynamicemb(folder, kind="exact_sgd", states=None, name="opt_values", ranks=2, **about):
    """Write what ``DynamicEmbDump`` writes of a table of some ranks, in the folder of its collection."""
    inside = folder / "model.ebc"
    inside.mkdir(parents=True)
    (inside / "goods_opt_args.json").write_text(json.dumps({"opt_type": kind, "lr": 0.1, **about}))
    for rank, some in enumerate(torch.arange(5).split(3 if ranks == 2 else 5)):
        end = f"rank_{rank}.world_size_{ranks}"
        write(inside / f"goods_emb_keys.{end}", KEYS[some])
        write(inside / f"goods_emb_values.{end}", VALUES[some])
        write(inside / f"goods_emb_scores.{end}", KEYS[some] * 0 + 4 + rank)
        if states is not None:
            write(inside / f"goods_{name}.{end}", states[some])
    return folder


@pytest.mark.parametrize(
    ("name", "optimizer", "parts"),
    [
        ("adam", lambda its: optim.Adam(its, lazy=True), {"exp_avg": slice(4, 8), "exp_avg_sq": slice(8, 12)}),
        ("row_wise_adagrad", optim.RowWiseAdagrad, {"sum": 4}),  # a row has four numbers in the table, one in the file
        ("sgd", optim.SGD, {}),
    ],
)
def test_what_dynamicembs_own_code_dumped(name, optimizer, parts):
    model = torch.nn.ModuleDict({"goods": nn.EmbeddingVariable(theirs.DIM)})
    table, its = model["goods"], optimizer(model.parameters())
    load_tables(GOLDENS / "dynamicemb", model, {"goods": f"model.{name}.goods"}, optimizer=its)
    keys, wanted = torch.tensor(theirs.KEYS), theirs.rows_of({"adam": 8, "row_wise_adagrad": 4, "sgd": 0}[name])
    assert torch.equal(rows_of(table, keys), wanted[:, : theirs.DIM])
    frequencies = range(4, 10) if name != "sgd" else [0] * 6  # its scores are times
    found = table.export()
    each = dict(zip(found.keys.tolist(), found.frequencies.tolist(), strict=True))
    assert each == dict(zip(theirs.KEYS, frequencies, strict=True))
    states, step = states_of(table, its, keys) if parts else ({}, None)
    assert step == (3 if name == "adam" else None) and states.keys() == parts.keys()
    assert all(torch.equal(states[state], wanted[:, part]) for state, part in parts.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_dynamicemb(tmp_path, ranks):
    model, table, _ = grown()
    moves = load_tables(dynamicemb(tmp_path, evict_strategy="EvictStrategy.KLfu", ranks=ranks), model)
    of_first = 5 if ranks == 1 else 3
    assert [str(x).replace(f".rank_0.world_size_{ranks}", "") for x in moves[:3]] == [
        f"model.ebc.goods_emb_keys -> keys of goods.weight  [{of_first}] int64",
        f"model.ebc.goods_emb_values -> values of goods.weight  [{of_first}, 2] float32",
        f"model.ebc.goods_emb_scores -> freqs of goods.weight  [{of_first}] int64",
    ]
    assert table.total_count() == 5 and torch.equal(rows_of(table), VALUES)
    found = table.export()
    wanted = dict(zip(KEYS.tolist(), [4, 4, 4, 5, 5] if ranks == 2 else [4] * 5, strict=True))
    assert dict(zip(found.keys.tolist(), found.frequencies.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("name", ["opt_values", "emb_opt_values"])
def test_states_of_dynamicemb(tmp_path, name):
    m, v = VALUES + 100, VALUES + 200
    path = dynamicemb(tmp_path / "adam", "adam", torch.cat([m, v], 1), name, iters=6)
    model, table, optimizer = grown(lambda its: optim.Adam(its, lazy=True))
    load_tables(path, model, optimizer=optimizer)
    states, step = states_of(table, optimizer)
    assert step == 6 and torch.equal(states["exp_avg"], m) and torch.equal(states["exp_avg_sq"], v)
    path = dynamicemb(tmp_path / "adagrad", "exact_adagrad", m, name)
    model, table, optimizer = grown(optim.Adagrad)
    load_tables(path, model, {"goods": "model.ebc.goods"}, optimizer=optimizer)
    assert torch.equal(states_of(table, optimizer)[0]["sum"], m)
    for width in (1, 4):  # of older dumps the others have no meaning
        path = dynamicemb(tmp_path / f"{width}", "exact_row_wise_adagrad", torch.arange(5.0 * width).view(5, -1), name)
        model, table, optimizer = grown(optim.RowWiseAdagrad)
        load_tables(path, model, optimizer=optimizer)
        assert torch.equal(states_of(table, optimizer)[0]["sum"], torch.arange(5.0) * width)


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (optim.Adam, {}, "optimizer must be SGD, as its opt_type 'exact_sgd' says, got Adam"),
        (optim.Adagrad, {"kind": "exact_adagrad"}, "opt_values.rank_0.world_size_2 is missing: DynamicEmbDump writes"),
        (optim.Adagrad, {"kind": "exact_adagrad", "states": VALUES[:, :1]}, r"must have \[3, 2\] numbers of torch.fl"),
        (optim.RowWiseAdagrad, {"kind": "exact_row_wise_adagrad", "states": VALUES}, "1, 4 or 8 numbers for each of 3"),
        (optim.Adam, {"kind": "adam", "states": torch.cat([VALUES] * 2, 1)}, "must say how many steps Adam has taken"),
        (lambda p: optim.SGD(p, momentum=0.9), {}, r"must have the states \['momentum_buffer'\], which SGD keeps"),
    ],
)
def test_what_is_refused_of_dynamicemb(tmp_path, optimizer, options, message):
    model, table, its = grown(optimizer)
    with pytest.raises(ValueError, match=message):
        load_tables(dynamicemb(tmp_path, **options), model, optimizer=its)
    assert table.total_count() == 0


def test_files_of_dynamicemb_that_do_not_fit(tmp_path):
    model, table, _ = grown()
    path = dynamicemb(tmp_path / "dump")
    with pytest.raises(ValueError, match="has tables that grow, 'model.ebc.goods', which 'goods.weight' is not"):
        load_tables(path, torch.nn.ModuleDict({"goods": nn.Embedding(5, 2)}))
    inside = path / "model.ebc"
    of_two = dynamicemb(tmp_path / "two", evict_strategy="EvictStrategy.KLfu")  # scores, as of (TIMESTAMP, LFU)
    write(of_two / "model.ebc/goods_emb_scores.rank_0.world_size_2", torch.arange(6))
    with pytest.raises(ValueError, match=r"scores.rank_0.world_size_2 must have \[3\] numbers .* 24 bytes, got 48"):
        load_tables(of_two, model)
    write(inside / "goods_emb_values.rank_1.world_size_2", VALUES)
    with pytest.raises(ValueError, match=r"values.rank_1.world_size_2 must have \[2, 2\] numbers .* 16 bytes, got 40"):
        load_tables(path, model)
    (inside / "goods_emb_values.rank_1.world_size_2").unlink()
    with pytest.raises(FileNotFoundError, match="goods_emb_values.rank_1.world_size_2 is missing"):
        load_tables(path, model)
    (inside / "goods_emb_keys.rank_1.world_size_2").unlink()
    with pytest.raises(ValueError, match=r"table 'goods' must have files of ranks 0 to 1, got \[0\]"):
        load_tables(path, model)
    assert table.total_count() == 0


# ---- SOK ------------------------------------------------------------------------------------------------------------


def sok(folder, name="goods", keys=KEYS, values=VALUES, key_dtype=1, slots=None, scope="Adagrad"):
    """Write what ``sok.dump`` writes of a variable: a head of 296 bytes, then numbers."""
    folder.mkdir(exist_ok=True)
    for mark in string.punctuation:
        name = name.replace(mark, "_")

    def file(end, kind, dtype, x, slot=""):
        head = b" " * 256 + kind.to_bytes(4, "big") + slot.rjust(32).encode() + dtype.to_bytes(4, "big")
        (folder / f"{name}-{end}").write_bytes(head + x.contiguous().numpy().tobytes())

    file("key", 0, key_dtype, keys)
    file("weight", 1, 5, values)
    for slot, x in (slots or {}).items():
        file(f"{scope}-{slot}", 2, 5, x, slot)
    return folder


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("adam", lambda its: optim.Adam(its, lr=theirs.LR, eps=1e-7, lazy=True, tensorflow_eps=True)),
        ("adagrad", lambda its: optim.Adagrad(its, lr=theirs.LR, eps=1e-7, initial_accumulator_value=0.1)),
        ("ftrl", lambda its: optim.Ftrl(its, lr=theirs.LR, initial_accumulator_value=0.1)),
    ],
)
def test_what_soks_own_code_dumped_after_the_same_steps(name, optimizer):
    model = torch.nn.ModuleDict({name: nn.EmbeddingVariable(theirs.DIM)})
    table, its = model[name], optimizer(model.parameters())
    load_tables(GOLDENS / "sok", model, "{}_0", optimizer=its, steps=3 if name == "adam" else None)
    own = nn.EmbeddingVariable(theirs.DIM)
    trained = optimizer(own.parameters())
    keys = torch.tensor(sorted({key for step in theirs.STEPS for key in step}))
    own.insert(keys, torch.full((len(keys), theirs.DIM), theirs.INITIAL))
    for step, gradient in zip(theirs.STEPS, theirs.GRADIENTS, strict=True):
        (own(torch.tensor(step)) * torch.from_numpy(gradient)).sum().backward()
        trained.step()
        trained.zero_grad()
    torch.testing.assert_close(rows_of(table, keys), rows_of(own, keys), rtol=2e-6, atol=1e-7)
    found, wanted = states_of(table, its, keys), states_of(own, trained, keys)
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-6, atol=1e-7)
    assert table.total_count() == len(keys) and (name != "adam" or found[1] == wanted[1])


def test_what_soks_own_code_dumped_of_a_fixed_table():
    model = torch.nn.ModuleDict({"users": nn.EmbeddingVariable(theirs.DIM)})
    load_tables(GOLDENS / "sok", model, {"users": "users_fixed_0"})
    assert torch.equal(rows_of(model["users"], torch.arange(5)), torch.arange(20.0).view(5, 4))


def test_sok(tmp_path):
    model, table, optimizer = grown(optim.Adagrad)
    path = sok(tmp_path, slots={"accumulator": VALUES + 100})
    moves = load_tables(path, model, optimizer=optimizer)
    assert [x.source for x in moves] == ["goods-key", "goods-weight", "goods-Adagrad-accumulator"]
    assert torch.equal(rows_of(table), VALUES)
    assert torch.equal(states_of(table, optimizer)[0]["sum"], VALUES + 100)
    small = torch.arange(5, dtype=torch.int32)
    model, table, _ = grown(name="others")
    load_tables(sok(tmp_path, "a/goods:0", small, key_dtype=0), model, {"others": "a_goods_0"})
    assert torch.equal(rows_of(table, small.long()), VALUES)


def test_steps_of_adam_are_not_in_a_dump_of_sok(tmp_path):
    path = sok(tmp_path, slots={"m": VALUES + 1, "v": VALUES + 2}, scope="Adam")
    model, table, optimizer = grown(lambda its: optim.Adam(its, lazy=True, tensorflow_eps=True))
    with pytest.raises(ValueError, match="must say how many steps Adam has taken, .* or steps of load_tables"):
        load_tables(path, model, optimizer=optimizer)
    load_tables(path, model, optimizer=optimizer, steps=3)
    states, step = states_of(table, optimizer)
    assert step == 3 and torch.equal(states["exp_avg"], VALUES + 1) and torch.equal(states["exp_avg_sq"], VALUES + 2)


def test_what_is_refused_of_sok(tmp_path):
    model, table, optimizer = grown(optim.Adagrad)
    with pytest.raises(ValueError, match="'goods' must have the slots of Adagrad, one of Adam, .*; it has none"):
        load_tables(sok(tmp_path), model, optimizer=optimizer)
    with pytest.raises(ValueError, match="of kind 0 and a dtype that this reads, got kind 0 and dtype 2"):
        load_tables(sok(tmp_path, key_dtype=2), model)
    with pytest.raises(ValueError, match=r"goods-weight must have \[5, 2\] numbers of torch.float32, 336 bytes, got"):
        load_tables(sok(tmp_path, values=VALUES[:4]), model)
    assert table.total_count() == 0
