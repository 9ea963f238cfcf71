"""The benchmarks: how medians and ratios are computed, the command line, and one row from end to end."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def scripted_clock(log, times):
    """Return a clock that logs each call it is given and answers with scripted times, the first of them high."""

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
    assert timing.plan_for(50.0, quick=False, device="cuda") == timing.SLOW  # a GPU's calls are slow sooner
    assert timing.plan_for(50.0, quick=False) == timing.FULL


def test_list_prints_rows_and_runs_none(benchmarks, capsys):
    assert benchmarks("__main__").main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [row.name for row in benchmarks("__main__").ROWS] and len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "no row for cpu begins with 'nothing'"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--beside", "/nowhere"], "--beside: /nowhere is no checkout of this repository"),
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


OTHER_CHECKOUT = {
    "__init__.py": "",
    "__main__.py": "import types; build = lambda options: print('built') or options\n"
    "ROWS = [types.SimpleNamespace(name='unique/distinct', build=build)]",
    "rows.py": "import types; Options = lambda *given: types.SimpleNamespace(ours=lambda: given)",
    "timing.py": "Call = object; clock_block = lambda call, calls, device: [1e6] * calls",
}


def test_rows_beside_another_checkout(benchmarks, capsys, tmp_path, restore_threads):
    folder = tmp_path / "older" / "benchmarks"
    folder.mkdir(parents=True)
    for name, text in OTHER_CHECKOUT.items():
        (folder / name).write_text(text)  # its build prints, which is no answer
    target = tmp_path / "figures.json"
    arguments = ["unique/distinct", "--quick", "--beside", str(folder.parent), "--json", str(target)]
    assert benchmarks("__main__").main(arguments) == 0
    row, counts = json.loads(target.read_text())["rows"]
    (there,), (not_there,) = row["peers"], counts["peers"]
    assert (there["name"], there["ms"], there["target"]) == ("older", 1e6, 0.95)
    assert 0 < there["ours_ms"] < 1e5 and there["ratio"] == 1e6 / there["ours_ms"]
    assert not_there["unavailable"].endswith("older: KeyError: 'unique/distinct-counts'")
    assert "TensorFlow" not in capsys.readouterr().out


def test_failing_check_is_not_timed_and_stops_no_other_row(benchmarks, monkeypatch, capsys, tmp_path, restore_threads):
    main, rows, log = benchmarks("__main__"), benchmarks("rows"), []

    def check():
        raise AssertionError("3 is not 4")

    def timed():
        log.append("timed")
        return lambda: None

    fine = rows.Row("fine/row", "nothing", lambda options: rows.Case(lambda: lambda: None, {}, lambda: None))
    wrong = rows.Row("wrong/row", "a wrong result", lambda options: rows.Case(timed, {}, check))
    monkeypatch.setattr(main, "ROWS", [wrong, fine])
    assert main.main(["--quick", "--json", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    text = "the result differs from the reference: 3 is not 4"
    assert f"wrong/row: {text}" in printed.err and f"FAILED: {text}" in printed.out
    wrong, right = json.loads((tmp_path / "cpu.json").read_text())["rows"]  # in a folder: named after the device
    assert wrong == {"name": "wrong/row", "what": "a wrong result", "sizes": "", "failed": text}
    assert right["ours_ms"] > 0 and not log


def test_rows_are_written_as_they_come(benchmarks, restore_threads):
    """Run a row that raises: the rows before it stay written, and the rows after it still run."""
    rows, report, seen = benchmarks("rows"), benchmarks("report"), []
    fine = rows.Row("fine/row", "nothing", lambda options: rows.Case(lambda: lambda: None, {}, lambda: None))

    def no_memory(options):
        raise torch.OutOfMemoryError("20 GB")

    def no_file(options):
        raise OSError("no such file")

    broken = [rows.Row("broken/row", "cannot run", build) for build in (no_memory, no_file)]
    options = rows.Options(quick=True)
    report.run([fine, *broken, fine], options, 1.0, lambda line: None, lambda results: seen.append(results[-1].failed))
    assert seen == [None, "OutOfMemoryError: 20 GB", "OSError: no such file", None]


def test_a_gpu_that_no_longer_answers_ends_the_rows(benchmarks, monkeypatch):
    """End the run when the GPU no longer answers: every later row would fail through no fault of its own."""
    rows, report, seen = benchmarks("rows"), benchmarks("report"), []

    def broken(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    row = rows.Row("some/row", "breaks the GPU", broken)
    assert len(report.run([row, row], rows.Options("cuda"), 1.0, seen.append)) == 1
    assert seen[-1].startswith("the GPU no longer answers, no other row is run: an illegal")


def test_unavailable_peers_have_no_figures(benchmarks, restore_threads):
    rows, report = benchmarks("rows"), benchmarks("report")

    def missing():
        raise rows.UnavailableError("TensorFlow is not installed")

    case = rows.Case(lambda: lambda: None, {"TensorFlow": missing}, lambda: None, bytes_moved=1000)
    row = rows.Row("some/row", "nothing", lambda options: case, {"TensorFlow": 2.0})
    result = report.run_row(row, rows.Options(quick=True))
    assert result.passed("TensorFlow") is None
    assert result.ours_ms() > 0
    (peer,) = report.as_json(result, copy_gb=10.0)["peers"]
    assert peer == {"name": "TensorFlow", "target": 2.0, "unavailable": "TensorFlow is not installed"}
    assert any("TensorFlow is not installed" in line for line in report.lines(result, copy_gb=10.0))


def two_pairs(timing):
    """Return timings of two peers that take 1.5 and 400 times as long as the candidate."""
    return {
        "fast": timing.Pair(1.0, 1.5, timing.FULL, timing.FULL),
        "slow": timing.Pair(1.0, 400.0, timing.FULL, timing.SLOW),
    }


def test_targets_and_limits_are_marked(benchmarks):
    rows, report, timing = benchmarks("rows"), benchmarks("report"), benchmarks("timing")
    row = rows.Row("some/row", "nothing", lambda options: None, {"fast": 2.0, "slow": 2.0})
    facts = [rows.Fact("peak", 70.0, "MB", 64.0), rows.Fact("size", 3.0, "MB")]
    pairs = two_pairs(timing)
    result = report.Result(row, bytes_moved=2_000_000, samples=10, peers=list(pairs), pairs=pairs, facts=facts)
    assert [result.passed(name) for name in pairs] == [False, True]
    assert [fact.passed() for fact in facts] == [False, None]
    assert result.gb_per_second() == pytest.approx(2.0)
    assert list(result.judgements(copy_gb=4.0)) == []
    _, ours, fast, slow, peak, size = report.lines(result, copy_gb=4.0)
    assert "2.0 GB/s, 50 % of copy" in ours and "10,000 samples/s" in ours
    assert "1.50 x" in fast and "MISS" in fast
    assert "400.00 x" in slow and "pass" in slow and "4 blocks of 5 calls" in slow
    assert "MISS" in peak and "MISS" not in size
    result.judged = False
    assert result.passed("slow") is None


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_report_begins_with_peers_that_are_faster(benchmarks, monkeypatch, capsys, restore_threads, interrupted):
    main, rows, timing = benchmarks("__main__"), benchmarks("rows"), benchmarks("timing")
    pairs = {"fast": timing.Pair(2.0, 1.0, timing.QUICK, timing.QUICK)}
    case = rows.Case(lambda: None, {"fast": lambda: None}, lambda: None, pair=pairs.get)

    def stop(options):
        raise KeyboardInterrupt

    made = [rows.Row("fine/row", "nothing", lambda options: case), rows.Row("last/row", "nothing", stop)]
    monkeypatch.setattr(main, "ROWS", made if interrupted else made[:1])
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            main.main(["--quick"])
    else:
        assert main.main(["--quick"]) == 0
    printed = capsys.readouterr()
    _, _, head, slower, row, *_ = printed.out.splitlines()
    assert head == "a peer is faster in 1 of 1 pairs" and slower.split() == ["0.50", "x", "fine/row", "fast"]
    assert row == printed.err.splitlines()[0] == "fine/row: nothing"


# ---- Figures of a GPU -----------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_result(benchmarks):
    """Return a result that a GPU might give: 2 GB/s of 4, a million ids in 1 ms, and targets that it half reaches."""
    rows, report, timing = benchmarks("rows"), benchmarks("report"), benchmarks("timing")
    wanted = rows.CudaTargets(copy_share=0.6, fastest_peer=1.2, peers={"slow": 500.0}, ids_per_second=0.5e9)
    row = rows.Row("some/row", "nothing", lambda options: None, {"slow": 2.0}, wanted, "another: 92 % of peak")
    pairs = two_pairs(timing)
    return report.Result(row, "cuda", 2_000_000, ids=1_000_000, sizes="3 x 4", peers=list(pairs), pairs=pairs)


def test_a_gpu_has_targets_of_its_own(benchmarks, gpu_result):
    report = benchmarks("report")
    assert gpu_result.passed("slow") is False and gpu_result.passed("fast") is None
    share, fastest, ids = gpu_result.judgements(copy_gb=4.0)
    assert (share.reached, share.wanted, share.passed()) == (pytest.approx(0.5), 0.6, False)
    assert (fastest.what, fastest.reached, fastest.passed()) == ("ratio to the fastest peer, fast", 1.5, True)
    assert (ids.reached, ids.wanted, ids.passed()) == (pytest.approx(1.0), 0.5, True)
    printed = report.lines(gpu_result, copy_gb=4.0)
    assert printed[0] == "some/row: nothing (3 x 4)"
    assert any("share of the copy bandwidth: 0.50, target >= 0.6   MISS" in line for line in printed)
    assert printed[-1] == "  published, not measured here: another: 92 % of peak"
    gpu_result.judged = False
    assert list(gpu_result.judgements(copy_gb=4.0)) == []


def results_file(folder, name, device, date, rows, quick=False, level="avx512"):
    machine = {"device": device, "date": date, "instruction set": level}
    content = {"machine": machine, "quick": quick, "copy_gb_per_second": 4.0, "rows": rows}
    (folder / name).write_text(json.dumps(content))


def test_the_table_has_no_gpu_figures_without_a_gpu(benchmarks, gpu_result, tmp_path):
    table, row = benchmarks("table"), gpu_result.row
    other = benchmarks("rows").Row("other/row", "more", lambda options: None)
    gpu_result.device = "cpu"
    figures = benchmarks("report").as_json(gpu_result, copy_gb=4.0)
    results_file(tmp_path, "new.json", "cpu", "2026-02-01", [figures])
    results_file(tmp_path, "old.json", "cpu", "2026-01-01", [{**figures, "ours_ms": 77.0}])
    results_file(tmp_path, "quick.json", "cpu", "2026-03-01", [{**figures, "ours_ms": 88.0}], quick=True)
    page = table.text([row, other], tmp_path)
    assert "no GPU was at hand" in page and "`new.json`" in page
    assert page.splitlines()[:3] == ["# Benchmark results", "", "On a CPU a peer is faster in 0 of 2 pairs."]
    *_, measured, missing = page.splitlines()
    assert [cell.strip() for cell in measured.split("|")[1:-1]] == [
        "`some/row`: nothing",
        "1; 2 GB/s, 50 % of copy; 1 G ids/s",
        "fast 1.5x, slow 400x",
        *[""] * 5,
        "60 % of copy, 1.2x the fastest, 0.5 G ids/s",
        "another: 92 % of peak",
    ]
    assert [cell.strip() for cell in missing.split("|")[1:-1]] == ["`other/row`: more", *[""] * 7, "1x the fastest", ""]


def test_the_table_has_a_gpus_figures_and_marks(benchmarks, gpu_result, tmp_path):
    figures = benchmarks("report").as_json(gpu_result, copy_gb=4.0)
    results_file(tmp_path, "gpu.json", "NVIDIA GPU", "2026-02-01", [figures])
    page = benchmarks("table").text([gpu_result.row], tmp_path)
    assert "GPU, `gpu.json`: device NVIDIA GPU" in page and "CPU: no results." in page
    cells = [cell.strip() for cell in page.splitlines()[-1].split("|")[1:-1]]
    assert cells[1:8] == [*[""] * 4, "3 x 4", "1; 2 GB/s, 50 % of copy; 1 G ids/s", "fast 1.5x, slow 400x"]
    assert cells[8] == "60 % of copy MISS, 1.2x the fastest pass, 0.5 G ids/s pass"


def test_a_cpu_with_avx2_has_columns_of_its_own(benchmarks, gpu_result, tmp_path):
    figures, row = {**benchmarks("report").as_json(gpu_result, copy_gb=4.0), "targets": []}, gpu_result.row
    results_file(tmp_path, "wide.json", "cpu", "2026-01-01", [figures])
    results_file(tmp_path, "narrow.json", "cpu", "2026-02-01", [{**figures, "ours_ms": 77.0}], level="avx2")
    page = benchmarks("table").text([row], tmp_path)
    assert "CPU, `wide.json`" in page and "CPU with AVX2, `narrow.json`" in page
    cells = [cell.strip() for cell in page.splitlines()[-1].split("|")[1:-1]]
    assert [cell.partition(";")[0] for cell in cells[1:5:2]] == ["1", "77"]


def test_the_committed_table_is_that_of_the_committed_results(benchmarks):
    """Compare the table with the results; where they differ, write it anew: python -m benchmarks --table."""
    table = benchmarks("table")
    assert (table.RESULTS / "README.md").read_text() == table.text(benchmarks("__main__").ROWS, table.RESULTS)


# ---- Ids ------------------------------------------------------------------------------------------------------------


def test_zipf_ids_follow_the_law(benchmarks):
    """Count each rank: within five standard deviations of k ** -1.05 of exactly this many rows."""
    ids, rows, count = benchmarks("ids"), 1_000, 400_000
    drawn = ids.zipf_ids(count, rows, "cpu")
    assert drawn.dtype == torch.int64 and drawn.min() >= 0 and drawn.max() < rows
    law = torch.arange(1, rows + 1, dtype=torch.float64) ** -1.05
    expected = law / law.sum() * count
    seen = torch.bincount(drawn, minlength=rows)[ids.scatter(torch.arange(rows), rows)]
    assert bool(((seen - expected).abs() < 5 * expected.sqrt() + 5).all())
    assert torch.equal(drawn, ids.zipf_ids(count, rows, "cpu"))
    assert not torch.equal(drawn, ids.zipf_ids(count, rows, "cpu", seed=1))


@pytest.mark.parametrize("rows", [1, 2, 7, 1_000, 65_536, 99_991])
def test_popular_rows_are_scattered_without_loss(benchmarks, rows):
    places = benchmarks("ids").scatter(torch.arange(rows), rows)
    assert torch.equal(places.sort().values, torch.arange(rows))
    if rows > 1_000:
        top = places[:30].sort().values
        assert int(top.diff().min()) > rows // 100


def test_scattering_does_not_overflow_at_the_largest_tables(benchmarks):
    rows = 167_772_160
    last = benchmarks("ids").scatter(torch.tensor([rows - 1]), rows)
    step = int(benchmarks("ids").scatter(torch.tensor([1]), rows))
    assert int(last) == (rows - 1) * step % rows


def test_bags_of_about_twenty(benchmarks):
    ids = benchmarks("ids")
    lengths = ids.bag_lengths(10_000, 16, 24, "cpu")
    assert (int(lengths.min()), int(lengths.max())) == (16, 24)
    assert abs(float(lengths.float().mean()) - 20) < 0.2
    offsets = ids.offsets_of(lengths)
    assert int(offsets[0]) == 0 and torch.equal(offsets.diff(), lengths)


def test_bytes_are_those_of_the_formula(benchmarks):
    """Add up ids, one row per lookup and the result by hand: two bags, three ids each, rows of 4 floats."""
    embedding = benchmarks("embedding")
    assert embedding.bag_kind("sum").bytes_moved(4, 6, 2) == 6 * 8 + 6 * 16 + 2 * 16 + 2 * 8
    assert embedding.bag_kind("max").bytes_moved(4, 6, 2) == 6 * 8 + 6 * 16 + 2 * 16 + 2 * 8 + 2 * 4 * 8
    assert embedding.WEIGHTED.bytes_moved(4, 6, 2) == 6 * 12 + 6 * 16 + 2 * 16 + 2 * 8
    assert embedding.PER_ID.bytes_moved(4, 6, 2) == 6 * 8 + 6 * 16 + 6 * 16


def test_tables_on_a_gpu_have_ten_gigabytes(benchmarks):
    rows, embedding, segment = benchmarks("rows"), benchmarks("embedding"), benchmarks("sparse_segment")
    on_gpu = rows.Options("cuda")
    for problem in (*embedding.GRID, embedding.POPULAR):
        assert problem.rows(on_gpu) * problem.dim * 4 >= 10e9
        assert 1.0e6 < problem.bags(on_gpu) * 20 < 1.1e6
    assert segment.Shape(16, "zipf").table_rows(on_gpu) * 16 * 4 >= 10e9


# ---- Rows from end to end --------------------------------------------------------------------------------------------


@pytest.fixture
def no_tensorflow(benchmarks, monkeypatch):
    """Leave TensorFlow out of the benchmark rows: its functions take seconds to compile."""
    rows = benchmarks("rows")

    def missing(options):
        raise rows.UnavailableError("left out")

    for name in ("many_tables_sides", "keras_report", "ncf", "wide_deep_training", "prebatched"):
        monkeypatch.setattr(benchmarks(name), "tensorflow", missing)


# Rows, and words that they print.
SMALL_RUNS = {
    **dict.fromkeys(("wide_deep/sgd", "wide_deep/rowwise_adagrad", "sok/adagrad", "overhead/collection"), "torch"),
    **dict.fromkeys(("adam/update-uniform", "adam/step-fused-zipf", "adam/step-sparse-uniform"), "torch"),
    **dict.fromkeys(("adam/step-fused-10M-uniform", "keras_report/fused", "ncf/fused"), "torch"),
    **dict.fromkeys(("wide_deep/step-identity", "wide_deep/step-hashed", "wide_deep/from-prebatched"), "ours"),
    **dict.fromkeys(("wide_deep/whole-identity", "wide_deep/whole-hashed"), "ours"),
    **dict.fromkeys(("embedding/bag-max-128", "embedding/rows-sgd-16-zipf", "embedding/weights"), "ours"),
    **dict.fromkeys(("dlrm/sparse", "dlrm/whole"), "torch sparse EmbeddingBags, hashed ids"),
    "sparse_segment/mean-grad-v2-16-zipf": "ours",
    "prebatched/compressed-uniform": "left out",
}


@pytest.mark.parametrize("name", SMALL_RUNS)
def test_rows_run_at_toy_size(benchmarks, no_tensorflow, name, restore_threads, capsys):
    if name.startswith(("wide_deep/", "dlrm/", "prebatched/")):
        pytest.importorskip("pyarrow")
    assert benchmarks("__main__").main([name, "--quick", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "ours" in printed and SMALL_RUNS[name] in printed and ("samples/s" in printed or "prebatched" not in name)
