"""Every node's output by layers, out of core: as in memory, both forms of layers; going on, errors, the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import Aggregate
from featstore.cli.main import main
from featstore.cli.model import ModelSizes, load_model, save_model
from featstore.cli.sage import GraphSAGE
from featstore.creation import steps
from featstore.errors import BudgetError, CorruptionError, FormatError
from featstore.graph.derive import making
from featstore.inference.gathered import whole_blocks
from featstore.sampling.batch import Block
from featstore.topology.types import ONE_NODE
from tests.support.pyg import GATConv, GCNConv, SAGEConv
from tests.support.pyg import GraphSAGE as PygSAGE
from tests.support.whole_graph import skewed_graph, whole_block

N, WIDTH = 700, 24


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("infer") / "g"
    rng = np.random.default_rng(1)
    x = rng.standard_normal((N, WIDTH))
    features = {"x": x.astype(np.float32), "x64": x, "half": x.astype(np.float16), "cube": x.reshape(N, 2, 12)}
    node_data = {"y": rng.integers(0, 5, N), "train_idx": np.arange(0, N, 3)}
    featstore.OutOfCoreGraph.create(path, *graph(), features, node_data, progress=False).close()
    return path


def graph() -> tuple[Any, Any]:
    return skewed_graph(N, 8, [5], 1_000)


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "g")
    return tmp_path / "g"


def sage(dtype: torch.dtype = torch.float32, n_out: int = 5) -> GraphSAGE:
    torch.manual_seed(0)
    return GraphSAGE(WIDTH, 32, n_out, 3).to(dtype).eval()


def callables(model: GraphSAGE) -> list[Callable[[torch.Tensor, Block], torch.Tensor]]:
    """Return a model's layers as they are called in a training loop."""

    def layer(i: int) -> Callable[[torch.Tensor, Block], torch.Tensor]:
        def run(h: torch.Tensor, block: Block) -> torch.Tensor:
            rows: torch.Tensor = model.layers[i](h, block)
            return model.norms[i](rows).relu() if i < len(model.norms) else rows

        return run

    return [layer(i) for i in range(len(model.layers))]


def in_memory(model: GraphSAGE, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(x, [whole_block(*graph())] * len(model.layers))
    return found


# --- as in memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_out", [5, 64])
@pytest.mark.parametrize("memory", [None, "3500KiB"])
def test_both_forms_of_layers_are_as_in_memory(path: Path, n_out: int, memory: str | None) -> None:
    with featstore.open(path, memory="64MiB") as g:
        for dtype, feature in ((torch.float32, "x"), (torch.float64, "x64"), (torch.float32, "half")):
            model = sage(dtype, n_out)
            expected = in_memory(model, g.features[feature][:].to(dtype))
            for layers in (model.inference_layers(), callables(model)):
                store = featstore.infer(g, layers, feature, overwrite=True, memory=memory, progress=False)
                assert store.dtype == dtype
                assert tuple(store.shape) == (N, n_out)
                if dtype == torch.float64:
                    torch.testing.assert_close(store[:], expected, rtol=1e-12, atol=1e-12)
                else:
                    assert torch.allclose(store[:], expected)
        assert not [name for name in os.listdir(path) if name.startswith("making")]
        assert "inference" not in g.memory_report()
        assert g.budget.peak <= g.budget.total
        g.verify(progress=False)


def test_rows_of_any_shape_and_what_is_not_asked_for(path: Path) -> None:
    with featstore.open(path, memory="64MiB") as g:
        seen: list[Any] = []

        def apply(h: Any, sums: torch.Tensor) -> torch.Tensor:
            seen.append(h)
            return sums * 2

        cube = featstore.infer(g, [Aggregate(apply, "sum", needs_self=False)], "cube", "cubes", progress=False)
        assert tuple(cube.shape) == (N, 2, 12)
        assert seen[0] is None
        flat = g.aggregate("cube", "sum", name="flat", progress=False)
        torch.testing.assert_close(cube[:], flat[:] * 2)
        blocks: list[Block] = []

        def general(h: torch.Tensor, block: Block) -> torch.Tensor:
            blocks.append(block)
            assert len(h) == block.n_src
            return h.new_zeros(block.n_dst, 2, 12).index_add_(0, block.dst, h.index_select(0, block.src)) * 2

        other = featstore.infer(g, [general], "cube", "others", memory="3500KiB", progress=False)
        assert torch.equal(other[:], cube[:])
        assert len(blocks) > 1
        assert all(bool((block.dst.diff() >= 0).all()) and block.n_dst <= block.n_src for block in blocks)


def test_pygs_convolutions_are_as_pyg_has_them(path: Path) -> None:
    from featstore.adapters.pyg import inference_layer

    block = whole_block(*graph())
    edges = torch.stack([block.src, block.dst])
    torch.manual_seed(0)
    with featstore.open(path, memory="64MiB") as g:
        x = g.features["x64"][:]
        for conv in (
            SAGEConv(WIDTH, 8),
            SAGEConv(WIDTH, 40, aggr="sum", root_weight=False),
            GCNConv(WIDTH, 8),
            GCNConv(WIDTH, 40, bias=False),
        ):
            conv = conv.double().eval()
            found = featstore.infer(g, [inference_layer(conv, torch.relu)], "x64", overwrite=True, progress=False)
            with torch.no_grad():
                torch.testing.assert_close(found[:], conv(x, edges).relu(), rtol=1e-12, atol=1e-12)
        for options in ({"improved": True}, {"aggr": "max"}, {"flow": "target_to_source"}):
            with pytest.raises(ValueError, match="only GCNConv itself, with normalize=True"):
                inference_layer(GCNConv(WIDTH, 8, **options))
        with pytest.raises(ValueError, match="no blockwise form"):
            inference_layer(SAGEConv(WIDTH, 8, flow="target_to_source"))

        class Own(SAGEConv):
            """Computes what it likes."""

        with pytest.raises(ValueError, match="no blockwise form"):
            inference_layer(Own(WIDTH, 8))


@pytest.mark.parametrize("conv", [SAGEConv(WIDTH, 8, aggr="max"), GATConv(WIDTH, 4, heads=2)])
def test_the_line_for_other_convolutions_of_pyg_computes_what_they_do(path: Path, conv: Any) -> None:
    from featstore.adapters.pyg import inference_layer

    with pytest.raises(ValueError, match="no blockwise form") as caught:
        inference_layer(conv)
    line = re.search(r"give infer (lambda .*), and in it", str(caught.value))
    assert line
    block = whole_block(*graph())
    edges = torch.stack([block.src, block.dst])
    with featstore.open(path, memory="64MiB") as g:
        found = featstore.infer(g, [eval(line[1], {"conv": conv.eval(), "torch": torch})], progress=False)
        with torch.no_grad():
            torch.testing.assert_close(found[:], conv(g.features["x"][:], edges))


def test_a_model_of_pyg_is_given_layer_by_layer(path: Path) -> None:
    from featstore.adapters.pyg import inference_layer

    model = PygSAGE(WIDTH, 16, 2, 3).eval()
    block = whole_block(*graph())
    with featstore.open(path, memory="64MiB") as g:
        for layers, words in (
            (model, "layers must be a sequence, not a GraphSAGE: give the model's layers in order, featstore.adapters.pyg"),
            ([model], "layer 0 is a GraphSAGE of PyG, which takes no block: give featstore.adapters.pyg.inference_layer"),
            (model.convs, r"layer 0 is a SAGEConv of PyG.*inference_layer\(conv, then\) of each conv"),
            (torch.nn.Linear(3, 3), "layers must be a sequence, not a Linear: .* its activation"),
            (Aggregate(lambda h, mean: mean), "not an Aggregate"),
        ):
            with pytest.raises(TypeError, match=words):
                featstore.infer(g, layers, progress=False)
        layers = [inference_layer(model.convs[0], torch.relu), inference_layer(model.convs[1])]
        found = featstore.infer(g, layers, progress=False)
        with torch.no_grad():
            torch.testing.assert_close(found[:], model(g.features["x"][:], torch.stack([block.src, block.dst])))


def test_the_example_of_the_aggregate_form_reads_no_more_than_its_passes(path: Path) -> None:
    with featstore.open(path, memory="64MiB") as g:
        before = g.features["x"].stats()["bytes_read"]
        featstore.infer(g, [Aggregate(lambda h, mean: mean, "mean", needs_self=False)], progress=False)
        assert g.features["x"].stats()["bytes_read"] - before <= 2 * g.features["x"].nbytes


# --- errors ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (lambda h: h[:-1], ValueError, "layer 1 returned shape"),
        (lambda h: h.numpy(), TypeError, "layer 1 returned a ndarray"),
        (lambda h: h.to(torch.int64), TypeError, "layer 1 returned torch.int64"),
        (lambda h: h[:, :0], ValueError, "no numbers"),
    ],
)
@pytest.mark.parametrize("form", ["aggregate", "general"])
def test_a_layer_that_returns_something_else_is_named(path: Path, form: str, returned: Any, error: Any, words: str) -> None:
    before = sorted(os.listdir(path))

    def general(h: torch.Tensor, block: Block) -> Any:
        return returned(h[: block.n_dst])

    layers = [Aggregate(lambda h, mean: mean), general if form == "general" else Aggregate(lambda h, mean: returned(mean))]
    with featstore.open(path, memory="64MiB") as g, pytest.raises(error, match=words):
        featstore.infer(g, layers, progress=False)
    assert [name for name in sorted(os.listdir(path)) if not name.startswith("making")] == before


def test_what_cannot_be_inferred_is_refused(path: Path) -> None:
    layer = Aggregate(lambda h, mean: mean)
    with featstore.open(path, memory="64MiB") as g:
        for arguments, options, error, words in (
            (([],), {}, ValueError, "at least one"),
            (([3],), {}, TypeError, "layer 0 must be"),
            (([layer], "z"), {}, KeyError, "no feature 'z'"),
            (([layer], "x", "x"), {}, ValueError, "choose another"),
            (([layer], "x", "x64"), {}, ValueError, "already"),
            (([layer], "x", "y"), {}, ValueError, "node data"),
            (([layer],), {"dtype": "float16"}, TypeError, "float32 or float64"),
            (([layer],), {"overwrite": 1}, TypeError, "overwrite"),
        ):
            with pytest.raises(error, match=words):
                featstore.infer(g, *arguments, **options, progress=False)
        with pytest.raises(ValueError, match="op must be"):
            Aggregate(lambda h, mean: mean, "max")
        with pytest.raises(TypeError, match="apply must be callable"):
            Aggregate(3)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            featstore.infer(g, [lambda h, block: 1 / 0], progress=False)
        assert not (path / "making.h").exists(), "nothing was there to go on from"


def test_a_graph_without_nodes_and_a_pack_have_no_output(tmp_path: Path) -> None:
    empty = np.zeros((0, 3), np.float32)
    with featstore.OutOfCoreGraph.create(tmp_path / "e", [0], np.zeros(0, np.int64), {"x": empty}, progress=False) as g:
        with pytest.raises(ValueError, match="without nodes"):
            featstore.infer(g, [Aggregate(lambda h, mean: mean)], progress=False)
        assert not (tmp_path / "e" / "making.h").exists()
    with pytest.raises(TypeError, match="adjacency"):
        featstore.infer(object(), [Aggregate(lambda h, mean: mean)])  # type: ignore[arg-type]


def test_blocks_are_counted_while_they_are_used(path: Path) -> None:
    with featstore.open(path, memory="64MiB") as g:
        rows, n = {ONE_NODE: g.fields.rows_of("x", ONE_NODE)}, 0
        for found in whole_blocks([g.edge_lists()], g.types.nodes[ONE_NODE], rows, 4, 0, N, g.budget, 1 << 20, "mine"):
            (block,) = found.edges.values()
            assert g.memory_report()["mine"] >= found.rows[ONE_NODE].nbytes + block.src.nbytes + block.dst.nbytes
            n += found.n_dst
        assert n == N
        assert "mine" not in g.memory_report()


def test_a_node_with_more_in_neighbours_than_memory_names_what_would_do(path: Path) -> None:
    layer = callables(sage())[:1]
    with featstore.open(path, memory="2500KiB") as g, pytest.raises(BudgetError, match="in-neighbours of node ") as caught:
        featstore.infer(g, layer, progress=False)
    assert caught.value.needed is not None
    with featstore.open(path, memory=caught.value.needed) as g:
        featstore.infer(g, layer, progress=False)
        assert g.budget.peak <= g.budget.total


# --- going on -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["aggregate", "general"])
def test_an_interrupted_run_with_a_name_is_gone_on_with(path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(steps, "CHECKPOINT_S", -1e9)
    model = sage()
    with featstore.open(path, memory="64MiB") as g:
        expected = in_memory(model, g.features["x"][:])
    left = [0]
    real = making.Making.checkpoint

    def checkpoint(self: Any) -> None:
        real(self)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    for calls in (1, 2, 3, 5):
        left[0] = calls
        layers: Any = model.inference_layers() if form == "aggregate" else callables(model)
        with featstore.open(path, memory="64MiB") as g, monkeypatch.context() as patch:
            patch.setattr(making.Making, "checkpoint", checkpoint)
            with pytest.raises(KeyboardInterrupt):
                featstore.infer(g, layers, overwrite=True, memory="3500KiB", resume="sage", progress=False)
        assert (path / "making.h" / "state").exists()
        with featstore.open(path, memory="64MiB") as g:
            store = featstore.infer(g, layers, overwrite=True, memory="3500KiB", resume="sage", progress=False)
            assert torch.allclose(store[:], expected)
        assert not (path / "making.h").exists()


def test_what_is_aggregated_is_made_once_and_dropped_with_its_layer(path: Path) -> None:
    rows: list[int] = []
    there: list[set[str]] = []

    def before(h: torch.Tensor) -> torch.Tensor:
        rows.append(len(h))
        return h

    def apply(h: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        there.append({name.partition(".")[0] for name in os.listdir(path / "making.h")})
        if len(there) == 1:
            raise KeyboardInterrupt
        return mean

    layers = [Aggregate(apply, before=before), Aggregate(apply, before=before)]
    with featstore.open(path, memory="64MiB") as g:
        with pytest.raises(KeyboardInterrupt):
            featstore.infer(g, layers, resume="a", progress=False)
        featstore.infer(g, layers, resume="a", progress=False)
    assert sum(rows) == 2 * N
    assert "step-0" in there[1]
    assert "step-0" not in there[-1]


# --- the command line -----------------------------------------------------------------------------------------------------------


def test_a_trained_model_is_saved_and_infers(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(tmp_path / "model")
    trained = ["train", str(path), "--fanouts", "3,3", "--hidden", "16", "--epochs", "1", "--batch-size", "100", "--json"]
    assert main([*trained, "--save", saved, "--memory", "64MiB"]) == 0
    assert main(["infer", str(path), "--model", saved, "--out", "scores", "--memory", "64MiB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["shape"] == [N, 5]
    model, sizes = load_model(saved)
    assert sizes == ModelSizes("x", WIDTH, 16, 5, 2)
    with featstore.open(path, memory="64MiB") as g:
        assert torch.allclose(g.features["scores"][:], in_memory(model, g.features["x"][:]))
    assert main(["infer", str(path), "--model", saved, "--out", "scores"]) == 2
    assert "already" in capsys.readouterr().err
    assert main(["infer", str(path), "--model", saved, "--feature", "cube"]) == 2
    assert "rows of 24 numbers" in capsys.readouterr().err
    assert main(["infer", str(path), "--model", str(path / "writer.lock")]) in (1, 2)


def test_the_command_goes_on_with_a_named_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, calls = str(tmp_path / "model"), [0]
    model, real = sage(), GraphSAGE._output
    save_model(saved, model, ModelSizes("x", WIDTH, 32, 5, 3))

    def output(self: GraphSAGE, i: int, *rows: torch.Tensor) -> torch.Tensor:
        calls.append(i)
        if i == 1 and 2 not in calls and calls.count(1) == 1:
            raise KeyboardInterrupt
        return real(self, i, *rows)

    monkeypatch.setattr(GraphSAGE, "_output", output)
    command = ["infer", str(path), "--model", saved, "--memory", "64MiB", "--resume"]
    assert main([*command, "model-1"]) == 130
    assert (path / "making.h").exists()
    del calls[:]
    calls.append(2)
    assert main([*command, "model-1"]) == 0
    assert 0 not in calls
    with featstore.open(path, memory="64MiB") as g:
        assert torch.allclose(g.features["h"][:], in_memory(model, g.features["x"][:]))
    capsys.readouterr()
    assert main([*command, "", "--overwrite"]) == 2
    assert "resume must be a name" in capsys.readouterr().err


def test_a_damaged_model_is_no_model(tmp_path: Path) -> None:
    saved = tmp_path / "model"
    save_model(saved, sage(), ModelSizes("x", WIDTH, 32, 5, 3))
    with saved.open("r+b") as file:
        file.seek(2_000)
        file.write(b"\xff\x00\xff")
    with pytest.raises(CorruptionError):
        load_model(saved)
    saved.write_bytes(b"nothing" * 100)
    with pytest.raises(FormatError):
        load_model(saved)
    save_model(saved, sage(), ModelSizes("x", WIDTH, 32, 5, 1000))
    with pytest.raises(FormatError, match="1000 layers of 13 weights"):
        load_model(saved)


def test_the_command_aggregates(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aggregate", str(path), "--op", "gcn", "--hops", "2", "--memory", "64MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "x_gcn2"
    assert main(["aggregate", str(path), "--memory", "64MiB"]) == 0
    assert "feature x_mean, 700 x 24 float32" in capsys.readouterr().out
    assert main(["aggregate", str(path), "--feature", "z"]) == 2
    assert "--feature: the dataset has no 'z'" in capsys.readouterr().err


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, h: torch.Tensor, block: Block) -> torch.Tensor:
        return self.drop(h[: block.n_dst])


class Share(torch.nn.Module):
    dropout = 0.5  # of attention, as PyG's convolutions have it

    def apply_to(self, h: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return h + mean


def test_layers_that_still_train_are_warned_of(path: Path) -> None:
    """Dropout and batch statistics would change the outputs; a module without either is the same in both modes."""
    drops, share = Dropping(), Share()
    with featstore.open(path, memory="16MiB") as g:
        for layer, name in (
            (drops, "Dropout"),
            (drops.forward, "Dropout"),
            (lambda h, block: drops(h, block), "Dropout"),
            (Aggregate(share.apply_to, "mean"), "Share"),
        ):
            with pytest.warns(featstore.FeatstoreWarning, match=f"a {name} is in training mode.*model.eval"):
                featstore.infer(g, [layer], "x", out="trained", overwrite=True, progress=False)
        drops.eval(), share.eval()
        of_none = Share()
        of_none.dropout = 0.0
        featstore.infer(g, [Aggregate(of_none.apply_to, "mean")], "x", out="trained", overwrite=True, progress=False)
        for layer in (drops, Aggregate(share.apply_to, "mean")):
            featstore.infer(g, [layer], "x", out="trained", overwrite=True, progress=False)
