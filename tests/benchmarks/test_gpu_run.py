"""``make gpu`` without a GPU: its stages, their limits, and its report."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from samples import cuda_small_cases
from samples.operators import SAMPLES

ROOT = Path(__file__).resolve().parents[2]
PASSED = "print('done')"


def stage(benchmarks, name, program, seconds=30.0, folder=ROOT, **more):  # noqa: F811
    return benchmarks("stages").Stage(name, seconds, lambda limit: [sys.executable, "-c", program], folder, **more)


@pytest.fixture
def report(benchmarks, tmp_path):  # noqa: F811
    """A report in an empty folder."""
    made = benchmarks("gpu").Report(tmp_path, {"device": "NVIDIA GPU", "driver": "580", "commit": "abc"})
    made.write()
    return made


def test_the_driver_needs_no_torch():
    """It says what is missing, also where that is torch."""
    program = "import sys; sys.modules['torch'] = None; from benchmarks import gpu"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_without_a_gpu_it_says_so(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("make gpu: it needs an NVIDIA GPU and a torch with CUDA") and not list(
        tmp_path.iterdir()
    )


# ---- Stages ---------------------------------------------------------------------------------------------------------


def test_a_stage_passes_and_leaves_its_output(benchmarks, tmp_path, capfd):  # noqa: F811
    seen = []
    given = stage(benchmarks, "one", "import os; print(os.environ['WORD'])", environment={"WORD": "hello"})
    outcome = benchmarks("stages").run_stage(given, 30.0, tmp_path / "one.txt", seen.append)
    assert (outcome.name, outcome.result, outcome.note) == ("one", "passed", "")
    assert (tmp_path / "one.txt").read_text() == "== one\nhello\n" and seen == ["hello\n"]
    assert "hello" in capfd.readouterr().out


def test_a_stage_fails(benchmarks, tmp_path):  # noqa: F811
    given = stage(benchmarks, "one", "raise SystemExit(3)", note=lambda: "2 failed")
    outcome = benchmarks("stages").run_stage(given, 30.0, tmp_path / "one.txt")
    assert (outcome.result, outcome.note) == ("failed", "exit status 3, 2 failed")


def test_a_stage_that_takes_too_long_is_ended_with_what_it_started(benchmarks, tmp_path):  # noqa: F811
    """A child that ignores polite requests and holds the output open is ended too."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(10**6)"
    )
    program = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    log = tmp_path / "one.txt"
    outcome = benchmarks("stages").run_stage(stage(benchmarks, "one", program, most=2.0), 30.0, log)
    assert (outcome.result, outcome.note) == ("timed out", "ended after 2 s")
    assert log.read_text().startswith("== one\nbegun\n")


def test_a_tool_that_cannot_work_on_a_machine_is_no_failure(benchmarks, tmp_path):  # noqa: F811
    program = "print('Error: Device not supported'); raise SystemExit(1)"
    given = stage(benchmarks, "memcheck", program, skip_if_printed="Device not supported")
    outcome = benchmarks("stages").run_stage(given, 30.0, tmp_path / "one.txt")
    assert (outcome.result, outcome.note) == ("skipped", "cannot work here: Device not supported")
    found = stage(benchmarks, "memcheck", "print('Invalid read'); raise SystemExit(86)", skip_if_printed="Device not")
    assert benchmarks("stages").run_stage(found, 30.0, tmp_path / "one.txt").result == "failed"


def test_files_of_tests_that_cannot_be_imported_are_left_out(benchmarks, monkeypatch):  # noqa: F811
    gpu = benchmarks("gpu")
    find = importlib.util.find_spec
    assert gpu.not_importable() == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    left_out = {f"{path.parent.name}/{path.name}" for path in gpu.not_importable()}
    # By itself, and by tests/data/tfrecord_cases.py.
    assert {"data/test_csv.py", "data/test_tfrecord_ahead.py"} <= left_out
    assert not {"ops/test_segment.py", "data/test_device.py", "ops/test_hash.py"} & left_out


def test_pytests_report_is_counted(benchmarks, tmp_path):  # noqa: F811
    path = tmp_path / "tests.xml"
    note = benchmarks("stages").tests_note
    assert note(path) == "no report"
    path.write_text('<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>')
    assert note(path) == "3 passed, 3 failed, 3 skipped"
    path.write_text("<testsuites><tests")
    assert note(path) == "no report"


# ---- All of them ----------------------------------------------------------------------------------------------------


def test_a_failed_stage_stops_no_other(benchmarks, report, tmp_path):  # noqa: F811
    stages = [
        stage(benchmarks, "import", PASSED),
        stage(benchmarks, "tests", "raise SystemExit(1)"),
        stage(benchmarks, "memcheck", PASSED, skip="compute-sanitizer is not installed"),
        stage(benchmarks, "benchmarks", PASSED),
    ]
    benchmarks("gpu").run_all(stages, 120.0, report)
    assert [outcome.result for outcome in report.outcomes] == ["passed", "failed", "skipped", "passed"]
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert [each["name"] for each in content["stages"]] == ["import", "tests", "memcheck", "benchmarks"]
    assert (tmp_path / "output.txt").read_text() == "== import\ndone\n== tests\n== benchmarks\ndone\n"
    page = (tmp_path / "gpu.md").read_text()
    assert "| memcheck | skipped | 0 | compute-sanitizer is not installed |" in page and "* driver: 580" in page


def test_without_a_library_nothing_else_runs(benchmarks, report):  # noqa: F811
    stages = [stage(benchmarks, "build", "raise SystemExit(1)"), stage(benchmarks, "tests", PASSED)]
    benchmarks("gpu").run_all(stages, 60.0, report)
    assert [(each.result, each.note) for each in report.outcomes] == [
        ("failed", "exit status 1"),
        ("skipped", "build failed"),
    ]


def test_what_a_stage_leaves_over_goes_to_the_next(benchmarks, report, monkeypatch):  # noqa: F811
    gpu, limits = benchmarks("gpu"), []

    def note_limit(given, limit, log, on_line):
        limits.append(round(limit))
        return benchmarks("stages").Outcome(given.name, "passed", 0.0, "")

    monkeypatch.setattr(gpu, "run_stage", note_limit)
    gpu.run_all([stage(benchmarks, name, PASSED, seconds) for name, seconds in (("a", 50), ("b", 20))], 100.0, report)
    assert limits == [80, 100]


def test_more_arguments_are_pytests(benchmarks, tmp_path):  # noqa: F811
    gpu = benchmarks("gpu")
    assert gpu.parse(["--out", str(tmp_path), "--"]).pytest == []
    given = gpu.parse(["--out", str(tmp_path), "--quick", "--", "-k", "unique"])
    command = gpu.stages_after_build(given)[0].command(10.0)
    assert command[-2:] == ["-k", "unique"] and command[command.index("-m", 3) + 1] == "cuda"


def test_make_hands_its_variables_on(tmp_path):
    command = [
        "make",
        "-n",
        "--no-print-directory",
        "gpu",
        f"OUT={tmp_path}",
        "PREBUILT=some/folder",
        "MINUTES=20",
        "ARGS=-k unique",
    ]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = " ".join(printed.replace("\\\n", " ").split())
    wanted = f'-m benchmarks.gpu --out "{tmp_path}" --prebuilt "some/folder" --minutes 20 -- -k unique'
    assert words.endswith(wanted)


def test_the_shares_fit_into_ten_minutes(benchmarks, tmp_path, monkeypatch):  # noqa: F811
    gpu = benchmarks("gpu")
    monkeypatch.setattr(gpu, "find_sanitizer", lambda: "/usr/bin/compute-sanitizer")
    given = gpu.parse(["--out", str(tmp_path)])
    stages = [gpu.build_stage("9.0"), gpu.import_stage("cuda"), *gpu.stages_after_build(given)]
    assert [each.name for each in stages] == [
        "build",
        "import",
        "tests",
        "memcheck",
        "racecheck",
        "synccheck",
        "benchmarks",
    ]
    assert sum(each.seconds for each in stages) <= 60 * given.minutes < 600
    before = time.time()
    command = stages[3].command(50.0)
    assert command[:3] == ["/usr/bin/compute-sanitizer", "--tool", "memcheck"]
    # Eight tenths of what is left, from now on.
    assert before < float(command[-1]) - 0.8 * 50 < time.time()
    assert stages[3].environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" and stages[3].most == 90
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in stages[4].environment


def test_figures_are_taken_over_as_they_come(benchmarks, report, tmp_path):  # noqa: F811
    """The report has the rows that were measured before a stage was ended."""
    row = {"name": "some/row", "what": "", "sizes": "3 x 4", "failed": "no memory\nmore"}
    content = {"machine": {"device": "x", "torch": "2.11"}, "quick": False, "copy_gb_per_second": 4000.0, "rows": [row]}
    (tmp_path / "benchmarks.json").write_text(json.dumps(content))
    os.utime(tmp_path / "gpu.json", (0, 0))
    report.follow("a line\n")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["rows"] == [row] and written["stages"] == []
    assert written["machine"] == {"device": "NVIDIA GPU", "torch": "2.11", "driver": "580", "commit": "abc"}
    page = (tmp_path / "gpu.md").read_text()
    assert "| some/row | 3 x 4 | failed: no memory |" in page and "Copy bandwidth 4,000 GB/s" in page


def test_a_row_of_the_page(benchmarks):  # noqa: F811
    row = {
        "name": "some/row",
        "sizes": "3 x 4",
        "ours_ms": 1.25,
        "gb_per_second": 3000.0,
        "share_of_copy": 0.75,
        "ids_per_second": 2e9,
        "peers": [{"name": "torch", "ratio": 1.5}, {"name": "TensorFlow", "unavailable": "no"}],
        "targets": [{"what": "share", "reached": 0.75, "wanted": 0.8, "passed": False}],
        "facts": [{"name": "limit by instructions", "value": 41.27, "unit": "x 10^9 ids/s"}],
        "published": "",
    }
    line = benchmarks("gpu")._line(row)
    reached = "share 0.75 of 0.8: MISS; limit by instructions 41.3 x 10^9 ids/s"
    assert line == f"| some/row | 3 x 4 | 1.250 | 3,000 | 75 | 2.00 | torch 1.50 | {reached} |  |"


# ---- The library ----------------------------------------------------------------------------------------------------


def test_prebuilt_libraries_are_joined_with_the_python_side(benchmarks, tmp_path, monkeypatch):  # noqa: F811
    gpu = benchmarks("gpu")
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "_C.so").write_text("cpu")
    monkeypatch.setattr(gpu, "BUILD", tmp_path / "build")
    with pytest.raises(FileNotFoundError, match=r"has no _C_cuda\.so"):
        gpu.copy_prebuilt(libraries, ["_C.so", "_C_cuda.so"])
    (libraries / "_C_cuda.so").write_text("cuda")
    gpu.copy_prebuilt(libraries, ["_C.so", "_C_cuda.so"])
    package = tmp_path / "build" / "torchsparse_rec"
    assert (package / "_C_cuda.so").read_text() == "cuda"
    for name in ("ops/unique.py", "compat/tensorflow/__init__.py", "compat/PARITY.md", "examples/ncf/__main__.py"):
        assert (package / name).is_file(), name


def test_compute_sanitizer_is_found_on_the_path_and_in_the_toolkit(benchmarks, tmp_path, monkeypatch):  # noqa: F811
    gpu = benchmarks("gpu")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    program = tmp_path / "toolkit" / "compute-sanitizer" / "compute-sanitizer"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    assert gpu.find_sanitizer() == str(program)


def test_small_cases_run_every_operator_within_their_time(capsys):
    """What compute-sanitizer watches, on the CPU."""
    first = [make().operator for make in cuda_small_cases.cases()[: len(SAMPLES)]]
    assert set(first) == set(SAMPLES)
    assert cuda_small_cases.main(["--device", "cpu", "--most", "60"]) == 0
    assert capsys.readouterr().out.startswith("60 of ")
    assert cuda_small_cases.main(["--device", "cpu", "--until", str(time.time() - 1)]) == 1
