"""torch-rechub: the optimizer is an argument of the trainer."""

import torch
from torch_rechub.basic.features import SparseFeature
from torch_rechub.models.ranking import DeepFM
from torch_rechub.trainers import CTRTrainer
from zoo.run import BATCH, DIM, STEPS, ids, labels

import torchsparse_rec


def deepfm(rows, ours, decay="0"):
    features = [SparseFeature("user", 1000, DIM), SparseFeature("item", rows, DIM)]
    model = DeepFM(features, features, {"dims": [64]})
    options = {"lr": 1e-2, "weight_decay": float(decay)}
    data = [{"user": ids(1000, BATCH), "item": ids(rows, BATCH)} for _ in range(STEPS)]
    batches = [(x, labels(BATCH)) for x in data]
    optimizer = torch.optim.Adam
    if ours:
        torchsparse_rec.nn.convert(model, grad_mode="auto")
        optimizer = torchsparse_rec.optim.Adam
        options["decay"] = "seen"
    CTRTrainer(model, optimizer_fn=optimizer, optimizer_params=options).train_one_epoch(batches)
