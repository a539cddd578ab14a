"""Miss curves: what replaying says, policy by policy and size by size; and `featstore plan --simulate` over them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.cache import base
from featstore.cli.main import main
from featstore.cli.plots import draw_miss_curve
from featstore.errors import MissingExtraError
from featstore.estimate.misscurve import Step, miss_curve, parse_sizes
from featstore.plan.simulate import simulate
from featstore.plan.trace import Trace
from featstore.plotting import check_plot
from tests.support.loaders import row_policies
from tests.support.refusing import refuses


def random_trace(n: int, n_batches: int, size: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.unique((n * rng.random(rng.integers(0, size + 1)) ** 2).astype(np.int64)) for _ in range(n_batches)]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that cannot be simulated: one for want of an array, one for an error of its own, one that fails at a size."""

    class NeedsParts(featstore.StaticPolicy):
        def scores(self, context: featstore.PolicyContext) -> Any:
            return context.parts

    class Wrong(featstore.StaticPolicy):
        def scores(self, context: featstore.PolicyContext) -> Any:
            return np.zeros(context.n + 1)

    class Late(type(featstore.get_policy("lru"))):  # type: ignore[misc]
        def start(self, capacity: int, context: featstore.PolicyContext) -> None:
            if capacity > 3:
                raise ZeroDivisionError("too large for me")
            super().start(capacity, context)

    for name, cls in (("needs-parts", NeedsParts), ("wrong", Wrong), ("late", Late)):
        monkeypatch.setitem(base.POLICIES.known, name, cls)


@pytest.fixture(scope="module", autouse=True)
def _fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib opens its fonts once, and keeps them open: before any test counts descriptors."""
    for ending in ("png", "svg", "pdf"):
        path = tmp_path_factory.mktemp("fonts") / f"first.{ending}"
        draw_miss_curve(miss_curve(Trace([[0, 1]]), [1], ["belady"]), path, 8, "fonts")


@given(
    n=st.integers(1, 60),
    n_batches=st.integers(1, 12),
    size=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    capacities=st.lists(st.integers(1, 60), min_size=1, max_size=5),
)
def test_every_number_is_that_of_simulate(n: int, n_batches: int, size: int, seed: int, capacities: list[int]) -> None:
    batches = random_trace(n, n_batches, size, seed)
    if not any(map(len, batches)):
        batches[0] = np.array([0])
    capacities = [min(n, each) for each in capacities]
    degree = np.random.default_rng(seed).integers(0, 5, n)
    known: dict[str, Any] = {"in_degree": lambda: degree, "out_degree": lambda: degree[::-1].copy(), "seed": 3}
    curve = miss_curve(Trace(batches, n), capacities, **known)
    assert curve.sizes == sorted(set(capacities))
    assert {each.policy for each in curve.curves} == set(row_policies())
    for each in curve.curves:
        want = [int(simulate(batches, rows, each.policy, n=n, **known).sum()) for rows in curve.sizes]
        assert each.rows_loaded == want, each.policy
    ends = [each.rows_loaded[-1] for each in curve.curves]
    assert ends == sorted(ends)
    best = next(each for each in curve.curves if each.policy == "belady")
    assert all(mine <= others for each in curve.curves for mine, others in zip(best.rows_loaded, each.rows_loaded, strict=True))
    assert curve.n_distinct == len(np.unique(np.concatenate(batches)))
    assert curve.n_distinct <= min(best.rows_loaded)
    assert curve.n_accesses == sum(map(len, batches))


def test_from_disk_within_a_budget(tmp_path: Path) -> None:
    in_memory = Trace(random_trace(500, 20, 100, 0), 500)
    in_memory.save(tmp_path / "trace")
    on_disk = Trace.open(tmp_path / "trace")
    policies = ["belady", "lru", "random", "frequency"]
    budget = Budget(60_000)
    found = miss_curve(on_disk, [10, 50], policies, budget=budget)
    assert found.to_dict(8)["sizes"][0]["rows"] == 10
    want = miss_curve(in_memory, [10, 50], policies)
    assert [(c.policy, c.rows_loaded) for c in found.curves] == [(c.policy, c.rows_loaded) for c in want.curves]
    assert budget.used == 0
    assert budget.peak > 16 * 500
    with pytest.raises(featstore.BudgetError, match="simulation") as caught:
        miss_curve(on_disk, [10, 50], policies, budget=Budget(10_000))
    assert caught.value.needed > 10_000
    on_disk.close()
    refuses(featstore.ClosedError, "", lambda: miss_curve(on_disk, [10]))


def test_steps() -> None:
    steps: list[Step] = []
    trace = Trace(random_trace(200, 10, 60, 1), 200)
    miss_curve(trace, [5, 20, 200], ["random", "lru", "belady"], on_step=steps.append)
    # One for the static policy; LRU at 200 rows never evicts, and needs none.
    assert [(s.done, s.total, s.policy, s.capacity) for s in steps] == [
        (0, 6, "random", 200),
        (1, 6, "lru", 5),
        (2, 6, "belady", 5),
        (3, 6, "lru", 20),
        (4, 6, "belady", 20),
        (5, 6, "belady", 200),
    ]
    assert [s.left_s is None for s in steps] == [True, True, False, False, False, False]
    assert all(s.left_s > 0 for s in steps[2:] if s.left_s is not None)


def test_policies_that_cannot_be_simulated(failing: None) -> None:
    trace = Trace(random_trace(50, 5, 20, 2), 50)
    known = {"in_degree": lambda: np.ones(50), "out_degree": lambda: np.ones(50)}
    curve = miss_curve(trace, [2, 10], **known)
    assert set(curve.skipped) == {"needs-parts", "wrong", "late"}
    assert "needs parts" in curve.skipped["needs-parts"]
    assert "too large for me" in curve.skipped["late"]
    assert not {each.policy for each in curve.curves} & set(curve.skipped)
    assert all(len(each.rows_loaded) == 2 for each in curve.curves)
    table = curve.table(8)
    assert "not simulated: wrong: policy" in table
    assert "scores must be 50 real numbers" in table
    for name, error in (("needs-parts", ValueError), ("wrong", featstore.PluginError), ("late", featstore.PluginError)):
        refuses(error, "", lambda: miss_curve(trace, [2, 10], [name]))
    assert set(miss_curve(trace, [2]).skipped) == {"needs-parts", "wrong", "degree", "in_out_ratio"}  # without degrees


@pytest.mark.parametrize(
    ("batches", "sizes", "policies", "message"),
    [
        ([[]], [1], None, "no rows"),
        ([], [1], None, "no rows"),
        ([[1]], [], None, "no sizes"),
        ([[1]], [0], None, "cache of 0 rows"),
        ([[1]], [3], None, "from 1 to 2"),
        ([[1]], [1], ["magic"], "no policy is named 'magic'"),
    ],
)
def test_what_cannot_be(batches: Any, sizes: list[int], policies: list[str] | None, message: str) -> None:
    refuses(ValueError, message, lambda: miss_curve(Trace(batches), sizes, policies))


def test_sizes() -> None:
    assert parse_sizes("50%, 1%,0.1,7", 1000, 64) == [7, 10, 100, 500]
    assert parse_sizes("100%,1000", 1000, 64) == [1000]
    assert parse_sizes("0.01%", 1000, 64) == [1]
    assert parse_sizes("8KiB", 1000, 64) == [(8192 - 4000) // 72]
    assert parse_sizes("1TiB", 1000, 64) == [1000]
    for text, message in [
        ("0%", "above 0"),
        ("101%", "at most 100"),
        ("1.5", "at most 100"),
        ("0", "a cache of 0 rows"),
        ("1001", "a cache of 1001 rows is out of range: sizes are from 1 to 1000 rows"),
        ("5%,many", "'many': not a size.*shares .5%., rows .20000. or memory .1GiB."),
        ("5%,", "''"),
        ("x%", "'x%'"),
        ("1KB", "takes 4072 bytes"),
    ]:
        refuses(ValueError, f"sizes: .*{message}", lambda: parse_sizes(text, 1000, 64))


def test_the_memory_that_it_names_suffices(small: Any) -> None:
    """Whatever the policy, a cache within those bytes holds those rows."""
    with featstore.open(small.path, memory="64MiB") as g:
        curve = miss_curve(Trace([np.arange(1000)]), [20, 300], ["lru", "s3fifo", "belady", "random"])
        for rows, n_bytes in zip(curve.sizes, curve.cache_bytes(100), strict=True):
            capacities = []
            for policy in ("lru", "s3fifo", "random"):
                g.cache("x", n_bytes, policy)
                capacities.append(g.features["x"].cache.capacity)
            assert min(capacities) == rows


def test_the_picture(tmp_path: Path) -> None:
    trace = Trace(random_trace(3000, 20, 900, 4), 3000)
    for name, sizes in (("many.png", list(range(10, 3000, 40))), ("one.svg", [30])):
        curve = miss_curve(trace, sizes, ["belady", "lru", "random"])
        draw_miss_curve(curve, tmp_path / name, 512, "some graph")
    assert (tmp_path / "many.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "one.svg").read_text()


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(tmp_path / "curve.png")
    refuses(ValueError, r"must end in one of .*\.png", lambda: check_plot(tmp_path / "curve.doc"))
    refuses(FileNotFoundError, "", lambda: check_plot(tmp_path / "nowhere" / "curve.png"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refuses(MissingExtraError, r"pip install matplotlib", lambda: check_plot(tmp_path / "curve.png"))


SAMPLING = ["--batch-size", "30", "--fanouts", "4,3", "--seed", "5"]


def plan(capsys: pytest.CaptureFixture[str], path: object, *options: object) -> dict[str, Any]:
    assert main(["plan", str(path), "--simulate", "--json", *map(str, options)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("one_thread")
def test_training_loads_what_was_planned(small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace is what `featstore train` asks for with the same options; the counts are what it then loads."""
    curve = plan(capsys, small.path, *SAMPLING, "--sizes", "2%,40%")
    assert [size["rows"] for size in curve["sizes"]] == [20, 400]
    assert set(curve["policies"]) == set(row_policies())
    train = ["train", str(small.path), *SAMPLING, "--epochs", "1", "--hidden", "4", "--memory", "64MiB", "--json"]
    for policy in ("lru", "sieve", "belady"):
        strategy = ["--strategy", "superbatch", "--length", "50"] if policy == "belady" else []
        for size, planned in zip(curve["sizes"], curve["policies"][policy]["rows_loaded"], strict=True):
            assert main([*train, "--policy", policy, "--cache", str(size["share"]), *strategy]) == 0
            stats = json.loads(capsys.readouterr().out)["stats"]
            assert stats["rows"] == curve["rows_asked_for"]
            assert stats["rows_loaded"] == planned, (policy, size)


def test_a_kept_trace(small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "epoch.trace"
    first = plan(capsys, small.path, *SAMPLING, "--max-batches", 4, "--save-trace", trace, "--plot", tmp_path / "curve.png")
    assert first["batches"] == 4
    assert first["plot"] == str(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    again = plan(capsys, small.path, "--trace", trace, "--seed", 5)
    drop = lambda found: {name: each["rows_loaded"] for name, each in found["policies"].items()}  # noqa: E731
    assert drop(again) == drop(first)
    some = plan(capsys, small.path, "--trace", trace, "--policies", "belady, lru", "--sizes", "50,64KB", "--feature", "h")
    assert set(some["policies"]) == {"belady", "lru"}
    assert some["row_bytes"] == 600
    assert [size["rows"] for size in some["sizes"]] == [50, (64_000 - 4000) // 608]
    assert main(["plan", str(small.path), "--simulate", "--trace", str(trace), "--plot", str(tmp_path / "b.pdf")]) == 0
    printed = capsys.readouterr().out
    for text in ("4 batches ask for", "belady", "each row once", "1,000", "KiB", "drawn: "):
        assert text in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.pdf", "curve.png", "epoch.trace"]
    assert not os.path.exists(f"{small.path}.runs")


def test_seeds_of_another_name(small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"mine": np.arange(0, 1000, 7)}
    featstore.OutOfCoreGraph.create(tmp_path / "g", small.indptr, small.indices, {"x": small.x}, data, progress=False).close()
    found = plan(capsys, tmp_path / "g", "--seeds", "mine", "--batch-size", 10)
    assert found["batches"] == 15
    for arguments, message in [
        ([], "labels: the dataset has no 'y'; it has 'mine'. Name others with --labels, or nodes with --seeds"),
        (["--labels", "mine"], "no training seeds"),
        (["--seeds", "yours"], "--seeds: the dataset has no node data 'yours'; it has 'mine'"),
    ]:
        assert main(["plan", str(tmp_path / "g"), "--simulate", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "g.runs")


def test_errors_of_the_command(small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    Trace([[1, 2]], 5).save(tmp_path / "other")
    Trace([], 1000).save(tmp_path / "empty")
    (tmp_path / "text").write_text("no trace" * 100)
    Trace([[1, 2]], 1000).save(tmp_path / "flipped")
    with (tmp_path / "flipped").open("r+b") as file:
        file.seek(8)  # a row of the only batch
        file.write(b"\x05")
    for arguments, message, status in [
        (["--sizes", "lots"], "sizes: 'lots': not a size", 2),
        (["--policies", "magic"], "no policy is named 'magic'", 2),
        (["--feature", "z"], "--feature: the dataset has no 'z'; it has 'h', 'x'", 2),
        (["--trace", f"{tmp_path}/other"], "is a trace over 5 rows, and the dataset has 1000; record one", 2),
        (["--trace", f"{tmp_path}/empty"], "asks for no rows", 2),
        (["--trace", f"{tmp_path}/text"], "text", 2),
        (["--trace", f"{tmp_path}/flipped"], "array 1 is damaged", 1),
        (["--trace", f"{tmp_path}/nowhere"], "nowhere: no such file", 2),
        (["--trace", f"{tmp_path}/other", "--fanouts", "3,3"], "--fanouts is for recording: leave it out, or", 2),
        (["--trace", f"{tmp_path}/other", "--save-trace", f"{tmp_path}/b"], "--save-trace is for recording", 2),
        (["--save-trace", f"{tmp_path}/text"], "there already; use it with --trace, or remove it", 2),
        (["--disk", "1KB", "--save-trace", f"{tmp_path}/new"], "disk budget", 2),
        (["--memory", "300KB"], "would do", 2),
        (["--plot", f"{tmp_path}/a.doc"], "must end in one of", 2),
        (["--plot", f"{tmp_path}/none/a.png"], "none/a.png' is not there", 2),
    ]:
        assert main(["plan", str(small.path), "--simulate", *arguments]) == status, arguments
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert message in captured.err, arguments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "flipped", "other", "text"]
    assert not os.path.exists(f"{small.path}.runs")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", str(small.path), "--simulate", "--plot", "a.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_bars(small: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["plan", str(small.path), "--simulate", *SAMPLING]) == 0
    shown = capsys.readouterr().err
    for text in ("sampling:", "simulating:", "belady, 20 rows, about", "left"):
        assert text in shown


@pytest.mark.parametrize(
    ("batches", "error", "match"),
    [
        ([[-1, 3]], IndexError, "row -1 at position 0: rows are numbered from 0"),
        ([np.array([2**63], np.uint64)], IndexError, "row 9223372036854775808 is beyond 64 bits"),
        ([[0.5, 1.0]], TypeError, "1-D integer array, not float64"),
        ([[[1, 2]]], TypeError, "2 dimensions"),
        ([["a"]], TypeError, "1-D integer array"),
        ([[1, 1]], ValueError, "batch 0 names a row twice"),
    ],
)
def test_what_is_no_trace(batches: list[Any], error: type[Exception], match: str) -> None:
    refuses(error, match, lambda: featstore.simulate(batches, 2))
