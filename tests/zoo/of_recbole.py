"""RecBole: the trainer looks the optimizer up when it is made."""

import os

import numpy as np
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.utils import get_model, get_trainer
from zoo.run import BATCH, DIM, STEPS, ids

import torchsparse_rec

_FILE = "inter/inter.inter"
_COLUMNS = {"user_id": "token", "item_id": "token", "label": "float", "timestamp": "float"}


def neumf(rows, ours, decay="0"):
    _train("NeuMF", rows, ours, mf_embedding_size=DIM // 2, mlp_embedding_size=DIM // 2, weight_decay=float(decay))


def deepfm(rows, ours):
    _train("DeepFM", rows, ours, embedding_size=DIM)


def _train(name, rows, ours, **settings):
    _write(STEPS * BATCH)
    settings |= {
        "data_path": ".",
        "load_col": {"inter": list(_COLUMNS)},
        "eval_args": {"split": {"RS": [1, 0, 0]}, "order": "RO", "mode": "labeled"},
        "train_neg_sample_args": None,
        "metrics": ["AUC"],
        "valid_metric": "AUC",
        "train_batch_size": BATCH,
        "learning_rate": 1e-2,
        "use_gpu": False,
        "show_progress": False,
    }
    config = Config(name, "inter", config_dict=settings)
    dataset = create_dataset(config)
    dataset.field2id_token["item_id"] = range(rows)  # what the file of so many items would give
    items = ids(rows, len(dataset.inter_feat))
    dataset.inter_feat["item_id"], dataset.inter_feat["label"] = items.numpy(), (items % 2).float().numpy()
    batches, *_ = data_preparation(config, dataset)
    model = get_model(name)(config, batches._dataset)
    if ours:
        torchsparse_rec.nn.convert(model, grad_mode="auto")
        torch.optim.Adam = torchsparse_rec.optim.Adam
    get_trainer(config["MODEL_TYPE"], name)(config, model)._train_epoch(batches, 0)


def _write(count):
    os.mkdir("inter")
    random = np.random.default_rng(0)
    with open(_FILE, "w") as file:
        print("\t".join(f"{name}:{kind}" for name, kind in _COLUMNS.items()), file=file)
        for row in range(count):
            print(random.integers(1000), random.integers(1000), row % 2, row, sep="\t", file=file)
