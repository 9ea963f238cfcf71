"""Clients that compile, export and quantise models by torch."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from clients.cases import Client, Results, Side, by_id, learned, train, trained
from clients.of_torch import IDS

from torchsparse_rec import nn


def compiled(side: Side, backend: str = "aot_eager") -> Results:
    """Train a compiled model, then look up by it."""
    torch.compiler.reset()
    model, optimizer, schedule = side.made()
    call: Any = torch.compile(model, backend=backend)
    train(call, optimizer, schedule)
    results = {"trained": call(IDS), **learned(model)}
    with torch.no_grad():
        results["without gradients"] = call(IDS)
    model.eval()
    results["evaluated"] = call(IDS)
    torch.compiler.reset()
    return results


def compiled_by_inductor(side: Side) -> Results:
    """Train and look up by a model that torch's own code generator compiles."""
    return compiled(side, "inductor")


def exported(side: Side) -> Results:
    """Export a program, save it and load it."""
    model, _optimizer, _ = trained(side)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model.eval(), (IDS,), strict=False), file)
    file.seek(0)
    program = torch.export.load(file)
    # Torch's programs have no buffers: a table that grows has its initial values.
    parameters = {name: x for name, x in program.state_dict.items() if isinstance(x, torch.nn.Parameter)}
    return {"output": program.module()(IDS), **by_id(model, parameters)}


def exported_in_training(side: Side) -> Results:
    """Export a model that is in ``train()``."""
    model, _optimizer, _ = trained(side)
    return {"output": torch.export.export(model, (IDS,)).module()(IDS)}


def aot_inductor(side: Side) -> Results:
    """Compile a library of machine code."""
    model, _optimizer, _ = trained(side)
    program = torch.export.export(model.eval(), (IDS,))
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "model.pt2"))
        return {"output": torch._inductor.aoti_load_package(path)(IDS)}


def quantized(side: Side, prepare: Any = lambda model: model) -> Results:
    """Quantise the tables' weights by torch.ao."""
    from torch.ao import quantization

    model, _optimizer, _ = trained(side)
    model = prepare(model.eval())
    config = {
        cls: quantization.float_qparams_weight_only_qconfig for cls in (torch.nn.Embedding, torch.nn.EmbeddingBag)
    }
    small = quantization.quantize_dynamic(model, config)
    return {"output": small(IDS), "how many": torch.tensor([str(small).count("Quantized")])}


def quantized_reverted(side: Side) -> Results:
    """Quantise after ``nn.revert``."""
    return quantized(side, nn.revert if side.ours else lambda model: model)


# Compiling takes long, so that few kinds are tried.
_FEW = ("Embedding", "EmbeddingBagCollection")
CLIENTS = [
    Client("`torch.compile`, `aot_eager`", compiled, full=True, kinds=_FEW),
    Client("`torch.compile`", compiled_by_inductor, full=True, kinds=_FEW),
    Client("`torch.export`", exported),
    Client("`torch.export` in `train()`", exported_in_training, way="`model.eval()` before it"),
    Client("AOTInductor", aot_inductor, full=True, kinds=_FEW),
    Client("`torch.ao.quantization`", quantized, way="`nn.revert(model)` before it"),
    Client("`torch.ao.quantization`, after `nn.revert`", quantized_reverted, kinds=("Embedding", "EmbeddingBag")),
]
