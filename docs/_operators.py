"""
Write docs/operators.md: every operator, and every kernel below them (``make docs`` runs this).

Nothing in the page is kept by hand. An operator's docstring says what it does, where it comes from and in what it is
differentiable. torch's dispatcher shows which kernels it calls while its example runs, and whether a kernel has a
derivative. csrc/cuda registers the kernels that run on CUDA. tests/samples names what is read back from a CUDA device,
and the tests hold it true. If an operator in Python reads back something by itself, its docstring says "On CUDA <what>
is read back".
"""

from __future__ import annotations

import doctest
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from samples.read_backs import READ_BACKS
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparse_rec import ops

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/operators.md"
_NAMESPACE = "torchsparse_rec::"
# Questions about the machine, which are no operators on tensors, and the numbers of plans.
_NOT_OPERATORS = {"cpu_level", "row_optimizer_rule", "check_errors", "collection_plan", "collection_plan_free"}
_HEAD = """\
# Operators

This page has the operators of `torchsparse_rec.ops` by family, then the kernels that they call. All take and return
torch tensors and work under `torch.compile`. `make docs` writes the page from the docstrings, the dispatcher and the
kernels' sources.

* **source**: the function of TensorFlow, torch or another program whose meaning the operator has.
* **devices**: where it runs; empty if it computes no tensor.
* **gradient**: the arguments in which it is differentiable; "in place" if it writes into its arguments.
* **CUDA graph**: "no" if a number is read back from the device, because the size of the result depends on the values of
  the input. Such a call waits for the device. [On a GPU](cuda.md#what-waits-for-the-device) says more.
"""


# ---- Docstrings -----------------------------------------------------------------------------------------------------


def markdown(text: str) -> str:
    """Return a docstring's text on one line, its roles and double backticks as Markdown's, fit for a table's cell."""
    text = re.sub(r":\w+:`[~.]*([^`]+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def summary(doc: str) -> str:
    """Return the first sentence of a docstring, without its full stop."""
    return re.split(r"\.(?=\s|$)", markdown(doc.split("\n\n")[0]))[0]


def source(doc: str) -> str:
    """Return the text of a docstring's ``Source:``, without its full stop; empty: it has none."""
    found = re.search(r"^Source:\s+(.+?)(?=\n\n|\Z)", doc, flags=re.MULTILINE | re.DOTALL)
    return markdown(found[1]).rstrip(".") if found else ""


def differentiable_in(doc: str) -> str | None:
    """Return the arguments in which a docstring says that there is a gradient; empty: none; None: it does not say."""
    text = " ".join(doc.split())
    if found := re.search(r"[Dd]ifferentiable in ((?:``\w+``(?:, | and )?)+)", text):
        return markdown(found[1]).rstrip(", ")
    return "" if re.search(r"[Nn]ot differentiable|[Nn]o gradient", text) else None


def own_read_back(name: str, doc: str) -> tuple[str, str] | None:
    """Return what a docstring says is read back, and with which argument nothing is; None: nothing is read back."""
    text = " ".join(doc.split())
    if "read back" not in text:
        return None
    if found := re.search(r"[Oo]n CUDA,? ([^.,:;]+?) (?:is|are) read back", text):
        return markdown(found[1]), ""
    # In an argument's own lines, of its default.
    if found := re.search(
        r"^ +(\w+): ([^:]*?)\b[Dd]efault: ([^:]*?), which\s+on\s+CUDA is read back", doc, re.MULTILINE
    ):
        return markdown(found[3]), f"with `{found[1]}`"
    raise ValueError(f'{name}: its docstring should say "On CUDA <what> is read back"')


def inherited(name: str, ask: Callable[[str], Any]) -> Any:
    """Return what a docstring says; if it says nothing, what the docstrings say to which it refers: "as :func:`x`"."""
    doc = inspect.getdoc(getattr(ops, name)) or ""
    answer = ask(doc)
    for other in re.findall(r"(?:\b[Aa]s|[Ss]ee) :func:`\.?(\w+)`", doc) if answer is None else ():
        if other != name and hasattr(ops, other):
            answer = inherited(other, ask)
            if answer is not None:
                break
    return answer


# ---- The dispatcher -------------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Note the names of all operators that are called, torch's own too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def called_by(name: str) -> set[str]:
    """Run the example of a public function, and return the names of the operators that the function itself calls."""
    function = getattr(ops, name)
    module = sys.modules[function.__module__]
    recorder = _Recorder()

    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with recorder:
            return function(*args, **kwargs)

    with mock.patch.object(ops, name, recorded):
        names = {"torch": torch, **vars(module), name: recorded}
        example = doctest.DocTestParser().get_doctest(function.__doc__ or "", names, name, None, None)
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        if runner.run(example).failed:
            raise ValueError(f"{name}: its example fails")
    return recorder.names


def schemas() -> list[str]:
    """Return the names of csrc/library.cpp's operators, in its order."""
    declared = re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc/library.cpp").read_text())
    known = {x.removeprefix(_NAMESPACE) for x in torch._C._dispatch_get_all_op_names() if x.startswith(_NAMESPACE)}
    if missing := known ^ set(declared):
        raise ValueError(f"csrc/library.cpp and the dispatcher disagree on {sorted(missing)}: build the library")
    return [name for name in declared if name not in _NOT_OPERATORS]


def on_cuda() -> set[str]:
    """Return the names of the operators that csrc/cuda registers: a machine without CUDA has not built them."""
    files = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    return {name for file in files for name in re.findall(r'TSR_IMPL\(m, "(\w+)"', file.read_text())}


def derivative(schema: str) -> str:
    """Return yes, no or in place: what the dispatcher knows of an operator's derivative."""
    if getattr(torch.ops.torchsparse_rec, schema).default._schema.is_mutable:
        return "in place"
    return "no" if torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(_NAMESPACE + schema, "Autograd") else "yes"


# ---- The page -------------------------------------------------------------------------------------------------------


def captured(what: str, without: str) -> str:
    """Return the cell that says whether a CUDA graph can capture a call."""
    what = what.split(", which")[0]
    if not what:
        return "yes"
    return f"{without}; otherwise reads back {what}" if without else f"no: reads back {what}"


def operator_row(name: str, kernels: dict[str, list[str]], cuda: set[str]) -> str:
    """Return a public function's row, and note with each kernel of its that it is called by the function."""
    doc = inspect.getdoc(getattr(ops, name)) or ""
    called = called_by(name)
    mine = [x.removeprefix(_NAMESPACE) for x in sorted(called) if x.startswith(_NAMESPACE)]
    for kernel in mine:
        kernels[kernel].append(name)

    devices = "CPU" if set(mine) - cuda else "CPU, CUDA" if called else ""

    said = inherited(name, differentiable_in)
    known = {derivative(kernel) for kernel in mine}
    if said == "" and "yes" in known:
        raise ValueError(f"{name}: its docstring says that it is not differentiable, but {mine} are")
    gradient = "in place" if name.endswith("_") else said or ("yes" if said is None and "yes" in known else "no")

    reading = next((kernel for kernel in mine if kernel in READ_BACKS), None)
    if devices != "CPU, CUDA":
        graph = ""
    elif reading is not None:
        graph = captured(*READ_BACKS[reading])
    else:
        graph = captured(*(own_read_back(name, doc) or ("", "")))
    return f"| `{name}` | {summary(doc)} | {source(doc)} | {devices} | {gradient} | {graph} |"


def families() -> Iterator[tuple[ModuleType, list[str]]]:
    """Yield the modules of ``torchsparse_rec.ops``, by name, with their public functions in the order of the file."""
    public = {name: x for name, x in vars(ops).items() if not name.startswith("_") and inspect.isfunction(x)}
    for module in sorted({x.__module__ for x in public.values()}):
        order = sorted(
            (x.__code__.co_firstlineno, name) for name, x in public.items() if inspect.unwrap(x).__module__ == module
        )
        yield sys.modules[module], [name for _, name in order]


def title(module: ModuleType) -> str:
    """Return what a family is: the first sentence of its module, without the words before it."""
    text = re.sub(r"^Family `\w+`: ", "", summary(inspect.getdoc(module) or ""))
    return text[:1].upper() + text[1:]


def page() -> str:
    """Return the whole page."""
    cuda = on_cuda()
    kernels: dict[str, list[str]] = {name: [] for name in schemas()}
    lines = [_HEAD]
    for module, names in families():
        lines += [
            f"## {module.__name__.rsplit('.', 1)[1]}\n",
            f"{title(module)}.\n",
            "| operator | what it does | source | devices | gradient | CUDA graph |",
            "|---|---|---|---|---|---|",
            *(operator_row(name, kernels, cuda) for name in names),
            "",
        ]
    lines += [
        "## Kernels\n",
        "These are all schemas of `torch.ops.torchsparse_rec`, as compiled and exported programs show them. Called by:",
        "the public functions whose examples call the schema. The others are derivatives, or serve `nn` and `optim`.\n",
        "| schema | called by | devices | differentiable | CUDA graph |",
        "|---|---|---|---|---|",
    ]
    for name, users in kernels.items():
        graph = captured(*READ_BACKS.get(name, ("", ""))) if name in cuda else ""
        devices = "CPU, CUDA" if name in cuda else "CPU"
        lines.append(f"| `{name}` | {', '.join(f'`{x}`' for x in users)} | {devices} | {derivative(name)} | {graph} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # It says of compilation what matters to nobody here.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    PAGE.write_text(page())
