"""What is neither right nor refused, and why: a cell of this list that has become right or refused fails its test."""

from __future__ import annotations

from collections.abc import Iterable

from clients.cases import MODES

BY_ROWS = MODES[1:]
IN_BACKWARD = ("fused", "auto, in_backward")
LAGS = "reads rows that are behind, by `parameters()`: `optimizer.flush()` before it"
NOT_NOTICED = "torch's clipping skips parameters without a `.grad`, so tables stepped in backward are not clipped"
NO_WEIGHT = "`KeyError: 'weight'` at the lookup of a collection whose table's `weight` is no parameter"
OTHERS_STEP = "the table that the other process steps is not current here"
FUNCTORCH = "of a collection: an error of torch's about `setup_context`; else " + LAGS

_ROWS: list[tuple[Iterable[str], Iterable[str], str]] = [
    (
        (
            "EMA (`AveragedModel`, by hand)",
            "SWA (`AveragedModel`, `SWALR`)",
            "`functional_call`",
            "`vmap` over `stack_module_state`",
            "Lightning, `WeightAveraging`",
            "safetensors",
        ),
        BY_ROWS,
        LAGS,
    ),
    (["`torch.func.grad`"], ("sparse", "auto", "auto, in_backward"), LAGS),
    (["`vmap` over `grad`"], ("auto", "auto, in_backward"), LAGS),
    (["`torch.func.grad`", "`vmap` over `grad`"], ["fused"], FUNCTORCH),
    (["`prune`", "`parametrize`"], MODES, NO_WEIGHT),
    (
        [
            "torch's `clip_grad_norm_`",
            "Lightning, `gradient_clip_val`",
            "accelerate, `clip_grad_norm_`",
            "Trainer, its default clipping",
        ],
        IN_BACKWARD,
        NOT_NOTICED,
    ),
    (["ZeRO (`ZeroRedundancyOptimizer`)"], ["sparse"], OTHERS_STEP),
]
KNOWN = {(name, mode): why for names, modes, why in _ROWS for name in names for mode in modes}
