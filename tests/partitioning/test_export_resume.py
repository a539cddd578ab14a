"""Exports that were ended: the same call goes on where they stopped, with the same bits; one of other inputs begins anew."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.creation import steps
from featstore.creation.steps import Steps
from featstore.errors import BudgetError
from featstore.partitioning import export as exporting
from featstore.storage.builddir import BUILD_STATE
from featstore.storage.catalog import Catalog, read_catalog
from featstore.storage.rowfile import RowFile
from featstore.testing.faults import sweep
from featstore.topology import part as parts
from tests.graph.test_partadjacency import FORMS, NAME, N, make
from tests.support.programs import run_in_fork
from tests.support.refusing import refuses

MEMORY = "64MiB"


@pytest.fixture(scope="module", params=sorted(FORMS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A dataset with a stale feature, and its exported part 1; a test must not change them."""
    found = make(tmp_path_factory.mktemp("parts") / "g", request.param)
    with featstore.open(found.path, memory=MEMORY) as g:
        g.add_feature("z", found.x.numpy(), progress=False)
        g.aggregate("z", "mean", name="h", progress=False)
        g.remove_feature("z")
    found.whole = Path(f"{found.path}.1")
    export(found.path, found.whole)
    return found


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, and a record after each."""
    monkeypatch.setattr(steps, "CHECKPOINT_S", -1e9)
    monkeypatch.setattr(exporting, "_PIECE_NODES", 61)
    monkeypatch.setattr(parts, "_PIECE_NODES", 61)


def export(path: Path, target: Path, part: int = 1, **options: Any) -> None:
    with featstore.open(path, memory=MEMORY, backend="pread", threads=1) as g:
        featstore.export(g, target, part, progress=False, **options)


def contents(path: Path) -> dict[str, Any]:
    """All that an export writes, but for ids of files, and what carries them."""
    catalog = read_catalog(path)
    found: dict[str, Any] = {name: (path / name).read_bytes()[4096:] for name in catalog.files}
    found["fields"] = {key: (each.role, each.shape, each.dtype) for key, each in catalog.fields.items()}
    found["dataset"] = {key: value for key, value in catalog.dataset.items() if key != "id"}
    found["extra"] = _without_ids(catalog)
    found["names"] = sorted(os.listdir(path))
    return found


def _without_ids(catalog: Catalog) -> Any:
    """The entries of a catalog, with keys of fields in place of the ids of their files."""
    text = json.dumps(catalog.extra)
    for key, record in catalog.fields.items():
        text = text.replace(catalog.files[record.parts[0].file].rows_id, key)
    return json.loads(text)


class Interrupts:
    """Ctrl-C after each record but the first ``n``; counts the rows that are read meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.records, self.gathered = 0, 0, 0
        record, gather = Steps._record, RowFile.gather

        def recorded(*args: Any) -> None:
            record(*args)
            self.records += 1
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

        def gathered(file: RowFile, rows: Any, *args: Any, **more: Any) -> Any:
            self.gathered += len(rows)
            return gather(file, rows, *args, **more)

        monkeypatch.setattr(Steps, "_record", recorded)
        monkeypatch.setattr(RowFile, "gather", gathered)


@pytest.mark.usefixtures("_often")
def test_each_call_goes_on_where_the_last_one_stopped(
    made: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is ended at its first record, so one that began anew would never be done."""
    interrupts = Interrupts(monkeypatch)
    target, n_calls = tmp_path / "p", 0
    while not target.exists():
        n_calls += 1
        assert n_calls < 200, "no call gets farther than the one before"
        try:
            interrupts.left = 0
            export(made.path, target)
        except KeyboardInterrupt:
            (left,) = os.listdir(tmp_path)
            assert left.startswith("p.tmp-")
    assert n_calls == interrupts.records + 1
    assert n_calls >= 2 * (N // 61) + 10, "nodes, lists, rows, node data come in pieces"
    with featstore.open(target, memory=MEMORY) as g:
        assert interrupts.gathered == 2 * g.own_part.n_nodes, "no row is read again"
        assert g.stale_features == {"h": ["z"]}
        g.verify(progress=False)
    assert contents(target) == contents(made.whole)
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.usefixtures("_often")
def test_other_inputs_begin_anew(made: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another part, another form, parts that were made again; what the other left is removed."""
    interrupts, target = Interrupts(monkeypatch), tmp_path / "p"
    shutil.copytree(made.path, tmp_path / "g")
    other = "chunked" if read_catalog(made.path).topology == "csc" else "csc"

    def again() -> None:
        with featstore.open(tmp_path / "g", memory=MEMORY) as g:
            featstore.partition(g, 3, "ldg", g.node_data["train_idx"], hops=2, seed=5, name=NAME, progress=False)

    seen = []
    for before, options in ((None, {}), (None, {"part": 0}), (None, {"topology": other}), (again, {})):
        if before is not None:
            before()
        interrupts.left = 9
        with pytest.raises(KeyboardInterrupt):
            export(tmp_path / "g", target, **options)
        (left,) = [each for each in os.listdir(tmp_path) if each != "g"]
        seen.append(left)
    assert len(set(seen)) == 4
    interrupts.left = 1 << 30
    shutil.rmtree(tmp_path / "g")
    export(made.path, target)
    assert contents(target) == contents(made.whole)
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.usefixtures("_often")
def test_a_damaged_record_costs_time_alone(made: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts, target = Interrupts(monkeypatch), tmp_path / "p"
    for damaged, n_records in ((exporting._REACHED, 4), (BUILD_STATE, 20)):
        interrupts.left = n_records
        with pytest.raises(KeyboardInterrupt):
            export(made.path, target)
        (left,) = tmp_path.glob("p.tmp-*")
        data = bytearray((left / damaged).read_bytes())
        data[len(data) // 2] ^= 1
        (left / damaged).write_bytes(data)
        interrupts.left = 1 << 30
        export(made.path, target)
        assert contents(target) == contents(made.whole)
        shutil.rmtree(target)


def fail_each(folder: str) -> None:
    """Fail writes and flushes; in the child."""
    steps.CHECKPOINT_S = -1e9  # type: ignore[misc]
    made, gcs = make(Path(folder) / "g"), gc.isenabled()
    gc.disable()  # memory is free at once, not when a cycle of references is found
    try:
        for operation in ("write", "fsync", "rename"):
            for fault in sweep(folder, operation, "EIO", step=7):
                with featstore.open(made.path, memory=MEMORY, backend="pread", threads=1) as g:
                    with fault:
                        try:
                            featstore.export(g, Path(folder) / "p", 1, overwrite=True, progress=False)
                        except OSError:
                            assert not [each for each in os.listdir(folder) if each.startswith("p.tmp")]
                    assert not {"part", "parts", "export"} & set(g.memory_report()), operation
    finally:
        if gcs:
            gc.enable()


@pytest.mark.usefixtures("_program_server")
def test_a_failed_call_leaves_nothing_and_holds_nothing(tmp_path: Path) -> None:
    run_in_fork(fail_each, str(tmp_path))


def calls(folder: Path) -> Iterator[tuple[str, Callable[[featstore.OutOfCoreGraph], Any]]]:
    yield "part", lambda g: g.part(2, progress=False)
    yield "export", lambda g: featstore.export(g, folder / "p", 2, progress=False, overwrite=True)


@pytest.mark.parametrize("which", ["part", "export"])
def test_what_is_needed_suffices_at_once(made: SimpleNamespace, tmp_path: Path, which: str) -> None:
    """Whatever the graph's budget is: it is opened again with what the error names."""
    call, n_refused = dict(calls(tmp_path))[which], 0
    for n_bytes in np.geomspace(64 << 10, 40 << 20, 24).astype(int).tolist():
        try:
            g = featstore.open(made.path, memory=n_bytes)
        except BudgetError:
            continue
        needed = None
        with g:
            try:
                call(g)
            except BudgetError as error:
                needed = error.needed
        if needed is None:
            break
        n_refused += 1
        assert needed > n_bytes
        with featstore.open(made.path, memory=needed) as g:
            call(g)
            assert g.budget.peak <= needed
    assert n_refused >= 8


def test_a_living_export_is_left_alone(made: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that make the same part at the same place."""
    record = Steps._record

    def meanwhile(*args: Any) -> None:
        record(*args)
        monkeypatch.setattr(Steps, "_record", record)
        refuses(featstore.errors.BusyError, "building it", lambda: export(made.path, tmp_path / "p"))

    monkeypatch.setattr(Steps, "_record", meanwhile)
    export(made.path, tmp_path / "p")
    assert contents(tmp_path / "p") == contents(made.whole)
