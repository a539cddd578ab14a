"""Datasets made without being opened, by the options that users give."""

from __future__ import annotations

import os
from typing import Any

from featstore.creation import build, typed
from featstore.creation.options import CreateOptions


def create(path: str | os.PathLike[str], *given: Any, edge_features: Any = None, **options: Any) -> None:
    build.create(CreateOptions.of(path, **options), *given, edge_features=edge_features)


def from_edge_index(path: str | os.PathLike[str], *given: Any, edge_features: Any = None, **options: Any) -> None:
    build.from_edge_index(CreateOptions.of(path, **options), *given, edge_features=edge_features)


def create_typed(path: str | os.PathLike[str], nodes: Any, edges: Any, **options: Any) -> None:
    typed.create_typed(CreateOptions.of(path, **options), nodes, edges)
