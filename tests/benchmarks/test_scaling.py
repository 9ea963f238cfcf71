"""How cost grows: each workload runs, rounds end in time, and the page has their figures."""

import dataclasses
import itertools
import json

import pytest
import torch


@pytest.fixture
def scaling(benchmarks):
    return benchmarks("scaling")


@pytest.mark.parametrize("axis", ["rows", "ids", "tables", "dim", "threads", "skew"])
def test_every_value_of_an_axis_is_a_point(scaling, axis):
    for quick, values in ((False, scaling.AXES[axis].values), (True, scaling.AXES[axis].quick)):
        base = scaling.QUICK if quick else scaling.Point()
        assert list(values) == sorted(set(values)) and (quick or getattr(base, axis) in values)
        for value in values:
            point = scaling.at(axis, value, quick)
            assert dataclasses.replace(point, **{axis: getattr(base, axis)}) == base
            assert point.ids % (scaling.HOT * point.tables) == 0 and point.rows % point.tables == 0


@pytest.mark.parametrize("workload", ["lookup", "fused", "sparse", "dynamic"])
@pytest.mark.parametrize("sizes", [{}, {"tables": 2, "skew": 1.0}])
def test_workloads_run_at_toy_size(scaling, monkeypatch, workload, sizes, restore_threads):
    monkeypatch.setattr(scaling, "DRAWN", 400)
    got = scaling.measure(workload, dataclasses.replace(scaling.QUICK, **sizes), True)
    assert got["ms"] > 0 and got["gather_ms"] > 0 and isinstance(got["beyond_bytes"], int)


@pytest.mark.parametrize("workload", ["lookup", "fused", "sparse", "dynamic"])
def test_steps_train_the_rows_that_are_looked_up(scaling, workload):
    """Take SGD's step of 0.01 for each of a row's ids, all of whose gradients are 1; a lookup changes nothing."""
    point = dataclasses.replace(scaling.QUICK, rows=50)
    ids = scaling.batches(point)[0]
    call, table = scaling.make(workload, point, [ids])
    counts = torch.bincount(ids, minlength=50).unsqueeze(1)
    before = scaling.make("lookup", point, [ids])[0]()
    call()
    expected = before if workload == "lookup" else (0.01 - 0.01 * counts)[ids].view(-1, 10, 1).sum(1).expand(-1, 4)
    torch.testing.assert_close(table()[ids].view(-1, 10, 4).sum(1), expected)


def test_keys_are_different_and_not_negative(scaling):
    keys = scaling.keys_of(torch.arange(100_000))
    assert len(keys.unique()) == 100_000 and int(keys.min()) >= 0 and int(keys.max()) > 2**62


def test_a_point_in_a_process_of_its_own(scaling):
    got = scaling.apart("fused", scaling.QUICK, True, 300.0)
    assert got["ms"] > 0 and got["beyond_bytes"] < 2**30


def test_a_point_that_cannot_run_says_why(scaling, monkeypatch):
    assert scaling.apart("fused", scaling.QUICK, True, 0.0) == {"skipped": "the time was over"}
    broken = dataclasses.replace(scaling.QUICK, rows=0)
    assert "Error" in scaling.apart("lookup", broken, True, 300.0)["skipped"]
    monkeypatch.setattr(scaling, "free_memory", lambda: 10**9)
    big = dataclasses.replace(scaling.Point(), rows=10**8)
    assert scaling.apart("dynamic", big, False, 1.0) == {"skipped": "needs 11 GB, of 1 free"}


def test_rounds_end_when_the_time_is_over(scaling, monkeypatch):
    """Run a clock by hand: each of the 8 points takes 3 of 60 seconds, one of them fails, and the rest has 2 rounds."""
    now = itertools.count()
    monkeypatch.setattr(scaling.time, "monotonic", lambda: 3.0 * next(now))
    monkeypatch.setitem(scaling.AXES, "rows", dataclasses.replace(scaling.AXES["rows"], values=(100, 1_000)))
    given, kept = [], []

    def run(workload, point, quick, left):
        given.append(left)
        if (workload, point.rows) == ("dynamic", 1_000):
            return {"skipped": "no memory"}
        return {"ms": float(len(given)), "gather_ms": 1.0, "beyond_bytes": 0}

    found = scaling.rounds(["rows"], False, 1.0, lambda figures: kept.append(len(figures)), run)
    assert len(found) == 8 and kept == [8] * len(given) and min(given) > 0
    assert {len(each.rounds) for each in found if not each.skipped} <= {1, 2, 3}
    assert [each.skipped for each in found if each.skipped] == ["no memory"]
    late = scaling.rounds(["rows"], False, 0.0, kept.append, run)
    assert {each.skipped for each in late} == {"the time was over"}


def test_costs_are_per_unit_of_the_axis(scaling):
    point = scaling.at("dim", 4, True)
    measured = scaling.Figures("fused", point, [{"ms": 1e-6 * point.ids}])
    assert list(scaling.curve("dim", "fused", [measured], True)) == [(4, measured)]
    assert scaling.cost("dim", measured) == pytest.approx(1 / 16)
    assert scaling.cost("rows", measured) == pytest.approx(1.0)
    assert scaling.cost("dim", scaling.Figures("fused", point)) is None


def test_the_page_and_its_files(scaling, benchmarks, monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    seen = []

    def apart(workload, point, quick, left):
        seen.append(point)
        if workload == "dynamic" and point.rows == 100:
            return {"skipped": "needs 9 GB, of 1 free"}
        return {"ms": 2e-6 * point.ids, "gather_ms": 1e-6 * point.ids, "beyond_bytes": 5_000_000}

    monkeypatch.setattr(scaling, "rounds", lambda *given, rounds=scaling.rounds: rounds(*given, apart))
    assert benchmarks("__main__").main(["scaling", "--quick", "--axes", "rows", "--out", str(tmp_path)]) == 0
    assert len(seen) == 8
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "scaling.json", "rows.png"}
    page = (tmp_path / "README.md").read_text()
    assert page in capsys.readouterr().out
    assert "| 100 | 2 [5] | 2 [5] | 2 [5] | needs 9 GB, of 1 free | 1 |" in page
    content = json.loads((tmp_path / "scaling.json").read_text())
    assert content["quick"] and content["rounds"] == 1 and len(content["points"]) == 8
