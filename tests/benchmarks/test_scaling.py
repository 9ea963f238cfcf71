"""How cost grows: each workload runs, rounds end in time, and what is not explained is said."""

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


@pytest.fixture
def figures(scaling):
    """Return figures of the quick points of two axes: ms as ids, but for one workload that takes twice as long."""

    def of(workload, point):
        ms = 1e-6 * point.ids * (2 if (workload, point.rows) == ("sparse", 1_000) else 1)
        return scaling.Figures(workload, point, [{"ms": ms, "gather_ms": ms / 2, "beyond_bytes": 3_000_000}])

    points = {scaling.at(axis, value, True) for axis in ("rows", "dim") for value in scaling.AXES[axis].quick}
    return [of(workload, point) for point in sorted(points, key=repr) for workload in scaling.WORKLOADS]


def test_a_knee_needs_a_sentence(scaling, monkeypatch, figures):
    """Find one jump of twice the cost between 100 and 1,000 rows; explained only in that workload and between both."""
    (found,) = scaling.knees("rows", figures, True)
    assert found.pop("why") == [] and found.pop("change") == pytest.approx(2.0)
    assert found == {"axis": "rows", "workload": "sparse", "from": 100, "to": 1_000}
    for knee, fits in (
        (scaling.Knee(10, 1_000, "caches"), True),
        (scaling.Knee(100, 1_000, "caches", ("sparse",)), True),
        (scaling.Knee(100, 1_000, "caches", ("lookup", "fused")), False),
        (scaling.Knee(100, 500, "caches"), False),
        (scaling.Knee(500, 1_000, "caches"), False),
    ):
        monkeypatch.setitem(scaling.AXES, "rows", dataclasses.replace(scaling.AXES["rows"], knees=(knee,)))
        assert scaling.knees("rows", figures, True)[0]["why"] == (["caches"] if fits else [])


def test_costs_are_per_unit_of_the_axis(scaling, figures):
    (_, each), *_ = scaling.curve("dim", "fused", figures, True)
    assert each.point.dim == 1 and scaling.cost("dim", each) == pytest.approx(1 / 4)
    assert scaling.cost("rows", each) == pytest.approx(1.0)
    assert scaling.cost("dim", scaling.Figures("fused", each.point)) is None
    lines = scaling.lines_of_floors("rows", figures, {"copy_gb_per_second": 10.0, "fault_ns_per_byte": 0.5}, True)
    gathered, copied, faults = lines.values()
    assert gathered == [(100, pytest.approx(0.5)), (1_000, pytest.approx(0.5))]
    assert copied[0] == (100, pytest.approx((8 + 64 + 2.4) / 10)) and faults[0] == (100, pytest.approx(0.5 * 1.6))


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
    assert "| 100 | 2 [5] | 2 [5] | 2 [5] | needs 9 GB, of 1 free | 1 |" in page and "does not explain: none." in page
    content = json.loads((tmp_path / "scaling.json").read_text())
    assert content["quick"] and content["rounds"] == 1 and len(content["points"]) == 8 and content["knees"] == []


def test_what_is_not_explained_is_loud(scaling, monkeypatch, capsys):
    monkeypatch.setitem(scaling.AXES, "tables", dataclasses.replace(scaling.AXES["tables"], values=(1, 10), knees=()))

    def apart(workload, point, quick, left):
        return {"ms": float(point.tables), "gather_ms": 1.0, "beyond_bytes": 0}

    def once(axes, quick, minutes, keep):
        points = [scaling.at("tables", value, quick) for value in (1, 10)]
        return [scaling.Figures(name, p, [apart(name, p, quick, 1)]) for name in scaling.WORKLOADS for p in points]

    monkeypatch.setattr(scaling, "rounds", once)
    monkeypatch.setattr(scaling, "floors", lambda quick: {"copy_gb_per_second": 30.0, "fault_ns_per_byte": 0.3})
    assert scaling.main(["--axes", "tables"]) == 1
    printed = capsys.readouterr()
    assert "UNEXPLAINED: lookup, tables 1 to 10: 10.00x" in printed.err
    assert "does not explain: lookup, tables 1 to 10: 10.00x; fused" in printed.out
