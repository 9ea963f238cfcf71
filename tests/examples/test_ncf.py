"""The NCF example: splitting, sampling, metrics, training, and where its data come from."""

import math
import os

import numpy as np
import pytest
import torch
from examples.cases import history_of, refused, run, settings_of, step_of

from torchsparse_rec.data import releases
from torchsparse_rec.data.pairs import PairSet
from torchsparse_rec.distributed.torchrun import Ranks
from torchsparse_rec.examples import ncf
from torchsparse_rec.examples._common import GRAD_MODES

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = os.environ.get(ncf.FOLDER_VARIABLE)


@pytest.fixture(scope="module")
def small():
    return ncf.generated(150, 300, 4500, seed=1)


def sizes(**given):
    return settings_of(ncf, **{"factors": 4, "layers": [16, 8], "batch_size": 256, **given})


def epoch_of(draw):
    """Return an epoch's samples."""
    return ncf.Batch(*map(torch.cat, zip(*draw(0), strict=True)))


# ---- Split and samples -----------------------------------------------------------------------------------------------


def test_leave_one_out_takes_the_latest_and_of_ties_the_last():
    users, items = np.array([0, 1, 0, 1, 0, 2], np.int32), np.array([5, 6, 7, 8, 9, 4], np.int32)
    found = ncf.leave_one_out(releases.Interactions("x", users, items, np.array([3, 9, 3, 1, 2, 7]), 3, 10))
    assert (found.test_users.tolist(), found.test_items.tolist()) == ([0, 1], [7, 6])
    assert (found.users.tolist(), found.items.tolist()) == ([0, 1, 0, 2], [5, 8, 9, 4])


def test_pair_set(small):
    pairs = PairSet(torch.from_numpy(small.users), torch.from_numpy(small.items), 150, 300)
    expected = torch.zeros(150, 300, dtype=torch.bool)
    expected[small.users, small.items] = True
    grid = torch.arange(300, dtype=torch.int32).expand(150, -1)
    assert torch.equal(pairs.contains(torch.arange(150).unsqueeze(1), grid), expected)
    assert torch.equal(pairs.row_mask(torch.arange(150)), expected)


def test_epoch_has_every_positive_once_and_fresh_negatives(small):
    split = ncf.leave_one_out(small)
    draw, length = ncf.batches(split, sizes(batch_size=4096), torch.Generator().manual_seed(3))
    first, second = epoch_of(draw), epoch_of(draw)
    trained = set(zip(split.users.tolist(), split.items.tolist(), strict=True))
    for epoch in (first, second):
        drawn = list(zip(epoch.users.tolist(), epoch.items.tolist(), epoch.labels.tolist(), strict=True))
        assert len(drawn) == 5 * len(split.users)
        assert sorted((u, i) for u, i, label in drawn if label) == sorted(trained)
        assert not any((u, i) in trained for u, i, label in drawn if not label)
    assert not torch.equal(first.items.sort().values, second.items.sort().values)
    assert [batch.size for batch in draw(0)] == [4096] * 5 + [5 * len(split.users) - 5 * 4096] and length == 6


def test_negatives_cover_what_is_left_and_can_run_out():
    users, items = torch.zeros(3, dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    split = ncf.Split(users, items, users[:1], torch.tensor([4], dtype=torch.int32), 1, 6)
    for excluded, left in ((None, [1, 4, 5]), (True, [1, 5])):
        settings = sizes(negatives=100, exclude_held_out=excluded)
        epoch = epoch_of(ncf.batches(split, settings, torch.Generator())[0])
        assert epoch.items[epoch.labels == 0].unique().tolist() == left
    with pytest.raises(ValueError, match="no negative exists for user 0, who has all 3 items"):
        ncf.batches(ncf.Split(users, torch.arange(3).int(), users, items, 1, 3), sizes(), torch.Generator())


def test_candidates_are_different_and_untouched(small):
    split = ncf.leave_one_out(small)
    candidates = ncf.candidates_of(split, seed=5)
    assert candidates.shape == (len(split.test_users), 99)
    touched = set(zip(small.users.tolist(), small.items.tolist(), strict=True))
    for user, row in zip(split.test_users.tolist(), candidates.tolist(), strict=True):
        assert len(set(row)) == 99 and not any((user, item) in touched for item in row)
    assert torch.equal(candidates, ncf.candidates_of(split, seed=5))
    assert not torch.equal(candidates, ncf.candidates_of(split, seed=6))
    with pytest.raises(ValueError, match="there must be 300 items that each user never touched, got "):
        split.pairs(True).draw_distinct_outside(split.test_users, 300, torch.Generator())


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    others = torch.tensor([[0.1, 0.2, 0.3], [0.9, 0.5, 0.1], [0.5, 0.5, 0.5], [0.1, 0.2, float("nan")]])
    found = ncf.ranks_of(torch.tensor([0.4, 0.5, 0.5, 0.3]), others)
    assert found.tolist() == [0, 2, 3, 1]  # a tie counts against the held-out item, a NaN too
    assert ncf.ranks_of(torch.tensor([float("nan")]), others[:1]).tolist() == [3]
    assert ncf.hit_rate_and_ndcg(torch.tensor([0, 9, 10, 50]))[0] == 0.5
    gains = (1 + 1 / 2 + 1 / math.log2(11)) / 4
    assert ncf.hit_rate_and_ndcg(torch.tensor([0, 2, 9, 10]))[1] == pytest.approx(gains)
    assert ncf.hit_rate_and_ndcg(found, top=2)[0] == 0.5


def test_metrics_equal_a_loop_over_users(small):
    split = ncf.leave_one_out(small)
    candidates = ncf.candidates_of(split, 0)
    model = ncf.make_model(150, 300, sizes(), torch.nn.Embedding).double()
    for table in (model.user_table, model.item_table):
        torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(0))
    found = ncf.evaluate(model, split, candidates, Ranks(), pairs=1000)  # several blocks, the last one smaller
    sampled, full = [], []
    for user, item, row in zip(split.test_users, split.test_items, candidates, strict=True):
        scores = model(user.expand(300), torch.arange(300))
        trained = set(split.items[split.users == user].tolist())
        rest = [other for other in range(300) if other not in trained and other != int(item)]
        sampled.append(int((scores[row.long()] >= scores[item]).sum()))
        full.append(int((scores[rest] >= scores[item]).sum()))
    for ranks, hr, ndcg in ((sampled, "hr", "ndcg"), (full, "full_hr", "full_ndcg")):
        assert found[hr] == pytest.approx(np.mean([rank < 10 for rank in ranks]))
        gains = [1 / math.log2(rank + 2) if rank < 10 else 0.0 for rank in ranks]
        assert found[ndcg] == pytest.approx(np.mean(gains))
    assert found["full_hr"] < found["hr"]


def test_model_is_the_papers_formula():
    torch.manual_seed(0)
    model = ncf.NeuMF(3, 5, factors=2, layers=(4, 3))
    user, item = model.user_table.weight[1], model.item_table.weight[4]
    hidden = (model.mlp[0].weight @ torch.cat([user[2:], item[2:]]) + model.mlp[0].bias).relu()
    expected = model.output.weight[0] @ torch.cat([user[:2] * item[:2], hidden]) + model.output.bias
    torch.testing.assert_close(model(torch.tensor([1]), torch.tensor([4])), expected)
    everything = model(torch.arange(3).repeat_interleave(5), torch.arange(5).repeat(3)).view(3, 5)
    torch.testing.assert_close(model.score_all(torch.arange(3)), everything)


# ---- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ncf.RATES)
@pytest.mark.parametrize("grad_mode", GRAD_MODES)
def test_training_learns(small, grad_mode, optimizer, tmp_path, monkeypatch):
    monkeypatch.setattr(ncf, "load", lambda *_: (small, "small data"))
    monkeypatch.setattr(ncf._common, "draw", lambda *_: "no curves")
    rate = {"adam": 1e-2, "sgd": 0.5, "adagrad": 0.1}[optimizer]
    flags = ["--factors", 4, "--layers", "16,8", "--batch-size", 256, "--lr", rate, "--grad-mode", grad_mode]
    assert run(ncf, *flags, "--optimizer", optimizer, "--epochs", 3, "--output-dir", tmp_path) == 0
    first, *_, last = history_of(tmp_path)
    assert last["loss"] < first["loss"] < 0.7
    if optimizer == "adam":  # by chance 0.10 and 0.05
        assert last["hr"] > 0.25 and last["ndcg"] > 0.11


def test_all_modes_and_torchs_tables_agree(small):
    split, losses = ncf.leave_one_out(small), {}
    for mode in GRAD_MODES:
        settings = sizes(grad_mode=mode)
        model = ncf.make_model(150, 300, settings)
        step = step_of(model, settings, lambda batch, model=model: model(batch.users, batch.items))
        draw, _ = ncf.batches(split, settings, torch.Generator().manual_seed(0))
        losses[mode] = [step(batch) for batch, _ in zip(draw(0), range(20), strict=False)]
    model = ncf.make_model(150, 300, settings, torch.nn.Embedding)
    adam, found = torch.optim.Adam(model.parameters(), lr=settings.lr), []
    for batch, _ in zip(ncf.batches(split, settings, torch.Generator().manual_seed(0))[0](0), range(20), strict=False):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch.users, batch.items), batch.labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        found.append(loss.item())
    for mode in GRAD_MODES:
        assert losses[mode] == pytest.approx(found, abs=1e-6), mode


# ---- Data ------------------------------------------------------------------------------------------------------------


def test_without_a_network_the_data_are_generated(monkeypatch, tmp_path):
    def fail(*_):
        raise OSError("network is unreachable")

    monkeypatch.delenv(ncf.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(releases, "download", fail)
    found, where = ncf.load()
    assert (found.num_users, found.num_items, len(found.users)) == (943, 1682, 100_000)
    assert "network is unreachable" in where and "GENERATED" in where and "\n" not in where
    with pytest.raises(ValueError, match="ml-1m is not downloaded: give its folder by --data-dir"):
        ncf.load("ml-1m")
    monkeypatch.setenv(ncf.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="TORCHSPARSE_REC_DATA is .*u.data"):
        ncf.load()


def test_command_refuses_what_it_cannot_use(tmp_path, capsys):
    garbled = tmp_path / "u.data"
    garbled.write_bytes(b"1\t2\t3\t881250949\n1\t2\t3\n")
    flags = ["--data-dir", tmp_path, "--output-dir", tmp_path / "a"]
    assert "u.data: line 2: expected user" in refused(capsys, ncf, *flags)
    assert "first one even, got 5,3" in refused(capsys, ncf, "--layers", "5,3")


@pytest.mark.skipif(DATA is None, reason=f"${ncf.FOLDER_VARIABLE} is not set")
def test_ml_100k_trains(tmp_path):
    assert run(ncf, "--lr", 3e-3, "--epochs", 2, "--output-dir", tmp_path) == 0
    record = history_of(tmp_path)[-1]
    assert record["hr"] > 0.42 and record["ndcg"] > 0.24  # by chance 0.10 and 0.05
