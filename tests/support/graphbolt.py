"""GraphBolt for tests: a stand-in with the classes that features need; what is installed, also without its compiled library."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["library_of", "load", "stand_in"]


class Feature:
    """GraphBolt's base class, with the methods that releases from 2.4 on document."""

    def read(self, ids: Any = None) -> Any:
        raise NotImplementedError

    def read_async(self, ids: Any) -> Any:
        raise NotImplementedError

    def read_async_num_stages(self, ids_device: Any) -> int:
        raise NotImplementedError

    def size(self) -> Any:
        raise NotImplementedError

    def count(self) -> int:
        raise NotImplementedError

    def metadata(self) -> dict[str, Any]:
        return {}

    def update(self, value: Any, ids: Any = None) -> None:
        raise NotImplementedError


class BasicFeatureStore:
    """GraphBolt's store of features by their keys."""

    def __init__(self, features: dict[tuple[str, str | None, str], Any]) -> None:
        self._features = features

    def __getattr__(self, name: str) -> Any:
        return lambda domain, kind, feature, *rest: getattr(self._features[domain, kind, feature], name)(*rest)


def stand_in() -> dict[str, ModuleType]:
    """Make the modules that ``import dgl.graphbolt`` finds in ``sys.modules``."""
    dgl, gb = ModuleType("dgl"), ModuleType("dgl.graphbolt")
    dgl.graphbolt, gb.Feature, gb.BasicFeatureStore = gb, Feature, BasicFeatureStore  # type: ignore[attr-defined]
    return {"dgl": dgl, "dgl.graphbolt": gb}


def library_of() -> Path | None:
    """Return where GraphBolt's compiled library for this torch is, or would be; None if DGL is not installed."""
    found = importlib.util.find_spec("dgl")
    if found is None or found.origin is None:
        return None
    release = torch.__version__.partition("+")[0]
    return Path(found.origin).parent / "graphbolt" / f"libgraphbolt_pytorch_{release}.so"


def load(which: str) -> Any:
    """Import GraphBolt in a process of its own: a ``"stand-in"``, or what is installed, ``"python"`` without its library.

    GraphBolt loads its library after all of its Python. Where there is none for this torch, that last step is left out: features,
    stores of features, item samplers and pipelines are Python, and drawing neighbours is not.
    """
    if which == "stand-in":
        sys.modules.update(stand_in())
    else:
        warnings.simplefilter("ignore")  # of an old release's imports
        os.environ["DGLBACKEND"] = "pytorch"  # or it writes into the user's home
        if not hasattr(torch.compiler, "is_compiling"):  # torch 2.2, which alone PyPI's last GraphBolt has a library for
            torch.compiler.is_compiling = lambda: False
        if which == "python":
            exists, library = os.path.exists, library_of()
            os.path.exists = lambda path: str(path) == str(library) or exists(path)
            torch.classes.load_library = lambda path: None
    return importlib.import_module("dgl.graphbolt")
