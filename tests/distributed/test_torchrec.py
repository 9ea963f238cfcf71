"""Checkpoints of TorchRec into tables over ranks: each reads its part, and together they are the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchsparse_rec import distributed, nn, optim
from torchsparse_rec.compat.torchrec import load_tables
from torchsparse_rec.distributed import ColumnWise, RowWise, TableWise

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "torchrec"
ROWS = {"t_user": 23, "t_item": 14, "t_cart": 17}
OPTIMIZERS: dict[str, Any] = {
    "adagrad": optim.Adagrad,
    "row_wise_adagrad": optim.RowWiseAdagrad,
    "both_styles": optim.Adam,
}


class Model(torch.nn.Module):
    def __init__(self, tables: dict[str, int]) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBagCollection(
            [
                nn.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=8, name=t, feature_names=[t])
                for t, rows in tables.items()
            ],
            grad_mode="sparse",
        )


def loaded(case: str, plan: Any) -> dict[str, Tensor]:
    """Load a checkpoint into a model, over ranks if there are some; return whole tables, and states as they are."""
    tables = {t: rows for t, rows in ROWS.items() if case != "by_rows" or t != "t_cart"}
    torch.manual_seed(0)  # ranks that have run other tests have drawn different numbers
    model = Model(tables)
    if dist.is_initialized():
        distributed.shard(model, plan=plan)
    optimizer = OPTIMIZERS["row_wise_adagrad" if case == "by_rows" else case](model.parameters())
    load_tables(GOLDENS / case, model, optimizer=optimizer, average_shards=True)
    whole = distributed.full_state_dict(model) if dist.is_initialized() else model.state_dict()
    found = {name.split(".")[-2]: weight.clone() for name, weight in whole.items()}
    for name, parameter in model.named_parameters():
        for state, x in optimizer.state.get(parameter, {}).items():
            found[f"{name.split('.')[-2]} {state}"] = x.clone()
    # The next step sees the states, wherever they are.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    whole = distributed.full_state_dict(model) if dist.is_initialized() else model.state_dict()
    return found | {f"{name.split('.')[-2]} next": weight.clone() for name, weight in whole.items()}


PLANS: dict[str, Any] = {
    "row": RowWise(),
    "table": TableWise(1),
    "column": ColumnWise((1, 0)),
    "copies": "data_parallel",
    "mixed": {"t_user": RowWise(), "t_item": TableWise(0), "t_cart": "data_parallel"},
}


# By columns states of whole rows are refused; the mixed plan names a table that is not in all checkpoints.
PAIRS = [(case, plan) for case in ("adagrad", "both_styles") for plan in PLANS]
PAIRS += [(case, plan) for case in ("row_wise_adagrad", "by_rows") for plan in ("row", "table", "copies")]


@pytest.mark.parametrize(("case", "plan"), [*PAIRS, ("row_wise_adagrad", "mixed")])
def test_parts_of_ranks_make_up_the_checkpoint(two: Any, case: str, plan: str) -> None:
    wanted = loaded(case, None)
    for found in two.run(loaded, case, PLANS[plan]):
        for name in (*[t for t in ROWS if t in wanted], *[f"{t} next" for t in ROWS if t in wanted]):
            assert torch.equal(found[name], wanted[name]), name


def test_states_of_whole_rows_are_refused_by_columns(two: Any) -> None:
    with pytest.raises(ValueError, match="'bags.embedding_bags.t_user.weight' is ColumnWise, but RowWiseAdagrad steps"):
        two.run(loaded, "row_wise_adagrad", ColumnWise((0, 1)))


def damaged_for_one(folder: str) -> list[float]:
    """Load what the first rank alone finds; return this rank's rows before and after."""
    model = distributed.shard(Model(ROWS), plan="row_wise")
    before = [x.detach().clone() for x in model.parameters()]
    try:
        load_tables(folder if dist.get_rank() == 0 else f"{folder}-none", model)
    except FileNotFoundError as error:
        assert "rank 1: " in str(error)
        return [float((a - b.detach()).abs().sum()) for a, b in zip(before, model.parameters(), strict=True)]
    raise AssertionError("no rank has raised an error")


def test_the_error_of_one_rank_is_that_of_all(two: Any) -> None:
    assert two.run(damaged_for_one, str(GOLDENS / "adagrad")) == [[0.0] * 3] * 2


def dry(folder: str) -> int:
    """Return how many tensors would go somewhere."""
    model = distributed.shard(Model(ROWS), plan="row_wise")
    return len(load_tables(folder, model, dry_run=True))


def test_a_dry_run(two: Any) -> None:
    assert two.run(dry, str(GOLDENS / "adagrad")) == [3, 3]
