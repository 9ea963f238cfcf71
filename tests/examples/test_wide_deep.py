"""The Wide & Deep example: generated examples, the network, its gradient modes and optimizers, training, resuming."""

import math

import pytest
import torch
import torch.nn.functional as F
from examples.cases import assert_same_end, history_of, run, settings_of, step_of

from torchsparse_rec import ops
from torchsparse_rec.data.generated import effects
from torchsparse_rec.distributed.torchrun import Ranks
from torchsparse_rec.examples import _common, wide_deep
from torchsparse_rec.examples._common import GRAD_MODES, OPTIMIZERS, RATES
from torchsparse_rec.examples.wide_deep import HOTS, NUMBERS, Batch, Generator
from torchsparse_rec.nn.linear import linear

pytestmark = pytest.mark.usefixtures("one_thread")


def small(**given):
    return settings_of(wide_deep, **{"rows": 300, "embedding_dim": 4, "mlp": [16, 8], "lr": 0.5, **given})


def made(settings, device="cpu"):
    """Return a network, a function that returns a batch's logits, and one that trains on a batch."""
    transform = wide_deep.make_transform(settings)
    model, transform = wide_deep.make_model(transform, settings).to(device), transform.to(device)

    def logits(batch):
        found = transform(batch.columns)
        return model(found.dense, found.sparse)

    return model, logits, step_of(model, settings, logits)


# ---- Examples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
def test_batches_have_the_blogs_columns_and_depend_on_number_and_seed_alone(distribution):
    generator = Generator(50, 64, distribution, seed=3)
    later, batch = generator.batch(5), generator.batch(2)
    assert len(batch.columns) == 50 and batch.size == 64
    assert sum(x.dim() == 2 and x.shape == (64, 10) for x in batch.columns.values()) == 3
    assert sum(x.dtype == torch.int64 and x.shape == (64,) for x in batch.columns.values()) == 37
    assert sum(x.dtype == torch.float32 and x.shape == (64,) for x in batch.columns.values()) == 10
    for name in HOTS:
        assert 0 <= int(batch.columns[name].min()) and int(batch.columns[name].max()) < 50
    assert set(batch.labels.tolist()) == {0.0, 1.0} and batch.labels.dtype == torch.float32
    again = Generator(50, 64, distribution, seed=3).batch(2)
    assert torch.equal(batch.labels, again.labels)
    assert all(torch.equal(x, again.columns[name]) for name, x in batch.columns.items())
    for other in (later, Generator(50, 64, distribution, seed=4).batch(2)):
        assert not torch.equal(batch.columns["one_hot_0"], other.columns["one_hot_0"])


def test_zipf_is_skewed_as_it_says():
    columns = Generator(1000, 2000, "zipf").batch(0).columns.values()
    ids = torch.cat([x.flatten() for x in columns if x.dtype == torch.int64])
    counts = ids.bincount(minlength=1000).double()
    # Id i has the mass of [i + 1, i + 2) under x ** -1.05 on [1, 1001).
    edges = torch.arange(1, 1002).double() ** -0.05
    expected = (edges[:-1] - edges[1:]) / (1 - edges[-1]) * len(ids)
    deviation = (counts - expected).abs() / expected.sqrt()
    assert float(deviation.max()) < 5.0 and float(deviation.mean()) < 1.0


def test_the_hidden_model_can_be_told_from_chance():
    generator = Generator(100, 4096)
    batch = generator.batch(0)
    numbers = torch.stack([batch.columns[name] for name in NUMBERS])
    logits = generator.logits(numbers, batch.columns)
    assert 1.4 < float(logits.std()) < 2.2  # numbers 1.0, ids 1.5
    ordered = batch.labels[logits.argsort()]
    assert ordered[-1000:].mean() > 0.8 and ordered[:1000].mean() < 0.2
    found = effects(torch.arange(10_000), 7)
    assert found.min() >= -1.0 and found.max() < 1.0 and abs(float(found.mean())) < 0.03
    assert abs(float(found.std()) - 3**-0.5) < 0.02


@pytest.mark.parametrize("kind", ["identity", "hashed"])
def test_columns_are_rows_of_the_tables(kind):
    transform = wide_deep.make_transform(small(columns=kind, rows=40))
    batch = Generator(1000 if kind == "hashed" else 40, 8).batch(0)
    features = transform(batch.columns)
    assert torch.equal(features.dense, torch.stack([batch.columns[name] for name in NUMBERS], 1))
    for name in HOTS:
        ids = batch.columns[name].flatten()
        wanted = ids if kind == "identity" else ops.to_hash_bucket_fast(ids, 40)
        assert torch.equal(features.sparse[name].values(), wanted)
    tables = transform.embedding_bag_configs()
    assert len(tables) == 40 and all((t.num_embeddings, t.embedding_dim) == (40, 5) for t in tables)


# ---- The network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(300, 20, 32), (256, 7, 16), (255, 20, 32), (300, 20, 15)])
def test_linear_is_torchs_with_its_gradients(shape, monkeypatch):
    monkeypatch.setattr("torchsparse_rec.nn.linear._IS_WIDE", True)  # As on a processor with AVX-512.
    examples, inputs, outputs = shape
    torch.manual_seed(0)
    given = [torch.randn(examples, inputs), torch.randn(outputs, inputs), torch.randn(outputs)]
    found = [x.clone().requires_grad_() for x in given]
    wanted = [x.double().requires_grad_() for x in given]
    ours, reference = linear(*found), F.linear(*wanted)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours.double(), reference, rtol=0, atol=1e-4)
    weights = torch.randn(examples, outputs)
    (ours * weights).sum().backward()
    (reference * weights).sum().backward()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-3)


def test_rows_begin_small_with_nothing_in_their_wide_part():
    state = made(small(seed=1))[0].state_dict()
    table = next(value for name, value in state.items() if "embedding_bags" in name)
    assert table[:, :-1].abs().max() <= 0.05 and bool((table[:, :-1] != 0).any()) and bool((table[:, -1] == 0).all())


def test_weights_depend_on_the_seed_alone_and_leave_the_generator():
    torch.manual_seed(5)
    before, batch = torch.random.get_rng_state(), Generator(300, 32).batch(0)
    one, other, third = (made(small(grad_mode="dense", seed=seed))[1](batch) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, other) and not torch.equal(one, third)


# ---- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_gradient_modes_train_the_same_parameters(optimizer):
    batches = list(map(Generator(300, 128).batch, range(5)))
    ends, losses = {}, {}
    for mode in GRAD_MODES:
        model, _, step = made(small(grad_mode=mode, optimizer=optimizer, lr=min(0.5, RATES[optimizer])))
        first = {name: value.clone() for name, value in model.state_dict().items()}
        losses[mode] = [step(batch) for batch in batches]
        ends[mode] = model.state_dict()
    for mode in GRAD_MODES[1:]:
        assert losses[mode] == pytest.approx(losses["fused"], abs=2e-5), mode
        for name, value in ends["fused"].items():
            torch.testing.assert_close(ends[mode][name], value, rtol=1e-3, atol=2e-4, msg=f"{mode} {name}: {{}}".format)
    assert all(not torch.equal(first[name], value) for name, value in ends["fused"].items())


@pytest.mark.parametrize("kind", ["identity", "hashed"])
def test_joined_rows_train_as_separate_tables_do(kind):
    """Compare one step of SGD with the gradient of a model whose wide part has tables of its own."""
    settings, batch = small(columns=kind), Generator(300, 64).batch(0)
    model, _, step = made(settings)
    names = [table.name for table in wide_deep.make_transform(settings).embedding_bag_configs()]
    state = {name: x.double() for name, x in model.state_dict().items()}
    rows = [state[f"bags.embedding_bags.{name}.weight"] for name in names]
    deep = [x[:, :-1].clone().requires_grad_() for x in rows]
    wide = [x[:, -1].clone().requires_grad_() for x in rows]
    pooled, weights = [], 0.0
    for name, embeddings, of_wide in zip(model.names, deep, wide, strict=True):
        ids = batch.columns[name].view(64, -1)
        ids = ids if kind == "identity" else ops.to_hash_bucket_fast(ids, 300)
        pooled.append(embeddings[ids].mean(1))
        weights = weights + of_wide[ids].sum(1)
    numbers = torch.stack([batch.columns[name] for name in NUMBERS], 1).double()
    hidden = torch.cat([*pooled, numbers], 1)
    for layer in range(2):
        hidden = (hidden @ state[f"hidden.{layer}.weight"].T + state[f"hidden.{layer}.bias"]).relu()
    logits = hidden @ state["output.weight"][0] + weights
    loss = F.binary_cross_entropy_with_logits(logits, batch.labels.double())
    loss.backward()
    assert step(batch) == pytest.approx(loss.item(), abs=1e-6)
    after = model.state_dict()
    for name, embeddings, of_wide in zip(names, deep, wide, strict=True):
        expected = torch.cat([embeddings - 0.5 * embeddings.grad, (of_wide - 0.5 * of_wide.grad)[:, None]], 1)
        torch.testing.assert_close(after[f"bags.embedding_bags.{name}.weight"].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["identity", "hashed"])
@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
def test_training_learns(kind, distribution, tmp_path, monkeypatch):
    monkeypatch.setattr(_common, "draw", lambda *_: "no curves")
    flags = f"--rows 300 --embedding-dim 4 --mlp 16,8 --lr 0.5 --columns {kind} --distribution {distribution} "
    flags += "--samples 16384 --held-out 4096 --batch-size 256 --epochs 2 --output-dir"
    assert run(wide_deep, *flags.split(), tmp_path) == 0
    first, last = history_of(tmp_path)
    assert (first["step"], first["epoch"], last["step"], last["epoch"]) == (64, 1, 128, 2)
    assert last["loss"] < first["loss"] < 0.69 and last["auc"] > 0.62 and last["log_loss"] < 0.67


def test_metrics_by_hand():
    model, logits, _ = made(small())
    held_out = list(map(Generator(300, 256).batch, range(2)))
    found = _common.metrics_of_clicks(model, logits, held_out, Ranks())
    with torch.no_grad():
        scores = torch.cat([logits(batch) for batch in held_out]).double()
    labels = torch.cat([batch.labels for batch in held_out])
    above = (scores[labels == 1, None] > scores[None, labels == 0]).double().mean()
    assert found["auc"] == pytest.approx(float(above), abs=1e-4)
    entropy = float(F.binary_cross_entropy_with_logits(scores, labels.double()))
    assert found["log_loss"] == pytest.approx(entropy, abs=1e-6)


def test_criteo_columns_take_what_is_missing():
    transform = wide_deep.make_transform(small(rows=50), is_criteo=True)
    numbers = list(transform.dense_slices())
    batch = {**{name: [None, 3] for name in numbers}, "I2": [-2, 0]}
    features = transform({**batch, **{name: ["68fd1e64", None] for name in wide_deep.CATEGORIES}})
    assert features.dense[:, numbers.index("I1")].tolist() == pytest.approx([0.0, math.log(4.0)])
    assert features.dense[:, numbers.index("I2")].tolist() == [0.0, 0.0]
    assert features.sparse["C1"].lengths().tolist() == [1, 0]
    assert features.sparse["C1"].values().tolist() == ops.to_hash_bucket_fast(["68fd1e64"], 50).tolist()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["identity", "hashed"])
def test_cuda_trains_as_the_cpu_does(kind):
    losses = []
    for device in ("cpu", "cuda"):
        _, _, step = made(small(columns=kind), device)
        batches = map(Generator(300, 256).batch, range(8))
        moved = [
            Batch(batch.labels.to(device), {name: x.to(device) for name, x in batch.columns.items()})
            for batch in batches
        ]
        losses.append([step(batch) for batch in moved])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.cuda
def test_cuda_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(_common, "draw", lambda *_: "no curves")
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    flags = "--rows 300 --samples 2048 --held-out 512 --batch-size 256 --columns hashed --device cuda".split()
    assert run(wide_deep, *flags, "--epochs", 2, "--output-dir", straight) == 0
    assert run(wide_deep, *flags, "--epochs", 1, "--output-dir", cut) == 0
    assert run(wide_deep, "--resume", cut / "checkpoint", "--device", "cuda", "--epochs", 2) == 0
    assert_same_end(straight, cut)
