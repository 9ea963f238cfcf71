"""The Wide & Deep example: generated examples, the network, its gradient modes and optimizers, training, resuming."""

import math

import pytest
import torch
import torch.nn.functional as F

from torchsparse_rec import ops
from torchsparse_rec.examples import _layers
from torchsparse_rec.examples._checkpoints import Checkpoint
from torchsparse_rec.examples._clicks import Clicks
from torchsparse_rec.examples._optimizers import LEARNING_RATES, OPTIMIZERS
from torchsparse_rec.examples.wide_deep import data, model, steps, train
from torchsparse_rec.examples.wide_deep.columns import criteo_columns, generated_columns
from torchsparse_rec.examples.wide_deep.settings import Settings
from torchsparse_rec.nn import EmbeddingBagConfig

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"rows": 300, "samples": 2048, "held_out": 1024, "batch_size": 256, "embedding_dim": 4, "mlp": (16, 8)}


def trainer_of(**settings):
    return train.make_trainer(Settings(**{**SMALL, **settings}))


def step_of(kind="identity", grad_mode="fused", optimizer="sgd", lr=0.5, seed=0, rows=300):
    columns = generated_columns(kind, rows, 4)
    return steps.TorchStep(columns, steps.make_model(columns, (16, 8), grad_mode, seed), optimizer, lr)


# ---- Examples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", data.DISTRIBUTIONS)
def test_batches_have_the_blogs_columns_and_depend_on_number_and_seed_alone(distribution):
    generator = data.Generator(50, 64, distribution, seed=3)
    later, batch = generator.batch(5), generator.batch(2)
    assert len(batch.columns) == 50 and batch.size == 64
    assert sum(x.dim() == 2 and x.shape == (64, 10) for x in batch.columns.values()) == 3
    assert sum(x.dtype == torch.int64 and x.shape == (64,) for x in batch.columns.values()) == 37
    assert sum(x.dtype == torch.float32 and x.shape == (64,) for x in batch.columns.values()) == 10
    for name in data.HOTS:
        assert 0 <= int(batch.columns[name].min()) and int(batch.columns[name].max()) < 50
    assert set(batch.labels.tolist()) == {0.0, 1.0} and batch.labels.dtype == torch.float32
    again = data.Generator(50, 64, distribution, seed=3).batch(2)
    assert torch.equal(batch.labels, again.labels)
    assert all(torch.equal(x, again.columns[name]) for name, x in batch.columns.items())
    for other in (later, data.Generator(50, 64, distribution, seed=4).batch(2)):
        assert not torch.equal(batch.columns["one_hot_0"], other.columns["one_hot_0"])


def test_zipf_is_skewed_as_it_says():
    columns = data.Generator(1000, 2000, "zipf").batch(0).columns.values()
    ids = torch.cat([x.flatten() for x in columns if x.dtype == torch.int64])
    counts = ids.bincount(minlength=1000).double()
    # Id i has the mass of [i + 1, i + 2) under x ** -1.05 on [1, 1001).
    edges = torch.arange(1, 1002).double() ** -0.05
    expected = (edges[:-1] - edges[1:]) / (1 - edges[-1]) * len(ids)
    deviation = (counts - expected).abs() / expected.sqrt()
    assert float(deviation.max()) < 5.0 and float(deviation.mean()) < 1.0


def test_the_hidden_model_can_be_told_from_chance():
    generator = data.Generator(100, 4096)
    batch = generator.batch(0)
    numbers = torch.stack([batch.columns[name] for name in data.NUMBERS])
    logits = generator._logits(numbers, batch.columns)
    assert 1.4 < float(logits.std()) < 2.2  # numbers 1.0, ids 1.5
    ordered = batch.labels[logits.argsort()]
    assert ordered[-1000:].mean() > 0.8 and ordered[:1000].mean() < 0.2
    effects = data.effects(torch.arange(10_000), 7)
    assert effects.min() >= -1.0 and effects.max() < 1.0 and abs(float(effects.mean())) < 0.03
    assert abs(float(effects.std()) - 3**-0.5) < 0.02


def test_generator_refuses():
    for arguments, text in (
        ((0, 4), "rows must be at least 1, got 0"),
        ((4, 0), "batch_size must be at least 1, got 0"),
        ((4, 4, "normal"), "distribution must be one of uniform, zipf, got 'normal'"),
    ):
        with pytest.raises(ValueError, match=text):
            data.Generator(*arguments)
    with pytest.raises(ValueError, match="columns must be one of identity, hashed, got 'raw'"):
        generated_columns("raw", 10, 4)


@pytest.mark.parametrize("kind", ["identity", "hashed"])
def test_columns_are_rows_of_the_tables(kind):
    columns, batch = generated_columns(kind, 40, 4), data.Generator(1000 if kind == "hashed" else 40, 8).batch(0)
    features = columns.transform(batch.columns)
    numbers = torch.stack([batch.columns[name] for name in columns.numbers], 1)
    assert torch.equal(features.dense, numbers)
    for name in data.HOTS:
        ids = batch.columns[name].flatten()
        wanted = ids if kind == "identity" else ops.to_hash_bucket_fast(ids, 40)
        assert torch.equal(features.sparse[name].values(), wanted)
    tables = columns.transform.embedding_bag_configs()
    assert len(tables) == 40 and all((t.num_embeddings, t.embedding_dim) == (40, 5) for t in tables)


# ---- The network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(300, 20, 32), (256, 7, 16), (255, 20, 32), (300, 20, 15)])
def test_linear_is_torchs_with_its_gradients(shape, monkeypatch):
    monkeypatch.setattr(_layers, "_IS_WIDE", True)  # As on a processor with AVX-512.
    examples, inputs, outputs = shape
    torch.manual_seed(0)
    given = [torch.randn(examples, inputs), torch.randn(outputs, inputs), torch.randn(outputs)]
    found = [x.clone().requires_grad_() for x in given]
    wanted = [x.double().requires_grad_() for x in given]
    ours, reference = _layers.linear(*found), F.linear(*wanted)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours.double(), reference, rtol=0, atol=1e-4)
    weights = torch.randn(examples, outputs)
    (ours * weights).sum().backward()
    (reference * weights).sum().backward()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-3)


def test_model_is_the_papers_formula():
    columns = generated_columns("identity", 30, 4)
    network = steps.make_model(columns, (16, 8), "dense", 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    batch = data.Generator(30, 6).batch(0)
    features = columns.transform(batch.columns)
    state = {name: x.double() for name, x in network.state_dict().items()}
    wide = features.dense.double() @ state["wide.weight"][0] + state["wide.bias"]
    pooled = []
    for table in columns.transform.embedding_bag_configs():
        ids, rows = batch.columns[table.feature_names[0]].view(6, -1), state[f"bags.embedding_bags.{table.name}.weight"]
        wide += rows[ids][..., -1].sum(1)
        pooled.append(rows[ids][..., :-1].mean(1))
    hidden = torch.cat([*pooled, features.dense.double()], 1)
    for layer in range(2):
        hidden = (hidden @ state[f"hidden.{layer}.weight"].T + state[f"hidden.{layer}.bias"]).relu()
    expected = hidden @ state["output.weight"][0] + state["output.bias"] + wide
    torch.testing.assert_close(network(features.dense, features.sparse).double(), expected, rtol=1e-5, atol=1e-4)


def test_model_refuses():
    def table(dim, name="a"):
        return EmbeddingBagConfig(10, dim, name, feature_names=[name], pooling="mean")

    for arguments, text in (
        (([table(1)], {"a": 1}, 2), r"one embedding_dim of at least 2, got \[1\]"),
        (([table(3), table(4, "b")], {"a": 1, "b": 1}, 2), r"got \[3, 4\]"),
        (([table(3)], {"a": 1}, 2, ()), r"mlp must have at least one width, and none below 1, got \[\]"),
        (([table(3)], {"a": 1}, 2, (4, 0)), r"got \[4, 0\]"),
        (([table(3)], {"a": 1}, 2, (4,), "lazy"), "grad_mode must be one of fused, sparse, dense, auto, got 'lazy'"),
    ):
        with pytest.raises(ValueError, match=text):
            model.WideDeep(*arguments)


def test_rows_begin_small_with_nothing_in_their_wide_part():
    state = step_of(seed=1).model.state_dict()
    table = next(value for name, value in state.items() if "embedding_bags" in name)
    assert table[:, :-1].abs().max() <= 0.05 and bool((table[:, :-1] != 0).any()) and bool((table[:, -1] == 0).all())


# ---- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_gradient_modes_train_the_same_parameters(optimizer):
    batches = list(data.Generator(300, 128).batches(0, 5))
    ends, losses = {}, {}
    for mode in model.GRAD_MODES:
        step = step_of(grad_mode=mode, optimizer=optimizer, lr=min(0.5, LEARNING_RATES[optimizer]))
        losses[mode] = [float(step(batch)) for batch in batches]
        ends[mode] = step.model.state_dict()
    for mode in model.GRAD_MODES[1:]:
        assert losses[mode] == pytest.approx(losses["fused"], abs=2e-5), mode
        for name, value in ends["fused"].items():
            torch.testing.assert_close(ends[mode][name], value, rtol=1e-3, atol=2e-4, msg=f"{mode} {name}: {{}}".format)
    moved = step_of(optimizer=optimizer).model.state_dict()
    assert all(not torch.equal(moved[name], value) for name, value in ends["fused"].items())


@pytest.mark.parametrize("kind", ["identity", "hashed"])
def test_joined_rows_train_as_separate_tables_do(kind):
    """Compare one step of SGD with the gradient of a model whose wide part has tables of its own."""
    columns, batch = generated_columns(kind, 300, 4), data.Generator(300, 64).batch(0)
    step = step_of(kind, lr=0.5)
    names = [table.name for table in columns.transform.embedding_bag_configs()]
    state = {name: x.double() for name, x in step.model.state_dict().items()}
    rows = [state[f"bags.embedding_bags.{name}.weight"] for name in names]
    deep = [x[:, :-1].clone().requires_grad_() for x in rows]
    wide = [x[:, -1].clone().requires_grad_() for x in rows]
    pooled, weights = [], 0.0
    for name, embeddings, linear in zip(step.model.names, deep, wide, strict=True):
        ids = batch.columns[name].view(64, -1)
        ids = ids if kind == "identity" else ops.to_hash_bucket_fast(ids, 300)
        pooled.append(embeddings[ids].mean(1))
        weights = weights + linear[ids].sum(1)
    numbers = torch.stack([batch.columns[name] for name in columns.numbers], 1).double()
    hidden = torch.cat([*pooled, numbers], 1)
    for layer in range(2):
        hidden = (hidden @ state[f"hidden.{layer}.weight"].T + state[f"hidden.{layer}.bias"]).relu()
    logits = hidden @ state["output.weight"][0] + weights
    loss = F.binary_cross_entropy_with_logits(logits, batch.labels.double())
    loss.backward()
    assert float(step(batch)) == pytest.approx(loss.item(), abs=1e-6)
    after = step.model.state_dict()
    for name, embeddings, linear in zip(names, deep, wide, strict=True):
        expected = torch.cat([embeddings - 0.5 * embeddings.grad, (linear - 0.5 * linear.grad)[:, None]], 1)
        torch.testing.assert_close(after[f"bags.embedding_bags.{name}.weight"].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["identity", "hashed"])
@pytest.mark.parametrize("distribution", data.DISTRIBUTIONS)
def test_training_learns(kind, distribution):
    trainer = trainer_of(columns=kind, distribution=distribution, samples=16_384, held_out=4096, lr=0.5)
    before = Clicks.of(trainer.train_on, trainer.source)
    records = list(trainer.run(2))
    assert before.auc < 0.6 and before.log_loss > 0.65
    assert [record.step for record in records] == [64, 128] and [record.epoch for record in records] == [1, 2]
    assert records[1].loss < records[0].loss < 0.69
    assert records[1].metrics.auc > 0.62 and records[1].metrics.log_loss < before.log_loss - 0.02


def test_metrics_by_hand():
    trainer = trainer_of(held_out=500)
    batches = trainer.source.held_out()
    with torch.no_grad():
        logits = torch.cat([trainer.train_on.logits(batch) for batch in batches]).double()
    labels = torch.cat([batch.labels for batch in batches])
    above = (logits[labels == 1, None] > logits[None, labels == 0]).double().mean()
    found = Clicks.of(trainer.train_on, trainer.source)
    assert found.auc == pytest.approx(float(above), abs=1e-4)
    assert found.log_loss == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, labels.double())), abs=1e-6)


def test_criteo_columns_take_what_is_missing():
    columns = criteo_columns(50, 4)
    batch = {name: [None, 3] for name in columns.numbers}
    batch["I2"] = [-2, 0]
    features = columns.transform({**batch, **{name: ["68fd1e64", None] for name in columns.hots}})
    place = columns.numbers.index("I1")
    assert features.dense[:, place].tolist() == pytest.approx([0.0, math.log(4.0)])
    assert features.dense[:, columns.numbers.index("I2")].tolist() == [0.0, 0.0]
    assert features.sparse["C1"].lengths().tolist() == [1, 0]
    assert features.sparse["C1"].values().tolist() == ops.to_hash_bucket_fast(["68fd1e64"], 50).tolist()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["identity", "hashed"])
def test_cuda_trains_as_the_cpu_does(kind):
    batches = list(data.Generator(300, 256).batches(0, 8))
    losses = []
    for device in ("cpu", "cuda"):
        columns = generated_columns(kind, 300, 4)
        step = steps.TorchStep(columns, steps.make_model(columns, (16, 8), "fused", 0, device), "sgd", 0.5)
        moved = [data.Batch(b.labels, {name: x.to(device) for name, x in b.columns.items()}) for b in batches]
        losses.append([float(step(batch)) for batch in moved])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.cuda
def test_cuda_trainer_resumes_bit_for_bit(tmp_path):
    pytest.importorskip("torchmetrics")
    settings, checkpoint = Settings(**SMALL, columns="hashed"), Checkpoint(tmp_path / "checkpoint.pt", "x")
    straight = train.make_trainer(settings, "cuda", checkpoint)
    list(straight.run(1))
    content, straight.checkpoint = checkpoint.read(), None
    list(straight.run(2))
    resumed = train.make_trainer(settings, "cuda")
    resumed.resume(content, checkpoint)
    list(resumed.run(2))
    for name, value in straight.train_on.model.state_dict().items():
        assert torch.equal(value, resumed.train_on.model.state_dict()[name]), name
