"""
``make gpu``: measures and tests the library on this machine's NVIDIA GPU.

It takes at most 300 seconds, 540 with ``--all``, in stages of known length; one that fails or runs out of time does not
stop the next. It needs a torch with CUDA, the compiled libraries and, for tests, pytest: no network and no virtual
environment. After each stage gpu.json has the results so far, and first of all what to do next.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from ..interrupt import run_command
from ..machine import ROOT
from . import ncu
from .stages import Outcome, Stage, run_stage

BUILD = ROOT / "build" / "gpu"
TESTS = ROOT / "tests"
LAST = ROOT / "benchmarks" / "results" / "gpu-h200.json"
WORKERS = 8
# A stage of tests stops by itself so long before its limit, so that its processes end in order.
STOPPING_SECONDS = 15
# First comes the test of every operator's results, which takes seconds, then the tests of what only a GPU can show.
_CUDA = ("synchronisation", "streams", "graphs", "errors", "large")
FIRST_TESTS = ["ops/test_operators.py::test_equals_reference", *(f"cuda/test_{name}.py" for name in _CUDA)]
FIRST_ROOMS = ["cuda", "ops", "compat"]
LAST_TESTS = ["test_opcheck_and_export", "test_gradients_of_gradients"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--prebuilt", type=Path, help="folder with _C.so and _C_cuda.so (default: this tree's)")
    parser.add_argument("--all", action="store_true", help="all stages, in 540 seconds")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="benchmark rows (default: where a peer was faster)")
    parser.add_argument("--seconds", type=float, default=95, help="time for these rows (default: 95)")
    parser.add_argument("--beside", type=Path, help="another checkout, built, whose rows are the peers")
    parser.add_argument("--quick", action="store_true", help="small sizes: show that all of it runs, not how fast")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal without a GPU")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    return parser.parse_args(arguments)


# ---- The library ----------------------------------------------------------------------------------------------------


def copy_library(libraries: Path, needed: list[str]) -> None:
    """Copy the Python files of this tree and the compiled libraries of a folder to where they are tested."""
    missing = [name for name in needed if not (libraries / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{libraries} has no {', '.join(missing)}: run `make prebuilt` or `make build` first")
    package = BUILD / "torchsparse_rec"
    shutil.rmtree(package, ignore_errors=True)
    leave = shutil.ignore_patterns("*.so", "__pycache__", "compat")
    shutil.copytree(ROOT / "torchsparse_rec", package, ignore=leave)
    shutil.copytree(ROOT / "compat", package / "compat", ignore=shutil.ignore_patterns("__pycache__"))
    for name in needed:
        shutil.copy2(libraries / name, package / name)


# ---- The stages -----------------------------------------------------------------------------------------------------


def stages_of(given: argparse.Namespace) -> list[Stage]:
    """Return all stages, in an order in which a cut loses the least."""
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (BUILD, ROOT)))}
    how = ["--device", given.device, *(["--quick"] if given.quick else [])]

    def python(name: str, seconds: float, *arguments: str, by_default: bool = True) -> Stage:
        return Stage(name, seconds, lambda _: [sys.executable, *arguments], paths, by_default)

    def measured(name: str, seconds: float) -> Stage:
        written = str(given.out / f"{name}.json")
        return python(name, seconds, "-m", "benchmarks.gpu.measure", name, "--json", written, *how)

    rows = ["--json", str(given.out / "benchmarks.json"), *how]
    rows += ["--beside", str(given.beside.resolve())] if given.beside else []
    minutes = 45 * 0.6 / 60
    auto = ["--json", str(given.out / "auto.json"), "--device", given.device, "--minutes", str(minutes)]
    return [
        measured("about", 30),
        measured("ceilings", 15),
        measured("prices", 30),
        measured("profile", 55),
        measured("capture", 30),
        python("benchmarks", given.seconds, "-m", "benchmarks", *(given.rows or losing()), *rows),
        measured("ranks", 30),
        ncu_stage(30, given.out, paths),
        python("auto", 45, "-m", "benchmarks.auto_map", *auto, by_default=False),
        tests_stage("first", 60, given, [str(TESTS / test) for test in FIRST_TESTS]),
        tests_stage("tests", 30, given, rooms()),
        *(sanitizer_stage(tool, seconds) for tool, seconds in (("memcheck", 45), ("racecheck", 30))),
    ]


def losing() -> list[str]:
    """Return the rows in which a peer was faster when a GPU last ran them all."""
    rows = json.loads(LAST.read_text())["rows"]
    return [row["name"] for row in rows if any(peer.get("ratio", 1) < 1 for peer in row.get("peers", ()))]


def find_tool(name: str) -> str | None:
    """Return the path of a program of CUDA's toolkit, on the PATH or in the toolkit's folder, or None."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), str(Path(nvcc).resolve().parent.parent) if nvcc else None, "/usr/local/cuda"]
    places = [f"{home}/{folder}" for home in homes if home for folder in ("bin", name)]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def ncu_stage(seconds: float, out: Path, paths: dict[str, str]) -> Stage:
    """Return a stage in which Nsight Compute measures single kernels."""
    tool, written = find_tool("ncu"), out / "kernels.csv"

    def command(limit: float) -> list[str]:
        program = [sys.executable, "-m", "benchmarks.gpu.ncu", str(time.time() + 0.5 * limit)]
        # ncu prints its messages, such as that the counters may not be read, where it writes the figures.
        shown = ["sh", "-c", '"$@"; code=$?; cat "$0"; exit $code', str(written)]
        return [*shown, *ncu.command(str(tool), program, written)]

    return Stage("ncu", seconds, command, paths, False, None if tool else "ncu is not installed", ncu.REFUSED)


def sanitizer_stage(tool: str, seconds: float) -> Stage:
    """Return a stage that runs a tool of compute-sanitizer over the small cases, as many as the time allows."""
    program = find_tool("compute-sanitizer")
    # Without torch's cache every tensor is a separate allocation, so that a read beyond its end is detected.
    more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}

    def command(limit: float) -> list[str]:
        cases = [sys.executable, str(TESTS / "cuda_small_cases.py"), "--until", str(time.time() + 0.8 * limit)]
        return [str(program), "--tool", tool, "--error-exitcode", "86", "--report-api-errors", "no", *cases]

    skip = None if program else "compute-sanitizer is not installed"
    return Stage(tool, seconds, command, {"PYTHONPATH": str(BUILD), **more}, False, skip, "Device not supported")


def tests_stage(name: str, seconds: float, given: argparse.Namespace, tests: list[str]) -> Stage:
    """Return a stage of the given tests. It stops by itself before its limit."""
    command = [sys.executable, str(TESTS / "in_time.py"), "--workers", str(min(WORKERS, os.cpu_count() or 1))]
    command += ["--log", str(given.out / f"{name}.log"), "--last", ",".join(LAST_TESTS)]
    command += ["-m", "cuda" if given.device == "cuda" else "not full"]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-o", "faulthandler_timeout=0"]

    def until(limit: float) -> list[str]:
        return [*command, "--until", str(time.time() + limit - STOPPING_SECONDS), *tests, *given.pytest]

    # Plugins of this machine's Python may warn, and a warning is an error here.
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (BUILD, TESTS))), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // WORKERS))
    return Stage(name, seconds, until, environment, by_default=False)


def rooms() -> list[str]:
    """Return the folders of tests, the most important ones first."""
    others = {path.parent.name for path in TESTS.glob("*/test_*.py")} - {*FIRST_ROOMS}
    return [str(TESTS / room) for room in [*FIRST_ROOMS, *sorted(others)]]


# ---- The report -----------------------------------------------------------------------------------------------------


def content(out: Path, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the results so far, from what the stages have left in their folder."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json")) if path.stem != "gpu"}
    rows = found.pop("benchmarks", {})
    about = {**found.pop("about", {}), **rows.pop("machine", {})}
    tests = {log.stem: tests_found(log.read_text()) for log in sorted(out.glob("*.log"))}
    kernels = ncu.read((out / "kernels.csv").read_text()) if (out / "kernels.csv").is_file() else []
    made = {"machine": about, "stages": [each.__dict__ for each in outcomes], "tests": tests, "kernels": kernels}
    return {"next": what_next({**made, **rows}), **made, **found, **rows}


def tests_found(log: str) -> dict[str, Any]:
    """Return from a log of tests/in_time.py how many tests passed, and the names of those with a problem."""
    words: dict[str, str] = {}
    for line in log.splitlines():
        word, _, test = line.partition(" ")
        if words.get(test) != "failed":
            words[test] = word
    counts = Counter(words.values())
    problems = {word: [test for test in words if words[test] == word] for word in ("failed", "begun")}
    return {**{word: counts[word] for word in ("passed", "skipped")}, **problems, "not run": counts["collected"]}


def what_next(made: dict[str, Any]) -> list[str]:
    """Return a list of things to mend, the most urgent first: errors, then rows in which a peer is faster."""
    todo = [f"{x['name']} {x['result']}, {x['note']}" for x in made["stages"] if x["result"] in ("failed", "timed out")]
    for name, tests in made["tests"].items():
        todo += [f"{name}: {test} failed" for test in tests["failed"]]
        todo += [f"{name}: {test} did not end" for test in tests["begun"]]
    rows = made.get("rows", [])
    todo += [f"{row['name']} failed: {row['failed'].splitlines()[0]}" for row in rows if "failed" in row]
    pairs = [(peer.get("ratio", 1), row["name"], peer["name"]) for row in rows for peer in row.get("peers", ())]
    return todo + [f"{row}: {x:.2f} of {peer}" for x, row, peer in sorted(pairs) if x < 1] or ["nothing"]


def write(out: Path, outcomes: list[Outcome]) -> dict[str, Any]:
    """Write gpu.json, whole or not at all, and return its content."""
    made, part = content(out, outcomes), out / ".gpu.json.part"
    part.write_text(json.dumps(made, indent=1) + "\n")
    part.replace(out / "gpu.json")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the stages. Return 1 if one failed or ran out of time, 2 if the program cannot begin, else 0."""
    given = parse(arguments)
    given.out = given.out.resolve()
    # SIGTERM becomes an exception, so that no stage outlives this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        stages = stages_of(given)
        if unknown := {*(given.only or ())} - {stage.name for stage in stages}:
            raise RuntimeError(f"--only: no stage {', '.join(unknown)}; there are {', '.join(x.name for x in stages)}")
        needed = ["_C.so", "_C_cuda.so"] if given.device == "cuda" else ["_C.so"]
        copy_library((given.prebuilt or ROOT / "torchsparse_rec").resolve(), needed)
        given.out.mkdir(parents=True, exist_ok=True)
        for path in given.out.iterdir():
            if path.suffix in (".json", ".log", ".csv", ".txt"):
                path.unlink()
    except (RuntimeError, OSError) as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    chosen = [x for x in stages if (x.name in given.only if given.only else x.by_default or given.all)]
    print(f"{len(chosen)} stages, at most {sum(stage.seconds for stage in chosen):.0f} s")
    outcomes: list[Outcome] = []
    keep = partial(write, given.out, outcomes)
    for stage in chosen:
        outcomes.append(run_stage(stage, stage.seconds, BUILD, given.out / "output.txt"))
        keep()
        if stage.name == "about" and outcomes[-1].result != "passed":
            break  # nothing else can run
    print(f"\nresults: {given.out}/gpu.json")
    for each in outcomes:
        print(f"{each.seconds:>6.0f} s  {each.name:<12}{each.result:<10}{each.note}")
    print("next: " + "; ".join(keep()["next"][:12]))
    return 0 if all(each.result in ("passed", "skipped") for each in outcomes) else 1


if __name__ == "__main__":
    run_command(main)
