"""FuxiCTR: a model makes its optimizer in its own constructor, so the name comes first. The trainer clips gradients."""

import torch
from fuxictr.features import FeatureMap
from model_zoo.LongCTR.DCNv2 import DCNv2
from zoo.run import BATCH, DIM, STEPS, ids

import torchsparse_rec


def dcnv2(rows, ours, penalty=""):
    if ours:
        torch.optim.Adam = torchsparse_rec.optim.Adam
    features = FeatureMap("zoo", ".")
    features.features = {
        "user": {"type": "categorical", "source": "user", "vocab_size": 1000},
        "item": {"type": "categorical", "source": "item", "vocab_size": rows},
    }
    features.labels, features.num_fields, features.default_emb_dim = ["label"], 2, DIM
    model = DCNv2(
        features,
        embedding_dim=DIM,
        parallel_dnn_hidden_units=[64],
        learning_rate=1e-2,
        embedding_regularizer=float(penalty) if penalty else None,
        **{"optimizer": "adam", "loss": "binary_crossentropy", "verbose": 0, "model_root": ".", "metrics": ["AUC"]},
        eval_steps=STEPS + 1,
    )
    if ours:
        torchsparse_rec.nn.convert(model, grad_mode="auto")
    model.load_weights = lambda path: None  # of the best epoch: none was evaluated
    batches = []
    for _ in range(STEPS):
        items = ids(rows, BATCH, 5)
        batch = {"user": ids(999, BATCH), "label": (items[:, -1] % 2).float()}
        batches.append((batch, {"item": items.flatten()}, torch.ones(BATCH, 4)))
    model.fit(batches)
