"""DistributedDataParallel around models with tables over several ranks: it must leave the tables out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .._torch_modules import ignore_in_ddp, parameters_of_active_ddp
from ..nn import EmbeddingVariable
from ..tables.table import table_if_any

__all__ = ["check_not_in_ddp", "leave_out_of_ddp"]


def leave_out_of_ddp(module: torch.nn.Module) -> None:
    """
    Have a DistributedDataParallel around a module leave out the tables that are shared over ranks, at any depth.

    ``DistributedDataParallel`` reads the names to leave out from the module that it is given, and from no other.
    ``shard`` calls this for the module that it is given; a parent of that module needs a call of its own, before it is
    wrapped.

    Args:
        module: the module that will be given to ``DistributedDataParallel``. Names that it leaves out already stay left
            out.

    Source: torch's ``DistributedDataParallel``, whose list of names this extends.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))  # with tables in it, that shard() has split
        >>> leave_out_of_ddp(model)
    """
    shared = [name for name, parameter in module.named_parameters(remove_duplicate=False) if _name(parameter)]
    for title, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, EmbeddingVariable) and _name(child.stored_weight()):  # its keys are buffers
            shared += [f"{title}.{name}".lstrip(".") for name, _ in child.named_buffers()]
    ignore_in_ddp(module, shared)


def check_not_in_ddp(parameters: Iterable[Tensor]) -> None:
    """
    Check that the DistributedDataParallel within whose forward this is, if any, leaves out the parts of tables.

    Raises:
        RuntimeError: it does not.
    """
    its = {id(parameter) for parameter in parameters_of_active_ddp()}
    found = next((parameter for parameter in parameters if id(parameter) in its), None) if its else None
    if found is not None:
        raise RuntimeError(
            f"table {_name(found)!r} is shared over ranks, but in the DistributedDataParallel around it, which copied "
            "rank 0's part over those of the others when it was made: make the tables anew, and before "
            "DistributedDataParallel(parent) call torchsparse_rec.distributed.leave_out_of_ddp(parent)"
        )


def _name(parameter: Tensor) -> str | None:
    """Return the name of the shared table that the parameter is a part of, or None."""
    table = table_if_any(parameter)
    return table.part.name if table is not None and table.part is not None else None
