"""Real graphs for benchmarks, from a folder that ``--graphs`` names: ``graphs.py`` loads them, a ``.npz`` file is each."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

__all__ = ["loading", "wanted"]


def loading(folder: Path | None) -> ModuleType | None:
    """Return the folder's module ``graphs``; None where no folder was given.

    Raises
    ------
    SystemExit
        The folder has no ``graphs.py``.
    """
    if folder is None:
        return None
    if not (folder / "graphs.py").exists():
        raise SystemExit(f"--graphs {folder}: the folder has no graphs.py")
    sys.path.insert(0, str(folder.absolute()))
    import graphs

    return graphs


def wanted(folder: Path | None, name: str, what: str) -> ModuleType:
    """Return the module ``graphs`` of a folder that has the graph ``name``, as ``what`` asks for; else SystemExit."""
    module = loading(folder)
    if module is None or folder is None:
        raise SystemExit(f"{what} needs the graph {name}: give --graphs DIR, a folder with graphs.py and {name}.npz")
    if not (folder / f"{name}.npz").exists():
        raise SystemExit(f"{what} needs the graph {name}: --graphs {folder} has no {name}.npz")
    return module
