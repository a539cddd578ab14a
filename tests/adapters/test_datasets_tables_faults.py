"""Imports of tables that the drive fails: the old dataset stays, whole, or the new one is there; nothing half-made is left."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import featstore
from featstore.adapters.datasets.tables import EdgeTable, NodeTable, import_tables
from featstore.adapters.datasets.tables import importer as module
from featstore.errors import CommittedError
from featstore.idmaps.numbering import Room
from featstore.testing.faults import run_in_child, sweep


def write_tables(folder: Path) -> None:
    (folder / "papers.csv").write_text("doi,w,split\n" + "".join(f"p{i},{i},train\n" for i in range(30)))
    (folder / "cites.csv").write_text("from,to\n" + "".join(f"p{i},p{i * 7 % 30}\n" for i in range(30)))
    (folder / "writes.csv").write_text("who,what\n" + "".join(f"{i * 1000},p{i % 30}\n" for i in range(1100)))


def make(folder: Path) -> None:
    import_tables(
        folder / "g",
        {"paper": NodeTable(folder / "papers.csv", "doi", {"x": "w"}, split="split")},
        {
            ("paper", "cites", "paper"): EdgeTable(folder / "cites.csv", "from", "to"),
            ("author", "writes", "paper"): EdgeTable(folder / "writes.csv", "who", "what"),
        },
        memory="16MiB",
        overwrite=True,
        progress=False,
    )


def is_new(folder: Path) -> bool:
    """Whether the dataset is the imported one; any other than that and the old one is an error."""
    with featstore.open(folder / "g", memory="64MiB", backend="pread") as g:
        g.verify(progress=False)
        if g.num_nodes == 1:
            return False
        assert g.ids("paper").encode(["p7", "p29"]).tolist() == [7, 29]
        assert g.ids("author").decode([0, 1099]).tolist() == [0, 1_099_000]
        assert g.features["paper/x"][:].tolist() == list(range(30))
    return True


def campaign(text: str, call: str, code: str, through_files: bool, step: int) -> None:
    """Fail such calls of an import, one by one, each ``step``-th."""
    folder = Path(text)
    write_tables(folder)
    if through_files:
        module.Room = lambda n_bytes: Room(20_000)  # type: ignore[assignment,misc]
    n_fired = 0
    made = True
    for fault in sweep(folder, call, code, step=step):
        if made:
            featstore.OutOfCoreGraph.create(folder / "g", [0, 0], [], overwrite=True, progress=False).close()
        with fault:
            try:
                make(folder)
                made = True
            except CommittedError:
                made = True
            except OSError as error:
                made = False
                assert error.errno == getattr(errno, code), error
        n_fired += fault.fired
        assert is_new(folder) == made
        left = {entry.name for entry in folder.iterdir()} - {"g", "papers.csv", "cites.csv", "writes.csv"}
        if code == "ENOSPC" and left:  # what was finished stays for the next call, and nothing else
            assert len(left) == 1
            made = make(folder) is None
            left = {entry.name for entry in folder.iterdir()} - {"g", "papers.csv", "cites.csv", "writes.csv"}
            assert is_new(folder)
        assert not left
    assert n_fired >= 3


@pytest.mark.parametrize(
    ("call", "code", "through_files", "step"),
    [
        ("fsync", "EIO", False, 17),
        ("write", "ENOSPC", True, 211),
        *(
            pytest.param(*line, 1, marks=pytest.mark.stress)
            for line in (("fsync", "EIO", False), ("rename", "EIO", False), ("write", "ENOSPC", False), ("write", "ENOSPC", True))
        ),
    ],
)
def test_calls_that_fail(tmp_path: Path, call: str, code: str, through_files: bool, step: int) -> None:
    run_in_child(campaign, str(tmp_path), call, code, through_files, step, faults=True)
