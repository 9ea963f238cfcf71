"""``make gpu`` without a GPU: its stages, their limits, what they measure, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import cuda_small_cases
import pytest
from samples.operators import SAMPLES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(benchmarks, tmp_path, monkeypatch):
    made = benchmarks("gpu.__main__")
    monkeypatch.setattr(made, "BUILD", tmp_path)
    return made


def run(benchmarks, folder, program, seconds=30.0, **more):
    stages = benchmarks("gpu.stages")
    stage = stages.Stage("one", seconds, lambda limit: [sys.executable, "-c", program], **more)
    return stages.run_stage(stage, seconds, folder, folder / "output.txt")


# ---- A stage --------------------------------------------------------------------------------------------------------


def test_a_stage_passes_and_leaves_its_output(benchmarks, tmp_path, capfd):
    program = "import os; print(os.environ['WORD'])"
    outcome = run(benchmarks, tmp_path, program, environment={"WORD": "hello"})
    assert (outcome.name, outcome.result, outcome.note) == ("one", "passed", "")
    assert (tmp_path / "output.txt").read_text() == "== one\nhello\n"
    assert "hello" in capfd.readouterr().out


def test_a_stage_that_takes_too_long_is_ended_with_what_it_started(benchmarks, tmp_path):
    """End a child process too that ignores SIGTERM and keeps the output open."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(10**6)"
    )
    program = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    outcome = run(benchmarks, tmp_path, program, 2.0)
    assert (outcome.result, outcome.note) == ("timed out", "ended after 2 s")
    assert (tmp_path / "output.txt").read_text().startswith("== one\nbegun\n")


def test_a_tool_that_cannot_work_on_a_machine_is_no_failure(benchmarks, tmp_path):
    for printed, code, result in (("Device not supported", 1, "skipped"), ("Invalid read", 86, "failed")):
        program = f"print('Error: {printed}'); raise SystemExit({code})"
        outcome = run(benchmarks, tmp_path, program, skip_if_printed="Device not supported")
        assert outcome.result == result
    assert run(benchmarks, tmp_path, "", skip="it is not installed").result == "skipped"


# ---- The tests ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_tests(benchmarks, gpu, tmp_path, monkeypatch):
    """Return a function that runs planted tests as a stage and returns the outcomes of the stage and of the tests."""
    monkeypatch.setattr(gpu, "WORKERS", 2)
    monkeypatch.setattr(gpu, "STOPPING_SECONDS", 40)

    def run(source, limit=80.0, name="first", arguments=()):
        given = gpu.parse(["--out", str(tmp_path), "--device", "cpu", "--", *arguments])
        (tmp_path / "test_planted.py").write_text(source)
        made = gpu.tests_stage(name, limit, given, [str(tmp_path / "test_planted.py")])
        outcome = benchmarks("gpu.stages").run_stage(made, limit, tmp_path, tmp_path / "output.txt")
        found = gpu.tests_found((tmp_path / f"{name}.log").read_text())
        return outcome, {**found, **{x: [test.rpartition("::")[2] for test in found[x]] for x in ("failed", "begun")}}

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


@pytest.mark.slow
def test_a_failing_and_a_hanging_test_are_named(run_tests, tmp_path):
    """Run the test after the hanging one too."""
    outcome, found = run_tests(PLANTED + "def test_after():\n    pass\n", arguments=["--hanging", "2"])
    assert outcome.result == "failed" and found["passed"] == 2 and not found["not run"]
    assert (found["failed"], found["begun"]) == (["test_fails"], ["test_hangs"])
    told = (tmp_path / "failures.txt").read_text()
    assert "assert (1 + 1) == 3" in told and "in test_hangs" in told


def test_failures_are_written_before_the_end(run_tests, tmp_path):
    """End the stage from outside while a test hangs."""
    arguments = ["--until", str(time.time() + 1000), "--hanging", "999"]
    outcome, found = run_tests(PLANTED, limit=6.0, arguments=arguments)
    assert outcome.result == "timed out"
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
    assert outcome.result == "passed" and outcome.seconds < 42
    assert found["passed"] == ran and found["not run"] == 8 - ran > 0
    monkeypatch.setenv("SECONDS", "0")
    assert run_tests(source, name="tests")[1]["passed"] == 8 - ran
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


def test_small_cases_run_every_operator_within_their_time(capsys):
    """Run on the CPU the small cases that compute-sanitizer watches on a GPU."""
    first = [make().operator for make in cuda_small_cases.cases()[: len(SAMPLES)]]
    assert set(first) == set(SAMPLES)
    assert cuda_small_cases.main(["--device", "cpu", "--most", "60"]) == 0
    assert capsys.readouterr().out.startswith("60 of ")
    assert cuda_small_cases.main(["--device", "cpu", "--until", str(time.time() - 1)]) == 1


# ---- All stages -----------------------------------------------------------------------------------------------------


def test_what_is_chosen_exists(benchmarks, gpu):
    for name in gpu.FIRST_TESTS:
        file, _, function = name.partition("::")
        assert f"def {function}" in (ROOT / "tests" / file).read_text()
    for function in gpu.LAST_TESTS:
        assert f"def {function}(" in (ROOT / "tests/ops/test_operators.py").read_text()
    assert {Path(room) for room in gpu.rooms()} == {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    choose, rows = benchmarks("__main__").choose, gpu.losing()
    rows += [*benchmarks("gpu.ncu").KERNELS.values(), *benchmarks("gpu.measure").PROFILED]
    assert all(choose([name], "cuda") for name in rows)


def test_the_stages_fit_into_their_time(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "find_tool", lambda name: f"/usr/bin/{name}")
    stages = gpu.stages_of(gpu.parse(["--out", str(tmp_path), "--", "-k", "unique"]))
    assert sum(stage.seconds for stage in stages if stage.by_default) <= 300
    assert sum(stage.seconds for stage in stages) <= 540
    by_name = {stage.name: stage for stage in stages}
    command, before = by_name["memcheck"].command(20.0), time.time()
    assert command[:3] == ["/usr/bin/compute-sanitizer", "--tool", "memcheck"]
    assert before - 1 < float(command[-1]) - 0.8 * 20 <= before  # eight tenths of its time
    assert by_name["memcheck"].environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert by_name["first"].command(30.0)[-2:] == by_name["tests"].command(30.0)[-2:] == ["-k", "unique"]


def test_the_driver_needs_no_torch_and_names_what_is_missing(tmp_path):
    program = "import sys; sys.modules['torch'] = None; from benchmarks.gpu.__main__ import main; sys.exit(main())"
    for arguments, told in (
        (["--prebuilt", str(tmp_path)], f"make gpu: {tmp_path} has no _C.so, _C_cuda.so: run `make prebuilt`"),
        (["--only", "capure"], "make gpu: --only: no stage capure; there are about, ceilings, prices"),
    ):
        command = [sys.executable, "-c", program, "--out", str(tmp_path / "out"), *arguments]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert made.returncode == 2 and made.stderr.startswith(told) and not list(tmp_path.iterdir())


def test_make_hands_its_variables_on(tmp_path):
    command = ["make", "-n", "--no-print-directory", "gpu", f"OUT={tmp_path}", "PREBUILT=some/folder", "ARGS=--all"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = " ".join(printed.replace("\\\n", " ").split())
    assert words.endswith(f'-m benchmarks.gpu --out "{tmp_path}" --prebuilt "some/folder" --all')


@pytest.mark.slow
def test_a_rehearsal(gpu, tmp_path, capfd):
    """Run each stage that measures, on the CPU: one that fails stops no other, and each is in the report."""
    stages = ("about", "benchmarks", "ceilings", "prices", "profile", "capture", "ranks")
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--quick", "--rows", "no/row", "--only", *stages]
    assert gpu.main(["--out", str(out), *arguments]) == 1
    made = json.loads((out / "gpu.json").read_text())
    results = {stage["name"]: stage["result"] for stage in made["stages"]}
    assert results == {**dict.fromkeys(stages, "passed"), "benchmarks": "failed"}
    assert made["next"] == ["benchmarks failed, exit status 1"] and made["machine"]["device"] == "cpu"
    assert made["capture"]["SGD"]["same bits"] and made["ranks"]["2 over gloo"].startswith("equal")
    assert made["ceilings"]["copy GB/s"] > 0 and made["prices"]["a wait us"] > 0
    assert made["profile"]["overhead/collection-step"]["ms"] > 0
    assert "no row for cpu begins with 'no/row'" in capfd.readouterr().out


def test_a_trace_is_split_into_host_and_device(benchmarks):
    """Take apart five calls of two kernels that overlap and of a wait each; the profiler waits too, after them."""
    measure = benchmarks("gpu.measure")
    events = [{"name": "process_name", "ph": "M"}]
    events += [{"cat": "user_annotation", "name": "calls", "ts": 0.0, "dur": 100.0 * measure.STEPS}]
    for step in range(measure.STEPS):
        begin = 100.0 * step
        events += [{"cat": "kernel", "name": "k", "ts": begin + x, "dur": 20.0} for x in (0.0, 10.0)]
        events += [{"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": begin, "dur": 1.0}]
    events += [{"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": x, "dur": 1.0} for x in (-1.0, 999.0)]
    assert measure.split(events) == {"works": 2.0, "work_ms": 0.04, "busy_ms": 0.03, "waits": 1.0}


def test_a_capture_that_fails_fails_its_stage(benchmarks, monkeypatch):
    measure = benchmarks("gpu.measure")

    def captured(step, device):
        raise RuntimeError(told)

    monkeypatch.setattr(measure, "_captured", captured)
    told = "a CUDA graph must not capture a step\nmore"
    options = benchmarks("rows").Options("cpu", quick=True)
    assert dict(measure.capture(options))["Adam"] == "a CUDA graph must not capture a step"
    told = "CUDA error: operation not permitted when stream is capturing"
    with pytest.raises(RuntimeError, match="not permitted"):
        next(measure.capture(options))


# ---- The report -----------------------------------------------------------------------------------------------------


def test_the_report_says_what_to_do_next(benchmarks, gpu, tmp_path):
    outcome = benchmarks("gpu.stages").Outcome
    assert gpu.content(tmp_path, [outcome("about", "passed", 9.0, "")])["next"] == ["nothing"]
    peers = [{"name": "torch", "ratio": 0.3}, {"name": "tf", "ratio": 1.2}, {"name": "none", "unavailable": "not here"}]
    rows = [{"name": "some/row", "peers": peers}, {"name": "some/broken", "failed": "OSError: no file\nmore"}]
    figures = {"machine": {"threads": "2"}, "quick": False, "copy_gb_per_second": 4000.0, "rows": rows}
    (tmp_path / "benchmarks.json").write_text(json.dumps(figures))
    (tmp_path / "about.json").write_text(json.dumps({"device": "NVIDIA GPU", "threads": "16"}))
    log = ["failed a.py::one", "passed a.py::two", "begun a.py::three", "collected a.py::four"]
    (tmp_path / "first.log").write_text("\n".join(log))
    made = gpu.write(tmp_path, [outcome("first", "failed", 9.0, "exit status 1")])
    assert made["next"] == [
        "first failed, exit status 1",
        "first: a.py::one failed",
        "first: a.py::three did not end",
        "some/broken failed: OSError: no file",
        "some/row: 0.30 of torch",
    ]
    assert made["tests"]["first"]["not run"] == 1 and made["rows"] == rows
    assert made["machine"] == {"device": "NVIDIA GPU", "threads": "2"}
    assert json.loads((tmp_path / "gpu.json").read_text()) == made


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


@pytest.mark.parametrize("program", ["figures", "refused"])
def test_nsight_compute_is_run_where_it_may_be(benchmarks, gpu, tmp_path, monkeypatch, program):
    """Put a program in the place of ncu that writes figures, or that the counters may not be read."""
    monkeypatch.setattr(gpu, "find_tool", lambda name: None)
    assert gpu.ncu_stage(50, tmp_path, {}).skip == "ncu is not installed"
    text = WATCHED if program == "figures" else "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"
    source = f"""#!{sys.executable}
import sys
assert sys.argv[-4:-1] == [{sys.executable!r}, "-m", "benchmarks.gpu.ncu"] and float(sys.argv[-1]) > {time.time()}
open(sys.argv[sys.argv.index("--log-file") + 1], "w").write({text!r})
sys.exit({text.startswith("==ERROR==")})
"""
    (tmp_path / "ncu").write_text(source)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setattr(gpu, "find_tool", lambda name: str(tmp_path / name))
    made = gpu.ncu_stage(50, tmp_path, {})
    outcome = benchmarks("gpu.stages").run_stage(made, 60.0, tmp_path, tmp_path / "output.txt")
    if program == "refused":
        assert (outcome.result, outcome.note) == ("skipped", "cannot work here: ERR_NVGPUCTRPERM")
        return
    bags, lookup = gpu.content(tmp_path, [])["kernels"]
    figures = {"us": 1250.0, "GB/s": 3912.0, "% of peak bandwidth": 81.5, "sectors per load": 15.9}
    assert bags == {"kernel": "bags_kernel", **figures, "% occupancy": 74.25, "registers": 40.0}
    assert lookup["kernel"] == "lookup_kernel" and lookup["GB/s"] == 2500.0 and "sectors per load" not in lookup


def test_prebuilt_libraries_are_joined_with_the_python_side(gpu, tmp_path):
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in ("_C.so", "_C_cuda.so"):
        with pytest.raises(FileNotFoundError, match=rf"has no .*{name}"):
            gpu.copy_library(libraries, ["_C.so", "_C_cuda.so"])
        (libraries / name).write_text(name)
    gpu.copy_library(libraries, ["_C.so", "_C_cuda.so"])
    package = tmp_path / "torchsparse_rec"
    assert (package / "_C_cuda.so").read_text() == "_C_cuda.so"
    for name in ("ops/unique.py", "compat/tensorflow/__init__.py", "compat/PARITY.md", "examples/ncf.py"):
        assert (package / name).is_file(), name


def test_tools_are_found_on_the_path_and_in_the_toolkit(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    program = tmp_path / "toolkit" / "compute-sanitizer" / "compute-sanitizer"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    assert gpu.find_tool("compute-sanitizer") == str(program)
