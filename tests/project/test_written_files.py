"""Files that the library writes: each is made under a name that nobody else has, and then takes its own."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Files that may open one for writing under its own name, which truncates what is there and follows links.
IN_PLACE = {
    "torchsparse_rec/data/_prebatched_writer.py": "in a folder of tempfile.TemporaryDirectory",
    "torchsparse_rec/distributed/whole.py": "in a folder of tempfile.mkdtemp",
    "compat/goldens.py": "records the tests' golden vectors",
    "compat/_parity/column_sides.py": "in a folder of tempfile.TemporaryDirectory",
    "compat/checkpoints/written.py": "the file that whole_file() has made, which HDF5 opens by its name",
}


def writes(node: ast.AST) -> bool:
    """Say whether a node is a call that opens a file for writing in place."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    if name in ("write_text", "write_bytes", "copyfile", "tofile") and isinstance(node.func, ast.Attribute):
        return True
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    modes = [x.value for x in values if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    return name in ("open", "File", "fdopen") and any(set("wa+") & set(mode) and len(mode) <= 3 for mode in modes)


def test_no_file_is_written_in_place() -> None:
    found = set()
    for folder in ("torchsparse_rec", "compat"):
        for path in (ROOT / folder).rglob("*.py"):
            if not path.is_relative_to(ROOT / "torchsparse_rec/compat"):
                name = str(path.relative_to(ROOT))
                found |= {name for node in ast.walk(ast.parse(path.read_text())) if writes(node)}
    assert found == IN_PLACE.keys()
