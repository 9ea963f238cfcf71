"""
``python -m benchmarks.gpu``, as ``make gpu`` calls it: builds, tests, checks and times on this machine's NVIDIA GPU.

It needs a torch with CUDA and pytest, no network and no virtual environment. Each stage has a share of the time, and
what earlier ones leave over; a stage that fails or runs out of time does not stop the next. After each stage gpu.json
and gpu.md say what is known so far; what the stages print is in output.txt.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .machine import ROOT, commit, now
from .stages import Outcome, Stage, run_stage, tests_note

BUILD = ROOT / "build" / "gpu"
TESTS = ROOT / "tests"
WORKERS = 8
SANITIZER_SECONDS = 90


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--prebuilt", type=Path, help="folder with _C.so and _C_cuda.so, instead of building them")
    parser.add_argument("--minutes", type=float, default=9.7, help="time for everything (default: 9.7)")
    parser.add_argument("--quick", action="store_true", help="small benchmarks: shows that all runs, not how fast")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal without a GPU")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    return parser.parse_args(arguments)


# ---- The library ----------------------------------------------------------------------------------------------------


def look_at_gpu(device: str) -> dict[str, str]:
    """What there is to run on, asked in a process of its own, which leaves nothing on the GPU."""
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
    """The Python side from here, the compiled one from there."""
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
    """Compile for this GPU alone, with all cores."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(BUILD)]
    command += ["build", "--build-lib", str(BUILD)]
    environment = {"TORCHSPARSE_REC_CUDA": "1", "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))}
    environment["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST", capability)
    return Stage("build", 190, lambda limit: command, ROOT, environment)


def import_stage(device: str) -> Stage:
    """Show what was built, and that torch loads it."""
    program = "import torchsparse_rec as t; t.show_config()"
    if device == "cuda":
        program += "; assert t.config()['CUDA library'] == 'loaded'"
    return Stage("import", 20, lambda limit: [sys.executable, "-c", program], BUILD, _path(BUILD))


def _path(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders)}


# ---- The checks and the benchmarks ----------------------------------------------------------------------------------


def tests_stage(more: list[str]) -> Stage:
    """Every test that needs a GPU; in several processes where pytest-xdist is installed."""
    command = [sys.executable, "-m", "pytest", str(TESTS), "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    command += ["-m", "cuda", "-q", "-p", "no:cacheprovider", "--durations=15", f"--junitxml={BUILD / 'tests.xml'}"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-p", "xdist", "-n", str(min(WORKERS, os.cpu_count() or 1))]
    command += [f"--ignore={path}" for path in not_importable()]
    # Other plugins of the machine's Python may warn, which is an error here.
    environment = {**_path(BUILD), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    report = BUILD / "tests.xml"
    return Stage("tests", 160, lambda limit: [*command, *more], BUILD, environment, note=lambda: tests_note(report))


def not_importable() -> list[Path]:
    """Test files that import, themselves or by another module of the tests, a library that is not installed."""
    needs = {path: _imported(path.read_text()) for path in TESTS.rglob("*.py")}
    absent = {name for name in ("hypothesis", "pyarrow") if importlib.util.find_spec(name) is None}
    names = {path: ".".join(path.relative_to(TESTS).with_suffix("").parts) for path in needs}
    found: set[Path] = set()
    while more := {path for path in needs if needs[path] & absent} - found:
        found |= more
        absent |= {names[path] for path in more}
    return sorted(path for path in found if path.name.startswith("test_"))


def _imported(source: str) -> set[str]:
    """The modules that a source imports when it is imported itself; of ``from a import b`` both a and a.b."""
    plain = re.findall(r"^import ([\w.]+)", source, re.MULTILINE)
    parts = re.findall(r"^from ([\w.]+) import ([\w, ]+)", source, re.MULTILINE)
    return {
        *plain,
        *(a for a, _ in parts),
        *(f"{a}.{b.split()[0]}" for a, rest in parts for b in rest.split(",") if b.strip()),
    }


def find_sanitizer() -> str | None:
    """compute-sanitizer, on the PATH or in the toolkit."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), str(Path(nvcc).resolve().parent.parent) if nvcc else None, "/usr/local/cuda"]
    places = [f"{home}/{folder}" for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def sanitizer_stage(tool: str, seconds: int) -> Stage:
    """One of compute-sanitizer's tools over the small cases, as many as the time allows."""
    program = find_sanitizer()
    if program is None:
        return Stage(tool, 0, lambda limit: [], BUILD, skip="compute-sanitizer is not installed")
    environment = _path(BUILD)
    if tool == "memcheck":
        # Without torch's cache every tensor is an allocation of its own: what is read beyond its end is seen.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

    def command(limit: float) -> list[str]:
        cases = [sys.executable, str(TESTS / "samples/cuda_small_cases.py"), "--until", str(time.time() + 0.8 * limit)]
        return [program, "--tool", tool, "--error-exitcode", "86", "--report-api-errors", "no", *cases]

    return Stage(
        tool, seconds, command, BUILD, environment, most=SANITIZER_SECONDS, skip_if_printed="Device not supported"
    )


def benchmarks_stage(out: Path, device: str, quick: bool) -> Stage:
    """All rows, as many as the time allows."""
    command = [sys.executable, "-m", "benchmarks", "--device", device, "--json", str(out / "benchmarks.json")]
    command += ["--quick"] if quick else []
    return Stage("benchmarks", 90, lambda limit: command, BUILD, _path(BUILD, ROOT))


def stages_after_build(given: argparse.Namespace) -> list[Stage]:
    """What runs once there is a library."""
    tools = (("memcheck", 50), ("racecheck", 40), ("synccheck", 25))
    return [
        tests_stage(given.pytest),
        *(sanitizer_stage(tool, seconds) for tool, seconds in tools),
        benchmarks_stage(given.out, given.device, given.quick),
    ]


# ---- The report -----------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """gpu.json and gpu.md, written anew whenever something is added."""

    out: Path
    machine: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """What is known so far; the benchmarks write their own file as they go."""
        measured = self.out / "benchmarks.json"
        figures = json.loads(measured.read_text()) if measured.is_file() else {}
        machine = {**figures.pop("machine", {}), **self.machine}
        return {"machine": machine, "stages": [outcome.__dict__ for outcome in self.outcomes], **figures}

    def write(self) -> None:
        """Both files, each whole or not at all."""
        content = self.content()
        for name, text in (("gpu.json", json.dumps(content, indent=1) + "\n"), ("gpu.md", markdown(content))):
            part = self.out / f".{name}.part"
            part.write_text(text)
            part.replace(self.out / name)

    def add(self, outcome: Outcome) -> None:
        """Keep a stage's outcome."""
        self.outcomes.append(outcome)
        self.write()

    def follow(self, line: str) -> None:
        """Take over new figures, at a line that a stage prints."""
        measured, written = self.out / "benchmarks.json", self.out / "gpu.json"
        if measured.is_file() and measured.stat().st_mtime_ns > written.stat().st_mtime_ns:
            self.write()

    def without_library(self) -> str | None:
        """Why nothing else can run, if the library could not be made or loaded."""
        made = {"build", "import"}
        broken = [each.name for each in self.outcomes if each.name in made and each.result != "passed"]
        return f"{broken[0]} failed" if broken else None


def markdown(content: dict[str, Any]) -> str:
    """The report as a page."""
    lines = ["# GPU run", ""]
    lines += [f"* {name}: {value}" for name, value in content["machine"].items()]
    lines += ["", "| stage | result | seconds | |", "|---|---|---|---|"]
    for stage in content["stages"]:
        lines.append(f"| {stage['name']} | {stage['result']} | {stage['seconds']:.0f} | {stage['note']} |")
    rows = content.get("rows", [])
    if rows:
        lines += ["", f"Copy bandwidth {content['copy_gb_per_second']:,.0f} GB/s, reads plus writes."]
        if content["quick"]:
            lines += ["", "Quick: small sizes and few calls; the figures say nothing about speed."]
        head = ["benchmark", "sizes", "ms", "GB/s", "% of copy", "G ids/s", "times as fast as", "targets and limits"]
        lines += ["", f"| {' | '.join([*head, 'published'])} |", "|---" * 9 + "|", *(_line(row) for row in rows)]
        lines += ["", "The last column quotes others' figures, as shares of peak bandwidth: not measured here."]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        why = row["failed"].partition("\n")[0].replace("|", " ")
        return f"| {row['name']} | {row['sizes']} | failed: {why} | | | | | | |"

    def number(value: float | None, text: str) -> str:
        return "" if value is None else format(value, text)

    peers = [f"{peer['name']} {peer['ratio']:.2f}" for peer in row["peers"] if "ratio" in peer]
    targets = [
        f"{target['what']} {target['reached']:.2f} of {target['wanted']:g}: {'pass' if target['passed'] else 'MISS'}"
        for target in row["targets"]
    ]
    targets += [f"{fact['name']} {fact['value']:.3g} {fact['unit']}" for fact in row["facts"]]
    share = None if row["share_of_copy"] is None else 100 * row["share_of_copy"]
    ids = None if row["ids_per_second"] is None else row["ids_per_second"] / 1e9
    cells = [row["name"], row["sizes"], f"{row['ours_ms']:.3f}", number(row["gb_per_second"], ",.0f")]
    cells += [number(share, ".0f"), number(ids, ".2f"), ", ".join(peers), "; ".join(targets), row["published"]]
    return f"| {' | '.join(cells)} |"


# ---- All of it ------------------------------------------------------------------------------------------------------


def prepare(given: argparse.Namespace, machine: dict[str, str]) -> list[Stage]:
    """The stages that make the library."""
    if given.prebuilt is not None:
        needed = ["_C.so", "_C_cuda.so"] if given.device == "cuda" else ["_C.so"]
        copy_prebuilt(given.prebuilt.resolve(), needed)
        return [import_stage(given.device)]
    return [build_stage(machine.get("compute capability", "9.0")), import_stage(given.device)]


def run_all(stages: list[Stage], seconds: float, report: Report) -> None:
    """
    Run stages one after another, each with its share of the time and what is left of the earlier ones'.

    The first ones make the library: without it nothing else can run.
    """
    began = time.monotonic()
    for n, stage in enumerate(stages):
        later = sum(each.seconds for each in stages[n + 1 :])
        limit = max(1.0, seconds - (time.monotonic() - began) - later)
        broken = report.without_library()
        if broken is not None:
            report.add(Outcome(stage.name, "skipped", 0.0, broken))
        else:
            report.add(run_stage(stage, limit, report.out / "output.txt", report.follow))


def main(arguments: list[str] | None = None) -> int:
    """Everything. Returns 1 if a stage failed or ran out of time, 2 if it cannot begin."""
    given = parse(arguments)
    given.out = given.out.resolve()
    # So that a stage does not outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        machine = look_at_gpu(given.device)
        given.out.mkdir(parents=True, exist_ok=True)
        BUILD.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(BUILD / "torchsparse_rec", ignore_errors=True)
        for path in (given.out / "benchmarks.json", given.out / "output.txt", BUILD / "tests.xml"):
            path.unlink(missing_ok=True)
        stages = [*prepare(given, machine), *stages_after_build(given)]
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    report = Report(given.out, machine)
    report.write()
    run_all(stages, 60 * given.minutes, report)
    print(f"\nresults: {given.out}/gpu.json and gpu.md")
    for outcome in report.outcomes:
        print(f"{outcome.seconds:>6.0f} s  {outcome.name:<12}{outcome.result:<10}{outcome.note}")
    return 0 if all(outcome.result in ("passed", "skipped") for outcome in report.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
