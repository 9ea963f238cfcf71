"""The benchmarks of whole training steps: many tables, Adam, collections, and the map of ``auto``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import types
from functools import partial

import pytest
import torch

needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow")


# ---- Many tables ----------------------------------------------------------------------------------------------------


@needs_tensorflow
@pytest.mark.tensorflow
@pytest.mark.parametrize(("rule", "form"), [("sgd", "safe_embedding_lookup_sparse"), ("adagrad", "gather")])
def test_tensorflow_trains_what_the_formulas_say(benchmarks, rule, form):
    wide_deep, sides = benchmarks("wide_deep"), benchmarks("many_tables_sides")
    options = benchmarks("rows").Options()
    wide_deep.check_sides(wide_deep.SHAPE, "cpu", rule, {form: partial(sides.tensorflow_side, options, rule, form)})


def test_a_side_that_trains_something_else_is_seen(benchmarks):
    wide_deep, sides = benchmarks("wide_deep"), benchmarks("many_tables_sides")
    wrong = {"torch": partial(sides.torch_side, "sgd")}
    with pytest.raises(AssertionError, match="torch: "):
        wide_deep.check_sides(wide_deep.SHAPE, "cpu", "adagrad", wrong)


def test_bytes_of_a_step_are_those_of_the_formula(benchmarks):
    """Compute the bytes by hand for two features, one and two ids in a bag, and too many rows for any to come twice."""
    shape = benchmarks("many_tables").Shape((1, 2), 10**9, 8, ((4, "mean"),))
    assert shape.ids() == 24
    forward = 24 * 8 + 24 * 16 + 2 * 8 * 2 * 16
    assert shape.bytes_moved("sgd") == pytest.approx(forward + 2 * 24 * 16, rel=1e-3)
    assert shape.bytes_moved("adagrad") == pytest.approx(forward + 2 * 24 * 32, rel=1e-3)
    assert shape.bytes_moved("rowwise_adagrad") == pytest.approx(forward + 2 * 24 * 20, rel=1e-3)


# ---- Adam -----------------------------------------------------------------------------------------------------------


def test_gradients_of_adams_update_are_of_fresh_rows(benchmarks):
    problem = benchmarks("adam").Problem(1_000, 32, "uniform", "cpu", count=3, dense_gradients=3)
    given = benchmarks("adam").row_gradients(problem), benchmarks("adam").dense_gradients(problem)
    seen = []
    for _ in range(3):
        rows, dense = next(given[0]), next(given[1])
        assert rows.is_coalesced()
        torch.testing.assert_close(rows.to_dense(), dense)
        seen.append(tuple(rows.indices()[0].tolist()))
    assert len(set(seen)) == 3 and tuple(next(given[0]).indices()[0].tolist()) == seen[0]


def test_sides_in_processes_of_their_own_take_turns(benchmarks, monkeypatch, capsys):
    """Print in this process what the processes of the two sides would print."""
    adam, rows, timing, ran = benchmarks("adam"), benchmarks("rows"), benchmarks("timing"), []

    def print_side(side, *rest):
        ran.append((side, *rest))
        print(json.dumps([[1.0, 2.0, 3.0] if side == "ours" else [40.0], timing.FULL.__dict__]))

    def run(command, **more):
        exec(command[-1].replace("from benchmarks.adam import print_side", "pass"), {"print_side": print_side})
        return types.SimpleNamespace(returncode=0, stdout=capsys.readouterr().out)

    monkeypatch.setattr(adam.subprocess, "run", run)
    problem = adam.Problem(10_000_000, 8, "uniform", "cpu")
    pair = adam.pair_apart(rows.Options(threads=3), "update", "sparse", problem, "torch SparseAdam")
    assert (pair.ours_ms, pair.peer_ms, pair.ours_plan) == (2.0, 40.0, timing.FULL)
    assert [side for side, *_ in ran] == ["ours", "torch SparseAdam"] * 2
    assert ran[0][1:] == ("update", "sparse", 10_000_000, 8, "uniform", 3)


def test_a_side_that_fails_in_its_process_is_named(benchmarks, monkeypatch):
    adam, options = benchmarks("adam"), benchmarks("rows").Options()
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nMemoryError: 8 GB\n")
    monkeypatch.setattr(adam.subprocess, "run", lambda *args, **more: failed)
    with pytest.raises(RuntimeError, match="ours: MemoryError: 8 GB"):
        adam.pair_apart(options, "step", "fused", adam.Problem(100, 8, "uniform", "cpu"), "torch SparseAdam")


def test_a_side_prints_times_and_plan(benchmarks, capsys, restore_threads):
    benchmarks("adam").print_side("torch SparseAdam", "step", "fused", 200, 16, "uniform", 1)
    times, plan = json.loads(capsys.readouterr().out)
    assert benchmarks("timing").Plan(**plan) == benchmarks("timing").FULL
    assert len(times) == 2 * 15 and min(times) > 0


# ---- The map of auto ------------------------------------------------------------------------------------------------


def point(choice, dense, sparse, fused, **more):
    """Return one point of the measurements, with times in ms."""
    given = {"rows": 1_000, "dim": 4, "batch": 256, "optimizer": "SGD", **more}
    return {**given, "choice": choice, "ms": {"dense": dense, "sparse": sparse, "fused": fused, "auto": 2 * dense}}


def test_the_grid_has_every_table_of_a_gigabyte(benchmarks):
    auto_map = benchmarks("auto_map")
    points = auto_map.grid()
    assert points == auto_map.grid() and len({auto_map.key(each) for each in points}) == len(points) == 390
    assert max(each["rows"] * each["dim"] * 4 for each in points) <= 1 << 30
    assert {each["dim"] for each in points if each["rows"] == 10_000_000} == {1, 4, 16}
    assert len({each["optimizer"] for each in points[:20]}) == 3


def test_what_is_close_enough(benchmarks):
    auto_map = benchmarks("auto_map")
    assert auto_map.excess(point("dense", 3.0, 2.0, 4.0)) == (1.5, 1.0)
    assert not auto_map.good(point("dense", 3.0, 2.0, 4.0))
    assert auto_map.good(point("dense", 10.9, 10.0, 20.0)) and auto_map.good(point("fused", 0.05, 0.2, 0.14))
    worst = point("sparse", 1.0, 1.75, 4.0)
    head, itself, first, second = auto_map.summary([point("dense", 1.0, 2.0, 4.0), worst])
    assert head == "2 points: auto's choice within 10 % or 0.1 ms of the fastest at 50.0 %; beyond 1.5 x at 1"
    assert "1.571 x" in itself and "1.75 x" in first and "auto chose sparse" in first and "1.00 x" in second
    assert list(auto_map.summary([])) == []


def test_a_map_goes_on_where_it_was(benchmarks, monkeypatch, tmp_path, capsys, restore_threads):
    pytest.importorskip("matplotlib")
    auto_map, measured = benchmarks("auto_map"), []
    sizes = [{"rows": 1_000, "dim": 4, "batch": 256, "optimizer": name} for name in ("SGD", "Adagrad")]

    def measure(given, spread, device):
        measured.append(given["optimizer"])
        return point("fused", 1.0, 2.0, 3.0, **given)

    monkeypatch.setattr(auto_map, "grid", lambda: sizes[: len(measured) + 1])
    monkeypatch.setattr(auto_map, "measure", measure)
    arguments = ["--json", str(tmp_path / "map.json"), "--png", str(tmp_path / "map.png"), "--threads", "1"]
    assert auto_map.main(arguments) == 0 and measured == ["SGD"]
    assert auto_map.main(arguments) == 0 and measured == ["SGD", "Adagrad"]
    assert auto_map.main([*arguments, "--minutes", "0"]) == 0 and measured == ["SGD", "Adagrad"]
    assert len(json.loads((tmp_path / "map.json").read_text())["points"]) == 2
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG") and "2 points" in capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adam"])
def test_a_point_is_measured_in_every_mode(benchmarks, monkeypatch, optimizer):
    auto_map = benchmarks("auto_map")
    monkeypatch.setattr(auto_map, "WARM_UP_STEPS", 3)
    monkeypatch.setattr(auto_map, "BLOCK_MS", 1.0)
    given = {"rows": 50, "dim": 4, "batch": 32, "optimizer": optimizer}
    measured = auto_map.measure(given, "zipf", "cpu", blocks=1)
    assert set(measured["ms"]) == set(auto_map.MODES) and min(measured["ms"].values()) > 0
    assert measured["choice"] in auto_map.FIXED
