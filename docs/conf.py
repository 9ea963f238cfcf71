"""
What Sphinx makes of the repository's pages and docstrings: the site of ``make docs``, in build/site.

The pages stay plain Markdown, which GitHub shows with the same links. The folder of sources is the repository.
README.md is its first page, and NAVIGATION below is the whole table of contents. This program writes the reference's
pages, from the public names of each package.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.nodes import make_refnode

import torchsparse_rec
import torchsparse_rec.compat.tensorflow
from torchsparse_rec.nn._owner import OF_THE_LIBRARY

# Keras's backend is chosen when it is first imported.
os.environ["KERAS_BACKEND"] = "torch"

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs/reference"

project = "torchsparse_rec"
version = release = torchsparse_rec.__version__
html_title = f"{project} {version}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

PACKAGES = [
    *("torchsparse_rec", "torchsparse_rec.ops", "torchsparse_rec.nn", "torchsparse_rec.variable"),
    "torchsparse_rec.checkpoint",
    *("torchsparse_rec.initializers", "torchsparse_rec.optim", "torchsparse_rec.jagged", "torchsparse_rec.features"),
    *("torchsparse_rec.data", "torchsparse_rec.profiling", "torchsparse_rec.distributed", "torchsparse_rec.serving"),
    *("torchsparse_rec.keras", "torchsparse_rec.keras.optimizers"),
    *("torchsparse_rec.compat.tensorflow", "torchsparse_rec.compat.torchrec", "torchsparse_rec.compat.keras"),
    "torchsparse_rec.compat.converters",
]
NAVIGATION = {
    "Getting started": ["docs/tutorials/click_log", "docs/choices"],
    "Tutorials": [
        f"docs/tutorials/{name}"
        for name in ("pytorch", "tensorflow", "feature_columns", "torchrec", "deeprec", "cluster")
    ],
    "Guides": [
        f"docs/{name}"
        for name in (
            *(
                "embeddings",
                "optimizers",
                "jagged",
                "features",
                "embedding_variable",
                "checkpoints",
                "distributed",
                "data",
                "profiling",
                "serving",
            ),
            *("cuda", "tensorflow", "keras", "clients", "zoo", "ncf", "retrieval", "wide_deep", "dlrm"),
        )
    ],
    "Reference": ["docs/operators", *(f"docs/reference/{name}" for name in PACKAGES)],
    "Project": [
        *("docs/design", "compat/PARITY", "benchmarks/results/README", "benchmarks/results/scaling/README"),
        *("CONTRIBUTING", "docs/developing", "SECURITY", "CHANGELOG"),
    ],
}
root_doc = "README"
# A page of docs/ that NAVIGATION does not name is an error: it is in no table of contents.
include_patterns = ["docs/**", *(f"{page}.md" for page in NAVIGATION["Project"]), "README.md"]
exclude_patterns = [".*", "build", "csrc", "tests", "torchsparse_rec", "**/__pycache__"]

# ---- Markdown and docstrings ----------------------------------------------------------------------------------------

myst_heading_anchors = 3
# A link is broken if nothing answers to it: with -W that is an error, in pages and in docstrings.
nitpicky = True
# Other programs' names have no page here.
_OTHERS = ("torch", "tf", "tensorflow", "numpy", "keras", "pathlib")
nitpick_ignore_regex = [("py:.*", rf"{name}\..*") for name in _OTHERS]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
add_module_names = False
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
# Arguments that share a description stay together.
napoleon_use_param = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# ---- Looks ----------------------------------------------------------------------------------------------------------

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


# ---- The reference --------------------------------------------------------------------------------------------------

# A property's docstring is prose: what stands before its first colon is no type.
GoogleDocstring._parse_attribute_docstring = GoogleDocstring._consume_to_end


def title(text: str, underline: str) -> str:
    """Return a heading of reStructuredText."""
    return f"{text}\n{underline * len(text)}\n"


def public(module: ModuleType) -> dict[str, Any]:
    """Return the functions and classes that a module makes public, of ``__all__`` if it has one, in its order."""
    others = tuple(name for name in PACKAGES if name.startswith(f"{module.__name__}."))
    given = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    return {
        name: x
        for name, x in vars(module).items()
        if name in given and callable(x) and is_ours(x) and not str(x.__module__).startswith(others)
    }


def is_ours(value: Any) -> bool:
    """Say whether a function or class is defined in this library."""
    return str(value.__module__).startswith("torchsparse_rec")


def common_base(values: Iterable[Any]) -> type:
    """Return the class of ours from which all classes among the values inherit: the nearest."""
    classes = [x for x in values if inspect.isclass(x)]
    return next(x for x in classes[0].__mro__ if is_ours(x) and all(issubclass(y, x) for y in classes))


def sections(package: ModuleType) -> Iterator[tuple[str, ModuleType, list[str]]]:
    """Yield the sections of a package's page: heading, module, and the names that are shown of it."""
    names = public(package)
    if package is torchsparse_rec.ops:
        for family in sorted({x.__module__ for x in names.values()}):
            yield family.rsplit(".", 1)[1], package, [name for name, x in names.items() if x.__module__ == family]
        return
    if package is torchsparse_rec.optim:
        base = common_base(names.values())
        yield "All optimizers", sys.modules[base.__module__], [base.__name__]
    yield "", package, list(names)
    if package is torchsparse_rec.compat.tensorflow:
        for name, module in sorted(vars(package).items()):
            if inspect.ismodule(module) and not name.startswith("_"):
                yield f"tf.{name}", module, [x for x in public(module) if x not in names]


def described(name: str, value: Any) -> str:
    """Return the directive that shows one name of the current module."""
    if not inspect.isclass(value):
        return f".. autofunction:: {name}\n"
    kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
    # What is inherited from classes that are not ours, or that the page shows, is not told again.
    base = common_base(public(torchsparse_rec.optim).values())
    others = ", ".join(x.__name__ for x in value.__mro__ if not is_ours(x) or x is base)
    return f".. {kind}:: {name}\n   :members:\n   :inherited-members: {others}\n"


def reference_page(package: ModuleType) -> str:
    """Return a package's page."""
    shown = package.__name__.removeprefix("torchsparse_rec.")
    lines = [title(shown, "="), f".. automodule:: {package.__name__}\n"]
    for heading, module, names in sections(package):
        lines += [title(heading, "-")] if heading else []
        lines += [f".. currentmodule:: {module.__name__}\n", *(described(x, getattr(module, x)) for x in names)]
    return "\n".join(lines)


def write_reference(app: Sphinx, config: Any) -> None:
    """Write the reference's pages; those that are as they were keep their time, so that Sphinx need not read them."""
    REFERENCE.mkdir(exist_ok=True)
    pages = {REFERENCE / f"{name}.rst": reference_page(importlib.import_module(name)) for name in PACKAGES}
    for path in set(REFERENCE.glob("*.rst")) - set(pages):
        path.unlink()
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def mend_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Write the defaults that are made anew for each object as Python can read them."""
    return signature and re.sub(r"<factory>|<(\w+\.\w+): [^>]+>", lambda x: x[1] or "...", signature), returns


def skip(app: Sphinx, what: str, name: str, value: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out the methods of modules that other packages of the library use."""
    return True if what == "class" and name in OF_THE_LIBRARY else None


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Element) -> nodes.Element | None:
    """Find what a docstring or a signature names without its module: on another page, or in the code alone."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].lstrip(".")
    is_type = "refexplicit" not in node or "._" in target
    last = target.rsplit(".", 1)[-1]
    for name, found in shown_names(env).get(last, ()):
        if is_type or name.endswith(f".{target}"):
            return make_refnode(app.builder, env.docname, found.docname, found.node_id, text)
    return text if is_type else None  # types are as the code has them


@lru_cache
def shown_names(env: BuildEnvironment) -> dict[str, list[tuple[str, Any]]]:
    """Return what the reference shows, full names and places, by the last part of the name."""
    places: dict[str, list[tuple[str, Any]]] = {}
    for name, found in env.get_domain("py").objects.items():
        places.setdefault(name.rsplit(".", 1)[-1], []).append((name, found))
    return places


# ---- Pages ----------------------------------------------------------------------------------------------------------


def prepare(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the table of contents to the first page, and say links as a site does."""
    folder = (ROOT / page).parent

    def said(link: re.Match[str]) -> str:
        # A folder has no page; a page goes by its title, not its file.
        if (folder / link[2]).is_dir():
            return link[1]
        return f"[]({link[2]})" if link[1].endswith(".md") else link[0]

    source[0] = re.sub(r"(?<!!)\[([^]]+)\]\(([^)#:\s]+)\)", said, source[0])
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            if pages:
                listed = "\n".join(pages)
                source[0] += f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n:maxdepth: 1\n\n{listed}\n```\n"


def link_names(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Link what pages name in code, as ``nn.EmbeddingBag``, to its place in the reference."""
    objects = app.env.get_domain("py").objects
    package = "torchsparse_rec.ops." if page == "docs/operators" else "torchsparse_rec."
    for literal in list(tree.findall(nodes.literal)):
        text = literal.astext()
        found = objects.get(package + text) or objects.get(text)
        # A word alone is an argument more often than a module.
        if (
            found
            and ("." in text or package == "torchsparse_rec.ops.")
            and found.docname != page
            and not isinstance(literal.parent, nodes.reference)
        ):
            address = f"{app.builder.get_relative_uri(page, found.docname)}#{found.node_id}"
            literal.replace_self(nodes.reference("", "", literal.deepcopy(), internal=True, refuri=address))


def write_index(app: Sphinx, failure: Exception | None) -> None:
    """Send who asks for the folder to the first page."""
    if failure is None:
        address = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(f"<!doctype html><title>{project}</title>{address}\n")


def setup(app: Sphinx) -> None:
    """Connect all this to Sphinx."""
    warnings.simplefilter("ignore", DeprecationWarning)
    app.connect("config-inited", write_reference)
    app.connect("autodoc-process-signature", mend_signature)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", resolve)
    app.connect("source-read", prepare)
    app.connect("doctree-resolved", link_names)
    app.connect("build-finished", write_index)
