"""What load_tables refuses before it changes anything: what is there twice, belongs to another, or does not fit."""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchsparse_rec import nn, optim, variable
from torchsparse_rec.compat import tensorflow as tf_tables
from torchsparse_rec.compat.checkpoints.writer import CheckpointWriter
from torchsparse_rec.compat.torchrec import load_tables

from .test_torchrec_dumps import VALUES, dynamicemb, grown, write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit:UserWarning")

W, A, B = (torch.arange(6.0).view(3, 2) + more for more in (0, 100, 200))
NAME = "ebc.embedding_bags.t.weight"


def small(optimizer=None):
    """Return a model of one table, t [3, 2] of ones, and its optimizer."""
    config = nn.EmbeddingBagConfig(3, 2, "t", feature_names=["f"])
    model = torch.nn.ModuleDict({"ebc": nn.EmbeddingBagCollection([config])})
    with torch.no_grad():
        model["ebc"].embedding_bags["t"].weight.fill_(1)
    return model, None if optimizer is None else optimizer(model.parameters())


def refused(source, message, optimizer=None, **options):
    """Check that a source is refused by a message, and that the table is as it was."""
    model, its = small(optimizer)
    with pytest.raises(ValueError, match=message):
        load_tables(source, model, optimizer=its, **options)
    assert torch.equal(model["ebc"].embedding_bags["t"].weight, torch.ones(3, 2))
    states = [] if its is None else [x for state in its.state.values() for x in state.values()]
    assert not any(bool(x.any()) for x in states)


# ---- Checkpoints of torch -------------------------------------------------------------------------------------------


def test_a_state_is_not_taken_for_a_table(tmp_path):
    state = {"state": {NAME: {"t.momentum1": A}}}
    refused({"model": {"ebc.embedding_bags.u.weight": W}, "optimizer": state}, "has no 't', for 'ebc.embedding_bags.t")
    dcp.save(state, checkpoint_id=tmp_path / "optimizer", no_dist=True)
    refused(tmp_path / "optimizer", "has no 't'")
    model = torch.nn.ModuleDict({"state": torch.nn.ModuleDict({"t": nn.Embedding(3, 2)})})
    load_tables({"model.state.t.weight": A, "model.state.u.weight": B}, model)  # a module may have that name
    assert torch.equal(model["state"]["t"].weight, A)


def test_a_slot_is_not_taken_for_a_table(tmp_path):
    for name in ("t/Adagrad", "part/t/Adam_1"):
        with CheckpointWriter(str(tmp_path / "model")) as writer:
            writer.add(name, A)
        with pytest.raises(ValueError, match="has no variable 't'"):
            tf_tables.load_tables(str(tmp_path / "model"), small()[0])
    model = small()[0]
    tf_tables.load_tables(str(tmp_path / "model"), model, {"t": "part/t/Adam_1"})
    assert torch.equal(model["ebc"].embedding_bags["t"].weight, A)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"optimizer": {"state": {NAME: {"t.sum": A}}}, "old": {"state": {NAME: {"t.sum": B}}}}, "one state 't.sum'"),
        ({"state": {NAME: {"t.sum": A, "sum": B}}}, "must have each state once"),
        ({"state": {NAME: {"t.sum": A, "step": 7, "iter": 9}}}, "step and iter of .* must be the same, got 7, 9"),
        ({"state": {NAME: {"t.sum": A, "step": -4}}}, "must be one number of steps"),
        ({"state": {NAME: {"t.sum": A, "step": 2.5}}}, "must be one number of steps"),
    ],
)
def test_states_of_which_there_are_several(state, message):
    refused({"model": {NAME: W}, **state}, message, lambda p: optim.Adagrad(p, lr_decay=0.1))


def test_names_of_which_there_are_several(tmp_path):
    refused({"model": {NAME: W}, f"model.{NAME}": A}, f"names must be of one tensor each, got two of 'model.{NAME}'")
    dcp.save({f"b.{NAME}": W}, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.save({NAME: A}, checkpoint_id=tmp_path / "a.b", no_dist=True)
    refused(tmp_path, "names must be of one tensor each")
    both = {"t": "a.weight", NAME: "b.weight"}
    refused({"a.weight": W, "b.weight": A}, f"tables must name '{NAME}' once, got it for 'a.w", tables=both)


@pytest.mark.parametrize("other", [W.to("meta"), W.to_sparse()])
def test_tensors_without_all_elements(other):
    refused({NAME: other}, f"'{NAME}' must be a tensor with all its elements, got a tensor o[nf]")


def test_a_file_whose_bytes_have_changed(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"other": B, NAME: W + 3}, path)
    content = bytearray(path.read_bytes())
    content[content.index((W + 3).numpy().tobytes()) + 7] ^= 64
    path.write_bytes(content)
    refused(path, "is damaged: .* must have the CRC")


def saved_state(folder):
    state = {"model": {NAME: W}, "optimizer": {"state": {NAME: {"t.momentum1": A, "step": torch.tensor(3.0)}}}}
    torch.save(state, folder / "state.pt")
    dcp.save(state, checkpoint_id=folder / "folder", no_dist=True)


@pytest.mark.parametrize("name", ["state.pt", "folder/.metadata", "folder/__0_0.distcp"])
@pytest.mark.parametrize("damage", ["cut", "foreign", "empty", "pickle"])
def test_files_of_torch_that_are_damaged(tmp_path, name, damage):
    saved_state(tmp_path)
    good = (tmp_path / name).read_bytes()
    # A pickle of a name that is no UTF-8; one that numbers an object 2**32 - 1; and one of what no checkpoint is.
    pickles = b"\x8c\x01\xff.", b"Nr\xff\xff\xff\xff.", b"]."
    bad = {"cut": [good[: len(good) // 2]], "foreign": [b"hello"], "empty": [b""], "pickle": pickles}
    path = tmp_path / name.partition("/")[0]
    for content in bad[damage]:
        (tmp_path / name).write_bytes(content)
        refused(path, re.escape(str(path)), optim.Adagrad)


def test_a_number_of_steps_that_is_none():
    for step in (float("inf"), torch.ones(1).expand(2**40), torch.ones(0)):
        state = {NAME: {"t.sum": A, "step": step}}
        refused({"model": {NAME: W}, "state": state}, "must be one number of steps for all shards", optim.Adagrad)


def test_a_bias_under_a_row_wise_optimizer():
    model = torch.nn.ModuleDict({"x": torch.nn.Linear(2, 3)})
    its = optim.RowWiseAdagrad(model.parameters())
    state = {"x.bias": torch.ones(3), "state": {"x.bias": {"sum": torch.arange(3.0)}}}
    load_tables(state, model, {"x.bias": "x.bias"}, optimizer=its)
    assert torch.equal(its.state[model["x"].bias]["sum"], torch.arange(3.0))


# ---- Tables that grow -----------------------------------------------------------------------------------------------


def two_tables(**second):
    tables = {"a": nn.EmbeddingVariable(2, name="a"), "b": nn.EmbeddingVariable(2, name="b", **second)}
    return torch.nn.ModuleDict(tables)


def dump(folder, name, keys):
    """Write what ``DynamicEmbDump`` writes of a table, a rank's keys in each of ``keys``."""
    folder.mkdir(exist_ok=True)
    for rank, its in enumerate(keys):
        end = f"rank_{rank}.world_size_{len(keys)}"
        write(folder / f"{name}_emb_keys.{end}", torch.tensor(its))
        write(folder / f"{name}_emb_values.{end}", torch.ones(len(its), 2))


@pytest.mark.parametrize(
    ("keys", "second", "message"),
    [
        ([[1, 2**40]], {"key_dtype": torch.int32}, "for 'b.weight': .*keys must be of the key_dtype, int32, got 1099"),
        ([[1, 2], [2, 3]], {}, "keys must be distinct, over all parts, got 2 2 times"),
        ([[5, 5]], {}, "keys must be distinct, over all parts, got 5 2 times"),
        (
            [list(range(8))],
            {"ev_option": variable.EmbeddingVariableOption(evict_option=variable.LRUEvict(7))},
            "rows must be no more than the table's capacity, 7, got 8: make",
        ),
    ],
)
def test_rows_that_one_of_two_tables_cannot_have(tmp_path, keys, second, message):
    dump(tmp_path, "a", [[1, 2]])
    dump(tmp_path, "b", keys)
    model = two_tables(**second)
    with pytest.raises(ValueError, match=message):
        load_tables(tmp_path, model)
    assert [table.total_count() for table in model.values()] == [0, 0]


def test_a_capacity_that_is_just_enough(tmp_path):
    dump(tmp_path, "b", [list(range(8))])
    table = two_tables(ev_option=variable.EmbeddingVariableOption(evict_option=variable.LRUEvict(8)))["b"]
    load_tables(tmp_path, torch.nn.ModuleDict({"b": table}))
    assert table.total_count() == 8


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"b-keys": [1, 2], "b/Adagrad-keys": [1, 3]}, "the keys of 'b/Adagrad-values' must be those of its table"),
        ({"b-keys": [1, 2], "b/Adagrad-keys": [1, 2], "b-freqs": [-5, 1]}, "frequencies must be in"),
    ],
)
def test_nothing_is_inserted_where_deeprecs_slots_do_not_fit(tmp_path, tensors, message):
    with CheckpointWriter(str(tmp_path / "model")) as writer:
        for name, x in {"a-keys": [1, 2], "a/Adagrad-keys": [1, 2], **tensors}.items():
            writer.add(name, torch.tensor(x))
        for name in ("b-values", "b/Adagrad-values", "a-values", "a/Adagrad-values"):
            writer.add(name, torch.ones(2, 2))
    model = two_tables()
    with pytest.raises(ValueError, match=message):
        tf_tables.load_tables(str(tmp_path / "model"), model, optimizer=optim.Adagrad(model.parameters()))
    assert [table.total_count() for table in model.values()] == [0, 0]


def test_files_of_two_dumps(tmp_path):
    path = dynamicemb(tmp_path / "sizes")
    for file in sorted((path / "model.ebc").glob("*.world_size_2")):
        file.with_name(file.name.replace("world_size_2", "world_size_1")).write_bytes(file.read_bytes())
    model, table, _ = grown()
    with pytest.raises(ValueError, match=r"files of one dump, got those of world sizes \[1, 2\]: remove the older"):
        load_tables(path, model)
    path = dynamicemb(tmp_path / "names", "exact_adagrad", VALUES)
    for file in (path / "model.ebc").glob("goods_opt_values*"):
        file.with_name(f"{file.name.replace('goods_', 'goods_emb_')}").write_bytes(file.read_bytes())
    model, table, its = grown(optim.Adagrad)
    with pytest.raises(ValueError, match=r"emb_opt_values.* and goods_opt_values.* must not be both there"):
        load_tables(path, model, optimizer=its)
    assert table.total_count() == 0


def test_what_is_missing_or_wrong_in_a_dump(tmp_path):
    path = dynamicemb(tmp_path / "scores", evict_strategy="EvictStrategy.KLfu")
    (path / "model.ebc" / "goods_emb_scores.rank_1.world_size_2").unlink()
    model, table, _ = grown()
    with pytest.raises(FileNotFoundError, match="goods_emb_scores.rank_1.world_size_2 is missing: where"):
        load_tables(path, model)
    states = torch.cat([VALUES, VALUES], 1)
    for iters in (-3, 2.5, "12", True, [1]):
        model, table, its = grown(lambda p: optim.Adam(p, lazy=True))
        path = dynamicemb(tmp_path / f"iters {iters}", "adam", states, iters=iters)
        with pytest.raises(ValueError, match="iters must be an integer of at least 0, got"):
            load_tables(path, model, optimizer=its)
    path = dynamicemb(tmp_path / "steps", "adam", states, iters=10)
    with pytest.raises(ValueError, match="steps must be None, or 10 as .* says for 'model.ebc.goods', got 77"):
        load_tables(path, model, optimizer=its, steps=77)
    about = path / "model.ebc" / "goods_opt_args.json"
    about.write_text('{"opt_type": ["adam"]}')
    with pytest.raises(ValueError, match=r"must say opt_type, one of adam, .* got \['adam'\]"):
        load_tables(path, model, optimizer=its)
    about.unlink()
    with pytest.raises(ValueError, match="must say opt_type, one of adam, .* got no such file: without optimizer"):
        load_tables(path, model, optimizer=its)
    assert table.total_count() == 0
