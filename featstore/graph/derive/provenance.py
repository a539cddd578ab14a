"""Inputs of derived features, as the catalog records them; features whose inputs were changed since are stale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from featstore.graph.snapshot import fingerprint_of
from featstore.storage.catalog import Catalog
from featstore.topology.types import qualified

__all__ = ["DERIVED", "copied_provenance", "provenance", "stale_features"]

DERIVED: Final = "derived/"  # prefix of the keys of entries, before the key of the feature
_ADJACENCY: Final = "adjacency"


def provenance(catalog: Catalog, made: str, uses: Iterable[str]) -> dict[str, Any]:
    """Describe a feature that was made of the adjacency and of other fields, for the catalog.

    ``made`` is the id of the feature's file, ``uses`` are the keys of the fields.
    """
    ids = fingerprint_of(catalog)
    return {"made": made, "of": {key: ids[key] for key in sorted({*catalog.adjacency(), *uses})}}


def stale_features(catalog: Catalog) -> dict[str, list[str]]:
    """List derived features of which an input was changed or removed since, and these inputs, by their names in the graph.

    A feature that was replaced or changed itself is derived no more.
    """
    found: dict[str, list[str]] = {}
    ids, adjacency = fingerprint_of(catalog), catalog.adjacency()
    for entry_key, entry in sorted(catalog.extra.items()):
        key, of = entry_key.removeprefix(DERIVED), entry.get("of")
        if entry_key == key or ids.get(key) != entry.get("made") or not isinstance(of, dict):
            continue
        changed = [each for each, made_of in of.items() if ids.get(each) != made_of]
        names = [_ADJACENCY] if any(each in adjacency or each.startswith("edge/_,_,_/") for each in changed) else []
        names += [_name(each) for each in changed if not each.startswith("edge/_,_,_/")]
        if names:
            found[_name(key)] = names
    return found


def copied_provenance(catalog: Catalog, ids: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Describe the derived features of a dataset for another one, which has its fields as files of these ids, by key.

    The entries are those of the other one's catalog: what is stale here is stale there.
    """
    found, now = {}, fingerprint_of(catalog)
    for entry_key, entry in catalog.extra.items():
        key, of = entry_key.removeprefix(DERIVED), entry.get("of")
        if entry_key == key or key not in ids or now.get(key) != entry.get("made") or not isinstance(of, dict):
            continue
        # The id of an input that has changed since stays: no field has it.
        copied = {each: ids.get(each, made_of) if now.get(each) == made_of else made_of for each, made_of in of.items()}
        found[entry_key] = {**entry, "made": ids[key], "of": copied}
    return found


def _name(key: str) -> str:
    """Name a field in the graph, given its key."""
    _, of, name = key.split("/", 2)
    return qualified(of, name)
