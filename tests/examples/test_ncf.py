"""The NCF example: splitting, sampling, metrics, training, resuming, and TensorFlow beside it."""

import math
import os
import re

import numpy as np
import pytest
import torch
from examples.cases import refused

from torchsparse_rec.examples._records import Record
from torchsparse_rec.examples.ncf import __main__ as command
from torchsparse_rec.examples.ncf import data, evaluate, sampling, settings, steps, train
from torchsparse_rec.examples.ncf.model import NeuMF
from torchsparse_rec.examples.ncf.settings import Settings

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = os.environ.get(data.ENVIRONMENT_VARIABLE)
SMALL = {"factors": 4, "layers": (16, 8), "batch_size": 256, "lr": 5e-3}


@pytest.fixture(scope="module")
def small():
    return data.generate(150, 300, 4500, seed=1)


# ---- Split and samples -----------------------------------------------------------------------------------------------


def test_leave_one_out_takes_the_latest_and_of_ties_the_last():
    users, items = np.array([0, 1, 0, 1, 0, 2], np.int32), np.array([5, 6, 7, 8, 9, 4], np.int32)
    found = sampling.leave_one_out(data.Interactions("x", users, items, np.array([3, 9, 3, 1, 2, 7]), 3, 10))
    assert (found.test_users.tolist(), found.test_items.tolist()) == ([0, 1], [7, 6])
    assert (found.users.tolist(), found.items.tolist()) == ([0, 1, 0, 2], [5, 8, 9, 4])


def test_pair_set(small):
    pairs = sampling.PairSet(torch.from_numpy(small.users), torch.from_numpy(small.items), 150, 300)
    expected = torch.zeros(150, 300, dtype=torch.bool)
    expected[small.users, small.items] = True
    grid = torch.arange(300, dtype=torch.int32).expand(150, -1)
    assert torch.equal(pairs.contains(torch.arange(150).unsqueeze(1), grid), expected)
    assert torch.equal(pairs.row_mask(torch.arange(150)), expected)
    assert torch.equal(pairs.counts(), expected.sum(1))


def test_epoch_has_every_positive_once_and_fresh_negatives(small):
    split = sampling.leave_one_out(small)
    sampler = sampling.TrainingSampler(split, negatives=4, seed=3)
    first, second = sampler.draw(), sampler.draw()
    trained = set(zip(split.users.tolist(), split.items.tolist(), strict=True))
    for epoch in (first, second):
        drawn = list(zip(epoch.users.tolist(), epoch.items.tolist(), epoch.labels.tolist(), strict=True))
        assert len(drawn) == 5 * len(split.users) == sampler.samples
        assert sorted((u, i) for u, i, label in drawn if label) == sorted(trained)
        assert not any((u, i) in trained for u, i, label in drawn if not label)
    assert not torch.equal(first.items.sort().values, second.items.sort().values)
    assert [len(batch[0]) for batch in first.split(4096)] == [4096] * 5 + [sampler.samples - 5 * 4096]


def test_negatives_cover_what_is_left_and_can_run_out():
    users, items = torch.zeros(3, dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    split = sampling.Split(users, items, users[:1], items[:1], 1, 6)
    epoch = sampling.TrainingSampler(split, negatives=100).draw()
    assert epoch.items[epoch.labels == 0].unique().tolist() == [1, 4, 5]
    split = sampling.Split(users, items, users[:1], torch.tensor([4], dtype=torch.int32), 1, 6)
    epoch = sampling.TrainingSampler(split, negatives=100, exclude_held_out=True).draw()
    assert epoch.items[epoch.labels == 0].unique().tolist() == [1, 5]
    with pytest.raises(ValueError, match="no negative exists for user 0, who has all 3 items"):
        sampling.TrainingSampler(sampling.Split(users, torch.arange(3).int(), users, items, 1, 3))


def test_candidates_are_different_and_untouched(small):
    split = sampling.leave_one_out(small)
    candidates = sampling.evaluation_candidates(split, seed=5)
    assert candidates.shape == (len(split.test_users), 99)
    touched = set(zip(small.users.tolist(), small.items.tolist(), strict=True))
    for user, row in zip(split.test_users.tolist(), candidates.tolist(), strict=True):
        assert len(set(row)) == 99 and not any((user, item) in touched for item in row)
    assert torch.equal(candidates, sampling.evaluation_candidates(split, seed=5))
    assert not torch.equal(candidates, sampling.evaluation_candidates(split, seed=6))
    with pytest.raises(ValueError, match="evaluation needs 300 items that a user never touched; user"):
        sampling.evaluation_candidates(split, count=300)


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    others = torch.tensor([[0.1, 0.2, 0.3], [0.9, 0.5, 0.1], [0.5, 0.5, 0.5], [0.1, 0.2, float("nan")]])
    found = evaluate.ranks(torch.tensor([0.4, 0.5, 0.5, 0.3]), others)
    assert found.tolist() == [0, 2, 3, 1]  # a tie counts against the held-out item, a NaN too
    assert evaluate.ranks(torch.tensor([float("nan")]), others[:1]).tolist() == [3]
    assert evaluate.hit_rate(torch.tensor([0, 9, 10, 50])) == 0.5
    assert evaluate.ndcg(torch.tensor([0, 2, 9, 10])) == pytest.approx((1 + 1 / 2 + 1 / math.log2(11)) / 4)
    assert evaluate.hit_rate(found, top=2) == 0.5


def test_evaluator_equals_a_loop_over_users(small, monkeypatch):
    monkeypatch.setattr(evaluate, "_PAIRS", 1000)  # several blocks, the last one smaller
    split = sampling.leave_one_out(small)
    candidates = sampling.evaluation_candidates(split)
    torch.manual_seed(0)
    model = NeuMF(150, 300, 4, (16, 8)).double()
    for table in model.tables():
        torch.nn.init.normal_(table.weight)
    found = evaluate.Evaluator(split, candidates)(model)
    sampled, full = [], []
    for user, item, row in zip(split.test_users, split.test_items, candidates, strict=True):
        scores = model(user.expand(300), torch.arange(300))
        trained = set(split.items[split.users == user].tolist())
        rest = [other for other in range(300) if other not in trained and other != int(item)]
        sampled.append(int((scores[row.long()] >= scores[item]).sum()))
        full.append(int((scores[rest] >= scores[item]).sum()))
    for ranks, hr, ndcg in ((sampled, found.hr, found.ndcg), (full, found.full_hr, found.full_ndcg)):
        assert hr == pytest.approx(np.mean([rank < 10 for rank in ranks]))
        assert ndcg == pytest.approx(np.mean([1 / math.log2(rank + 2) if rank < 10 else 0.0 for rank in ranks]))
    assert found.full_hr < found.hr


def test_model_is_the_papers_formula():
    torch.manual_seed(0)
    model = NeuMF(3, 5, factors=2, layers=(4, 3))
    user, item = model.user_table.weight[1], model.item_table.weight[4]
    hidden = (model.mlp[0].weight @ torch.cat([user[2:], item[2:]]) + model.mlp[0].bias).relu()
    expected = model.output.weight[0] @ torch.cat([user[:2] * item[:2], hidden]) + model.output.bias
    torch.testing.assert_close(model(torch.tensor([1]), torch.tensor([4])), expected)
    everything = model(torch.arange(3).repeat_interleave(5), torch.arange(5).repeat(3)).view(3, 5)
    torch.testing.assert_close(model.score_all(torch.arange(3)), everything)
    for bad in ({"layers": (5, 3)}, {"layers": (4,)}, {"factors": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            NeuMF(3, 5, **bad)


# ---- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", settings.OPTIMIZERS)
@pytest.mark.parametrize("grad_mode", settings.GRAD_MODES)
def test_training_learns(small, grad_mode, optimizer):
    rate = {"adam": 1e-2, "sgd": 0.5, "adagrad": 0.1}[optimizer]
    trainer = train.make_trainer(Settings(**{**SMALL, "lr": rate}, grad_mode=grad_mode, optimizer=optimizer), small)
    before = evaluate.Metrics.of(trainer.train_on, trainer.source)
    *_, record = trainer.run(3)
    assert record.loss < trainer.history[0].loss < 0.7
    if optimizer == "adam":
        assert before.hr < 0.2  # chance: 0.10, and 0.05 for NDCG
        assert record.metrics.hr > 0.25 and record.metrics.ndcg > 0.11


def test_all_kinds_and_modes_agree(small):
    split = sampling.leave_one_out(small)
    batches = sampling.TrainingSampler(split).draw().split(256)[:20]
    losses = {}
    for name, kind, mode in (("torch", "torch", "auto"), *((mode, "ours", mode) for mode in settings.GRAD_MODES)):
        step = steps.build_step(kind, 150, 300, Settings(factors=4, layers=(16, 8), grad_mode=mode))
        losses[name] = [float(step(batch)) for batch in step.prepare(batches)]
    for mode in settings.GRAD_MODES:
        assert losses[mode] == pytest.approx(losses["torch"], abs=1e-6), mode


def test_lines_of_records():
    record = Record(3, 99, 0.312, evaluate.Metrics(0.66124, 0.39871, 0.1, 0.05), 412345.2)
    assert record.line(30) == (
        "epoch  3/30  HR@10 0.6612 NDCG@10 0.3987 full-HR@10 0.1000 full-NDCG@10 0.0500 loss 0.3120 412,345 samples/s"
    )


def test_command_refuses_what_it_cannot_use(tmp_path, capsys):
    garbled = tmp_path / "u.data"
    garbled.write_bytes(b"1\t2\t3\t881250949\n1\t2\t3\n")
    flags = ["--data-dir", tmp_path, "--output-dir", tmp_path / "a"]
    assert "u.data: line 2: expected user" in refused(capsys, command, *flags)
    assert list((tmp_path / "a").iterdir()) == []
    assert "first one even, got 5,3" in refused(capsys, command, "--layers", "5,3")


@pytest.mark.skipif(DATA is None, reason=f"${data.ENVIRONMENT_VARIABLE} is not set")
def test_training_learns_ml_100k():
    *_, record = train.make_trainer(Settings(lr=3e-3), data.load("ml-100k")[0]).run(2)
    assert record.metrics.hr > 0.42 and record.metrics.ndcg > 0.24  # chance: 0.10 and 0.05


# ---- TensorFlow's rule -----------------------------------------------------------------------------------------------


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("grad_mode", "optimizer"),
    [
        ("dense", "adam"),
        ("auto", "adam"),
        ("sparse", "adam"),
        ("fused", "adam"),
        ("sparse", "sgd"),
        ("fused", "adagrad"),
    ],
)
def test_first_losses_equal_tensorflows(small, grad_mode, optimizer):
    pytest.importorskip("tensorflow")
    from torchsparse_rec.examples.ncf.compare_tensorflow import COMPARED_STEPS, TOLERANCE, compare

    lines = []
    chosen = Settings(**{**SMALL, "batch_size": 128, "lr": None}, grad_mode=grad_mode, optimizer=optimizer)
    found = compare(chosen, small, epochs=1, print_line=lines.append)
    assert len(found.first_losses["ours"]) == len(found.first_losses["tensorflow"]) == COMPARED_STEPS
    assert found.largest_difference() <= TOLERANCE
    assert found.first_losses["ours"][-1] < found.first_losses["ours"][0] - 1e-3
    sides = found.epochs[0]
    assert sides["ours"].metrics.hr == pytest.approx(sides["tensorflow"].metrics.hr, abs=0.05)
    assert any(re.search(r"first 100 losses: largest difference \S+ \(within 1e-05\)", line) for line in lines)
