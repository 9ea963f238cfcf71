"""What the functions of the family ``scores`` are given: samples, rows, and the rows that do not count for a sample."""

from __future__ import annotations

import torch
from torch import Tensor

from ..jagged import JaggedTensor
from ..jagged.checks import check_tensor
from .scores_passes import targets_of

__all__ = ["ascending", "check_block", "check_factors", "excluded_pairs", "floats_of", "left_out", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def floats_of(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of rows beside samples of ``dtype``: float64 is not mixed with others."""
    return (torch.float64,) if dtype == torch.float64 else (torch.float32, torch.bfloat16, torch.float16)


def check_block(name: str, block: int | None) -> None:
    """Raise ``ValueError`` unless rows can be read so many at a time."""
    if block is not None and block < 1:
        raise ValueError(f"{name}: block must be at least 1 row, got {block}")


def check_factors(name: str, of_samples: str, samples: Tensor, of_rows: str, rows: Tensor) -> None:
    """Raise ``ValueError`` unless samples ``[..., D]`` and rows ``[V, D]`` have products, on whatever devices."""
    if samples.dim() == 0 or not samples.is_floating_point():
        raise ValueError(
            f"{name}: {of_samples} must be [..., D] of floats, got {samples.dtype} of shape {tuple(samples.shape)}"
        )
    dtypes = floats_of(samples.dtype)
    if rows.dim() != 2 or rows.shape[1] != samples.shape[-1] or rows.dtype not in dtypes:
        raise ValueError(
            f"{name}: {of_rows} must be [V, {samples.shape[-1]}] of {' or '.join(map(str, dtypes))}, as {of_samples} "
            f"is {samples.dtype}, got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    if rows.shape[0] == 0:
        raise ValueError(f"{name}: {of_rows} must have at least one row, got shape {tuple(rows.shape)}")


# ---- What is excluded ------------------------------------------------------------------------------------------------


def excluded_pairs(
    name: str, excluded: JaggedTensor | Tensor, count: int, device: torch.device, whose: str = "samples"
) -> tuple[Tensor, Tensor]:
    """Return the ids that are excluded, in their dtype, and for which of so many samples: each ``[E]``."""
    if isinstance(excluded, JaggedTensor):
        ids, lengths = excluded.values(), excluded.lengths()
        shape, fits = f"{lengths.shape[0]} rows", lengths.shape[0] == count and ids.dim() == 1
        samples = torch.repeat_interleave(lengths.long(), output_size=ids.shape[0])
    else:
        check_tensor(name, "excluded", excluded)
        ids, shape = excluded, f"shape {tuple(excluded.shape)}"
        fits = ids.dim() == 2 and ids.shape[0] == count
        samples = torch.arange(count, device=ids.device).repeat_interleave(ids.shape[-1] if fits else 0)
    if not fits or ids.dtype not in (torch.int32, torch.int64) or ids.device != device:
        raise ValueError(
            f"{name}: excluded must have a row of int32 or int64 ids for each of {count} {whose}, on {device}, got "
            f"{ids.dtype} of {shape} on {ids.device}"
        )
    return ids.reshape(-1), samples


def ascending(ids: Tensor, samples: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return pairs of rows and samples by row; -1 in place of a sample's own target."""
    ids, order = ids.where(ids != targets[samples], -1).sort(stable=True)
    return ids, samples[order]


def left_out(
    name: str, excluded: JaggedTensor | Tensor | None, targets: Tensor, rows: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return what is excluded, as row and sample, by row; -1 in place of a sample's own target."""
    if excluded is None:
        return None, None
    ids, samples = excluded_pairs(name, excluded, targets.shape[0], targets.device)
    return ascending(targets_of(ids, rows, -1, True), samples, targets)
