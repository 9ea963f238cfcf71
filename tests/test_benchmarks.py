"""The benchmarks: how medians and ratios are made, the command line, and one row from end to end."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def benchmarks():
    """A function that imports a module of the benchmarks; the repository's root stays off the path."""
    folder = ROOT / "benchmarks"
    spec = importlib.util.spec_from_file_location(
        "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = package
    spec.loader.exec_module(package)
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


def scripted_clock(log, times):
    """A clock that notes which call it is given and answers its scripted times, first ones high."""

    def clock(call, calls, device):
        log.append((call, calls))
        first, then = times[call]
        return [first] * min(5, calls - 1) + [then] * max(1, calls - 5)

    return clock


def test_compare_alternates_blocks_and_takes_medians_of_what_is_kept(benchmarks):
    log = []
    clock = scripted_clock(log, {"ours": (90.0, 2.0), "peer": (80.0, 7.0)})
    pair = benchmarks("timing").compare("ours", "peer", "cpu", quick=False, clock=clock)
    assert (pair.ours_ms, pair.peer_ms, pair.ratio()) == (2.0, 7.0, 3.5)
    assert log == [("ours", 2), ("peer", 2)] + [("ours", 20), ("peer", 20)] * 4


def test_compare_repeats_slow_calls_less_often(benchmarks):
    timing, log = benchmarks("timing"), []
    clock = scripted_clock(log, {"ours": (1.0, 1.0), "peer": (300.0, 300.0)})
    pair = timing.compare("ours", "peer", "cpu", quick=False, clock=clock)
    assert log[2:] == [("ours", 20), ("peer", 5)] * 4
    assert pair.peer_plan == timing.SLOW and pair.ours_plan == timing.FULL
    assert pair.ratio() == 300.0
    assert str(pair.peer_plan) == "4 blocks of 5 calls, first 1 dropped"
    assert timing.plan_for(250.0, quick=False).kept() == 60


def test_clock_block_times_every_call(benchmarks):
    calls = []
    times = benchmarks("timing").clock_block(lambda: calls.append(0), 7, "cpu")
    assert len(times) == len(calls) == 7
    assert all(time >= 0 for time in times)


def test_choose_takes_beginnings_of_names(benchmarks):
    main = benchmarks("__main__")
    assert [row.name for row in main.choose(["hash/mixed"])] == ["hash/mixed"]
    assert {row.name.partition("/")[0] for row in main.choose(["unique", "ncf"])} == {"unique", "ncf"}
    assert main.choose([]) == main.ROWS
    assert len({row.name for row in main.ROWS}) == len(main.ROWS)


def test_list_prints_rows_and_runs_none(benchmarks, capsys):
    assert benchmarks("__main__").main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"keras_report/sparse", "segment/sum-grad-v2-out", "unique/bounded", "hash/strings", "ncf/auto"} <= set(
        names
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "no row begins with 'nothing'"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_wrong_arguments_are_one_line(benchmarks, capsys, arguments, text):
    assert benchmarks("__main__").main(arguments) == 1
    printed = capsys.readouterr()
    assert text in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_quick_row_writes_json(benchmarks, capsys, tmp_path, restore_threads):
    target = tmp_path / "figures.json"
    assert benchmarks("__main__").main(["keras_report/dense", "--quick", "--threads", "1", "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert content["quick"] is True and content["copy_gb_per_second"] > 0
    assert content["machine"]["threads"] == "1"
    (row,) = content["rows"]
    assert row["name"] == "keras_report/dense" and row["ours_ms"] > 0
    (peer,) = row["peers"]
    assert peer["name"] == "torch dense"
    assert peer["ratio"] == pytest.approx(peer["ms"] / peer["ours_ms"])
    assert "torch dense" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [target]


def test_json_in_a_folder_is_named_after_the_device(benchmarks, tmp_path):
    assert benchmarks("__main__").write_json(tmp_path, "cpu", {"rows": []}) == tmp_path / "cpu.json"
    assert json.loads((tmp_path / "cpu.json").read_text()) == {"rows": []}


def failing_row(rows, log):
    """A row whose candidate gives a wrong result."""

    def check():
        raise AssertionError("3 is not 4")

    def ours():
        log.append("timed")
        return lambda: None

    return rows.Row("wrong/row", "a wrong result", lambda options: rows.Case(ours, {}, check))


def test_failing_check_stops_with_exit_code_1(benchmarks, monkeypatch, capsys, tmp_path, restore_threads):
    main, log = benchmarks("__main__"), []
    monkeypatch.setattr(main, "ROWS", [failing_row(benchmarks("rows"), log)])
    assert main.main(["--quick", "--json", str(tmp_path / "figures.json")]) == 1
    assert "wrong/row: the result differs from the reference: 3 is not 4" in capsys.readouterr().err
    assert not log and not list(tmp_path.iterdir())


def test_unavailable_peers_have_no_figures(benchmarks, restore_threads):
    rows, report = benchmarks("rows"), benchmarks("report")

    def missing():
        raise rows.UnavailableError("TensorFlow is not installed")

    case = rows.Case(lambda: lambda: None, {"TensorFlow": missing}, lambda: None, bytes_moved=1000)
    row = rows.Row("some/row", "nothing", lambda options: case, {"TensorFlow": 2.0})
    result = report.run_row(row, rows.Options(quick=True))
    assert result.passed("TensorFlow") is None
    assert result.ours_ms() > 0
    (peer,) = report.as_json(result)["peers"]
    assert peer == {"name": "TensorFlow", "target": 2.0, "unavailable": "TensorFlow is not installed"}
    assert any("TensorFlow is not installed" in line for line in report.lines(result, copy_gb=10.0))


def test_targets_and_limits_are_marked(benchmarks):
    rows, report, timing = benchmarks("rows"), benchmarks("report"), benchmarks("timing")
    case = rows.Case(
        lambda: lambda: None, {"fast": None, "slow": None}, lambda: None, bytes_moved=2_000_000, samples=10
    )
    row = rows.Row("some/row", "nothing", lambda options: case, {"fast": 2.0, "slow": 2.0})
    pairs = {
        "fast": timing.Pair(1.0, 1.5, timing.FULL, timing.FULL),
        "slow": timing.Pair(1.0, 400.0, timing.FULL, timing.SLOW),
    }
    facts = [rows.Fact("peak", 70.0, "MB", 64.0), rows.Fact("size", 3.0, "MB")]
    result = report.Result(row, case, pairs, facts=facts)
    assert [result.passed(name) for name in pairs] == [False, True]
    assert [fact.passed() for fact in facts] == [False, None]
    assert result.gb_per_second() == pytest.approx(2.0)
    _, ours, fast, slow, peak, size = report.lines(result, copy_gb=4.0)
    assert "2.0 GB/s, 50 % of copy" in ours and "10,000 samples/s" in ours
    assert "1.50 x" in fast and "MISS" in fast
    assert "400.00 x" in slow and "pass" in slow and "4 blocks of 5 calls" in slow
    assert "MISS" in peak and "MISS" not in size
    result.judged = False
    assert result.passed("slow") is None
