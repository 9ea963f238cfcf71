"""RePlay: a factory looks the optimizer up when Lightning asks for it."""

import lightning
import torch
from replay.data import FeatureHint, FeatureSource, FeatureType
from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
from replay.nn.lightning import LightningModule
from replay.nn.loss import CE, CESampled
from replay.nn.sequential import SasRec
from zoo.run import BATCH, DIM, STEPS, ids

import torchsparse_rec

LENGTH = 16


def sasrec(rows, ours, loss="sampled"):
    item = TensorFeatureInfo(
        "item_id",
        is_seq=True,
        feature_type=FeatureType.CATEGORICAL,
        embedding_dim=DIM,
        padding_value=rows,
        cardinality=rows,
        feature_hint=FeatureHint.ITEM_ID,
        feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
    )
    model = SasRec.from_params(TensorSchema([item]), DIM, num_heads=2, num_blocks=1, max_sequence_length=LENGTH)
    model.loss = {"sampled": CESampled, "whole": CE}[loss](ignore_index=rows)
    model.loss.logits_callback = model.get_logits
    if ours:
        torchsparse_rec.nn.convert(model, grad_mode="auto")
        torch.optim.Adam = torchsparse_rec.optim.Adam
    count = BATCH // LENGTH
    batches = [_batch(rows, count) for _ in range(STEPS)]
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **dict.fromkeys(quiet, False))
    trainer.fit(LightningModule(model), torch.utils.data.DataLoader(batches, batch_size=None))


def _batch(rows, count):
    items = ids(rows, count, LENGTH + 1)
    every = torch.ones(count, LENGTH, dtype=torch.bool)
    return {
        "feature_tensors": {"item_id": items[:, :-1]},
        "padding_mask": every,
        "positive_labels": items[:, 1:, None],
        "negative_labels": ids(rows, 100),
        "target_padding_mask": every[..., None],
    }
