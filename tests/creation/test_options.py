"""The options of a new dataset: the same at every door, checked once."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from featstore.adapters.datasets.tables import import_tables
from featstore.cli.create import CREATE_OPTIONS, add_create_options, create_options
from featstore.creation.cleaning import Cleaning
from featstore.creation.options import CreateOptions
from featstore.errors import BudgetError
from featstore.graph.dataset import OutOfCoreGraph

NAMES = [name for name in inspect.signature(CreateOptions.of).parameters if name != "path"]


@pytest.mark.parametrize("door", [OutOfCoreGraph.create, OutOfCoreGraph.from_edge_index, import_tables])
def test_every_door_has_the_options_with_their_defaults(door: Callable[..., Any]) -> None:
    own, common = inspect.signature(door).parameters, inspect.signature(CreateOptions.of).parameters
    assert [name for name in own if name in NAMES] == NAMES
    assert {name: own[name].default for name in NAMES} == {name: common[name].default for name in NAMES}
    assert {name: own[name].annotation for name in NAMES} == {name: common[name].annotation for name in NAMES}
    assert all(own[name].kind is inspect.Parameter.KEYWORD_ONLY for name in NAMES)


@pytest.mark.parametrize("door", [OutOfCoreGraph.create, OutOfCoreGraph.from_edge_index, import_tables])
def test_no_door_mixes_them_up(door: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on under its own name."""
    seen: list[inspect.BoundArguments] = []
    signature = inspect.signature(CreateOptions.of)

    def bound(*given: Any, **named: Any) -> CreateOptions:
        seen.append(signature.bind(*given, **named))
        raise InterruptedError

    monkeypatch.setattr(CreateOptions, "of", bound)
    options = {name: object() for name in NAMES}
    needed = {
        name: None
        for name, each in inspect.signature(door).parameters.items()
        if each.default is each.empty and name not in ("path", "cls")
    }
    with pytest.raises(InterruptedError):
        door(tmp_path / "g", **needed, **options)
    assert seen[0].arguments == {"path": tmp_path / "g"} | options


def test_the_command_line_has_them_all() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    add_create_options(parser)
    assert {*CREATE_OPTIONS, "progress"} == set(NAMES)
    assert create_options(parser.parse_args([])) == {
        name: [] if name == "stripes" else each.default
        for name, each in inspect.signature(CreateOptions.of).parameters.items()
        if name != "path"
    }
    words = ["--coalesce", "--topology", "chunked", "--stripe", "a", "--stripe", "b", "--memory", "1MiB", "--json"]
    given = create_options(parser.parse_args(words))
    assert (given["coalesce"], given["to_undirected"], given["progress"]) == (True, False, False)
    assert (given["topology"], given["stripes"], given["memory"]) == ("chunked", ["a", "b"], 1 << 20)


def test_what_is_made_of_them(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    options = CreateOptions.of(
        tmp_path / "g", topology="chunked", chunk_bytes="1MiB", stripes=[tmp_path / "s"], memory="9MiB", progress=False
    )
    assert (options.path, options.memory, options.work_bytes) == (str(tmp_path / "g"), "9MiB", 8 << 20)
    assert (options.form.chunk_bytes, options.form.stripes) == (1 << 20, (str(tmp_path / "s"),))
    assert (options.cleaning, options.overwrite, options.progress) == (Cleaning(False, False, False), False, False)
    with pytest.raises(BudgetError, match=r"with chunks of 1\.00 MiB needs more memory than 9437183 bytes") as caught:
        CreateOptions.of(tmp_path / "g", topology="chunked", memory=(9 << 20) - 1)
    assert caught.value.needed == 9 << 20


@pytest.mark.parametrize("name", ["coalesce", "remove_self_loops", "to_undirected", "overwrite", "progress"])
def test_flags_are_true_or_false(tmp_path: Path, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be True or False, not 1$"):
        CreateOptions.of(tmp_path / "g", **{name: 1})


def test_an_option_that_there_is_not_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    given = CreateOptions.given(tmp_path / "g", {"overwrite": True})
    assert given.overwrite
    with pytest.raises(
        TypeError, match=r"no option 'zzz'; an importer takes those of OutOfCoreGraph.create: coalesce, .*, memory"
    ):
        CreateOptions.given(tmp_path / "g", {"zzz": 3})
