"""``make gpu`` without a GPU: its stages, their limits, and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import cuda_small_cases
import pytest
from samples.operators import SAMPLES

ROOT = Path(__file__).resolve().parents[2]
PASSED = "print('done')"


def stage(benchmarks, name, program, seconds=30.0, folder=ROOT, **more):
    return benchmarks("stages").Stage(name, seconds, lambda limit: [sys.executable, "-c", program], folder, **more)


@pytest.fixture
def report(benchmarks, tmp_path):
    """Return a report in an empty folder."""
    made = benchmarks("gpu").Report(tmp_path, {"device": "NVIDIA GPU", "driver": "580", "commit": "abc"})
    made.write()
    return made


def test_the_driver_needs_no_torch():
    """Import the driver without torch, so that it can also say that torch is missing."""
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


def test_a_stage_passes_and_leaves_its_output(benchmarks, tmp_path, capfd):
    given = stage(benchmarks, "one", "import os; print(os.environ['WORD'])", environment={"WORD": "hello"})
    outcome = benchmarks("stages").run_stage(given, 30.0, tmp_path / "one.txt")
    assert (outcome.name, outcome.result, outcome.note) == ("one", "passed", "")
    assert (tmp_path / "one.txt").read_text() == "== one\nhello\n"
    assert "hello" in capfd.readouterr().out


def test_a_stage_fails(benchmarks, tmp_path):
    given = stage(benchmarks, "one", "raise SystemExit(3)", note=lambda: "2 failed")
    outcome = benchmarks("stages").run_stage(given, 30.0, tmp_path / "one.txt")
    assert (outcome.result, outcome.note) == ("failed", "exit status 3, 2 failed")


def test_a_stage_that_takes_too_long_is_ended_with_what_it_started(benchmarks, tmp_path):
    """End a child process too that ignores SIGTERM and keeps the output open."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(10**6)"
    )
    program = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    log = tmp_path / "one.txt"
    outcome = benchmarks("stages").run_stage(stage(benchmarks, "one", program, most=2.0), 30.0, log)
    assert (outcome.result, outcome.note) == ("timed out", "ended after 2 s")
    assert log.read_text().startswith("== one\nbegun\n")


def test_a_tool_that_cannot_work_on_a_machine_is_no_failure(benchmarks, tmp_path):
    program = "print('Error: Device not supported'); raise SystemExit(1)"
    given = stage(benchmarks, "memcheck", program, skip_if_printed="Device not supported")
    outcome = benchmarks("stages").run_stage(given, 30.0, tmp_path / "one.txt")
    assert (outcome.result, outcome.note) == ("skipped", "cannot work here: Device not supported")
    found = stage(benchmarks, "memcheck", "print('Invalid read'); raise SystemExit(86)", skip_if_printed="Device not")
    assert benchmarks("stages").run_stage(found, 30.0, tmp_path / "one.txt").result == "failed"


# ---- The tests ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_tests(benchmarks, tmp_path, monkeypatch):
    """Return a function that runs planted tests as a stage and returns the outcomes of the stage and of the tests."""
    gpu = benchmarks("gpu")
    monkeypatch.setattr(gpu, "BUILD", tmp_path)
    monkeypatch.setattr(gpu, "WORKERS", 2)
    monkeypatch.setattr(gpu, "STOPPING_SECONDS", 40)

    def run(source, limit=80.0, name="first", arguments=()):
        given = gpu.parse(["--out", str(tmp_path), "--device", "cpu", "--", *arguments])
        (tmp_path / "test_planted.py").write_text(source)
        made = gpu.tests_stage(name, 100, given, [str(tmp_path / "test_planted.py")])
        outcome = benchmarks("stages").run_stage(made, limit, tmp_path / "output.txt")
        found = gpu.tests_found(tmp_path / f"{name}.log")
        short = {word: [test.rpartition("::")[2] for test in found[word]] for word in ("failed", "begun")}
        return outcome, {**found, **short}

    return run


# This call keeps Python's lock: only a thread of C can end the process.
PLANTED = """
import ctypes, os
def test_fails():
    assert 1 + 1 == 3
def test_passes():
    pass
def test_hangs():
    ctypes.PyDLL(None).sleep(1000)
"""


def test_a_failing_and_a_hanging_test_are_named(run_tests, tmp_path):
    """Run the test after the hanging one too."""
    outcome, found = run_tests(PLANTED + "def test_after():\n    pass\n", arguments=["--hanging", "2"])
    assert outcome.result == "failed" and found["passed"] == 2 and not found["not run"]
    assert (found["failed"], found["begun"]) == (["test_fails"], ["test_hangs"])
    told = (tmp_path / "failures.txt").read_text()
    assert "assert (1 + 1) == 3" in told and "in test_hangs" in told


def test_failures_are_written_before_the_end(run_tests, tmp_path):
    """End the stage from outside while a test hangs."""
    outcome, found = run_tests(PLANTED, limit=6.0, arguments=["--until", str(time.time() + 1000), "--hanging", "999"])
    assert outcome.result == "timed out" and "1 did not end" in outcome.note
    assert (found["failed"], found["begun"]) == (["test_fails"], ["test_hangs"])
    assert "assert (1 + 1) == 3" in (tmp_path / "failures.txt").read_text()


def test_it_stops_in_time_and_the_next_stage_goes_on(run_tests, tmp_path, monkeypatch):
    source = """
import os, pathlib, time, pytest
@pytest.mark.parametrize("n", range(8))
def test_slow(n):
    with open(pathlib.Path(__file__).with_name("ran"), "a") as file:
        file.write(f"{n}\\n")
    time.sleep(float(os.environ["SECONDS"]))
"""
    monkeypatch.setenv("SECONDS", "3")
    outcome, found = run_tests(source, limit=42.0)
    ran = len((tmp_path / "ran").read_text().split())
    assert outcome.result == "passed" and outcome.seconds < 42 and outcome.note.endswith(f"{8 - ran} not run")
    assert found["passed"] == ran and sum(found["not run"].values()) == 8 - ran > 0
    monkeypatch.setenv("SECONDS", "0")
    outcome, found = run_tests(source, name="tests")
    assert outcome.note == f"{8 - ran} passed"
    assert sorted((tmp_path / "ran").read_text().split()) == [str(n) for n in range(8)]


def test_a_gpu_that_no_longer_answers_takes_one_process_along(run_tests, tmp_path):
    """Count the test that broke the GPU as failed, even if it passed by itself, and run the next in a new process."""
    source = """
import sys, types
def test_breaks():
    def broken(): raise RuntimeError("an illegal memory access was encountered")
    sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=bool, synchronize=broken))
    sys.modules["torch"].cuda.is_initialized = lambda: True
def test_after():
    assert "torch" not in sys.modules
"""
    _, found = run_tests(source, arguments=["--workers", "1"])
    assert found["failed"] == ["test_breaks"] and found["passed"] == 1
    assert "after this test: an illegal memory access" in (tmp_path / "failures.txt").read_text()


def test_a_file_that_needs_what_is_not_installed_is_no_failure(run_tests):
    """Count a file that cannot be imported as failed, unless pyarrow or hypothesis is not installed."""
    assert run_tests("raise ModuleNotFoundError(\"No module named 'pyarrow'\")")[1]["failed"] == []
    outcome, found = run_tests("raise ModuleNotFoundError(\"No module named 'torchsparse_rec.ops'\")")
    assert outcome.result == "failed" and len(found["failed"]) == 1


def test_what_is_chosen_exists(benchmarks):
    gpu, main = benchmarks("gpu"), benchmarks("__main__")
    for name in gpu.FIRST_TESTS:
        file, _, function = name.partition("::")
        assert (
            f"def {function}(" in (ROOT / "tests" / file).read_text() if function else (ROOT / "tests" / file).exists()
        )
    for function in gpu.LAST_TESTS:
        assert f"def {function}(" in (ROOT / "tests/ops/test_operators.py").read_text()
    tested = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert {Path(room) for room in gpu.rooms()} == tested
    chosen, known = main.choose(gpu.FIRST_ROWS, "cuda"), main.choose([], "cuda")
    assert {row.name for row in chosen} == {row.name for row in known} and len(chosen) == len(known)
    assert [row.name.partition("/")[0] for row in chosen[:30]].count("embedding") == 23
    assert {row.name for row in known} >= set(benchmarks("kernels").KERNELS.values())


# ---- All of them ----------------------------------------------------------------------------------------------------


def test_a_failed_stage_stops_no_other(benchmarks, report, tmp_path):
    stages = [
        stage(benchmarks, "import", PASSED),
        stage(benchmarks, "tests", "raise SystemExit(1)"),
        stage(benchmarks, "memcheck", PASSED, skip="compute-sanitizer is not installed"),
        stage(benchmarks, "benchmarks", PASSED),
    ]
    benchmarks("gpu").run_all(stages, time.monotonic() + 120.0, report)
    assert [outcome.result for outcome in report.outcomes] == ["passed", "failed", "skipped", "passed"]
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert [each["name"] for each in content["stages"]] == ["import", "tests", "memcheck", "benchmarks"]
    assert (tmp_path / "output.txt").read_text() == "== import\ndone\n== tests\n== benchmarks\ndone\n"
    assert content["stages"][2]["note"] == "compute-sanitizer is not installed"
    assert content["machine"]["driver"] == "580"


def test_without_a_library_nothing_else_runs(benchmarks, report):
    stages = [stage(benchmarks, "build", "raise SystemExit(1)"), stage(benchmarks, "tests", PASSED)]
    benchmarks("gpu").run_all(stages, time.monotonic() + 60.0, report)
    assert [(each.result, each.note) for each in report.outcomes] == [
        ("failed", "exit status 1"),
        ("skipped", "build failed"),
    ]


def test_stages_share_what_is_left(benchmarks, report, monkeypatch):
    """Divide any amount of time among the stages; the first, without which no other can run, may take all of it."""
    gpu, limits = benchmarks("gpu"), []

    def note_limit(given, limit, log):
        limits.append(round(limit))
        return benchmarks("stages").Outcome(given.name, "passed", 0.0, "")

    monkeypatch.setattr(gpu, "run_stage", note_limit)
    shares = (("import", None), ("a", 50), ("b", 30), ("c", 0), ("d", 20))
    for seconds in (100, 200):
        gpu.run_all(
            [stage(benchmarks, name, PASSED, share) for name, share in shares], time.monotonic() + seconds, report
        )
    assert limits == [100, 50, 60, 100, 100, 200, 100, 120, 200, 200]


def test_more_arguments_are_pytests(benchmarks, tmp_path):
    gpu = benchmarks("gpu")
    assert gpu.parse(["--out", str(tmp_path), "--"]).pytest == []
    given = gpu.parse(["--out", str(tmp_path), "--quick", "--", "-k", "unique"])
    for n in (0, -1):
        command = gpu.stages_after_build(given)[n].command(10.0)
        assert command[-2:] == ["-k", "unique"] and command[command.index("-m") + 1] == "cuda"


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


def test_all_stages_fit_into_ten_minutes(benchmarks, tmp_path, monkeypatch):
    gpu = benchmarks("gpu")
    monkeypatch.setattr(gpu, "find_tool", lambda name: f"/usr/bin/{name}")
    given = gpu.parse(["--out", str(tmp_path)])
    stages = [gpu.build_stage("9.0"), gpu.import_stage("cuda"), *gpu.stages_after_build(given)]
    assert [each.name for each in stages] == [
        "build",
        "import",
        "first",
        "benchmarks",
        "kernels",
        "memcheck",
        "racecheck",
        "synccheck",
        "tests",
    ]
    assert 60 * given.minutes < 600 and stages[1].most == 60
    # With libraries built beforehand, the first tests have their hundred seconds, and the seconds to stop in.
    shares = [each.share or 0 for each in stages]
    assert (60 * given.minutes - 60) * shares[2] / sum(shares) > 100 + gpu.STOPPING_SECONDS
    before = time.time()
    memcheck, racecheck = stages[5:7]
    command = memcheck.command(50.0)
    assert command[:3] == ["/usr/bin/compute-sanitizer", "--tool", "memcheck"]
    # Eight tenths of the time that is left from now on.
    assert before < float(command[-1]) - 0.8 * 50 < time.time()
    assert memcheck.environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" and memcheck.most == 90
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in racecheck.environment


def test_the_benchmarks_figures_are_taken_over(benchmarks, report, tmp_path):
    """Report the rows that were measured before their stage was ended."""
    row = {"name": "some/row", "what": "", "sizes": "3 x 4", "failed": "no memory\nmore"}
    content = {"machine": {"device": "x", "torch": "2.11"}, "quick": False, "copy_gb_per_second": 4000.0, "rows": [row]}
    (tmp_path / "benchmarks.json").write_text(json.dumps(content))
    report.write()
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["rows"] == [row] and written["stages"] == []
    assert written["machine"] == {"device": "NVIDIA GPU", "torch": "2.11", "driver": "580", "commit": "abc"}


def row_that_reached(name, reached, peers=(), facts=()):
    target = {"what": "share of the copy bandwidth", "reached": reached, "wanted": 0.8, "passed": reached >= 0.8}
    figures = {"ours_ms": 1.0, "gb_per_second": None, "share_of_copy": None, "ids_per_second": None}
    head = {"name": name, "sizes": "", **figures, "published": ""}
    return {**head, "targets": [target], "peers": list(peers), "facts": list(facts)}


def test_the_report_says_what_to_do_next(benchmarks, report, tmp_path):
    """List what failed, in the order of the stages, then rows by the share of their target that they reach."""
    peer = {"name": "torch", "ratio": 0.3, "target": 1.0, "passed": False}
    unjudged = {**peer, "passed": None}
    memory = {"name": "peak", "value": 8.0, "limit": 4.0, "unit": "GB", "passed": False}
    rows = [
        row_that_reached("some/fast", 0.9, [unjudged]),
        row_that_reached("some/slow", 0.6),
        row_that_reached("some/slower", 0.8, [peer], [memory]),
        {"name": "some/broken", "sizes": "", "failed": "OSError: no file\nmore"},
    ]
    figures = {"machine": {}, "quick": False, "copy_gb_per_second": 4000.0, "rows": rows}
    (tmp_path / "benchmarks.json").write_text(json.dumps(figures))
    log = ["failed a.py::one", "passed a.py::two", "begun a.py::three", "collected a.py::four"]
    (tmp_path / "first.log").write_text("\n".join(log))
    outcome = benchmarks("stages").Outcome
    report.outcomes += [outcome("first", "failed", 9.0, ""), outcome("memcheck", "failed", 9.0, "exit status 86")]
    report.write()
    wanted = [
        "first: a.py::one (see failures.txt)",
        "first: a.py::three (did not end)",
        "memcheck failed, exit status 86: see output.txt",
        "some/broken failed: OSError: no file",
        "some/slower: ratio to torch 0.30 of 1",
        "some/slower: peak 8, at most 4",
        "some/slow: share of the copy bandwidth 0.60 of 0.8",
        "first: 1 passed, 1 failed, 1 did not end, 1 not run",
    ]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["next"] == wanted and written["tests"]["first"]["not run"] == {"a.py": 1}


def test_with_nothing_wrong_there_is_nothing_to_do(benchmarks, report):
    report.add(benchmarks("stages").Outcome("first", "passed", 9.0, ""))
    assert report.content()["next"] == ["nothing: all that ran is as it should be"]


# The output of Nsight Compute 2025.3: its own lines, a head, units, a line for each launch.
WATCHED = """==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "bags_kernel" - 0: 0%....50%....100% - 8 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Kernel Name","Block Size","Grid Size","dram__bytes.sum.per_second",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum",\
"l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio","launch__registers_per_thread",\
"sm__warps_active.avg.pct_of_peak_sustained_active"
"","","","","","byte/s","%","ns","sector","register/thread","%"
"0","4242","void tsr::(anonymous namespace)::bags_kernel<float, float, long>(tsr::PoolView<T2, T3>)","(256, 1, 1)",\
"(4096, 1, 1)","3,912,000,000,000","81.5","1,250,000","15.9","40","74.25"
"1","4242","lookup_kernel(tsr::Lookup)","(256, 1, 1)","(99, 1, 1)","2.5e+12","52","1,000","n/a","32","60"
"""


def test_nsight_computes_figures_are_read(benchmarks, report, tmp_path):
    (tmp_path / "kernels.csv").write_text(WATCHED)
    bags, lookup = report.content()["kernels"]
    assert bags == {
        "kernel": "bags_kernel",
        "us": 1250.0,
        "GB/s": 3912.0,
        "% of peak bandwidth": 81.5,
        "sectors per load": 15.9,
        "% occupancy": 74.25,
        "registers": 40.0,
    }
    assert lookup["kernel"] == "lookup_kernel" and lookup["GB/s"] == 2500.0 and "sectors per load" not in lookup


@pytest.mark.parametrize("program", ["figures", "refused"])
def test_nsight_compute_is_run_where_it_may_be(benchmarks, tmp_path, monkeypatch, program):
    """Put a program in the place of ncu that writes figures, or that the counters may not be read."""
    gpu, kernels = benchmarks("gpu"), benchmarks("kernels")
    monkeypatch.setattr(gpu, "find_tool", lambda name: None)
    assert gpu.kernels_stage(50, tmp_path).skip == "ncu is not installed"
    text = WATCHED if program == "figures" else "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"
    source = f"""#!{sys.executable}
import sys
assert sys.argv[-4:-1] == [{sys.executable!r}, "-m", "benchmarks.kernels"] and float(sys.argv[-1]) > {time.time()}
open(sys.argv[sys.argv.index("--log-file") + 1], "w").write({text!r})
sys.exit({text.startswith("==ERROR==")})
"""
    (tmp_path / "ncu").write_text(source)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setattr(gpu, "BUILD", tmp_path)
    monkeypatch.setattr(gpu, "find_tool", lambda name: str(tmp_path / name))
    made = gpu.kernels_stage(50, tmp_path)
    outcome = benchmarks("stages").run_stage(made, 60.0, tmp_path / "output.txt")
    if program == "refused":
        assert (outcome.result, outcome.note) == ("skipped", "cannot work here: ERR_NVGPUCTRPERM")
    else:
        assert outcome.result == "passed" and len(kernels.read((tmp_path / "kernels.csv").read_text())) == 2


# ---- The library ----------------------------------------------------------------------------------------------------


def test_prebuilt_libraries_are_joined_with_the_python_side(benchmarks, tmp_path, monkeypatch):
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
    for name in ("ops/unique.py", "compat/tensorflow/__init__.py", "compat/PARITY.md", "examples/ncf.py"):
        assert (package / name).is_file(), name


def test_compute_sanitizer_is_found_on_the_path_and_in_the_toolkit(benchmarks, tmp_path, monkeypatch):
    gpu = benchmarks("gpu")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    program = tmp_path / "toolkit" / "compute-sanitizer" / "compute-sanitizer"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    assert gpu.find_tool("compute-sanitizer") == str(program)


def test_small_cases_run_every_operator_within_their_time(capsys):
    """Run on the CPU the small cases that compute-sanitizer watches on a GPU."""
    first = [make().operator for make in cuda_small_cases.cases()[: len(SAMPLES)]]
    assert set(first) == set(SAMPLES)
    assert cuda_small_cases.main(["--device", "cpu", "--most", "60"]) == 0
    assert capsys.readouterr().out.startswith("60 of ")
    assert cuda_small_cases.main(["--device", "cpu", "--until", str(time.time() - 1)]) == 1
