"""Clients that are other packages, which ``make test-full`` installs."""

from __future__ import annotations

import copy
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from clients.cases import (
    BATCH,
    DECAY,
    STEPS,
    Client,
    Model,
    Results,
    Side,
    batches,
    by_id,
    learned,
    loss_of,
    train,
    trained,
)
from clients.of_torch import IDS, resumed
from torch import Tensor
from torch.utils.data import DataLoader

from torchsparse_rec import nn

CLIP = 0.1


def loader() -> DataLoader:
    """Return a loader of the examples one by one, in order, so that the clients make the batches."""
    examples = [example for ids, target in batches() for example in zip(ids, target, strict=True)]
    return DataLoader(examples, batch_size=BATCH)


# ---- Lightning -------------------------------------------------------------------------------------------------------


def lightning(side: Side, callbacks: tuple[Any, ...] = (), **arguments: Any) -> Results:
    """Train by Lightning's Trainer, with a LightningModule as in its documentation."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = side.model()

        def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
            return loss_of(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = side.optimizer(self.parameters())
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": side.schedule(optimizer), "interval": "step"},
            }

    module = Module()
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    with tempfile.TemporaryDirectory() as folder:
        quiet |= {"enable_checkpointing": False, "default_root_dir": folder}
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=list(callbacks), **{**quiet, **arguments})
        trainer.fit(module, loader())
        trainer.save_checkpoint(Path(folder) / "end.ckpt")
        state = torch.load(Path(folder) / "end.ckpt", weights_only=False)
    loaded = Module()
    loaded.load_state_dict(state["state_dict"])
    return {**learned(module), **learned(loaded, "saved ")}


def lightning_clipped(side: Side) -> Results:
    """Train with the ``gradient_clip_val`` of Lightning's Trainer."""
    return lightning(side, gradient_clip_val=CLIP)


def lightning_average(side: Side) -> Results:
    """Average by Lightning's callback for exponential averages."""
    from lightning.pytorch.callbacks import WeightAveraging
    from torch.optim.swa_utils import get_ema_avg_fn

    return lightning(side, (WeightAveraging(avg_fn=get_ema_avg_fn(0.8)),))


# ---- accelerate ------------------------------------------------------------------------------------------------------


def accelerate(side: Side, clip: Any = None, accumulate: int = 1) -> Results:
    """Train in accelerate's loop, as in its documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, optimizer, schedule = side.made()
    prepared = accelerator.prepare(model, optimizer, loader(), schedule)
    for ids, target in prepared[2]:
        with accelerator.accumulate(prepared[0]):
            accelerator.backward(loss_of(prepared[0](ids), target))
            if clip is not None and accelerator.sync_gradients:
                clip(accelerator, prepared[0].parameters())
            prepared[1].step()
            prepared[3].step()
            prepared[1].zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)

        def load(fresh: Model, its: torch.optim.Optimizer) -> None:
            other = Accelerator(cpu=True)
            other.prepare(fresh, its)
            other.load_state(folder, load_kwargs=None)

        results = learned(accelerator.unwrap_model(prepared[0]))
        return {**results, **(resumed(side, load, model, optimizer) if clip is None and accumulate == 1 else {})}


def accelerate_clipped(side: Side) -> Results:
    """Clip by accelerate's ``clip_grad_norm_``."""
    return accelerate(side, lambda accelerator, parameters: accelerator.clip_grad_norm_(parameters, CLIP))


def accelerate_accumulated(side: Side) -> Results:
    """Accumulate gradients by accelerate."""
    return accelerate(side, accumulate=2)


# ---- transformers' Trainer -------------------------------------------------------------------------------------------


def trainer(side: Side, clip: float = CLIP) -> Results:
    """Train by transformers' Trainer, with ``optimizers=`` as for any optimizer that it does not make itself."""
    import transformers

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = side.model()

        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.model(ids)
            return {"loss": loss_of(output, labels), "logits": output}

    module = WithLoss()
    optimizer = side.optimizer(module.parameters())
    examples = [{"ids": ids, "labels": target} for batch in batches() for ids, target in zip(*batch, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            max_grad_norm=clip,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            train_sampling_strategy="sequential",
            save_strategy="no",
        )
        its = transformers.Trainer(
            model=module, args=arguments, train_dataset=examples, optimizers=(optimizer, side.schedule(optimizer))
        )
        its.remove_callback(transformers.PrinterCallback)
        its.train()
        its.save_model(folder)
        from safetensors.torch import load_file

        loaded = WithLoss()
        loaded.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return {**learned(module), **learned(loaded, "saved ")}


def trainer_unclipped(side: Side) -> Results:
    """Train by transformers' Trainer with ``max_grad_norm=0``."""
    return trainer(side, 0.0)


# ---- Files and programs ----------------------------------------------------------------------------------------------


def safetensors(side: Side) -> Results:
    """Save and load by ``save_model`` and ``load_model``; save ``named_parameters()`` to a file."""
    from safetensors.torch import load_file, load_model, save_file, save_model

    model, optimizer, _ = trained(side, 6)
    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(model.named_parameters()), f"{folder}/parameters")
        save_model(model, f"{folder}/model")
        state = load_file(f"{folder}/parameters")

        def load(fresh: Model, its: torch.optim.Optimizer) -> None:
            load_model(fresh, f"{folder}/model")
            its.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        state = {f"parameter {name}": value for name, value in by_id(model, state).items()}
        return {**resumed(side, load, model, optimizer), **state}


def onnx(side: Side, prepare: Any = lambda model: model, **arguments: Any) -> Results:
    """Export by ``torch.onnx.export``, and run the program by onnxruntime."""
    import onnxruntime

    model, _optimizer, _ = trained(side)
    model = prepare(model.eval())
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        torch.onnx.export(model, (IDS,), path, dynamo=True, verbose=False, **arguments)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        output = session.run(None, {session.get_inputs()[0].name: IDS.numpy()})[0]
    return {"output": torch.from_numpy(output)}


def onnx_reverted(side: Side) -> Results:
    """Export to ONNX after ``nn.revert``."""
    return onnx(side, nn.revert if side.ours else lambda model: model)


def onnx_translated(side: Side) -> Results:
    """Export to ONNX with our translations."""
    from torchsparse_rec.onnx import translations

    return onnx(side, custom_translation_table=translations() if side.ours else None)


def torchao(side: Side) -> Results:
    """Quantise the weights of tables and dense layers by torchao's ``quantize_``."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, _optimizer, _ = trained(side)
    wanted = (torch.nn.Embedding, nn.EmbeddingVariable, torch.nn.Linear)
    quantize_(model.eval(), Int8WeightOnlyConfig(), filter_fn=lambda module, _: isinstance(module, wanted))
    quantised = [type(table.weight).__name__ for table in model.tables()]
    output = model(IDS)
    return {"output": output, **{f"{k} {name}": torch.zeros(1) for k, name in enumerate(quantised)}}


def torchao_optimizer(side: Side) -> Results:
    """Train by our optimizer, then by one of torchao's."""
    from torchao.optim import AdamW8bit

    model, optimizer, _ = trained(side, 6)
    theirs = AdamW8bit(model.parameters(), lr=0.01)
    train(model, theirs, torch.optim.lr_scheduler.ExponentialLR(theirs, DECAY), 6, 6)
    del optimizer
    return learned(model)


_LIGHTNING, _TRANSFORMERS = ("lightning",), ("transformers", "accelerate")
_ONNX = ("onnx", "onnxruntime", "onnxscript")
_CLIPPING = "under `fused` nothing can be clipped: another `grad_mode`"
CLIENTS = [
    Client("Lightning", lightning, _LIGHTNING),
    Client("Lightning, `gradient_clip_val`", lightning_clipped, _LIGHTNING, way=_CLIPPING),
    Client("Lightning, `WeightAveraging`", lightning_average, _LIGHTNING),
    Client("accelerate", accelerate, ("accelerate",)),
    Client("accelerate, `clip_grad_norm_`", accelerate_clipped, ("accelerate",), way=_CLIPPING),
    Client("accelerate, `accumulate`", accelerate_accumulated, ("accelerate",)),
    Client("Trainer, its default clipping", trainer, _TRANSFORMERS, way=_CLIPPING),
    Client(
        "Trainer, `max_grad_norm=0`",
        trainer_unclipped,
        _TRANSFORMERS,
        way=_CLIPPING + ". Trainer asks for the norm in any case",
    ),
    Client("safetensors", safetensors, ("safetensors",)),
    Client("ONNX", onnx, _ONNX, way="the translations of `torchsparse_rec.onnx`, or `nn.revert(model)` before it"),
    Client("ONNX, our translations", onnx_translated, (*_ONNX, "torchsparse_rec.onnx")),
    Client("ONNX, after `nn.revert`", onnx_reverted, _ONNX, kinds=("Embedding", "EmbeddingBag")),
    Client(
        "torchao, `quantize_`",
        torchao,
        ("torchao",),
        kinds=("Embedding",),
        way="a `filter_fn` that leaves out tables that grow",
    ),
    Client("torchao, `AdamW8bit`", torchao_optimizer, ("torchao",), way='`grad_mode="dense"`'),
]
