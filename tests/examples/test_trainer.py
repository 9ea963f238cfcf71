"""The trainer of all examples: when it records, that evaluation changes nothing, and how it ends early."""

from functools import cache

import pytest
import torch

from torchsparse_rec.examples.dlrm.settings import Settings as DlrmSettings
from torchsparse_rec.examples.dlrm.tables import Placement
from torchsparse_rec.examples.dlrm.train import make_trainer as dlrm_trainer
from torchsparse_rec.examples.ncf import data
from torchsparse_rec.examples.ncf.settings import Settings as NcfSettings
from torchsparse_rec.examples.ncf.train import make_trainer as ncf_trainer
from torchsparse_rec.examples.wide_deep.settings import Settings as WideDeepSettings
from torchsparse_rec.examples.wide_deep.train import make_trainer as wide_deep_trainer

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"samples": 1024, "held_out": 256, "batch_size": 128, "embedding_dim": 4}
interactions = cache(lambda: data.generate(150, 300, 4500, seed=1))


def dlrm_of(tables):
    def make(seed=0):
        settings = DlrmSettings(
            **SIZES, tables=tables, buckets=60, bottom=(8,), top=(16,), max_cardinality=100, seed=seed
        )
        return dlrm_trainer(settings, Placement())

    return make


def ncf_of(seed=0):
    return ncf_trainer(NcfSettings(factors=4, layers=(16, 8), batch_size=2719, seed=seed), interactions())


def wide_deep_of(seed=0):
    return wide_deep_trainer(WideDeepSettings(**SIZES, rows=300, mlp=(16, 8), optimizer="adam", seed=seed))


MAKE = {"ncf": ncf_of, "wide_deep": wide_deep_of, "dlrm dynamic": dlrm_of("dynamic"), "dlrm hashed": dlrm_of("hashed")}


@pytest.fixture(params=MAKE)
def trainer_of(request):
    """Return a function that makes a trainer whose epochs have 8 batches."""
    return MAKE[request.param]


def test_records_within_epochs_and_an_end_after_steps(trainer_of):
    trainer = trainer_of()
    found = [(record.epoch, record.step) for record in trainer.run(epochs=5, steps=19, every=3)]
    # Epochs have 8 batches; every third step, every epoch's end, and the last step.
    assert found == [(1, 3), (1, 6), (1, 8), (2, 9), (2, 12), (2, 15), (2, 16), (3, 18), (3, 19)]
    assert (trainer.epoch, trainer.batch, trainer.step) == (2, 3, 19)
    assert [record.step for record in trainer.run(epochs=3)] == [24]
    trainer = trainer_of()
    assert [record.step for record in trainer.run(epochs=5, steps=8)] == [8] and trainer.epoch == 1


def test_evaluation_changes_no_bits(trainer_of):
    often, (once,) = list(trainer_of().run(1, every=1)), trainer_of().run(1)
    assert len(often) == 8 and once.metrics == often[-1].metrics and once.samples_per_second > 0
    sizes = [batch.size for batch in trainer_of().source.batches()]
    mean = sum(record.loss * size for record, size in zip(often, sizes, strict=True)) / sum(sizes)
    assert once.loss == pytest.approx(mean, abs=1e-12)


def test_weights_depend_on_the_seed_alone_and_leave_the_generator(trainer_of):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    batch = next(iter(trainer_of().source.batches()))
    one, other, third = (trainer_of(seed).train_on.logits(batch) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, other) and not torch.equal(one, third)


def test_diverged_training_stops(trainer_of, monkeypatch):
    trainer = trainer_of()
    logits = trainer.train_on.logits
    monkeypatch.setattr(trainer.train_on, "logits", lambda batch: logits(batch) * torch.nan)
    with pytest.raises(FloatingPointError, match="the loss up to step 8 is nan: a smaller learning rate may help"):
        next(trainer.run(1))


def test_examples_that_have_gone_are_named(trainer_of):
    trainer = trainer_of()
    trainer.batch = 8
    with pytest.raises(ValueError, match="there is no batch 8 any more"):
        next(trainer.run(1))
