"""DeepCTR-Torch: the model's ``compile`` looks the optimizer up, or takes one. Its penalty reads whole tables."""

import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
from deepctr_torch.models import DIN, DeepFM
from zoo.run import BATCH, DIM, STEPS, ids, labels

import torchsparse_rec


def deepfm(rows, ours, penalty="0"):
    columns = [SparseFeat("user", 1000, DIM), SparseFeat("item", rows, DIM), DenseFeat("price", 1)]
    l2 = 0.0 if ours else float(penalty)
    model = DeepFM(columns, columns, dnn_hidden_units=(64,), l2_reg_linear=l2, l2_reg_embedding=l2)
    _fit(model, rows, ours, {}, float(penalty))


def din(rows, ours):
    item = SparseFeat("item", rows, DIM)
    columns = [SparseFeat("user", 1000, DIM), item, DenseFeat("price", 1)]
    columns += [VarLenSparseFeat(SparseFeat("hist_item", rows, DIM, embedding_name="item"), 10, length_name="length")]
    model = DIN(columns, ["item"], dnn_hidden_units=(64,), l2_reg_embedding=0.0)
    count = BATCH * STEPS
    _fit(model, rows, ours, {"hist_item": ids(rows, count, 10).numpy(), "length": ids(10, count).numpy()})


def _fit(model, rows, ours, more, penalty=0.0):
    count = BATCH * STEPS
    x = {"user": ids(1000, count).numpy(), "item": ids(rows, count).numpy(), "price": torch.rand(count).numpy(), **more}
    y = labels(count).numpy()
    optimizer = "adam"
    if ours:
        torchsparse_rec.nn.convert(model, grad_mode="auto")
        torch.optim.Adam = torchsparse_rec.optim.Adam
        if penalty:
            tables = [p for name, p in model.named_parameters() if "embedding_dict" in name]
            others = [p for name, p in model.named_parameters() if "embedding_dict" not in name]
            seen = {"params": tables, "weight_decay": 2 * penalty, "decay": "seen"}
            optimizer = torch.optim.Adam([seen, {"params": others}])
    model.compile(optimizer, "binary_crossentropy")
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
