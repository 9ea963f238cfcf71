"""
``python -m benchmarks.gpu``, which ``make gpu`` calls: build, test, check and time on this machine's NVIDIA GPU.

It needs a torch with CUDA and pytest, no network and no virtual environment. Each stage has a share of the time that is
left; one that fails or runs out of time does not stop the next. After each stage gpu.json contains the results so far,
and first of all what to do next. The stages' output goes to output.txt, the failed tests to failures.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import kernels
from .interrupt import run_command
from .machine import ROOT, commit, now
from .stages import Outcome, Stage, last_words, run_stage

BUILD = ROOT / "build" / "gpu"
TESTS = ROOT / "tests"
WORKERS = 8
SANITIZER_SECONDS = 90
# A stage of tests stops by itself so long before its limit, so that its processes end in order.
STOPPING_SECONDS = 15
# First comes the test of every operator's results, which takes seconds, then the tests of what only a GPU can show.
_CUDA = ("synchronisation", "streams", "graphs", "errors", "large")
FIRST_TESTS = ["ops/test_operators.py::test_equals_reference", *(f"cuda/test_{name}.py" for name in _CUDA)]
# The folders of tests that come before the others; the one that comes after them, because its tests start ranks that
# share the GPU; and the tests that come last.
FIRST_ROOMS = ["cuda", "ops", "compat"]
LAST_ROOM = "distributed"
LAST_TESTS = ["test_opcheck_and_export", "test_gradients_of_gradients"]
# Rows with a target for their share of the bandwidth come first, then the other kernels, then whole trainings. Every
# row's name begins with "".
FIRST_ROWS = ["embedding/", "row_update", "adam/update", "sparse_segment/", "unique/", "hash/", "embedding_variable/"]
FIRST_ROWS += ["embedding_lookup/", "sparse_tensor/", "overhead/", "adam/", "features/", "wide_deep/step", ""]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--prebuilt", type=Path, help="folder with _C.so and _C_cuda.so, instead of building them")
    parser.add_argument("--minutes", type=float, default=9.7, help="time for everything (default: 9.7)")
    parser.add_argument("--quick", action="store_true", help="small benchmarks: show that all of it runs, not how fast")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal without a GPU")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    return parser.parse_args(arguments)


# ---- The library ----------------------------------------------------------------------------------------------------


def look_at_gpu(device: str) -> dict[str, str]:
    """Return the GPU, its driver, and versions. A separate process asks for them, and leaves nothing on the GPU."""
    about = {"device": "cpu", "python": sys.version.split()[0], "commit": commit(), "date": now()}
    program = "import json, torch; print(torch.__version__)"
    if device == "cuda":
        program += "; from benchmarks.machine import gpu; print(json.dumps(gpu()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)
    if printed.returncode != 0:
        why = printed.stderr.strip().splitlines()[-1:] or [f"exit status {printed.returncode}"]
        raise RuntimeError(f"it needs an NVIDIA GPU and a torch with CUDA; {sys.executable} has not both: {why[0]}")
    version, *facts = printed.stdout.splitlines()
    return {**about, "torch": version, **(json.loads(facts[0]) if facts else {})}


def copy_prebuilt(libraries: Path, needed: list[str]) -> None:
    """Copy the Python files of this tree and the compiled libraries of a folder to where they are tested."""
    missing = [name for name in needed if not (libraries / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{libraries} has no {', '.join(missing)}")
    package = BUILD / "torchsparse_rec"
    leave = shutil.ignore_patterns("*.so", "__pycache__", "compat")
    shutil.copytree(ROOT / "torchsparse_rec", package, ignore=leave)
    shutil.copytree(ROOT / "compat", package / "compat", ignore=shutil.ignore_patterns("__pycache__"))
    for name in needed:
        shutil.copy2(libraries / name, package / name)


def build_stage(capability: str) -> Stage:
    """Return a stage that compiles for this GPU alone, with all cores."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(BUILD)]
    command += ["build", "--build-lib", str(BUILD)]
    environment = {"TORCHSPARSE_REC_CUDA": "1", "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))}
    environment["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST", capability)
    return Stage("build", None, lambda limit: command, ROOT, environment)


def import_stage(device: str) -> Stage:
    """Return a stage that shows the built library, and that torch loads it."""
    program = "import torchsparse_rec as t; t.show_config()"
    if device == "cuda":
        program += "; assert t.config()['CUDA library'] == 'loaded'"
    return Stage("import", None, lambda limit: [sys.executable, "-c", program], BUILD, _path(BUILD), most=60)


def _path(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders)}


# ---- The checks and the benchmarks ----------------------------------------------------------------------------------


def tests_stage(name: str, share: float, given: argparse.Namespace, tests: list[str]) -> Stage:
    """Return a stage of the given tests. It stops by itself before its limit."""
    log = given.out / f"{name}.log"
    command = [sys.executable, str(TESTS / "in_time.py"), "--workers", str(min(WORKERS, os.cpu_count() or 1))]
    command += ["--log", str(log), "--last", ",".join(LAST_TESTS)]
    command += ["-m", "cuda" if given.device == "cuda" else "not full"]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-o", "faulthandler_timeout=0"]

    def until(limit: float) -> list[str]:
        return [*command, "--until", str(time.time() + limit - STOPPING_SECONDS), *tests, *given.pytest]

    # Plugins of this machine's Python may warn, and a warning is an error here.
    environment = {**_path(BUILD, TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // WORKERS))
    return Stage(name, share, until, BUILD, environment, note=lambda: tests_note(tests_found(log)))


def rooms() -> list[str]:
    """Return the folders of tests, the most important ones first."""
    others = {path.parent.name for path in TESTS.glob("*/test_*.py")} - {*FIRST_ROOMS, LAST_ROOM}
    return [str(TESTS / room) for room in [*FIRST_ROOMS, *sorted(others), LAST_ROOM]]


def tests_found(log: Path) -> dict[str, Any]:
    """Read the outcomes of tests from a log: the names of tests with a problem, else numbers."""
    words = last_words(log)
    named = {word: [test for test in words if words[test] == word] for word in ("failed", "begun", "collected")}
    counted = {word: sum(each == word for each in words.values()) for word in ("passed", "skipped")}
    files = [test.partition("::")[0] for test in named.pop("collected")]
    return {**counted, **named, "not run": {file: files.count(file) for file in dict.fromkeys(files)}}


def tests_note(found: dict[str, Any]) -> str:
    """Describe the outcomes of tests in one line."""
    counts = [(found["passed"], "passed"), (len(found["failed"]), "failed"), (found["skipped"], "skipped")]
    counts += [(len(found["begun"]), "did not end"), (sum(found["not run"].values()), "not run")]
    return ", ".join(f"{count} {word}" for count, word in counts if count) or "no tests"


def find_tool(name: str) -> str | None:
    """Return the path of a program of CUDA's toolkit, on the PATH or in the toolkit's folder, or None."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), str(Path(nvcc).resolve().parent.parent) if nvcc else None, "/usr/local/cuda"]
    places = [f"{home}/{folder}" for home in homes if home for folder in ("bin", name)]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def kernels_stage(share: float, out: Path) -> Stage:
    """Return a stage in which Nsight Compute measures single kernels."""
    ncu, written = find_tool("ncu"), out / "kernels.csv"
    if ncu is None:
        return Stage("kernels", 0, lambda limit: [], BUILD, skip="ncu is not installed")

    def command(limit: float) -> list[str]:
        program = [sys.executable, "-m", "benchmarks.kernels", str(time.time() + 0.5 * limit)]
        # ncu prints its messages, such as that the counters may not be read, where it writes the figures.
        shown = ["sh", "-c", '"$@"; code=$?; cat "$0"; exit $code', str(written)]
        return [*shown, *kernels.command(ncu, program, written)]

    environment = _path(BUILD, ROOT)
    return Stage("kernels", share, command, BUILD, environment, most=120, skip_if_printed=kernels.REFUSED)


def sanitizer_stage(tool: str, share: float) -> Stage:
    """Return a stage that runs a tool of compute-sanitizer over the small cases, as many as the time allows."""
    program = find_tool("compute-sanitizer")
    if program is None:
        return Stage(tool, 0, lambda limit: [], BUILD, skip="compute-sanitizer is not installed")
    environment = _path(BUILD)
    if tool == "memcheck":
        # Without torch's cache every tensor is a separate allocation, so that a read beyond its end is detected.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

    def command(limit: float) -> list[str]:
        cases = [sys.executable, str(TESTS / "cuda_small_cases.py"), "--until", str(time.time() + 0.8 * limit)]
        return [program, "--tool", tool, "--error-exitcode", "86", "--report-api-errors", "no", *cases]

    return Stage(
        tool, share, command, BUILD, environment, most=SANITIZER_SECONDS, skip_if_printed="Device not supported"
    )


def benchmarks_stage(share: float, out: Path, device: str, quick: bool) -> Stage:
    """Return a stage that runs all benchmark rows, as many as the time allows."""
    command = [sys.executable, "-m", "benchmarks", *FIRST_ROWS, "--device", device]
    command += ["--json", str(out / "benchmarks.json"), *(["--quick"] if quick else [])]
    return Stage("benchmarks", share, lambda limit: command, BUILD, _path(BUILD, ROOT))


def stages_after_build(given: argparse.Namespace) -> list[Stage]:
    """Return the stages that run once there is a library."""
    return [
        tests_stage("first", 140, given, [str(TESTS / test) for test in FIRST_TESTS]),
        benchmarks_stage(140, given.out, given.device, given.quick),
        kernels_stage(50, given.out),
        *(sanitizer_stage(tool, share) for tool, share in (("memcheck", 60), ("racecheck", 40), ("synccheck", 25))),
        tests_stage("tests", 100, given, rooms()),
    ]


# ---- The report -----------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """The file gpu.json, which is written anew whenever something is added."""

    out: Path
    machine: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """Return the results so far. The benchmarks write their own file meanwhile."""
        measured = self.out / "benchmarks.json"
        figures = json.loads(measured.read_text()) if measured.is_file() else {}
        machine = {**figures.pop("machine", {}), **self.machine}
        content = {"machine": machine, "stages": [outcome.__dict__ for outcome in self.outcomes], **figures}
        content["tests"] = {log.stem: tests_found(log) for log in sorted(self.out.glob("*.log"))}
        watched = self.out / "kernels.csv"
        content["kernels"] = kernels.read(watched.read_text()) if watched.is_file() else []
        return {"next": what_next(content), **content}

    def write(self) -> None:
        """Write the file, whole or not at all."""
        part = self.out / ".gpu.json.part"
        part.write_text(json.dumps(self.content(), indent=1) + "\n")
        part.replace(self.out / "gpu.json")

    def add(self, outcome: Outcome) -> None:
        """Add a stage's outcome, and write the file."""
        self.outcomes.append(outcome)
        self.write()

    def without_library(self) -> str | None:
        """Return why nothing else can run if the library could not be built or loaded, else None."""
        made = {"build", "import"}
        broken = [each.name for each in self.outcomes if each.name in made and each.result != "passed"]
        return f"{broken[0]} failed" if broken else None


def what_next(content: dict[str, Any]) -> list[str]:
    """Return a list of things to mend, the most urgent first: errors, then slow rows."""
    todo = []
    for stage in content["stages"]:
        found = content["tests"].get(stage["name"], {})
        wrong = [("failed", "see failures.txt"), ("begun", "did not end")]
        lines = [f"{stage['name']}: {_names(found[word])} ({what})" for word, what in wrong if found.get(word)]
        if not lines and stage["result"] == "failed":
            lines = [f"{stage['name']} failed, {stage['note']}: see output.txt"]
        todo += lines
    rows = content.get("rows", [])
    todo += [f"{row['name']} failed: {row['failed'].splitlines()[0]}" for row in rows if "failed" in row]
    slow = sorted((share, row["name"], what) for row in rows if "failed" not in row for share, what in _missed(row))
    todo += [f"{name}: {what}" for _, name, what in slow]
    todo += [f"{name}: {tests_note(found)}" for name, found in content["tests"].items() if found["not run"]]
    return todo or ["nothing: all that ran is as it should be"]


def _names(tests: list[str], most: int = 5) -> str:
    more = [f"and {len(tests) - most} more"] if len(tests) > most else []
    return ", ".join([*tests[:most], *more])


def _missed(row: dict[str, Any]) -> list[tuple[float, str]]:
    """Return a row's missed targets: the share of each that was reached, and its description."""
    found = [(each["what"], each["reached"], each["wanted"]) for each in row["targets"] if each["passed"] is False]
    peers = [each for each in row["peers"] if each.get("passed") is False]
    found += [(f"ratio to {each['name']}", each["ratio"], each["target"]) for each in peers]
    missed = [(reached / least, f"{what} {reached:.2f} of {least:g}") for what, reached, least in found]
    facts = [(each["name"], each["value"], each["limit"]) for each in row["facts"] if each.get("passed") is False]
    return missed + [(most / value, f"{what} {value:g}, at most {most:g}") for what, value, most in facts]


# ---- All of it ------------------------------------------------------------------------------------------------------


def prepare(given: argparse.Namespace, machine: dict[str, str]) -> list[Stage]:
    """Return the stages that make the library."""
    if given.prebuilt is not None:
        needed = ["_C.so", "_C_cuda.so"] if given.device == "cuda" else ["_C.so"]
        copy_prebuilt(given.prebuilt.resolve(), needed)
        return [import_stage(given.device)]
    return [build_stage(machine.get("compute capability", "9.0")), import_stage(given.device)]


def run_all(stages: list[Stage], end: float, report: Report) -> None:
    """
    Run stages in order until ``time.monotonic()`` is at ``end``, each for its share of the time that is left.

    The first stages make the library: without it nothing else can run.
    """
    for n, stage in enumerate(stages):
        limit = max(1.0, end - time.monotonic())
        if stage.share:
            limit *= stage.share / sum(each.share or 0 for each in stages[n:])
        broken = report.without_library()
        if broken is not None:
            report.add(Outcome(stage.name, "skipped", 0.0, broken))
        else:
            report.add(run_stage(stage, limit, report.out / "output.txt"))


def main(arguments: list[str] | None = None) -> int:
    """Run all stages. Return 1 if one failed or ran out of time, 2 if the program cannot begin, else 0."""
    given = parse(arguments)
    end = time.monotonic() + 60 * given.minutes
    given.out = given.out.resolve()
    # SIGTERM becomes an exception, so that no stage outlives this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        machine = look_at_gpu(given.device)
        given.out.mkdir(parents=True, exist_ok=True)
        BUILD.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(BUILD / "torchsparse_rec", ignore_errors=True)
        written = [given.out / name for name in ("benchmarks.json", "output.txt", "failures.txt", "kernels.csv")]
        for path in (*written, *given.out.glob("*.log")):
            path.unlink(missing_ok=True)
        stages = [*prepare(given, machine), *stages_after_build(given)]
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    report = Report(given.out, machine)
    report.write()
    run_all(stages, end, report)
    print(f"\nresults: {given.out}/gpu.json")
    for outcome in report.outcomes:
        print(f"{outcome.seconds:>6.0f} s  {outcome.name:<12}{outcome.result:<10}{outcome.note}")
    print("next: " + "; ".join(report.content()["next"][:12]))
    return 0 if all(outcome.result in ("passed", "skipped") for outcome in report.outcomes) else 1


if __name__ == "__main__":
    run_command(main)
