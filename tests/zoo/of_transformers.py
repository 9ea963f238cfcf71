"""Transformers: the Trainer imports the optimizer when it makes it, and clips gradients."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from zoo.run import BATCH, DIM, STEPS, ids

import torchsparse_rec

LENGTH = 16


def bert(rows, ours):
    sizes = {"hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=rows, **sizes, max_position_embeddings=LENGTH))
    if ours:
        torchsparse_rec.nn.convert(model, grad_mode="auto")
        torch.optim.AdamW = torchsparse_rec.optim.AdamW
    count = BATCH // LENGTH
    words = ids(rows, STEPS * count, LENGTH)
    data = [{"input_ids": row, "labels": row[0] % 2} for row in words]
    options = {"max_steps": STEPS, "per_device_train_batch_size": count, "learning_rate": 1e-2}
    fixed = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    Trainer(model, TrainingArguments("out", **options, **fixed), train_dataset=data).train()
