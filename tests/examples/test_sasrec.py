"""The SASRec example: its split, the network, its three losses, metrics over all items, and torch beside it."""

import math
import os
import re
from argparse import Namespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from examples.cases import assert_same_end, history_of, refused, run, settings_of

from torchsparse_rec.data import releases
from torchsparse_rec.examples import _common, ncf, sasrec
from torchsparse_rec.examples._common import GRAD_MODES

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = os.environ.get(ncf.FOLDER_VARIABLE)
SMALL = ["--dim", 8, "--positions", 10, "--blocks", 1, "--batch-size", 19, "--sampled", 100]


@pytest.fixture(scope="module")
def small():
    return ncf.generated(150, 300, 4500, seed=1)


@pytest.fixture
def loaded(small, monkeypatch):
    """Let the command train on small data, and draw no curves, which takes longer."""
    monkeypatch.setattr(ncf, "load", lambda *_: (small, "small data"))
    monkeypatch.setattr(_common, "draw", lambda *_: "no curves")


def sizes(**given):
    small = {"dim": 8, "positions": 10, "blocks": 1, "batch_size": 19, "sampled": 20, "grad_mode": "dense"}
    return settings_of(sasrec, **{**small, **given})


def made(data, settings):
    """Return a split, a network, and the batches of the first epoch."""
    split = sasrec.leave_two_out(data)
    sasrec.begin_epoch(settings, 0)
    batches = list(sasrec.examples_of(split, settings).batches(0))
    return split, sasrec.make_model(split.num_items, settings), batches


# ---- Split -----------------------------------------------------------------------------------------------------------


def test_leave_two_out_numbers_items_by_their_frequency_in_training():
    users = np.array([0, 1, 0, 2, 0, 2, 0, 2, 1, 0, 2, 1], np.int32)
    items = np.array([4, 9, 6, 4, 7, 6, 8, 3, 3, 9, 0, 6], np.int32)
    times = np.array([5, 0, 3, 1, 3, 2, 9, 3, 1, 8, 4, 2])
    found = sasrec.leave_two_out(releases.Interactions("x", users, items, times, 3, 10))
    # User 0: 6, 7 (of equal times in the file's order), 4 | 9 | 8; user 2: 4, 6 | 3 | 0; user 1 has only three.
    assert found.counts.tolist() == [2, 2, 1, *[0] * 7] and found.num_items == 10
    assert (found.begins.tolist(), found.ends.tolist()) == ([0, 5], [5, 9])
    # Of equal frequencies the lower id comes first: 4, 6, then 7, and those that are held out: 0, 1, 2, 3, 5, 8, 9.
    assert found.items.tolist() == [1, 2, 0, 9, 8, 0, 1, 6, 3]
    alone = releases.Interactions("x", users[:3], items[:3], times[:3], 3, 10)
    with pytest.raises(ValueError, match="no user has four interactions or more"):
        sasrec.leave_two_out(alone)


def test_each_place_of_a_batch_is_followed_by_its_target_and_nothing_held_out_is_there(small):
    split, _, batches = made(small, sizes())
    order = np.lexsort((small.times, small.users))
    number = {}
    sequences = {}
    for place, (user, item) in enumerate(zip(small.users[order], small.items[order], strict=True)):
        number[item] = int(split.items[place])
        sequences.setdefault(user, []).append(int(split.items[place]))
    assert len(set(number.values())) == len(number)
    expected = []
    for items in sequences.values():
        inputs, targets = items[:-3][-10:], items[1:-2][-10:]
        filling = [300] * (10 - len(inputs))
        expected.append((filling + inputs, filling + targets))
    found = [x for batch in batches for x in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)]
    assert found != expected and sorted(found) == sorted(expected)
    assert [batch.size for batch in batches] == [19] * 7 + [17]
    assert any(300 in inputs for inputs, _ in expected) and not all(300 in inputs for inputs, _ in expected)


# ---- The network -----------------------------------------------------------------------------------------------------


def test_a_place_knows_nothing_of_what_comes_later(small):
    _, model, batches = made(small, sizes(blocks=2))
    model.eval()
    inputs = batches[0].inputs
    changed = inputs.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 300
    found, other = model(inputs), model(changed)
    assert torch.equal(found[:, :6], other[:, :6])
    assert ((found[:, 6:] - other[:, 6:]).abs().amax(2) > 1e-6).all()


def test_weights_depend_on_the_seed_alone_and_padding_is_zeros():
    before = torch.random.get_rng_state()
    one, other, third = (sasrec.make_model(300, sizes(seed=seed)).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert not torch.equal(one["items.weight"], third["items.weight"])
    assert one["items.weight"].shape == (301, 8) and bool((one["items.weight"][300] == 0).all())
    torchs = sasrec.make_model(300, sizes(seed=1), torch.nn.Embedding).state_dict()
    assert all(torch.equal(x, one[name]) for name, x in torchs.items())


# ---- Losses ----------------------------------------------------------------------------------------------------------


def test_losses_by_hand(small):
    for loss in sasrec.LOSSES:
        split, model, (batch, *_) = made(small, sizes(loss=loss, dropout=0.0, seed=3))
        torch.nn.init.normal_(model.items.weight, generator=torch.Generator().manual_seed(0))
        log_q = sasrec.log_q_of(split.counts)
        assert log_q.exp().sum().item() == pytest.approx(1, abs=1e-6) and bool((log_q.diff() <= 0).all())
        target = batch.targets[batch.targets != 300]
        hidden, rows = model(batch.inputs)[batch.targets != 300].double(), model.items.weight.double()
        scores = hidden @ rows[:300].T
        if loss == "in_batch":
            scores = scores - log_q.double()
            others = torch.tensor([item not in set(target.tolist()) for item in range(300)])
            assert 20 < int(others.sum()) < 280
            scores[:, others] = -torch.inf
        elif loss == "sampled":
            same = sasrec.make_model(300, sizes(loss=loss, seed=3)).sampler(target)  # draws the same
            own = scores.gather(1, target.unsqueeze(1)) - same.target_count.log().unsqueeze(1)
            others = (scores[:, same.ids] - same.count.log()).masked_fill(same.ids == target.unsqueeze(1), -torch.inf)
            scores, target = torch.cat([own, others], 1), torch.zeros_like(target)
        expected = F.cross_entropy(scores, target).item()
        assert sasrec.loss_of(model, batch, loss, log_q).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", sasrec.LOSSES)
def test_all_gradient_modes_train_the_same_parameters(small, loss):
    ends, losses = {}, {}
    for mode in GRAD_MODES:
        settings = sizes(loss=loss, grad_mode=mode, lr=1e-2)
        split, model, batches = made(small, settings)
        first, log_q = model.state_dict()["items.weight"].clone(), sasrec.log_q_of(split.counts)
        optimizer = ncf.make_optimizer(model, settings)
        steps = (sasrec.loss_of(model, batch, loss, log_q) for batch in batches)
        losses[mode] = [float(_common.step(model, optimizer, x, _common.Ranks())) for x in steps]
        ends[mode] = model.state_dict()
    for mode in GRAD_MODES[1:]:
        assert losses[mode] == pytest.approx(losses["fused"], abs=1e-4), mode
        for name, value in ends["fused"].items():
            torch.testing.assert_close(ends[mode][name], value, rtol=1e-3, atol=1e-3, msg=f"{mode} {name}: {{}}".format)
    assert not torch.equal(first, ends["auto"]["items.weight"])
    assert bool((ends["fused"]["items.weight"][300] == 0).all())


@pytest.mark.parametrize("optimizer", sasrec.RATES)
@pytest.mark.parametrize("loss", sasrec.LOSSES)
def test_training_learns(loaded, loss, optimizer, tmp_path):
    rate = {"adam": 1e-2, "sgd": 0.5, "adagrad": 0.05}[optimizer]
    flags = ["--loss", loss, "--optimizer", optimizer, "--lr", rate, "--epochs", 6, "--output-dir", tmp_path]
    assert run(sasrec, *SMALL, *flags) == 0
    first, *_, last = history_of(tmp_path)
    assert last["loss"] < first["loss"] - 0.1
    if optimizer == "adam":  # by chance 0.037 at most and 0.017
        assert last["valid_hr"] > 0.1 and last["valid_ndcg"] > 0.04 and last["test_hr"] > 0.06


@pytest.mark.slow
def test_the_sampler_goes_on_where_it_was(loaded, tmp_path):
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    flags = [*SMALL, "--loss", "sampled", "--output-dir"]
    assert run(sasrec, *flags, straight, "--epochs", 3) == 0
    assert run(sasrec, *flags, cut, "--epochs", 1) == 0
    assert run(sasrec, "--resume", cut / "checkpoint", "--epochs", 3) == 0
    assert_same_end(straight, cut)


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_equal_a_loop_over_users(small):
    split, model, _ = made(small, sizes())
    torch.nn.init.normal_(model.items.weight, generator=torch.Generator().manual_seed(0))
    for back, name in ((2, "valid"), (1, "test")):
        model.eval()
        ranks = []
        for begin, end in zip(split.begins, split.ends, strict=True):
            seen, item = split.items[begin : end - back], int(split.items[end - back])
            inputs = torch.full((1, 10), 300)
            inputs[0, 10 - len(seen[-10:]) :] = seen[-10:]
            scores = (model.items.weight @ model(inputs)[0, -1]).tolist()
            others = set(range(300)) - set(seen.tolist()) - {item}
            ranks.append(sum(scores[other] > scores[item] for other in others))
        found = sasrec.evaluate(model, split, back, name)
        assert found[f"{name}_hr"] == pytest.approx(np.mean([rank < 10 for rank in ranks]))
        gains = [1 / math.log2(rank + 2) if rank < 10 else 0.0 for rank in ranks]
        assert found[f"{name}_ndcg"] == pytest.approx(np.mean(gains)) and 0 < found[f"{name}_ndcg"] < 0.2
        assert model.training


@pytest.mark.slow
def test_mean_and_error_of_several_seeds(loaded, tmp_path, capsys):
    records = [{"test_hr": x, "test_ndcg": y} for x, y in ((0.1, 0.05), (0.2, 0.05), (0.3, 0.05))]
    assert sasrec.text_of_runs(records) == "test-HR@10 0.2000 +- 0.0577 test-NDCG@10 0.0500 +- 0.0000"
    flags = ["--epochs", 2, "--seed", 5, "--runs", 2, "--output-dir", tmp_path]
    assert run(sasrec, *SMALL, *flags) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed5", "seed6"]
    best = [max(history_of(tmp_path / x), key=lambda record: record["valid_ndcg"]) for x in ("seed5", "seed6")]
    assert best[0] != best[1]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"2 seeds, each at its best epoch: {sasrec.text_of_runs(best)}"
    assert run(sasrec, *SMALL, "--epochs", 2, "--seed", 6, "--output-dir", tmp_path / "alone") == 0
    assert history_of(tmp_path / "alone") == history_of(tmp_path / "seed6")


# ---- Beside torch, and costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fused", "dense"])
def test_torchs_losses_are_equal(loaded, mode, capsys):
    flags = ["--grad-mode", mode, "--compare", "torch", "--epochs", 2]
    assert run(sasrec, *SMALL, *flags) == 0
    first, second, verdict = capsys.readouterr().out.splitlines()[1:]
    found = re.fullmatch(
        r"epoch 1/2  loss of torchsparse_rec (\d\.\d{7}), torch (\d\.\d{7}); up to here steps differ by \S+ at most",
        first,
    )
    assert float(found[1]) == pytest.approx(float(found[2]), rel=1e-6) and second.startswith("epoch 2/2  loss of ")
    assert re.fullmatch(r"equal: the losses of the first 16 steps differ by \S+ of their size at most", verdict)


def test_losses_that_differ_are_a_failure(loaded, monkeypatch, capsys):
    make = ncf.make_optimizer

    def other(model, settings):
        return make(model, Namespace(**{**vars(settings), "lr": settings.lr * 1.01}))

    monkeypatch.setattr(ncf, "make_optimizer", other)
    assert run(sasrec, *SMALL, "--compare", "torch", "--epochs", 1) == 1
    assert "NOT EQUAL: the losses of the first 8 steps differ by " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("loss", sasrec.LOSSES)
def test_costs_of_generated_items(loss, capsys):
    for flags, what in (([], f"torchsparse_rec, loss {loss}, grad_mode fused"), (["--compare", "torch"], "torch")):
        assert run(sasrec, *SMALL, "--loss", loss, "--items", 40_000, *flags) == 0
        line = rf"{what}: \d\.\d\d\d s a step of 190 targets, [\d,]+ MB at most; the table of 40,000 items has 1\n"
        assert re.fullmatch(line, capsys.readouterr().out)


def test_command_refuses_what_it_cannot_use(loaded, tmp_path, capsys, monkeypatch):
    assert refused(capsys, sasrec, "--dropout", 1).endswith("argument --dropout: must be in [0, 1), got 1")
    assert "argument --runs: must be at least 2" in refused(capsys, sasrec, "--runs", 1)
    assert "invalid choice: 'tensorflow'" in refused(capsys, sasrec, "--compare", "tensorflow")
    for flags, text in (
        (["--compare", "torch", "--resume"], "--compare does not go with --resume"),
        (["--items", 9, "--runs", 2], "--items does not go with --runs"),
        (["--runs", 2, "--resume"], "--runs does not go with --resume"),
        (["--compare", "torch", "--loss", "sampled"], "--optimizer adam, got sampled, adam"),
        (["--loss", "sampled", "--sampled", 301, "--output-dir", tmp_path], "at most range_max, 300"),
    ):
        assert text in refused(capsys, sasrec, *flags)
    monkeypatch.setattr(_common, "is_under_torchrun", lambda: True)
    assert refused(capsys, sasrec).endswith("the example runs in one process: start it without torchrun")


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason=f"${ncf.FOLDER_VARIABLE} is not set")
def test_ml_100k_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(_common, "draw", lambda *_: "no curves")
    assert run(sasrec, "--epochs", 2, "--output-dir", tmp_path) == 0
    record = history_of(tmp_path)[-1]
    assert record["test_hr"] > 0.06 and record["test_ndcg"] > 0.03  # by chance 0.006 and 0.003
