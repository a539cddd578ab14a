"""Operations of the library, each as what is there before, a call, and what is there after: the table of all campaigns.

:data:`SCENARIOS` has a row for every call that changes, makes or reads what is on the drive. A campaign breaks the call in its
way (a kill, a power cut, a failing call), and :class:`Prepared` says what is there then: the old state or the new one, whole.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.adapters import datasets
from featstore.adapters.datasets import tables
from featstore.adapters.datasets.tables import importer
from featstore.idmaps.idmap import maps_of
from featstore.idmaps.numbering import Room
from featstore.sampling import listweights
from featstore.sampling.batch import Block
from featstore.storage.catalog import read_catalog
from featstore.storage.lock import OPENING_LOCK, READERS_LOCK, WRITER_LOCK
from featstore.storage.stripes import mark_of
from featstore.storage.update import Update
from tests.support.imports import Folder
from tests.support.loaders import make_loader

LOCKS = {OPENING_LOCK, READERS_LOCK, WRITER_LOCK}
KEPT = {"g", "p", "drive", "in", "out"}  # entries of a root; all others are leftovers
CACHE_BYTES = "20KB"
N = {"old": 700, "new": 800}
APPENDED = 7
TYPES = ("a", "b")
KEY = "drive/speed"
FULL, MEMORY, ENDED = "ENOSPC", "ENOMEM", "Ctrl-C"
IN_CHUNKS = {"topology": "chunked", "chunk_bytes": 4096}


def arrays(which: str) -> tuple[np.ndarray, np.ndarray]:
    """Edges and features of one of two datasets, which differ in everything."""
    rng = np.random.default_rng(N[which])
    return rng.integers(0, N[which], (2, 5000)), rng.standard_normal((N[which], 5), np.float32)


def labels(which: str) -> np.ndarray:
    return np.arange(N[which]) * 3 + N[which]


def appended() -> tuple[np.ndarray, np.ndarray]:
    """Rows and labels of nodes that are appended."""
    return np.arange(5 * APPENDED, dtype=np.float32).reshape(APPENDED, 5), np.arange(APPENDED) + 9000


def make(path: Path, which: str, overwrite: bool = False, **form: Any) -> None:
    edges, x = arrays(which)
    order = np.lexsort((edges[0], edges[1]))
    indptr = np.searchsorted(edges[1][order], np.arange(N[which] + 1))
    featstore.OutOfCoreGraph.create(
        path, indptr, edges[0][order], {"x": x}, {"y": labels(which)}, overwrite=overwrite, memory="9MiB", progress=False, **form
    ).close()


def make_types(root: Path) -> None:
    """A dataset of two types, whose features share a file: nodes of one have ids behind those of the other."""
    edges, x = arrays("old")
    nodes = {name: featstore.Nodes(N["old"], {"x": x}, {"y": labels("old")}) for name in TYPES}
    pairs = {("b", "to", "a"): edges, ("a", "to", "b"): edges}
    featstore.OutOfCoreGraph.create(root / "g", nodes=nodes, edges=pairs, memory="9MiB", progress=False).close()


def append_to_a_type(root: Path) -> None:
    with opened(root) as g:
        rows, y = appended()
        g.append_nodes(APPENDED, {"x": rows}, {"y": y}, type="a", progress=False)


def rows_of_w() -> np.ndarray:
    """Return a feature of the old dataset of which no two rows are the same."""
    return np.random.default_rng(1).standard_normal((N["old"], 5), dtype=np.float32)


def add_rows(root: Path) -> None:
    """The old dataset, with rows that are all different."""
    make(root / "g", "old")
    with opened(root) as g:
        g.add_feature("w", rows_of_w(), progress=False)


def make_from_edges(path: Path, which: str, overwrite: bool = False) -> None:
    edges, x = arrays(which)
    nodes = {"features": {"x": x}, "node_data": {"y": labels(which)}, "edge_features": {"w": np.arange(5000, dtype=np.int32)}}
    featstore.OutOfCoreGraph.from_edge_index(
        path, edges, N[which], **nodes, overwrite=overwrite, memory="8MiB", progress=False
    ).close()


def opened(root: Path) -> featstore.OutOfCoreGraph:
    return featstore.open(root / "g", memory="16MiB", backend="pread", threads=1)


def save(root: Path, seed: int) -> None:
    with opened(root) as g:
        g.cache_neighbors(CACHE_BYTES, "random", seed=seed, save=True)


def convert(root: Path, to: str) -> None:
    form = {"csc": {"topology": "csc"}, "chunked": IN_CHUNKS, "stripes": {**IN_CHUNKS, "stripes": [root / "drive"]}}[to]
    featstore.convert(root / "g", **form, memory="64MiB", progress=False)


def keep(root: Path, value: int) -> None:
    """As measured rates are kept."""
    with Update(root / "g") as update:
        update.add([], extra={KEY: {"value": value}})
        update.commit()


def sweep_as_a_writer(root: Path) -> None:
    """Commit to what is there, as the next writer does, which sweeps what a dead one left."""
    if os.path.lexists(root / "g"):
        keep(root, 2)
    if os.path.lexists(root / "out" / "catalog.lmdb"):
        with Update(root / "out"):
            pass


def change(root: Path, name: str) -> None:
    """Change the dataset in one commit."""
    with opened(root) as g:
        if name == "add":
            g.add_feature("z", np.arange(5.0 * g.num_nodes).reshape(-1, 5).astype(np.float32), progress=False)
        elif name == "add again":
            z = np.arange(7.0 * g.num_nodes).reshape(-1, 7).astype(np.float32)
            g.add_feature("z", z, overwrite=True, progress=False)
        elif name == "remove":
            g.remove_feature("z")
        elif name == "append":
            rows, y = appended()
            g.append_nodes(APPENDED, {"x": rows}, {"y": y}, progress=False)
        elif name == "add data":
            g.add_data("d", np.zeros(g.num_nodes, np.float32), progress=False)
        elif name == "update data":
            g.update_data("d", [1, 600], np.ones(2, np.float32), progress=False)
        elif name == "remove data":
            g.remove_data("d")
        else:
            g.features["z"].update(UPDATES[name][0], UPDATES[name][1], progress=False)


UPDATES: dict[str, Any] = {  # a few pages; more, into which those are merged; so many that the file is written anew
    "update": ([1, 600], -np.arange(10, dtype=np.float32).reshape(2, 5)),
    "merge": (slice(200, 220), 0.5 + np.arange(100, dtype=np.float32).reshape(20, 5)),
    "anew": (slice(None, None, 2), 0.25 + np.arange(1750, dtype=np.float32).reshape(350, 5)),
}


def changed(*names: str) -> Callable[[Path], None]:
    """The dataset after these changes of the old one."""

    def make_it(root: Path) -> None:
        make(root / "g", "old")
        for name in names:
            change(root, name)

    return make_it


def pack(root: Path, seed: int, overwrite: bool) -> None:
    with opened(root) as g:
        sampler = featstore.NeighborSampler(g, fanouts=[3], seed=seed)
        ids = np.arange(0, 600, 3)
        featstore.sample_offline(
            g, sampler, ids, 50, seed=seed, path=root / "p", overwrite=overwrite, threads=1, progress=False
        ).close()


def layout(root: Path) -> None:
    with opened(root) as g:
        featstore.Loader(g, features="x", labels="y", strategy=featstore.Packed(root / "p", cache=0.1)).close()


def import_folder(root: Path) -> None:
    datasets.ogb(root / "in", root / "g", overwrite=True, memory="9MiB", progress=False)


def import_tables(root: Path, room_bytes: int | None = None) -> None:
    """Import tables; with little room their keys go through files."""
    if room_bytes is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importer, "Room", lambda n_bytes: Room(room_bytes))
            return import_tables(root)
    nodes = tables.NodeTable(root / "in" / "nodes.csv", "name", {"x": ["x"]}, {"y": "y"})
    edges = tables.EdgeTable(root / "in" / "edges.csv", "from", "to")
    tables.import_tables(root / "g", nodes, edges, overwrite=True, memory="16MiB", progress=False)
    return None


def export(root: Path, form: str) -> None:
    with opened(root) as g:
        datasets.export(g, root / "out", form, memory="8MiB", progress=False)


def partition(root: Path, hops: int | None = None) -> None:
    with opened(root) as g:
        featstore.partition(g, 3, "ldg", np.arange(0, N["old"], 7), hops=hops, progress=False)


def export_part(root: Path, part: int) -> None:
    with featstore.open(root / "g", memory="20MiB", backend="pread", threads=1) as g:
        featstore.export(g, root / "out", part, overwrite=True, progress=False)


def aggregate(root: Path) -> None:
    with opened(root) as g:
        g.aggregate("w", "mean", hops=2, name="m", progress=False)


def infer(root: Path, resume: str | None) -> None:
    with opened(root) as g:
        layers = [featstore.Aggregate(_half), _add_one, featstore.Aggregate(_half)]
        featstore.infer(g, layers, "w", "h", resume=resume, progress=False)


def _half(h: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return (h + mean) / 2


def _add_one(h: torch.Tensor, block: Block) -> torch.Tensor:
    return h[: block.n_dst] + 1


def epoch(root: Path, strategy: str = "superbatch", **options: Any) -> None:
    """Load an epoch by way of run files; its batches must be right."""
    with opened(root) as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        options = {"strategy": strategy, "length": 4, "cache": 0.1, "run_dir": root / "runs", **options}
        with make_loader(g, sampler, np.arange(0, 600, 2), 30, features="w", labels=None, **options) as loader:
            for batch in loader:
                assert np.array_equal(batch.x.numpy(), rows_of_w()[batch.input_ids.numpy()])


def weigh(root: Path, *, fit: bool) -> list[Any]:
    """Load an epoch that draws by weights and return the draws.

    The weights fit the memory, or their alias tables are in a run file, which goes with the sampler.
    """
    found = []
    with pytest.MonkeyPatch.context() as patch, opened(root) as g, warnings.catch_warnings():
        patch.setattr(listweights, "_KEPT_FRACTION", int(fit))
        warnings.filterwarnings("ignore", "weight=.*each hop reads")  # where there is no room for the file
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1, weight="w")
        options: dict[str, Any] = {"features": "x", "labels": None, "strategy": "ondemand"}
        with make_loader(g, sampler, np.arange(0, 600, 2), 30, **options) as loader:
            for batch in loader:
                assert np.array_equal(batch.x.numpy(), arrays("old")[1][batch.input_ids.numpy()])
                found.append(batch.input_ids.tolist())
    return found


@functools.cache
def weighed() -> list[Any]:
    """Draw the epoch by weights in memory, elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        of_edges(Path(folder))
        return weigh(Path(folder), fit=True)


def epoch_by_weight(root: Path) -> None:
    expected = weighed()
    try:
        assert weigh(root, fit=False) == expected
    except Exception as error:
        each: BaseException | None = error
        while each is not None:  # the frames have the sampler
            each.with_traceback(None)
            each = each.__context__
        raise
    finally:
        if os.path.lexists(root / "g.runs"):  # as long as errors, and those that were handled, have frames
            gc.collect()


def read(root: Path) -> None:
    with opened(root) as g:
        check_rows(g)
        assert len(featstore.NeighborSampler(g, fanouts=[3]).sample(torch.arange(4)).input_ids) >= 4


def verify(root: Path) -> None:
    with opened(root) as g:
        g.verify(progress=False)


# -- what is there ---------------------------------------------------------------------------------------------------------------


def check_rows(g: featstore.OutOfCoreGraph) -> str:
    """Compare the rows of nodes with what they were made of; return which of the datasets this is."""
    which = "new" if g.num_nodes == N["new"] else "old"
    (edges, x), y, n_more = arrays(which), labels(which), g.num_nodes - len(g.node_types) * N[which]
    assert n_more in (0, APPENDED)
    assert g.num_edges == len(g.edge_types) * edges.shape[1]
    for name in ("_",) if g.types.is_one else TYPES:
        of = g if g.types.is_one else g[name]
        has_more = n_more and name != "b"
        rows, more_y = appended() if has_more else (x[:0], y[:0])
        found = of.features["x"][:].numpy()
        assert np.array_equal(found, np.concatenate([x, rows])[:, : found.shape[1]])
        assert np.array_equal(of.node_data["y"].numpy().reshape(-1), np.concatenate([y, more_y]))
    return f"{which}{' types' * (not g.types.is_one)}{', appended' * bool(n_more)}"


def digests(g: featstore.OutOfCoreGraph) -> dict[str, str]:
    """Hash all that a dataset holds as its users see it, whatever files have it: rows, lists, numbers of edges, names."""
    lists = np.arange(g.types.num_lists)
    degrees, numbers = np.empty(len(lists), np.int64), np.arange(g.num_edges)
    g.topology.offsets(lists, np.empty(len(lists), np.int64), degrees)
    if g.topology.edge_ids is not None:
        g.topology.edge_ids.replace(numbers, g.pool.array)
    ids = [each.ids.astype(np.int64) for each in g.topology.lists(lists, 1 << 20)]
    held = {"degrees": degrees, "neighbours": np.concatenate([lists[:0], *ids]), "numbers of edges": numbers}
    for what, of in (("feature", g.features), ("edge feature", g.edge_features), ("data", g.node_data)):
        held |= {f"{what} {name}": of[name][:].numpy() for name in of}
    held |= {f"names of {of}": np.array(g.ids(of).decode(np.arange(len(g.ids(of))))) for of in maps_of(g.catalog)}
    return {name: hashlib.sha256(f"{of.dtype} {of.shape}".encode() + of.tobytes()).hexdigest() for name, of in held.items()}


def state(root: Path) -> tuple[Any, ...]:
    """Open and verify everything in ``root``; return what says which of the states it is in."""
    found: list[Any] = []
    if os.path.lexists(root / "g"):
        with opened(root) as g:
            g.verify(progress=False)
            found.append(check_rows(g))
            found.append(digests(g))
            parts = ((each, each.self_reliant().train_nodes if each.hops else each.load()) for each in g.parts().values())
            found.append([(each.name, nodes.tolist()) for each, nodes in parts])
        catalog = read_catalog(root / "g")
        found += [catalog.topology, sum("/" in name for name in catalog.files)]
        found.append(json.dumps({key: catalog.extra.get(key) for key in ("cache/neighbors", KEY)}, sort_keys=True))
        for seed in (1, 2) if "node_types" not in catalog.dataset else ():  # lists of types are not cached at random
            with opened(root) as g:
                g.cache_neighbors(CACHE_BYTES, "random", seed=seed)  # from the saved one, where that is this
    if os.path.lexists(root / "p"):
        with featstore.Pack(root / "p") as found_pack:
            checked = found_pack.verify(progress=False)
            found += [found_pack.record["seed"], checked["layouts"], checked["node_data"]]
    if os.path.lexists(root / "out" / "catalog.lmdb"):
        with featstore.open(root / "out", memory="16MiB", backend="pread", threads=1) as part:
            part.verify(progress=False)
            found.append(contents(root / "out"))
    elif os.path.lexists(root / "out"):
        files = sorted(each for each in (root / "out").rglob("*") if each.is_file())
        found.append([(os.fspath(each.relative_to(root)), hashlib.sha256(each.read_bytes()).hexdigest()) for each in files])
    return tuple(found)


def contents(path: Path) -> dict[str, Any]:
    """All that a dataset holds, bit for bit, but for ids of files, and what carries them."""
    catalog = read_catalog(path)
    return {
        "files": {name: hashlib.sha256((path / name).read_bytes()[4096:]).hexdigest() for name in catalog.files},
        "fields": {key: (each.role, each.shape, each.dtype) for key, each in catalog.fields.items()},
        "dataset": {key: value for key, value in catalog.dataset.items() if key != "id"},
        "extra": re.sub("[0-9a-f]{32}", "id", json.dumps(catalog.extra, sort_keys=True)),
        "names": sorted(name for name in set(os.listdir(path)) - LOCKS if not name.endswith(".tmp")),
    }


def named(root: Path) -> set[str]:
    if not os.path.lexists(root / "g"):
        return set()
    catalog = read_catalog(root / "g")
    return {name.partition("/")[0] for record in catalog.files.values() for name in (record.name, record.sums_name)}


def leftovers(root: Path, before: Path) -> set[str]:
    """Files that nothing names, and directories of builders; what was named ``before`` is swept once nobody reads it."""
    found = set(os.listdir(root)) - KEPT
    if os.path.lexists(root / "drive"):
        found |= set(os.listdir(root / "drive")) - named(root) - named(before)
    if os.path.lexists(root / "g"):
        found |= set(os.listdir(root / "g")) - named(root) - named(before) - LOCKS - {"catalog.lmdb"}
        found |= set(os.listdir(root / "g" / "catalog.lmdb")) - {"data.mdb"}
    if os.path.lexists(root / "out" / "catalog.lmdb"):
        found |= {name for name in os.listdir(root / "out") if name.endswith(".tmp")}
    if os.path.lexists(root / "p"):
        found |= {name for name in os.listdir(root / "p") if name.endswith((".tmp", ".partial"))}
        with featstore.Pack(root / "p") as there:
            found |= set(there.verify(progress=False)["others"])
    return found


# -- scenarios -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A call that is to fail, and what is there before.

    ``commits``: the state is another one afterwards. ``goes_on``: the call does more than commit, which fails in its own way.
    ``resumes``: after which ends what was finished stays for the next call: a full drive, too little memory, Ctrl-C.
    """

    before: Callable[[Path], None]
    call: Callable[[Path], None]
    commits: bool = True
    goes_on: bool = False
    resumes: tuple[str, ...] = ()


def nothing(root: Path) -> None:
    pass


def an_old_dataset(root: Path) -> None:
    make(root / "g", "old")


def a_saved_cache(root: Path) -> None:
    make(root / "g", "old")
    save(root, 1)


def a_drive(root: Path) -> None:
    (root / "drive").mkdir()


def chunks(root: Path) -> None:
    a_drive(root)
    make(root / "g", "old", **IN_CHUNKS)


def stripes(root: Path) -> None:
    a_drive(root)
    make(root / "g", "old", **IN_CHUNKS, stripes=[root / "drive"])


def a_pack(root: Path) -> None:
    make(root / "g", "old")
    pack(root, 1, False)


def of_edges(root: Path) -> None:
    """A dataset whose edges are sorted back when they are exported."""
    make_from_edges(root / "g", "old")


def a_folder(root: Path, form: str = "binary") -> None:
    """OGB's layout of the new dataset."""
    folder = Folder(root / "in", N["new"], 5000)
    folder.edges, folder.x = arrays("new")
    folder.y = labels("new")[:, None]
    getattr(folder, form)()


def a_folder_and_an_old_dataset(root: Path) -> None:
    a_folder(root)
    an_old_dataset(root)


def csv_and_an_old_dataset(root: Path) -> None:
    a_folder(root, "csv")
    an_old_dataset(root)


def parts_of_training_nodes(root: Path) -> None:
    add_rows(root)
    partition(root, 2)


def a_part(root: Path) -> None:
    parts_of_training_nodes(root)
    export_part(root, 0)


def tables_and_an_old_dataset(root: Path) -> None:
    (root / "in").mkdir()
    nodes = enumerate(zip(arrays("new")[1][:, 0].tolist(), labels("new").tolist(), strict=True))
    (root / "in" / "nodes.csv").write_text("name,x,y\n" + "".join(f"p{i},{x!r},{y}\n" for i, (x, y) in nodes))
    (root / "in" / "edges.csv").write_text("from,to\n" + "".join(f"p{a},p{b}\n" for a, b in arrays("new")[0].T))
    an_old_dataset(root)


SCENARIOS = {
    "create": Scenario(nothing, lambda root: make(root / "g", "new")),
    "replace": Scenario(an_old_dataset, lambda root: make(root / "g", "new", overwrite=True)),
    "edges": Scenario(nothing, lambda root: make_from_edges(root / "g", "new")),
    "edges replace": Scenario(an_old_dataset, lambda root: make_from_edges(root / "g", "new", overwrite=True)),
    "create chunks": Scenario(nothing, lambda root: make(root / "g", "new", **IN_CHUNKS)),
    "convert": Scenario(a_saved_cache, lambda root: convert(root, "chunked")),
    "convert back": Scenario(chunks, lambda root: convert(root, "csc")),
    "create stripes": Scenario(a_drive, lambda root: make(root / "g", "new", **IN_CHUNKS, stripes=[root / "drive"])),
    "replace stripes": Scenario(stripes, lambda root: make(root / "g", "new", True, **IN_CHUNKS, stripes=[root / "drive"])),
    "convert to stripes": Scenario(chunks, lambda root: convert(root, "stripes")),
    "convert stripes back": Scenario(stripes, lambda root: convert(root, "csc")),
    "open": Scenario(a_saved_cache, read, commits=False),
    "verify": Scenario(a_saved_cache, verify, commits=False),
    "save": Scenario(an_old_dataset, lambda root: save(root, 1)),
    "save again": Scenario(a_saved_cache, lambda root: save(root, 2)),
    "keep": Scenario(a_saved_cache, lambda root: keep(root, 1)),
    "add": Scenario(an_old_dataset, lambda root: change(root, "add")),
    "add again": Scenario(changed("add"), lambda root: change(root, "add again")),
    "remove": Scenario(changed("add"), lambda root: change(root, "remove")),
    "append": Scenario(an_old_dataset, lambda root: change(root, "append")),
    "append to chunks": Scenario(chunks, lambda root: change(root, "append")),
    "append to stripes": Scenario(stripes, lambda root: change(root, "append")),
    "append to a type": Scenario(make_types, append_to_a_type),
    "update": Scenario(changed("add"), lambda root: change(root, "update")),
    "merge": Scenario(changed("add", "update"), lambda root: change(root, "merge")),
    "anew": Scenario(changed("add", "update", "merge"), lambda root: change(root, "anew")),
    "add data": Scenario(an_old_dataset, lambda root: change(root, "add data")),
    "update data": Scenario(changed("add data"), lambda root: change(root, "update data")),
    "remove data": Scenario(changed("add data"), lambda root: change(root, "remove data")),
    "import": Scenario(a_folder, import_folder, resumes=(FULL, MEMORY, ENDED)),
    "import replace": Scenario(a_folder_and_an_old_dataset, import_folder, resumes=(FULL, MEMORY, ENDED)),
    "import tables": Scenario(tables_and_an_old_dataset, import_tables, resumes=(FULL, MEMORY, ENDED)),
    "import csv": Scenario(csv_and_an_old_dataset, import_folder, resumes=(FULL, MEMORY, ENDED)),
    "import keys": Scenario(tables_and_an_old_dataset, lambda root: import_tables(root, 20_000), resumes=(FULL, MEMORY, ENDED)),
    "export": Scenario(of_edges, lambda root: export(root, "npy")),
    "export parquet": Scenario(of_edges, lambda root: export(root, "parquet")),
    "partition": Scenario(add_rows, partition),
    "part": Scenario(parts_of_training_nodes, lambda root: export_part(root, 1), resumes=(FULL, MEMORY, ENDED)),
    "part again": Scenario(a_part, lambda root: export_part(root, 1), resumes=(FULL, MEMORY, ENDED)),
    "aggregate": Scenario(add_rows, aggregate, resumes=(MEMORY, ENDED)),
    "infer": Scenario(add_rows, lambda root: infer(root, None)),
    "infer named": Scenario(add_rows, lambda root: infer(root, "model"), resumes=(MEMORY, ENDED)),
    "epoch": Scenario(add_rows, epoch, commits=False),
    "epoch by turns": Scenario(add_rows, lambda root: epoch(root, "ginex"), commits=False),
    "epoch streamed": Scenario(add_rows, lambda root: epoch(root, "streamed"), commits=False),
    "epoch by weight": Scenario(of_edges, epoch_by_weight, commits=False),
    "pack": Scenario(an_old_dataset, lambda root: pack(root, 1, False)),
    "pack again": Scenario(a_pack, lambda root: pack(root, 2, True)),
    "layout": Scenario(a_pack, layout, goes_on=True, resumes=(MEMORY, ENDED)),
    "verify pack": Scenario(a_pack, lambda root: featstore.Pack(root / "p").verify(progress=False) and None, commits=False),
}


def fresh(template: Path, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root, symlinks=True)
    for link in root.glob("g/featstore-stripe-*"):
        link.unlink()
        link.symlink_to(root / "drive" / link.name)
    own_stripes(root)


def own_stripes(root: Path) -> None:
    """Mark each stripe as if it had been made with the very link that leads to it."""
    for link in root.glob("*/featstore-stripe-*"):
        if link.is_symlink():
            for mark in (root / "drive" / link.name).glob("owner-*"):
                mark.rename(mark.with_name(mark_of(os.fspath(link))))
