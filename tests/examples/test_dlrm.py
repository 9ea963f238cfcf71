"""The DLRM example: generated examples, rows of files, the network, training, evaluation."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from examples.cases import history_of, run, settings_of, step_of, write_criteo

from torchsparse_rec import ops
from torchsparse_rec.data import write_prebatched
from torchsparse_rec.data.criteo import CATEGORIES, INTEGERS, MISSING, as_tensors
from torchsparse_rec.examples import dlrm
from torchsparse_rec.examples._common import GRAD_MODES, OPTIMIZERS
from torchsparse_rec.examples.dlrm import KINDS, Batch, Generator

pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "buckets": 60,
    "embedding_dim": 4,
    "bottom": [8],
    "top": [16],
    "max_cardinality": 100,
    "samples": 1024,
    "held_out": 512,
    "batch_size": 128,
}


def small(**given):
    return settings_of(dlrm, **{**SMALL, **given})


def make_step(settings, device="cpu"):
    """Return a network, and a function that trains it on a batch."""
    model = dlrm.make_model(settings).to(device)
    return model, step_of(model, settings, lambda batch: model(batch.numbers, batch.ids))


def batches(count, size=128, cardinality=100):
    return list(map(Generator(size, cardinality).batch, range(count)))


# ---- Generated examples ----------------------------------------------------------------------------------------------


def test_the_generator_has_criteos_shape():
    assert len(dlrm.CARDINALITIES) == 26 and sum(dlrm.CARDINALITIES) == 33_762_577
    batch = Generator(64).batch(0)
    assert batch.labels.shape == (64,) and batch.labels.dtype == torch.float32 and batch.size == 64
    assert batch.numbers.shape == (64, 13) and batch.numbers.dtype == torch.float32
    assert batch.ids.shape == (26, 64) and batch.ids.dtype == torch.int64
    assert set(batch.labels.tolist()) == {0.0, 1.0}
    # log(1 + x) of counts.
    counts = batch.numbers.double().expm1()
    torch.testing.assert_close(counts, counts.round(), rtol=1e-5, atol=1e-5)
    assert 0 <= int(batch.ids.min()) and int(batch.ids.max()) < 1 << 32


def test_batches_depend_on_number_and_seed_alone():
    generator = Generator(32, seed=3)
    later, batch = generator.batch(5), generator.batch(2)
    again = Generator(32, seed=3)
    for one, other in zip(batch, again.batch(2), strict=True):
        assert torch.equal(one, other)
    for other in (later, Generator(32, seed=4).batch(2)):
        assert not torch.equal(batch.ids, other.ids) and not torch.equal(batch.numbers, other.numbers)


@pytest.mark.parametrize("limit", [None, 1000, 1])
def test_categories_have_no_more_values_than_they_should(limit):
    generator = Generator(20_000, limit)
    ids = generator.batch(0).ids
    found = [len(row.unique()) for row in ids]
    limits = [min(count, limit or count) for count in dlrm.CARDINALITIES]
    assert all(count <= limit for count, limit in zip(found, limits, strict=True))
    # All values of small categories occur.
    assert all(count == limit for count, limit in zip(found, limits, strict=True) if limit <= 105)
    assert limit is not None or found[2] > 5000


def test_raw_ids_are_spread_over_32_bits_one_to_one():
    found = dlrm.spread(torch.arange(1 << 20))
    assert len(found.unique()) == 1 << 20
    assert 0 <= int(found.min()) < 1 << 16 and (1 << 32) - (1 << 16) < int(found.max()) < 1 << 32
    halves = torch.bincount(found >> 24, minlength=256)
    assert abs(halves.double() / 4096 - 1).max() < 0.1
    ends = dlrm.spread(torch.tensor([0, 1, (1 << 32) - 1]))
    assert len(ends.unique()) == 3 and 0 <= int(ends.min()) and int(ends.max()) < 1 << 32


def test_labels_follow_the_hidden_model():
    generator = Generator(16_384, 10)
    first, second = generator.batch(0), generator.batch(1)
    assert 0.2 < float(first.labels.mean()) < 0.35
    # Each value's share of clicks in one batch predicts the labels of another batch.
    score = torch.zeros(16_384)
    for row, later in zip(first.ids, second.ids, strict=True):
        for value in row.unique():
            score[later == value] += first.labels[row == value].mean()
    ordered = second.labels[score.argsort()]
    assert ordered[:2000].mean() < 0.15 and ordered[-2000:].mean() > 0.45


# ---- Rows of files ---------------------------------------------------------------------------------------------------


def batch_of(rows):
    return Batch(*as_tensors(rows))


def rows_of(**given):
    columns = {"label": [0, 1, 1], **dict.fromkeys(INTEGERS, [1, None, 3]), **dict.fromkeys(CATEGORIES, ["a", "b", ""])}
    return pa.record_batch({**columns, **given})


def test_rows_become_numbers_and_raw_ids():
    strings = ["68fd1e64", None, "FFFFffff"]
    batch = batch_of(rows_of(I2=[-2, 0, 7], C1=strings, C2=["0", "abc", None], C3=[5, None, -7]))
    assert batch.labels.tolist() == [0.0, 1.0, 1.0]
    assert batch.numbers[:, 0].tolist() == pytest.approx([math.log(2), 0.0, math.log(4)])
    assert batch.numbers[:, 1].tolist() == pytest.approx([0.0, 0.0, math.log(8)])
    assert batch.ids[0].tolist() == [0x68FD1E64, MISSING, 0xFFFFFFFF]
    assert batch.ids[1].tolist() == [0, 0xABC, MISSING]
    assert batch.ids[2].tolist() == [5, MISSING, -7]
    assert batch.ids[3].tolist() == [10, 11, MISSING]  # an empty string is a missing one


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_hexadecimal_strings_of_any_arrow_type(kind):
    numbers = np.random.default_rng(0).integers(0, 1 << 32, 100)
    strings = pa.array([f"{number:08x}" for number in numbers]).cast(kind)
    columns = {"label": [0] * 100, **dict.fromkeys(INTEGERS, pa.nulls(100)), **dict.fromkeys(CATEGORIES, strings)}
    rows = pa.record_batch(columns)
    for part, wanted in ((rows, numbers), (rows.slice(7, 50), numbers[7:57])):
        assert batch_of(part).ids[4].tolist() == wanted.tolist()


def test_no_rows_are_an_empty_batch():
    batch = batch_of(rows_of().slice(0, 0))
    assert batch.size == 0 and batch.ids.shape == (26, 0) and batch.numbers.shape == (0, 13)


@pytest.mark.parametrize("wrong", ["0x12", "123456789", "12g", "éééééééé", "-1"])
def test_strings_that_are_not_hexadecimal_are_refused(wrong):
    with pytest.raises(ValueError, match=f"column 'C9' must hold hexadecimal ids of up to 8 digits, got '{wrong}'"):
        batch_of(rows_of(C9=["aa", None, wrong]))


def test_rows_without_a_column_are_refused():
    with pytest.raises(ValueError, match="there must be a column 'I5', got label, "):
        batch_of(rows_of().drop_columns(["I5"]))


def same_batches(one, other):
    one, other = list(one), list(other)
    assert len(one) == len(other) > 0
    for batch, its in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(batch, its, strict=True))


@pytest.mark.parametrize("stored", ["strings", "integers"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_prebatched_file_gives_the_texts_batches(stored, compression, tmp_path):
    from torchsparse_rec.data.criteo import read_criteo

    text, arrow = tmp_path / "train.txt", tmp_path / "train.arrow"
    write_criteo(text, 437)
    batches = list(read_criteo(text, batch_size=100))
    if stored == "integers":
        batches = [_as_integers(batch) for batch in batches]
    write_prebatched(arrow, batches, compression=compression)
    settings = small(batch_size=50, held_out=30)
    one, other = (dlrm.make_examples(settings, [path]) for path in (text, arrow))
    same_batches(one.batches(0), other.batches(0))
    same_batches(one.batches(4), other.batches(4))
    same_batches(one.held_out, other.held_out)
    assert one.name != other.name
    assert sum(batch.size for batch in one.held_out) == 30
    assert sum(batch.size for batch in one.batches(0)) == 437 - 43


def _as_integers(batch):
    columns = {name: batch.column(name) for name in batch.schema.names}
    for name in CATEGORIES:
        columns[name] = pa.array([None if x is None else int(x, 16) for x in columns[name].to_pylist()], pa.int64())
    return pa.record_batch(columns)


def test_several_files_are_read_as_one(tmp_path):
    write_criteo(tmp_path / "all.txt", 230)
    lines = (tmp_path / "all.txt").read_text().split("\n")
    (tmp_path / "day_0").write_text("\n".join(lines[:100]))
    (tmp_path / "day_1").write_text("\n".join(lines[100:]))
    settings = small(batch_size=45)
    one = dlrm.make_examples(settings, [tmp_path / "all.txt"])
    same_batches(one.batches(0), dlrm.make_examples(settings, [tmp_path / "day_0", tmp_path / "day_1"]).batches(0))


def test_files_of_both_kinds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--data must be all prebatched or all text, got a.txt, b.arrow"):
        dlrm.make_examples(small(), [Path("a.txt"), Path("b.arrow")])


# ---- The network -----------------------------------------------------------------------------------------------------


def reference_logits(state, numbers, rows):
    """Return DLRM's logits by its formula, pair by pair, from a copy of the state and each feature's embeddings."""

    def perceptron(x, name, linear_end):
        layers = sum(key.startswith(f"layers.{name}.weights.") for key in state)
        for layer in range(layers):
            x = x @ state[f"layers.{name}.weights.{layer}"].T + state[f"layers.{name}.biases.{layer}"]
            x = x if linear_end and layer == layers - 1 else x.relu()
        return x

    dense = perceptron(numbers, "bottom", False)
    vectors = [dense, *rows]
    products = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
    return perceptron(torch.cat([dense, torch.stack(products, 1)], 1), "top", True)[:, 0]


def test_network_and_step_are_the_papers_formula_with_torchs_adagrad():
    model, step = make_step(small(tables="hashed", lr=0.1))
    state = {name: x.double().clone().requires_grad_() for name, x in model.state_dict().items()}
    adagrad = torch.optim.Adagrad(state.values(), lr=0.1)
    for batch in batches(3, 32):
        ids = ops.to_hash_bucket_fast(batch.ids, 60)
        rows = [state[f"bags.embedding_bags.{name}.weight"][row] for name, row in zip(CATEGORIES, ids, strict=True)]
        expected = reference_logits(state, batch.numbers.double(), rows)
        torch.testing.assert_close(model(batch.numbers, batch.ids).double(), expected, rtol=1e-4, atol=1e-4)
        adagrad.zero_grad()
        loss = F.binary_cross_entropy_with_logits(expected, batch.labels.double())
        loss.backward()
        adagrad.step()
        assert step(batch) == pytest.approx(loss.item(), abs=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.double(), state[name].detach(), rtol=0, atol=2e-3, msg=f"{name}: {{}}".format)


def test_the_default_network_is_the_papers_programs():
    network = dlrm.make_model(settings_of(dlrm, tables="hashed", buckets=10))
    shapes = [tuple(x.shape) for x in network.layers.bottom.weights]
    assert shapes == [(512, 13), (256, 512), (64, 256), (16, 64)]
    assert [tuple(x.shape) for x in network.layers.top.weights] == [(512, 367), (256, 512), (1, 256)]


def test_weights_depend_on_the_seed_alone_and_leave_the_generator():
    torch.manual_seed(5)
    before, (batch,) = torch.random.get_rng_state(), batches(1)
    models = [dlrm.make_model(small(tables="hashed", grad_mode="dense", seed=seed)) for seed in (1, 1, 2)]
    one, other, third = (model(batch.numbers, batch.ids) for model in models)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, other) and not torch.equal(one, third)


# ---- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_training_learns(kind, tmp_path):
    flags = (
        "--samples 8192 --held-out 2048 --batch-size 128 --max-cardinality 100 --embedding-dim 4 --bottom 8 --top 16"
    )
    kinds = ["--tables", kind, *(["--buckets", 1000] if kind == "hashed" else [])]
    assert run(dlrm, *flags.split(), *kinds, "--lr", 0.03, "--epochs", 2, "--checkpoint", tmp_path) == 0
    first, last = history_of(tmp_path)
    assert (first["step"], last["step"], first["epoch"], last["epoch"]) == (64, 128, 1, 2)
    assert last["loss"] < first["loss"] < 0.69
    # The hidden model's own AUC is about 0.8.
    assert last["auc"] > first["auc"] > 0.6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_gradient_modes_train_the_same_losses(kind, optimizer):
    losses = {}
    for mode in GRAD_MODES:
        _, step = make_step(small(tables=kind, grad_mode=mode, optimizer=optimizer))
        losses[mode] = [step(batch) for batch in batches(4)]
    for mode in GRAD_MODES[1:]:
        assert losses[mode] == pytest.approx(losses["fused"], abs=1e-4), mode


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_trains_as_the_cpu_does(kind):
    losses = []
    for device in ("cpu", "cuda"):
        _, step = make_step(small(tables=kind), device)
        losses.append([step(Batch(*(x.to(device) for x in batch))) for batch in batches(8)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
