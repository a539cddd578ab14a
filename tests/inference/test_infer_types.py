"""Outputs of the nodes of several types by layers, out of core: as in memory and in PyG, going on, types without rows, errors."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import featstore
from featstore.creation import steps
from featstore.errors import BudgetError
from featstore.graph.derive import making
from featstore.sampling.batch import Block
from featstore.testing.faults import forked, sweep
from tests.support.programs import run_in_fork
from tests.support.pyg import GATConv, HeteroConv, SAGEConv
from tests.support.refusing import refuses
from tests.support.typed import CITES, EMPLOYS, REV, WRITES, TypedArrays, academic, random_types

pytestmark = pytest.mark.usefixtures("_program_server")

Rows = dict[str, torch.Tensor]
Blocks = dict[Any, Block]


class Relations(torch.nn.Module):
    """A layer: a map of a node's own rows, and of the sum of its neighbours' by each type of edges; all numbers are whole.

    Types without rows count their edges. ``without`` names types that get no output.
    """

    def __init__(self, graph: TypedArrays, widths: dict[str, int], out: int, seed: int, without: str = "") -> None:
        super().__init__()
        rng = np.random.default_rng(seed)

        def weights(n: int) -> torch.Tensor:
            return torch.from_numpy(rng.integers(-2, 3, (n, out)).astype(np.float64))

        self.kinds = [kind for kind in graph.n if kind != without]
        self.own = {kind: weights(widths[kind]) for kind in graph.n}
        self.of = {key: weights(1 + widths[key[0]]) for key in graph.edges}

    def forward(self, h: Rows, blocks: Blocks) -> Rows:
        kinds = {key[2] for key in blocks} or set(h)
        found = {}
        for kind in kinds & set(self.kinds):
            n = next((block.n_dst for key, block in blocks.items() if key[2] == kind), len(h[kind]))
            total = h[kind][:n] @ self.own[kind]
            for key, block in blocks.items():
                if key[2] == kind:
                    assert block.n_src == len(h[key[0]])
                    rows = torch.cat([h[key[0]].new_ones(block.n_src, 1), h[key[0]]], 1) @ self.of[key]
                    total = total.index_add(0, block.dst, rows.index_select(0, block.src))
            found[kind] = total.remainder(64)  # so that sums are exact in any order
        return found


def in_memory(graph: TypedArrays, layers: list[Any], x: Rows) -> Rows:
    """Return the outputs of layers over the whole graph, each type for itself."""
    h = x
    for layer in layers:
        found: Rows = {}
        for kind, n in graph.n.items():
            rows = {each: h.get(each, torch.empty(graph.n[each], 0, dtype=torch.float64)) for each in graph.n}
            blocks = {
                key: Block(torch.from_numpy(src.copy()), torch.from_numpy(dst.copy()), graph.n[key[0]], n)
                for key, (src, dst) in graph.edges.items()
                if key[2] == kind
            }
            if not blocks:
                rows = {kind: rows[kind]}
            found |= {name: each for name, each in layer(rows, blocks).items() if name == kind}
        h = found
    return h


def numbers(graph: TypedArrays, name: str = "x") -> Rows:
    return {kind: torch.from_numpy(of[name]).double() for kind, of in graph.features.items() if name in of}


# --- as in memory ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(seed=st.integers(0, 60), chunked=st.booleans(), absent=st.sampled_from(["", "t0", "t1"]))
@example(seed=1, chunked=True, absent="t1")
def test_any_types_are_as_in_memory(tmp_path_factory: Any, seed: int, chunked: bool, absent: str) -> None:
    """Types without nodes, without edges into them, without features (``absent``), and without an output of the first layer."""
    graph = random_types(seed)
    for kind, of in graph.features.items():
        of["x"] = np.random.default_rng(seed).integers(-9, 9, (graph.n[kind], 4)).astype(np.float64)
    graph.features.pop(absent, None)
    features = dict.fromkeys(graph.features, "x")
    widths = {kind: 4 if kind in features else 0 for kind in graph.n}
    dropped = "t2" if seed % 3 == 0 else ""
    layers = [
        Relations(graph, widths, 5, seed, dropped),
        Relations(graph, {kind: 0 if kind == dropped else 5 for kind in graph.n}, 3, seed + 1),
        Relations(graph, dict.fromkeys(graph.n, 3), 2, seed + 2, "t0" if seed % 2 else ""),
    ]
    expected = in_memory(graph, layers, numbers(graph))
    options: dict[str, Any] = {"topology": "chunked", "chunk_bytes": 4096} if chunked else {}
    with graph.create(tmp_path_factory.mktemp("types") / "g", memory="16MiB", **options) as g:
        found = featstore.infer(g, layers, features, "out", dtype="float64", progress=False)
        assert list(found) == list(expected)
        for kind, rows in expected.items():
            assert found[kind] is g[kind].features["out"]
            assert torch.equal(found[kind][:], rows), kind
        g.verify(progress=False)
        assert g.budget.peak <= g.budget.total
        assert not [name for name in os.listdir(g.path) if name.startswith("making")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TypedArrays]:
    path, graph = tmp_path_factory.mktemp("infer") / "g", academic(papers=600)
    rng = np.random.default_rng(5)
    for kind, n in graph.n.items():
        graph.features.setdefault(kind, {})["z"] = rng.integers(-9, 9, (n, 8)).astype(np.float32)
    graph.create(path).close()
    return path, graph


@pytest.fixture
def g(made: tuple[Path, TypedArrays], tmp_path: Path) -> Any:
    shutil.copytree(made[0], tmp_path / "g")
    with featstore.open(tmp_path / "g", memory="64MiB") as opened:
        yield opened


Z = {"paper": "z", "author": "z", "institution": "z"}


@pytest.mark.parametrize("memory", [None, "2MiB"])
def test_convolutions_of_pyg_are_as_pyg_has_them(g: Any, made: tuple[Path, TypedArrays], memory: str | None) -> None:
    """Means, maxima and attention by type, where institutions, which no edges end at, have no output of a layer."""
    graph = made[1]
    torch.manual_seed(0)
    kinds = {
        WRITES: SAGEConv((-1, -1), 6),
        REV: SAGEConv((-1, -1), 6, aggr="max"),
        CITES: GATConv((-1, -1), 6, add_self_loops=False),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There exist node types")
        first = HeteroConv({**kinds, EMPLOYS: SAGEConv((-1, -1), 6)}).eval()
        second = HeteroConv({WRITES: SAGEConv((-1, -1), 3), CITES: SAGEConv((-1, -1), 3)}, aggr="max").eval()
    edges = {key: torch.from_numpy(pairs) for key, pairs in graph.edges.items()}
    with torch.no_grad():
        hidden = first({kind: rows.float() for kind, rows in numbers(graph, "z").items()}, edges)
        hidden = {kind: rows.relu() for kind, rows in hidden.items()}
        expected = second(hidden, {key: edges[key] for key in (WRITES, CITES)})
    seen: list[int] = []

    def layer(conv: Any, then: Any) -> Any:
        def run(h: Rows, blocks: Blocks) -> Rows:
            seen.extend(block.n_dst for block in blocks.values())
            x = {kind: rows for kind, rows in h.items() if rows.shape[1]}
            if not blocks:
                return {}
            found = conv(x, {key: torch.stack([block.src, block.dst]) for key, block in blocks.items() if key in conv.convs})
            return {kind: then(rows) for kind, rows in found.items()}

        return run

    found = featstore.infer(g, [layer(first, torch.relu), layer(second, lambda rows: rows)], Z, memory=memory, progress=False)
    assert list(found) == ["paper"]
    torch.testing.assert_close(found["paper"][:], expected["paper"])
    if memory is not None:
        assert max(seen) < graph.n["paper"]


def test_rows_of_a_shared_file_and_of_other_names(g: Any, made: tuple[Path, TypedArrays]) -> None:
    """Authors' rows lie behind those of papers; papers take another feature."""
    graph = made[1]

    def layer(h: Rows, blocks: Blocks) -> Rows:
        assert {kind: tuple(rows.shape[1:]) for kind, rows in h.items() if kind != "institution"} in (
            {"paper": (16,), "author": (8,)},
            {},
        )
        found = {}
        for key, block in blocks.items():
            rows = h[key[0]].sum(1, keepdim=True)
            own = h[key[2]][: block.n_dst].sum(1, keepdim=True)
            found.setdefault(key[2], own).index_add_(0, block.dst, rows[block.src])
        return found

    found = featstore.infer(g, [layer], {"paper": "x", "author": "z"}, dtype="float64", progress=False)
    assert list(found) == ["paper", "author"]
    sums = {"paper": numbers(graph)["paper"].sum(1), "author": numbers(graph, "z")["author"].sum(1)}
    for kind, keys in (("paper", (WRITES, CITES)), ("author", (REV,))):
        expected = sums[kind].clone()
        for key in keys:
            src, dst = map(torch.from_numpy, graph.edges[key])
            expected.index_add_(0, dst, sums[key[0]][src])
        torch.testing.assert_close(found[kind][:][:, 0], expected)


# --- going on -------------------------------------------------------------------------------------------------------------------


def two(h: Rows, blocks: Blocks) -> Rows:
    """Return outputs of all types but institutions, which only the first layer has."""
    n = {key[2]: block.n_dst for key, block in blocks.items()}
    found = {}
    for kind in {*n, "institution"} & {kind for kind, rows in h.items() if rows.shape[1]}:
        total = h[kind][: n.get(kind, len(h[kind]))].clone()
        for key, block in blocks.items():
            if key[2] == kind and h[key[0]].shape[1]:
                total.index_add_(0, block.dst, h[key[0]][block.src])
        found[kind] = total.remainder(32)
    return found


def last(h: Rows, blocks: Blocks) -> Rows:
    """Return outputs of papers and authors alone: institutions come last, and have none."""
    found = two(h, blocks)
    found.pop("institution", None)
    return found


def test_interrupted_between_and_within_types_goes_on(g: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every record of what is there."""
    monkeypatch.setattr(steps, "CHECKPOINT_S", -1e9)
    control = featstore.infer(g, [two, last, two], Z, "control", progress=False)
    real, interrupted = making.Making._record, 0
    for number in range(1, 100):
        count = [0]

        def record(self: Any, *args: Any, count: list[int] = count, number: int = number) -> None:
            real(self, *args)
            count[0] += 1
            if count[0] == number:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(making.Making, "_record", record)
            try:
                featstore.infer(g, [two, last, two], Z, "h", resume="model", memory="3MiB", overwrite=True, progress=False)
                break
            except KeyboardInterrupt:
                interrupted += 1
        assert os.path.exists(os.path.join(g.path, "making.paper,author,institution%2Fh", "state"))
        found = featstore.infer(g, [two, last, two], Z, "h", resume="model", overwrite=True, progress=False)
        assert list(found) == list(control) == ["paper", "author"]
        for kind, rows in control.items():
            assert torch.equal(found[kind][:], rows[:])
        assert not [name for name in os.listdir(g.path) if name.startswith("making")]
    assert interrupted > 6


def attempt(path: Path) -> None:
    with featstore.open(path, memory="64MiB", backend="pread", threads=1) as g:
        featstore.infer(g, [two, last], Z, "h", resume="model", progress=False)


def kill_some(folder: str) -> None:
    steps.CHECKPOINT_S = -1e9  # type: ignore[misc]
    warnings.filterwarnings("ignore", "making 'paper,author,institution/h' from the start: files are missing")
    original, path, seen, expected = Path(folder) / "g", Path(folder) / "h", set(), None
    for fault in sweep(folder, ["write", "fsync", "rename", "unlink"], "kill", step=29):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original, path)
        with fault:
            killed = forked(lambda: attempt(path))
        with featstore.open(path, memory="64MiB", backend="pread", threads=1) as g:
            there = [kind for kind in g.node_types if "h" in g[kind].features]
        assert there in ([], ["paper", "author"]), "one commit has both"
        assert killed is not None or there
        if not there:
            attempt(path)
        with featstore.open(path, memory="64MiB", backend="pread", threads=1) as g:
            g.verify(progress=False)
            found = torch.cat([g[kind].features["h"][:] for kind in ("paper", "author")])
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
        seen.add(len(there))
    assert seen == {0, 2}


def test_outputs_of_another_model_do_not_stay_beside_new_ones(g: Any) -> None:
    """Type by type: one whose output would stay, since the new model has none of it, is named."""

    def papers(h: Rows, blocks: Blocks) -> Rows:
        return {kind: rows for kind, rows in two(h, blocks).items() if kind == "paper"}

    old = featstore.infer(g, [two], Z, "kept", progress=False)
    rows = {kind: store[:] for kind, store in old.items()}
    refuses(
        ValueError,
        r"there is a feature '(author|institution)/kept', and the last layer has no rows of its type",
        lambda: featstore.infer(g, [papers], Z, "kept", overwrite=True, progress=False),
    )
    assert all(torch.equal(g[kind].features["kept"][:], each) for kind, each in rows.items())
    assert not [name for name in os.listdir(g.path) if name.startswith("making")]


# --- errors ---------------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_inferred_is_refused(g: Any, small: Any) -> None:
    before = sorted(os.listdir(g.path))

    def constant(found: Any) -> Any:
        return [lambda h, blocks: found]

    def of_some(h: Rows, blocks: Blocks) -> Any:
        calls.append(1)
        return {key[2]: h[key[2]] for key in blocks if len(calls) < 3}

    calls: list[int] = []
    conv = HeteroConv({CITES: SAGEConv(8, 2)})
    good = constant({})
    for error, words, layers, features in (
        (TypeError, r'features must be a mapping .* such as \{"paper": "x"\}.*\'x\'; its types are \'paper\', ', good, "x"),
        (ValueError, "no node type 'papers'; it has 'paper', 'author'", good, {"papers": "x"}),
        (KeyError, "no feature 'x' of 'author'; there is 'z'", good, {"author": "x"}),
        (ValueError, "layer 0 returned rows of no type of nodes", good, Z),
        (TypeError, "layer 0 for 'paper' returned a Tensor, not a mapping of types of nodes", constant(torch.ones(3)), Z),
        (TypeError, "layer 0 for 'paper' returned a list, not a tensor", constant({"paper": []}), Z),
        (ValueError, r"layer 0 for 'paper' returned shape \(3, 2\) for 600 nodes", constant({"paper": torch.ones(3, 2)}), Z),
        (TypeError, "layer 0 is an Aggregate, which is for graphs of one type", [featstore.Aggregate(lambda h, m: m)], Z),
        (
            TypeError,
            r"HeteroConv of PyG, which takes no block: give lambda h, blocks",
            [conv],
            Z,
        ),
    ):
        refuses(error, words, lambda layers=layers, features=features: featstore.infer(g, layers, features, progress=False))
    refuses(
        ValueError,
        "layer 0 for 'paper' returned outputs of the type for some nodes, and none for nodes from",
        lambda: featstore.infer(g, [of_some], Z, memory="2MiB", progress=False),
    )
    refuses(ValueError, "'paper/z' is the feature that is read", lambda: featstore.infer(g, good, Z, "z", overwrite=True))
    refuses(ValueError, "'paper/y' is the name of node data", lambda: featstore.infer(g, good, Z, "y"))
    refuses(ValueError, "a feature 'paper/x' already; overwrite=True", lambda: featstore.infer(g, good, {"author": "z"}, "x"))
    with featstore.open(small.path, memory="64MiB") as one:
        refuses(TypeError, "the name of a feature in a graph of one type", lambda: featstore.infer(one, good, {"_": "x"}))
    assert sorted(os.listdir(g.path)) == before


def test_a_node_beyond_the_memory_is_named_with_its_type(tmp_path: Path) -> None:
    pairs = np.stack([np.arange(20_000) % 700, np.full(20_000, 2)])
    graph = TypedArrays({"a": 700, "b": 5}, {("a", "r", "b"): pairs}, {"a": {"x": np.ones((700, 64), np.float32)}})

    def layer(h: Rows, blocks: Blocks) -> Rows:
        block = blocks.get(("a", "r", "b"))
        return {} if block is None else {"b": h["a"].new_zeros(block.n_dst, 64).index_add_(0, block.dst, h["a"][block.src])}

    with graph.create(tmp_path / "g", memory="64MiB") as g:
        with pytest.raises(BudgetError, match="the 20000 in-neighbours of b 2 take") as caught:
            featstore.infer(g, [layer], {"a": "x"}, memory="4MiB", progress=False)
        found = featstore.infer(g, [layer], {"a": "x"}, memory=caught.value.needed, progress=False)
        assert torch.equal(found["b"][2], torch.full((64,), 20_000.0))


def test_runs_killed_at_a_system_call(made: tuple[Path, TypedArrays], tmp_path: Path) -> None:
    shutil.copytree(made[0], tmp_path / "g")
    run_in_fork(kill_some, str(tmp_path))
