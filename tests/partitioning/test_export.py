"""Exported parts: a dataset of the part's rows and lists alone, which gives the batches of the whole one, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.errors import BudgetError, CorruptionError, FormatError, StaleError
from featstore.partitioning import export
from featstore.progress import Progress
from featstore.storage.catalog import read_catalog
from featstore.storage.update import Update
from featstore.testing.faults import flipped
from tests.graph.test_partadjacency import FORMS, NAME, SAMPLERS, TRAIN, K, N, digests, make, make_none, outside, rank_loader
from tests.support.programs import run_ranks
from tests.support.ranks import group
from tests.support.refusing import refuses
from tests.support.sampled import covering
from tests.support.typed import random_types

MEMORY = "64MiB"


@pytest.fixture(scope="module", params=sorted(FORMS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A dataset and its exported parts; a test must not change them."""
    found = make(tmp_path_factory.mktemp("parts") / "g", request.param)
    found.parts = [Path(f"{found.path}.{i}") for i in range(K)]
    with featstore.open(found.path, memory=MEMORY) as g:
        for i, path in enumerate(found.parts):
            part = featstore.export(g, path, part=i, progress=False)
            assert part.hop_of.tolist() == found.hop_of[i].tolist()
    found.form = request.param
    return found


@pytest.fixture
def part(made: SimpleNamespace) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(made.parts[1], memory=MEMORY, threads=2) as graph:
        yield graph
    assert set(graph.memory_report()) <= {"sampler scratch"}, "which samplers hold that still live"


def test_its_progress_ends_at_its_total(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: dict[str, tuple[int, int]] = {}

    class Recorded(Progress):
        def __init__(self, label: str, total: int, show: bool, unit: str = "B", delay_s: float = 0.0) -> None:
            super().__init__(label, total, False, unit, delay_s)
            self.label, self.total = label, total

        def __exit__(self, *_: object) -> None:
            bars[self.label] = (self.total, self._done)

    monkeypatch.setattr(export, "Progress", Recorded)
    with featstore.open(made.path, memory=MEMORY) as g:
        featstore.export(g, tmp_path / "part", part=1, progress=False)
    total, done = bars["export"]
    assert total == done > 0


def test_it_has_the_rows_and_lists_of_the_part(part: Any, made: SimpleNamespace) -> None:
    hop_of = made.hop_of[1]
    nodes = np.flatnonzero(hop_of < 255)
    catalog = read_catalog(made.parts[1])
    assert catalog.fields["node/_/x"].shape == (len(nodes), 9), "no row of others is on its disk"
    assert catalog.topology == made.form
    assert part.num_nodes == N
    assert part.own_part.nodes.tolist() == nodes.tolist()
    assert part.own_part.train_nodes.tolist() == made.groups[1]
    assert part.features["x"].shape == (N, 9)
    assert torch.equal(part.features["x"][nodes], made.x[nodes])
    assert torch.equal(part.node_data["y"], torch.from_numpy(made.y))
    lists = [made.lists[v] if hop_of[v] < 2 else [] for v in range(N)]
    assert part.num_edges == sum(map(len, lists))
    assert part.in_degree.tolist() == list(map(len, lists))
    assert part.out_degree.tolist() == np.bincount([u for each in lists for u in each], minlength=N).tolist()
    assert torch.cat(list(part.edges()), 1).T.tolist() == [[u, v] for v, each in enumerate(lists) for u in each]
    own = int(np.flatnonzero(hop_of == 1)[0])
    assert part.neighbors(own).tolist() == made.lists[own]
    part.verify(progress=False)
    kept = part.parts()[NAME]
    assert not kept.is_stale
    assert [kept.self_reliant().part(i).tolist() for i in range(K)] == made.groups


def test_others_are_refused_by_name(part: Any, made: SimpleNamespace, tmp_path: Path) -> None:
    alien, far, near = outside(made, 1), outside(made, 1, 2), outside(made, 1, 1)
    refuses(IndexError, f"node {alien} at position 1 is not in part 1 of '{NAME}'", lambda: part.features["x"][[far, alien]])
    refuses(IndexError, f"node {far} is 2 hops from part 1", lambda: part.neighbors(far))
    refuses(IndexError, f"node {alien} at position 0 is not in part 1", lambda: part.neighbors(alien))
    refuses(ValueError, "has hops=2: make parts with hops=3", lambda: featstore.NeighborSampler(part, [2, 2, 2]))
    sampler = featstore.NeighborSampler(part, [2, 2])
    refuses(IndexError, f"seed {near} at position 0 is 1 hops from", lambda: sampler.sample(torch.tensor([near])))
    refuses(IndexError, f"seed {alien} at position 0 is not in part 1", lambda: sampler.sample(torch.tensor([alien])))
    refuses(NotImplementedError, "edge ids are in the dataset", lambda: featstore.NeighborSampler(part, [2], edges=True))
    own = int(part.own_part.train_nodes[0])
    refuses(NotImplementedError, "edge ids are in the dataset", lambda: part.neighbors(own, edge_pos=True))
    refuses(NotImplementedError, "edge ids are in the dataset", lambda: next(iter(part.edges(edge_pos=True))))
    for call in (
        lambda: part.aggregate("x", progress=False),
        lambda: part.part(0),
        lambda: featstore.export(part, tmp_path / "again", 0, progress=False),
        lambda: featstore.partition(part, 2, "random", progress=False),
        lambda: part.cache("x", "10%", shared=2),
    ):
        refuses(NotImplementedError, "part 1 of", call)
    assert not os.listdir(tmp_path)


CASES = [(sampler, "ondemand") for sampler in ("neighbor", "labor", "layer", "shadow", "epoch")]
CASES += [("neighbor", strategy) for strategy in ("superbatch", "ginex", "streamed", "auto")] + [("epoch", "streamed")]


@pytest.mark.parametrize(("case", "made"), covering(CASES, sorted(FORMS)), indirect=["made"])
def test_batches_are_the_whole_graphs(made: SimpleNamespace, case: tuple[str, str]) -> None:
    """Each rank with its part alone; the state of training goes from one to the other."""
    sampler, strategy = case
    with featstore.open(made.path, memory=MEMORY, threads=2) as g:
        for rank, path in enumerate(made.parts):
            with rank_loader(g, g.parts()[NAME], rank, sampler, strategy) as loader:
                whole, state = [digests(loader), digests(loader)], loader.state_dict()
            with featstore.open(path, memory=MEMORY, threads=2) as part:
                with rank_loader(part, part.parts()[NAME], rank, sampler, strategy) as loader:
                    assert [digests(loader), digests(loader)] == whole
                    assert loader.state_dict() == state
                    loader.load_state_dict(state)


def test_packs_caches_and_pickles(part: Any, made: SimpleNamespace, tmp_path: Path) -> None:
    seeds = made.groups[1]

    def load(graph: Any, **options: Any) -> list[Any]:
        with featstore.Loader(graph, SAMPLERS["neighbor"](graph), seeds, 6, **options) as loader:
            return digests(loader)

    with featstore.open(made.path, memory=MEMORY) as g:
        whole = load(g, strategy="ondemand")
    with featstore.sample_offline(part, SAMPLERS["neighbor"](part), seeds, 6, 1, tmp_path / "pack", progress=False) as pack:
        for cache, policy in ((0.1, "belady"), (0.1, "frequency"), (1.0, "frequency"), (0.0, "belady")):
            with featstore.Loader(part, strategy=featstore.Packed(pack, cache, policy)) as loader:
                assert sorted(digests(loader)) == whole
        assert pack.verify(progress=False)["layouts"] == 4
    with featstore.PackedGraph(tmp_path / "pack", memory=MEMORY) as alone:
        with featstore.Loader(alone, strategy=featstore.Packed(None, 0.1, "belady"), labels="y") as loader:
            assert sorted(digests(loader)) == whole
    for policy in ("sieve", "degree", "random", "frequency"):
        for size in ("30%", "100%"):
            assert load(part, strategy=featstore.OnDemand(cache=size, policy=policy)) == whole
    assert load(part, strategy="superbatch", device_cache="10%") == whole
    for policy in ("degree", "in_out_ratio"):
        part.cache("x", "20%", policy)
        part.cache_neighbors("64KiB", policy)
        assert load(part, strategy="ondemand") == whole
    part.cache_neighbors()
    assert part.neighbor_cache.whole
    assert load(part, strategy="ondemand") == whole
    store = pickle.loads(pickle.dumps(part.features["x"]))
    assert torch.equal(store[seeds], made.x[seeds])


def be_a_rank(rank: int, folder: Path, paths: list[str]) -> None:
    """Train on the rank's part alone, in a group; write a digest of the batches."""
    with group(rank, K, folder), featstore.open(paths[rank], memory=MEMORY) as g:
        batches = featstore.PartBatches(g.parts()[NAME], g.node_data["train_idx"], 6)
        with featstore.Loader(g, SAMPLERS["neighbor"](g), batches, strategy="superbatch") as loader:
            found = digests(loader)
        (folder / f"rank-{rank}").write_text(hashlib.sha256(pickle.dumps(found)).hexdigest())


@pytest.mark.usefixtures("_program_server")
@pytest.mark.parametrize("made", ["csc"], indirect=True)
def test_processes_with_their_parts_alone(made: SimpleNamespace, tmp_path: Path) -> None:
    """The whole dataset is not there; ranks are a gloo group's."""
    expected = []
    with featstore.open(made.path, memory=MEMORY) as g:
        for rank in range(K):
            with rank_loader(g, g.parts()[NAME], rank, "neighbor", "superbatch") as loader:
                expected.append(hashlib.sha256(pickle.dumps(digests(loader))).hexdigest())
    away = made.path.with_name("away")
    made.path.rename(away)
    try:
        found = run_ranks(be_a_rank, K, tmp_path, [str(each) for each in made.parts])
        assert [status for status, _ in found] == [0] * K, found
    finally:
        away.rename(made.path)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(K)] == expected


def test_forms_and_conversion(made: SimpleNamespace, tmp_path: Path) -> None:
    """Whatever the form of either, and converted later."""
    other = "chunked" if made.form == "csc" else "csc"
    with featstore.open(made.path, memory=MEMORY) as g:
        chunks = {"chunk_bytes": 8192} if other == "chunked" else {}
        featstore.export(g, tmp_path / "p", 1, NAME, topology=other, **chunks, progress=False)
    catalog = read_catalog(tmp_path / "p")
    assert (catalog.topology, catalog.chunk_bytes) == (other, chunks.get("chunk_bytes", 0))
    with featstore.open(made.parts[1], memory=MEMORY) as a, featstore.open(tmp_path / "p", memory=MEMORY) as b:
        b.verify(progress=False)
        assert torch.equal(torch.cat(list(a.edges()), 1), torch.cat(list(b.edges()), 1))
    assert featstore.convert(tmp_path / "p", made.form, memory=MEMORY, progress=False)
    with featstore.open(tmp_path / "p", memory=MEMORY) as b:
        assert b.own_part.number == 1
        b.verify(progress=False)
        with rank_loader(b, b.parts()[NAME], 1, "neighbor", "ondemand") as loader:
            found = digests(loader)
    with featstore.open(made.path, memory=MEMORY) as g, rank_loader(g, g.parts()[NAME], 1, "neighbor", "ondemand") as loader:
        assert found == digests(loader)


@pytest.mark.usefixtures("small_pieces")
def test_little_memory(made: SimpleNamespace, tmp_path: Path) -> None:
    """The error names a number that suffices; files are the same whatever the memory."""
    with featstore.open(made.path, memory="256MiB") as g:
        error = refuses(BudgetError, "takes more memory than", lambda: featstore.export(g, tmp_path / "p", 0, memory="1MiB"))
        assert not os.listdir(tmp_path)
        featstore.export(g, tmp_path / "p", 0, memory=error.value.needed, progress=False)
        assert g.budget.used < 16 << 20
    for key, record in read_catalog(made.parts[0]).fields.items():
        (file,), (again,) = ([each.file for each in of.parts] for of in (record, read_catalog(tmp_path / "p").fields[key]))
        assert (tmp_path / "p" / again).read_bytes()[4096:] == (made.parts[0] / file).read_bytes()[4096:]


def test_what_cannot_be_exported(made: SimpleNamespace, tmp_path: Path) -> None:
    def export(g: Any, *args: Any, path: Any = tmp_path / "p", **options: Any) -> Any:
        return featstore.export(g, path, *args, progress=False, **options)

    with featstore.open(made.path, memory=MEMORY) as g:
        refuses(IndexError, r"part 3 is not in \[0, 3\)", lambda: export(g, 3))
        refuses(ValueError, "no self-reliant parts 'none'", lambda: export(g, 0, "none"))
        refuses(ValueError, "is the dataset that the part is of", lambda: export(g, 0, path=made.path, overwrite=True))
        refuses(ValueError, "p lies inside the dataset that the part is of", lambda: export(g, 0, path=made.path / "p"))
        (tmp_path / "link").symlink_to(made.path)
        refuses(ValueError, "lies inside the dataset", lambda: export(g, 0, path=tmp_path / "link" / "p" / "q"))
        (tmp_path / "link").unlink()
        refuses(TypeError, "path must be the directory of the new dataset, not None", lambda: export(g, 0, path=None))
        refuses(FileExistsError, "a dataset exists here", lambda: export(g, 0, path=made.parts[0]))
        refuses(FileNotFoundError, "", lambda: export(g, 0, path=tmp_path / "no" / "p"))
        refuses(ValueError, "topology must be one of", lambda: export(g, 0, topology="other"))
        refuses(TypeError, "parts of an open dataset", lambda: export(made.path, 0))
        refuses(TypeError, "overwrite", lambda: export(g, 0, overwrite=1))
    with make_none(tmp_path / "bare") as bare:
        refuses(ValueError, "keeps no self-reliant parts", lambda: export(bare, 0))
        featstore.partition(bare, 9, "ldg", [1, 2, 3], hops=1, progress=False)
        empty = int(np.flatnonzero(np.diff(bare.parts()["ldg-9-hops-1"].self_reliant().offsets) == 0)[0])
        refuses(ValueError, f"part {empty} of 'ldg-9-hops-1' has no training nodes", lambda: export(bare, empty))
    with random_types(0).create(tmp_path / "typed") as typed:
        refuses(NotImplementedError, r"part\(\) is for a graph of one type", lambda: export(typed, 0))
    weights = {"w": np.zeros(2, np.float32)}
    with featstore.OutOfCoreGraph.create(tmp_path / "e", [0, 1, 2], [1, 0], edge_features=weights, progress=False) as edges:
        featstore.partition(edges, 1, "ldg", [0], hops=1, progress=False)
        refuses(NotImplementedError, "does not take edge features, and the dataset has 'w'", lambda: export(edges, 0))
        assert edges.part(0).edge_features["w"][[0]].tolist() == [0.0], "a view has them"
    assert sorted(os.listdir(tmp_path)) == ["bare", "e", "typed"]


def test_what_features_were_made_of_goes_with_the_part(tmp_path: Path) -> None:
    """Features that are stale in the whole dataset are stale in the part, and no others."""
    made = make(tmp_path / "g")
    with featstore.open(made.path, memory=MEMORY) as g:
        g.add_feature("z", made.x.numpy(), progress=False)
        for name, feature in {"fresh": "x", "changed": "z", "removed": "z", "own": "x", "of own": "own"}.items():
            g.aggregate(feature, "mean", name=name, progress=False)
        g.features["own"].update([0], np.zeros((1, 9), np.float32), progress=False)
        featstore.export(g, tmp_path / "before", 1, progress=False)
        g.features["z"].update([0], np.zeros((1, 9), np.float32), progress=False)
        stale = {"changed": ["z"], "removed": ["z"], "of own": ["own"]}
        assert g.stale_features == stale
        featstore.export(g, tmp_path / "p", 1, progress=False)
        g.remove_feature("z")
        featstore.export(g, tmp_path / "q", 1, progress=False)
        assert g.stale_features == stale
    for name, expected in {"before": {"of own": ["own"]}, "p": stale, "q": stale}.items():
        with featstore.open(tmp_path / name, memory=MEMORY) as part:
            assert part.stale_features == expected
            part.verify(progress=False)


def test_stale_parts_are_not_exported(tmp_path: Path) -> None:
    made = make(tmp_path / "g")
    with Update(made.path) as update:
        key = f"parts/{NAME}"
        update.add([], extra={key: {**update.catalog.extra[key], "made_of": {"out_degree": "0" * 32}}})
        update.commit()
    with featstore.open(made.path) as g:
        refuses(StaleError, "partition it again", lambda: featstore.export(g, tmp_path / "p", 0, progress=False))


def test_damage_is_found(made: SimpleNamespace, tmp_path: Path) -> None:
    """A flipped bit, and an entry that says other things than the file."""
    with featstore.open(made.path, memory=MEMORY) as g:
        featstore.export(g, tmp_path / "p", 0, progress=False)
    entry = read_catalog(tmp_path / "p").extra["part"]
    file = tmp_path / "p" / entry["files"]["part_hops"]
    with flipped(file, 4096 + 7, 0):
        refuses(CorruptionError, "part.hops", lambda: featstore.open(tmp_path / "p", memory=MEMORY))
    for change, error, words in (
        ({"nodes": entry["nodes"] + 1}, FormatError, "feature 'x' has .* rows for"),
        ({"hops": 1}, CorruptionError, "the hops are not those of part 0"),
        ({"hops": 0}, FormatError, "the catalog's part cannot be used"),
        ({"number": "0"}, FormatError, "the catalog's part cannot be used"),
        ({"files": {}}, FormatError, "names no file with the hops"),
    ):
        with Update(tmp_path / "p") as update:
            update.add([], extra={"part": {**entry, **change}})
            update.commit()
        refuses(error, words, lambda: featstore.open(tmp_path / "p", memory=MEMORY))
    with Update(tmp_path / "p") as update:
        update.add([], extra={"part": entry})
        update.commit()
    featstore.open(tmp_path / "p", memory=MEMORY).close()


def test_verify_finds_lists_that_are_no_part(made: SimpleNamespace, tmp_path: Path) -> None:
    """The file of hops of another part, whose sums and number of nodes are right."""
    with featstore.open(made.path, memory=MEMORY) as g:
        featstore.export(g, tmp_path / "p", 0, progress=False)
    hops = made.hop_of[0].astype(np.uint8)
    far, train = np.flatnonzero(hops == 2)[0], np.flatnonzero((hops == 0) & [len(each) > 0 for each in made.lists])[0]
    alien = np.flatnonzero(hops == 255)[0]
    for at, words in (((far, train), "has a list, which part 0"), ((far, alien), "which is not in part 0")):
        swapped = hops.copy()
        swapped[list(at)] = hops[list(at)[::-1]]
        with Update(tmp_path / "p") as update:
            record = update.write_array("part.hops", "part_hops", np.dtype(np.uint8), [swapped])
            entry = update.catalog.extra["part"]
            update.add([record], extra={"part": {**entry, "files": {"part_hops": record.name}}})
            update.commit()
        with featstore.open(tmp_path / "p", memory=MEMORY) as g:
            refuses(CorruptionError, words, lambda g=g: g.verify(progress=False))


def test_command(made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "part.2")
    assert main(["export", str(made.path), target, "--part", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    hop_of = made.hop_of[2]
    assert result["nodes"] == np.count_nonzero(hop_of < 255)
    assert result["dropped"] == np.count_nonzero(hop_of == 255)
    assert (result["part"], result["name"], result["hops"], result["train_nodes"]) == (2, NAME, 2, len(made.groups[2]))
    assert main(["export", str(made.path), target, "--part", "2"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["export", str(made.path), target, "--part", "2", "--overwrite", "--name", NAME]) == 0
    assert f"part 2 of '{NAME}'" in capsys.readouterr().out
    assert main(["info", target]) == 0
    assert f"2 of '{NAME}', 2 hops: has {result['nodes']:,} of these nodes" in capsys.readouterr().out
    assert main(["info", target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["features"]["x"]["bytes"] == 36 * result["nodes"], "of the rows that are there"
    assert main(["verify", target]) == 0
    assert main(["export", str(made.path), target, "--part", "9", "--overwrite"]) == 2
    assert "part 9 is not in [0, 3)" in capsys.readouterr().err
    assert len(TRAIN) == sum(map(len, made.groups))
