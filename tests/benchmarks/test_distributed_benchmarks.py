"""The benchmarks of tables over ranks: what each rank gets, and one row from end to end."""

import json

import pytest
import torch


@pytest.mark.parametrize("skew", [False, True])
def test_parts_of_ranks_are_the_whole_batch(benchmarks, skew):
    sides, many_tables = benchmarks("distributed_sides"), benchmarks("many_tables")
    shape = many_tables.Shape((1, 3), 50, 8, ((4, "mean"),))
    parts = [sides.Average(shape, rank, 2, skew).part() for rank in range(2)]
    whole = sides.Average(shape, 0, 2, skew)
    assert len({tuple(ids.tolist()) for ids in whole.batches}) == len(whole.batches)
    for k, batch in enumerate(whole.batches):
        of_ranks = [part.by_feature(part.batches[k]) for part in parts]
        for feature, its in zip(whole.by_feature(batch), zip(*of_ranks, strict=True), strict=True):
            assert torch.equal(feature, torch.cat(its))
    assert torch.equal(whole.gradients[0], torch.cat([part.gradients[0] for part in parts]) / 2)
    for part in parts:
        assert all(map(torch.equal, part.tables, whole.tables))


def test_a_row_over_two_ranks_from_end_to_end(benchmarks, tmp_path, restore_threads):
    target = tmp_path / "figures.json"
    assert benchmarks("__main__").main(["distributed/ten-ids-2", "--quick", "--json", str(target)]) == 0
    (row,) = json.loads(target.read_text())["rows"]
    (peer,) = row["peers"]
    assert peer["name"] == "ours on one process" and "2 ranks" in row["sizes"] and "Zipf" in row["sizes"]
    assert peer["ms"] > 0 and peer["ratio"] == pytest.approx(peer["ms"] / peer["ours_ms"])


def test_the_error_of_a_rank_is_the_rows(benchmarks):
    distributed = benchmarks("distributed")
    shape = benchmarks("many_tables").Shape((1, 2), 50, 8, ((4, "sum"),))
    options = benchmarks("rows").Options(quick=True)
    with pytest.raises(RuntimeError, match="ValueError: rank 0: shard: the plan of table 'f0_0' must be one of"):
        distributed._run(2, shape, "by_rows", False, distributed.ONE, options, True)


def test_a_peer_that_cannot_run_beside_us_has_no_figures(benchmarks):
    rows, report, timing = benchmarks("rows"), benchmarks("report"), benchmarks("timing")

    def pair(name):
        if name == "TorchRec":
            raise rows.UnavailableError("torchrec is not installed")
        return timing.Pair(1.0, 3.0, timing.FULL, timing.FULL)

    peers = dict.fromkeys(["TorchRec", "torch"])
    row = rows.Row("some/row", "nothing", lambda options: rows.Case(None, peers, lambda: None, pair=pair))
    result = report.run_row(row, rows.Options())
    assert result.unavailable == {"TorchRec": "torchrec is not installed"}
    assert {name: pair.ratio() for name, pair in result.pairs.items()} == {"torch": 3.0}


def test_rows_over_ranks_are_left_out_on_a_gpu(benchmarks):
    main = benchmarks("__main__")
    names = {device: {row.name for row in main.choose([], device)} for device in ("cpu", "cuda")}
    left_out = names["cpu"] - names["cuda"]
    assert "distributed/rows-2" in left_out and {name.partition("/")[0] for name in left_out} == {"distributed"}
