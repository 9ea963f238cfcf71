"""Packages that an extra of ours installs: imported when a function first needs them."""

from __future__ import annotations

import importlib
import re
from typing import Any

__all__ = ["extra_module", "extras", "module_of_repository"]


def extra_module(module: str, extra: str, user: str) -> Any:
    """
    Import a module of a package that an extra of ours installs.

    Args:
        module: the name of the module.
        extra: the name of the extra that installs it.
        user: the feature that needs the module, for the error.

    Raises:
        ImportError: the package is not installed; the error names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{user} needs {package}: {_how_to_install(extra)}") from error


def module_of_repository(module: str, user: str) -> Any:
    """Import a module of the repository that is not installed; ``ImportError`` says what needs it, and where it is."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or "?"):  # what the module itself imports is missing
            raise
        raise ImportError(f"{user} needs {module} of the repository: run it in the folder of a checkout") from None


def extras() -> dict[str, str]:
    """
    Return which packages of each extra are installed; of an extra that lacks one, also how to install it.

    The extras and their packages come from the installed distribution's metadata: without any, there are none.

    Example:
        >>> print(extras()["arrow"])
        pyarrow ...
    """
    from importlib import metadata

    packages: dict[str, list[str]] = {}
    missing = set()
    try:
        requirements = metadata.requires("torchsparse_rec") or []
    except metadata.PackageNotFoundError:
        return {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?.*;.*extra == .(\w+)", requirement)
        if match is None:  # of no extra
            continue
        package, least, extra = match.groups()
        try:
            version = metadata.version(package)
            found = f"{package} {version}"
            if least is not None and _numbers(version) < _numbers(least):
                missing.add(extra)
                found += f" (at least {least} is needed)"
        except metadata.PackageNotFoundError:
            missing.add(extra)
            found = f"no {package}"
        packages.setdefault(extra, []).append(found)
    return {
        extra: ", ".join(found) + (f": {_how_to_install(extra)}" if extra in missing else "")
        for extra, found in packages.items()
    }


def _numbers(version: str) -> list[int]:
    """Return the numbers of a version's release, such as 2.13.0 of 2.13.0+cu130."""
    release = re.match(r"[\d.]*", version)
    assert release is not None
    return [int(number) for number in release[0].split(".") if number]


def _how_to_install(extra: str) -> str:
    return f"pip install 'torchsparse_rec[{extra}]'"
