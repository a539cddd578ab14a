"""Every benchmark runs at its smallest size and prints figures that can be read."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from benchmarks.__main__ import LONG, scripts
from benchmarks.results import TOPICS
from benchmarks.tools.memmap import MemmapRows
from tests.support.programs import run_program

pytestmark = pytest.mark.usefixtures("_program_server")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = scripts()
FIELDS = {"name", "value", "unit", "reference", "ratio", "runs", "machine"}
ASKS_FIO = {  # a group of each script that fio is a reference of
    "epochs.epoch": "preparation",
    "rows.gather": "cold",
    "sizes.growth": "open",
    "sampling.insitu": "reading",
    "epochs.packing": "extents",
}
PLOTTING = {"papers.partition_batches"}
OF_TOPICS = re.compile(rf"^ *from benchmarks\.(?:{'|'.join(TOPICS)})\b", re.MULTILINE)
Figures = list[dict[str, Any]]
# But for one that takes the drive's best rate, which is the library's own where fio is not there.
FIO_SCRIPTS = {each for each in SCRIPTS if "fio" in BENCHMARKS.joinpath(*each.split(".")).with_suffix(".py").read_text()}
FIO_SCRIPTS.remove("data.infer")
# Those that run long, most of it to start processes: make test runs some of their groups, make stress all of them at once.
GROUPS = {
    "choices.auto": ["10"],
    "choices.division": [],
    "epochs.epoch": ["hidden"],
    "rows.gather": ["widths", "blocks"],
    "sizes.growth": [],  # what asks for fio suffices
    "epochs.strategies": ["rows"],
    "sampling.insitu": ["reading"],
    "papers.partition_batches": ["accuracy", "lists"],
    "epochs.packing": ["epochs"],
    "data.pyg": ["cost"],
    "machines.ranks": ["export", "drive", "planted"],
    "sizes.types": ["accuracy", "streamed"],
}


def runs(scripts: set[str]) -> list[Any]:
    """Return pairs of a script and what it is limited to, for :func:`pytest.mark.parametrize`."""
    groups = [(script, group) for script in sorted(scripts) for group in GROUPS.get(script, [""])]
    return [*groups, *(pytest.param(script, "", marks=pytest.mark.stress) for script in sorted(scripts & GROUPS.keys()))]


# Reads nothing, and says that it read 1 GiB in half a second.
FIO = """
import json, pathlib, sys
options = dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:])
if options["rw"] == "write":
    pathlib.Path(options["filename"]).touch()
done = {"io_bytes": 1 << 30, "runtime": 500}
print("a line before the report", json.dumps({"jobs": [{"read": done, "write": done}]}))
"""


def check_lines(text: str) -> list[dict[str, Any]]:
    """Check that each line is a figure with all its fields; return them."""
    figures = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert figures
    for figure in figures:
        assert figure.keys() >= FIELDS, figure
        assert isinstance(figure["value"], int | float)
        assert (figure["ratio"] is None) == (figure["reference"] is None), figure
    return figures


def run_script(script: str, tmp_path: Path, *more: str, **environment: str) -> tuple[list[dict[str, Any]], str]:
    """Run a benchmark at its smallest size; return its figures and what it wrote to stderr."""
    out = tmp_path / "out.jsonl"
    line = [f"benchmarks.{script}", "--tiny", "--scratch", tmp_path / "scratch", "--out", out, *more]
    options: dict[str, Any] = {"cwd": tmp_path, "starts_programs": True, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = run_program("-m", *line, **options, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = check_lines(done.stdout)
    assert figures == check_lines(out.read_text())
    assert not any((tmp_path / "scratch").iterdir()), "generated data is removed"
    return figures, done.stderr


def find(figures: list[dict[str, Any]], start: str, reference: str = "") -> dict[str, Any]:
    """The one figure of this name whose reference contains a text."""
    (found,) = [f for f in figures if str(f["name"]).startswith(start) and reference in str(f["reference"])]
    return found


def epochs_against_memory_maps_are_whole_and_have_both_references(figures: Figures) -> None:
    many, one = (find(figures, "R22, an epoch on demand", text) for text in ("read by 16 threads", "read by 1 thread,"))
    assert "target" in many
    assert "target" not in one
    assert many["runs"] == one["runs"]
    assert many["batches"] == one["batches"] == 195  # seeds of R12, one a batch


def hidden_has_two_equal_halves_and_no_epoch_is_shorter_than_they(figures: Figures) -> None:
    """Were one half much the shorter, hiding it would show nothing."""
    figure = find(figures, "R22, epoch with preparation beside the loop")
    assert figure["halves"]
    for halves, reference, seconds in zip(figure["halves"], figure["reference_runs"], figure["runs"], strict=True):
        assert {"sample", "plan", "gather"} <= figure["stages_beside_and_alone"][0].keys()
        assert halves["preparation"] == pytest.approx(sum(halves["stages"].values()))
        assert {"sample", "plan", "gather"} <= {stage for stage, s in halves["stages"].items() if s > 0}
        assert halves["preparation"] <= halves["compute"] * 1.001  # a sleep is never too short
        assert reference == pytest.approx(max(halves["preparation"], halves["compute"]), rel=1e-3)
        assert seconds >= reference * 0.999


def frozen_epochs_have_a_bound_without_fio(figures: Figures) -> None:
    """The library's reader measures the drive, too. Where fio is there, a bound takes the better of both."""
    frozen = find(figures, "R22 frozen, data preparation")
    copy, read = frozen["copy_s"][len(frozen["copy_s"]) // 2 :], frozen["read_bytes_per_s"][len(frozen["copy_s"]) // 2 :]
    bounds = [max(c, frozen["missed"] * 512 / r) for c, r in zip(copy, read, strict=True)]
    assert frozen["reference_runs"] == pytest.approx(bounds, rel=1e-3)
    assert "missing" in find(figures, "R22 streamed, data preparation")
    for copy_s, copies in zip(frozen["copy_s"], frozen["copies"], strict=True):
        assert copy_s == min(copies.values())
        assert {name.split(",")[0] for name in copies} == {"copy_rows", "index_select"}


def memory_that_is_tight_has_passes(figures: Figures) -> None:
    tight = [f for f in figures if " batches in 64 MiB, streamed" in str(f["name"])]
    assert len(tight) == 2 * 3
    assert all(f["value"] >= 1 for f in tight if f["unit"] == "passes")
    assert all(f["ratio"] > 0 for f in tight if "bytes read" in str(f["name"]))


def large_graphs_stay_within_their_memory(figures: Figures) -> None:
    peaks = [f for f in figures if "peak resident memory beyond import" in str(f["name"])]
    assert len(peaks) == 2 + 3
    assert all(f["met"] for f in peaks)
    created = find(figures, "2**22 nodes in 24 MiB, created in chunks", "None")
    assert created["offsets_bytes"] > 24 << 20
    assert "target" not in find(figures, "R22, 20,15,10, in memory", "which writes nothing")
    (at_random,) = [f for f in figures if str(f["name"]).endswith("beside random access")]
    assert at_random["reference_runs"] == pytest.approx(min(at_random["ways"].values()), rel=1e-3)


def preparation_compares_batches_in_equal_memory(figures: Figures) -> None:
    found = [figure for figure in figures if "data preparation in random batches" in str(figure["name"])]
    for figure, strategy in zip(found, ("superbatch", "streamed"), strict=True):
        assert f", {strategy}: data preparation in random batches" in str(figure["name"])
        assert figure["reference"] == "in partition batches, at equal memory"
        assert figure["ratio"] == pytest.approx(figure["runs"][0] / figure["reference_runs"][0], rel=1e-3)
        assert figure["reference_rows"] < figure["rows"]
        for stages in (figure["stages"], figure["reference_stages"]):
            assert {"sample", "plan", "gather"} <= {stage for stage, s in stages.items() if s > 0}
            assert ("pack" in {stage for stage, s in stages.items() if s > 0}) == (strategy == "streamed")


def accuracy_compares_ways_of_training(figures: Figures) -> None:
    found = [figure for figure in figures if ", accuracy of " in str(figure["name"])]
    reference, *others = found
    assert str(reference["name"]).endswith("random batches")
    assert len(others) >= 10
    for figure in others:
        assert figure["ratio"] == pytest.approx(100 * (figure["value"] - reference["value"]), abs=0.02)
        assert (figure["rows_ratio"] < 1) == ("LABOR" in str(figure["name"]) or figure["macro"] is not None)


def outre_counts_rows_of_layer_neighbour_sampling(figures: Figures) -> None:
    rows = {figure["name"]: figure["value"] for figure in figures}
    few = rows["R12, random batches, rows requested, [10, 10, 10], LABOR-0"]
    assert 0 < few < rows["R12, random batches, rows requested, [10, 10, 10], neighbours"]
    streamed = {str(f["name"]).split(" cached, ")[1]: f for f in figures if str(f["name"]).startswith("R12, streamed, ")}
    for more in ("", ", an epoch at a time"):
        plain, shared = (streamed[f"{name}{more}: data preparation"] for name in ("neighbour sampling", "LABOR"))
        assert shared["rows"] < plain["rows"]
        assert shared["stages"]["pack"] > 0


def a_history_requests_fewer_rows_and_changes_nothing_where_it_is_never_used(figures: Figures) -> None:
    counted = [figure for figure in figures if "rows requested" in str(figure["name"]) and "history" in str(figure["name"])]
    assert len(counted) == 4
    assert all(figure["ratio"] < 1 and figure["pulled"] > 0 for figure in counted)
    chosen = [figure for figure in figures if "a history (auto)" in str(figure["reference"])]
    assert len(chosen) == 2
    assert all(figure["split"] and figure["reference_rows"] <= figure["rows"] for figure in chosen)
    prepared = [figure for figure in figures if "a history (history)" in str(figure["reference"])]
    assert [str(figure["name"]).split(", ")[1].split(":")[0] for figure in prepared] == ["superbatch", "streamed"]
    assert all(figure["reference_rows"] < figure["rows"] for figure in prepared)


def lists_at_hand_read_fewer_ids(figures: Figures) -> None:
    sampled = [figure for figure in figures if "lists at hand" in str(figure["name"])]
    assert len(sampled) == 4
    assert all(figure["ids_read"] < figure["reference_ids_read"] for figure in sampled)


OUTRE: dict[str, tuple[Callable[[Figures], None], ...]] = {  # by the group that prints what is checked; all at once have all
    "accuracy": (accuracy_compares_ways_of_training,),
    "lists": (lists_at_hand_read_fewer_ids,),
}
OUTRE[""] = (
    *(check for checks in OUTRE.values() for check in checks),
    preparation_compares_batches_in_equal_memory,
    outre_counts_rows_of_layer_neighbour_sampling,
    a_history_requests_fewer_rows_and_changes_nothing_where_it_is_never_used,
)


def edges_are_numbered_by_every_sampler_and_from_a_stored_permutation(figures: Figures) -> None:
    samplers = {str(f["name"]).split()[0] for f in figures if "with the numbers of edges, lists" in str(f["name"])}
    assert samplers == {"NeighborSampler", "LaborSampler", "LayerSampler", "ShadowSampler", "EpochSampler"}
    assert len([f for f in figures if "of a permutation on disk" in str(f["name"])]) == 2


def simulate_is_timed_with_both_widths(figures: Figures) -> None:
    found = [f for f in figures if str(f["name"]).startswith("featstore.simulate, belady, arrays of ")]
    assert [str(f["name"]).split()[-1] for f in found] == ["int32", "int64"]


def types_are_created_within_their_memory(figures: Figures) -> None:
    peak = find(figures, "create R-GAT's shape, peak resident memory beyond import", "budget + 64 MB")
    assert peak["met"]
    assert peak["reference_runs"] == [pytest.approx(peak["budget"] + 64e6, rel=1e-3)]


def both_sides_train_and_their_means_are_compared(figures: Figures) -> None:
    memory, own = (find(figures, f"R-GAT, accuracy {side}") for side in ("in memory", "through featstore"))
    assert own["reference_runs"] == memory["runs"]
    assert all(0 < each["mean"] < 100 for each in (memory, own))
    difference = find(figures, "R-GAT, difference of the mean accuracies")
    assert difference["value"] == pytest.approx(abs(own["mean"] - memory["mean"]), abs=0.01)
    assert difference["target"] == "<= 0.5"


@pytest.mark.parametrize(("script", "only"), runs(set(SCRIPTS) - FIO_SCRIPTS))
def test_benchmark_runs(script: str, only: str, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    is_plotted = script == "papers.partition_batches" and only in ("", "accuracy")
    more = ("--only", only) if only else ()
    figures, errors = run_script(script, tmp_path, *more, *(("--plot", str(plot)) if is_plotted else ()))
    assert [figure for figure in figures if "missing" in figure] == []
    # Figures of several machines stand in one table: each says whose it is, and so does the run.
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = model[1].strip() if model else platform.machine()
    assert all(str(figure["machine"]).startswith(name) for figure in figures)
    assert f"# {figures[0]['machine']}\n" in errors
    if script == "epochs.planner":
        simulate_is_timed_with_both_widths(figures)
    if script == "sampling.samplers":
        edges_are_numbered_by_every_sampler_and_from_a_stored_permutation(figures)
    if script == "machines.ranks":
        what_ranks_promise_holds_where_it_is_counted(figures, only)
    if script == "sizes.types" and only != "streamed":
        both_sides_train_and_their_means_are_compared(figures)
    if script == "sizes.types" and only != "accuracy":
        types_are_created_within_their_memory(figures)
    if script == "papers.partition_batches":
        for check in OUTRE[only]:
            check(figures)
    if script in PLOTTING:
        assert plot.exists() == is_plotted
        assert not is_plotted or plot.stat().st_size > 1_000


@pytest.mark.stress
def test_defaults_stand_beside_the_best_strategy_and_a_memory_map(tmp_path: Path) -> None:
    figures, errors = run_script("choices.defaults", tmp_path, "--json")
    names = [str(figure["name"]) for figure in figures]
    title = "R12, a quarter of the rows (257 MiB), an epoch of "
    sides = ["default loader", 'strategy="auto"', "featstore train", "a memory map read by 16 threads"]
    sides.append("store[ids] after g.cache()")
    assert names == [title + side for side in sides]
    best = figures[0]["best"]
    assert best == min(figures[0]["fixed"], key=figures[0]["fixed"].get)
    assert [figure["reference"] for figure in figures] == [f"the best fixed strategy, {best}"] * 3 + [
        "default loader",
        "np.memmap",
    ]
    assert figures[3]["reference_runs"] == figures[0]["runs"]
    assert figures[4]["reference_runs"] == figures[3]["runs"]
    for figure in figures:
        assert figure["impossible"] == {}
        (details,) = figure["details"]
        assert len(details["epochs"]) == 3
        assert figure["value"] == pytest.approx(sum(details["epochs"][1:]) / 2, rel=1e-3)  # the first does not count
    assert title.split(", an")[0] in errors.splitlines()[-1]


def test_defaults_draw_seconds_against_memory(tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    figures, _ = run_script("choices.defaults", tmp_path, "--json", "--curve", str(picture))
    sides = ["np.memmap", "ondemand frequency", "superbatch belady", "streamed belady", "default loader"]
    shares = ["12%", "50%", "150%"]
    assert [figure["name"] for figure in figures] == [
        f"R12, in {share} of the rows' bytes, an epoch of {side}" for share in shares for side in sides
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("one", ["packed,", pytest.param("", marks=pytest.mark.stress)])
def test_papers100m_stands_beside_what_drive_and_cores_take(one: str, tmp_path: Path) -> None:
    words = "epoch,10-10-10,chunked"
    (tmp_path / "scratch").mkdir()
    rates, *figures = run_script("sizes.papers100m", tmp_path, "--folder", str(tmp_path / "graph"), "--only", one + words)[0]
    strategies = {"packed"} if one else {"auto", "streamed", "superbatch", "ondemand", "packed"}
    assert {figure["name"] for figure in figures} == {", ".join([each, *words.split(",")]) for each in strategies}
    for figure in figures:
        assert figure["ran"] == [3, 3]
        assert figure["hits"]["host"] + figure["hits"]["base"] + figure["hits"].get("packed", 0) == figure["rows"]
        assert figure["bound"]["draw"] == pytest.approx(figure["edges"] / rates["edges"], abs=0.06)
        assert figure["reference_runs"] == [pytest.approx(max(figure["bound"]["drive"], figure["bound"]["cores"]), abs=0.06)]
        assert figure["steady_wait_s"] <= max(each["seconds"] for each in figure["waits"]) + 0.01


@pytest.mark.stress
def test_papers_of_mag240m_have_their_width(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    line = ("--folder", str(tmp_path / "graph"), "--shape", "mag240m", "--only", "auto,neighbor,15-10-5,csc", "--train")
    _, figure, trained = run_script("sizes.papers100m", tmp_path, *line)[0]
    with featstore.open(next((tmp_path / "graph").iterdir()), memory="64MiB") as g:
        assert g.features["x"].shape[1] == 768
        assert g.num_nodes == round(121_751_666 / 2**15)
    assert figure["ran"][0] == figure["ran"][1]
    assert trained["name"] == f"{figure['name']}, trained on"
    assert 0 < trained["hidden"] <= 1


@pytest.mark.stress
def test_convergence_compares_batches_and_frozen_samples(tmp_path: Path) -> None:
    figures, errors = run_script("choices.convergence", tmp_path, "--json", "--frozen", "--only", "default,macro of 2,frozen")
    reference, default, few, frozen = figures
    assert [figure["reference"] for figure in figures] == [None, *["random batches, in points of accuracy"] * 3]
    assert few["rows_ratio"] < default["rows_ratio"] <= 1 == frozen["rows_ratio"]
    assert few["loaded_ratio"] < 1 == frozen["loaded_ratio"]
    for figure in figures:
        (run,) = figure["trained"]
        assert len(run["validation"]) == len(run["seconds"]) == 2
        assert figure["runs"] == pytest.approx([run["accuracy"]], rel=1e-3)
        reached = [n for n, each in enumerate(run["validation"], 1) if each >= max(reference["trained"][0]["validation"]) - 0.005]
        assert figure["epochs_to_accuracy"] == [min(reached, default=None)]
    # The first epoch is the samples that are frozen, in the same weights; then the others are fresh.
    assert frozen["trained"][0]["rows"] == reference["trained"][0]["rows"]
    assert frozen["trained"][0]["validation"] != reference["trained"][0]["validation"]
    assert errors.splitlines()[-1].startswith("frozen samples")


RANKS = {  # by the group, the ends of names of the figures that are counts, and so have targets at the smallest size, too
    "export": ["batches that differ", "batches that differ", "ids read of lists outside the part"],
    "drive": [],
    "planted": [
        "nodes a part, exact",
        "nodes a part, paths",
        "training nodes of the largest part, exact",
        "training nodes of the largest part, paths",
    ],
}


def what_ranks_promise_holds_where_it_is_counted(figures: Figures, only: str) -> None:
    promised = [figure for figure in figures if "target" in figure]
    expected = RANKS[only] if only else [end for ends in RANKS.values() for end in ends]
    assert sorted(str(figure["name"]).rsplit(": ", 1)[1] for figure in promised) == sorted(expected)
    assert [figure for figure in promised if not figure["met"]] == []
    exported = [figure for figure in promised if str(figure["name"]).endswith("batches that differ")]
    assert all(figure["batches"] == 2 * 8 for figure in exported), "both ranks have as many"


EPOCHS: dict[str, tuple[Callable[[Figures], None], ...]] = {
    "memmap": (epochs_against_memory_maps_are_whole_and_have_both_references,),
    "hidden": (hidden_has_two_equal_halves_and_no_epoch_is_shorter_than_they,),
}
EPOCHS[""] = (*EPOCHS["memmap"], *EPOCHS["hidden"])


def stand_in(tmp_path: Path, has_fio: bool) -> str:
    """Return a PATH on which there is nothing, or a stand-in for fio alone."""
    programs = tmp_path / "programs"
    programs.mkdir()
    if has_fio:
        (programs / "fio").write_text(f"#!{sys.executable}\n{FIO}")
        (programs / "fio").chmod(0o755)
    return str(programs)


@pytest.mark.parametrize(("script", "only"), runs(FIO_SCRIPTS))
def test_benchmark_runs_without_fio(script: str, only: str, tmp_path: Path) -> None:
    """Figures against fio say that it is absent, and all others are complete."""
    figures, errors = run_script(script, tmp_path, *(("--only", only) if only else ()), PATH=stand_in(tmp_path, has_fio=False))
    missing = [str(figure["missing"]) for figure in figures if "missing" in figure]
    asks = only in ("", "blocks", ASKS_FIO[script]) or script == "epochs.packing"
    assert ("fio is not installed" in errors) == asks
    assert bool(missing) == asks
    assert len(figures) > len(missing)
    assert not [figure for figure in figures if "fio" in str(figure["reference"])]
    assert all("fio" in reference for reference in missing)
    if script == "epochs.epoch":
        for check in EPOCHS[only]:
            check(figures)
    if script == "sizes.growth" and not only:
        memory_that_is_tight_has_passes(figures)
    if script == "sampling.insitu" and not only:
        large_graphs_stay_within_their_memory(figures)
    if script == "epochs.packing":
        frozen_epochs_have_a_bound_without_fio(figures)


@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=[pytest.mark.stress] * (script == "epochs.epoch")) for script in sorted(FIO_SCRIPTS)]
)
def test_benchmark_runs_with_fio(script: str, tmp_path: Path) -> None:
    """A stand-in is fio where it is there. One group that asks for it is enough: without it, the whole script runs."""
    figures, errors = run_script(script, tmp_path, "--only", ASKS_FIO[script], PATH=stand_in(tmp_path, has_fio=True))
    referring = [figure for figure in figures if "fio" in str(figure["reference"])]
    assert "fio is not installed" not in errors
    assert 0 < len(referring) < len(figures)
    assert not [figure for figure in figures if "missing" in figure]


@pytest.mark.stress
def test_a_ray_actor_is_asked_beside_gloo(tmp_path: Path) -> None:
    """Over the loopback device, and over the link where there can be one."""
    figures, errors = run_script("machines.shards", tmp_path, "--only", "calls")
    engines = ["sharded", "send and recv", "all_to_all", "rpc", "a Ray actor", "a Ray actor, whole calls"]
    has_link = "the link is left out" not in errors
    names = [str(figure["name"]).rsplit(": ", 1) for figure in figures]
    assert [name for _, name in names] == engines * (2 if has_link else 1)
    assert [("Mbit/s" in where) for where, _ in names] == [False] * 6 + [True] * 6 * has_link
    assert all(figure["value"] > 0 for figure in figures)


@pytest.mark.stress
def test_two_trees_are_compared_in_turn(tmp_path: Path) -> None:
    """Here both are this one: they load the same rows."""
    line = ("--only", "epochs", "--strategy", "superbatch", "--beside", str(BENCHMARKS.parent))
    (figure,), _ = run_script("epochs.strategies", tmp_path, *line)
    assert figure["reference"] == "the other tree, in turn"
    assert figure["target"] == "<= 1.03"
    assert figure["loads_equal"]
    assert 0 < figure["loads"][0] == figure["loads_beside"][0] < figure["rows"]
    assert figure["batches"] == 195  # seeds of R12, one a batch


def test_the_large_graph_has_its_longest_wait(tmp_path: Path) -> None:
    (figure,), _ = run_script("epochs.strategies", tmp_path, "--only", "large", "--large")
    assert figure["reference"] is None
    assert 0 < figure["longest_wait_s"][0] <= figure["value"]
    assert figure["superbatch"]["passes"] >= 1


def test_what_needs_a_gpu_is_measured_or_said_to_be_skipped(tmp_path: Path) -> None:
    line = ["benchmarks.papers.device", "--tiny", "--scratch", tmp_path / "scratch", "--only", "gpu"]
    done = run_program("-m", *line, cwd=tmp_path, PYTHONPATH=str(BENCHMARKS.parent))
    assert done.returncode == 0, done.stderr
    skipped = [line for line in done.stderr.splitlines() if line.startswith("skipped, no GPU: ")]
    if torch.cuda.is_available():
        names = " ".join(str(figure["name"]) for figure in check_lines(done.stdout))
        assert not skipped
        assert all(each in names for each in ("two passes", "that it waits"))
    else:
        assert skipped == ["skipped, no GPU: hits against index_select, pinned copies, an epoch's waiting"]
        assert done.stdout == ""


def test_real_graphs_come_from_a_folder_that_is_named(tmp_path: Path) -> None:
    """Nothing is looked for beside the checkout."""
    for given, message in (((), "give --graphs DIR"), (("--graphs", tmp_path), "the folder has no graphs.py")):
        line = ["benchmarks.papers.partition_batches", "--scratch", tmp_path / "scratch", "--only", "accuracy", *given]
        done = run_program("-m", *line, cwd=tmp_path, PYTHONPATH=str(BENCHMARKS.parent), FEATSTORE_GRAPHS="")
        assert done.returncode != 0
        assert message in done.stderr


def test_every_part_has_a_benchmark() -> None:
    assert ASKS_FIO.keys() == FIO_SCRIPTS
    assert {each.split(".")[0] for each in SCRIPTS} == set(TOPICS)
    assert {path.parent.name for path in BENCHMARKS.glob("*/__init__.py")} == {*TOPICS, "tools"}


def test_folders_are_topics_of_scripts_beside_the_tools() -> None:
    """Files in a topic's folder run as modules; helpers of several scripts lie in tools, which know none of them."""
    for script in {*SCRIPTS, *LONG}:
        assert 'if __name__ == "__main__"' in BENCHMARKS.joinpath(*script.split(".")).with_suffix(".py").read_text(), script
    assert not [path for path in (BENCHMARKS / "tools").glob("*.py") if re.search(OF_TOPICS, path.read_text())]
    assert {path.name for path in BENCHMARKS.rglob("*.py") if "sys.path." in path.read_text()} == {"harness.py", "realgraphs.py"}


HARNESS = """
import pathlib, torch
from benchmarks.tools import drive, harness
from benchmarks.tools.harness import Report, alternate, median_ratio, timed_epoch, whole_epoch
order = []
results = alternate(3, {"a": lambda: order.append("a") or 4.0, "b": lambda: order.append("b")}, warm_up=1)
assert order == list("abbaabba") and results["a"] == [4.0] * 3 and all(0 <= s < 60 for s in results["b"]), (order, results)
assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0
report = Report()
assert report.figure("f", [1.0, 3.0, 2.0], "s", reference="r", references=[2.0, 3.0, 8.0], target="<= 0.4") == 0.5
assert report.failed == 1
report.figure("g", 5.0, "s", target=">= 5")
# An epoch that ran whole is what it came to; one that was cut goes on as its second half did, however slow the first was.
assert whole_epoch([5.0, 6.0, 7.0], 3) == 7.0
assert whole_epoch([50.0, 90.0, 92.0, 94.0], 10) == 94.0 + 6 * 2.0
assert whole_epoch([50.0, 90.0, 91.0, 94.0, 97.0], 7) == 97.0 + 2 * (97.0 - 90.0) / 3
assert whole_epoch([3.0], 4) == 12.0
batches = [torch.full((n, 2), float(n)) for n in range(1, 9)]
epoch = timed_epoch(batches, lambda batch: batch, compute_s=0.001, note=lambda: {"more": 1})
assert (epoch["batches"], epoch["rows"], len(epoch["marks"]), epoch["marks"][-1]["more"]) == (8, 36, 8, 1)
assert 0.008 <= epoch["compute_s"] <= epoch["loop_s"] and 0 <= epoch["lookup_s"] <= epoch["marks"][-1]["lookup_s"]
other = timed_epoch(batches, lambda batch: batch + (batch == 3), most=4)  # its third batch has other rows
same = [a["checksum"] == b["checksum"] for a, b in zip(epoch["marks"], other["marks"])]
assert other["batches"] == 4 and same == [True, True, False, False]
assert timed_epoch(batches, lambda batch: batch, limit_s=1e-9)["batches"] == harness.LEAST_BATCHES
# What a job lists is dropped from the page cache, and nothing else.
pathlib.Path("kid.py").write_text("print('{}')")
dropped, harness.drop_from_page_cache = [], lambda path: dropped.append(str(path))
assert harness.run_child("kid", {"dataset": "a", "features": "b", "drop": ["c", "d", "e"]}) == {}
assert dropped == ["c", "d", "e"]
# Direct reads, in sequence and at random places; a file smaller than a block is one.
small = pathlib.Path("small")
small.write_bytes(bytes(16384))
assert all(drive.direct_rate(small, *options) > 0 for options in ((1 << 20,), (4096, 3), (4096, 3, 10), (1 << 20, 2, 5)))
# The drive's rate is that at the best depth.
rates = {16: 3.0, 32: 5.0, 256: 9.0 * 4096, 512: 7.0 * 4096}
drive.fio = lambda path, *, depth, **_: rates[depth]
assert drive.fio_scan_bandwidth(pathlib.Path()) == 5.0 and drive.fio_random_iops(pathlib.Path(), 1) == 9.0
assert drive.fio_random_iops(pathlib.Path(), 1, (512,)) == 7.0
assert report.figure("h", [1.0], "s", reference="fio", target=">= 9") is None
assert report.failed == 1
"""


@pytest.mark.parametrize("n_threads", [1, 3, 16])
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_the_threaded_memory_map_has_the_rows_of_the_file(n_threads: int, dtype: type, tmp_path: Path) -> None:
    """Every count of ids, so that the threads' parts end anywhere; repeats; the first row and the last."""
    x = np.random.default_rng(0).integers(-999, 999, (257, 7)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    mapped = MemmapRows(tmp_path / "x.npy", n_threads)
    for n in (0, 1, 2, 11, 12, 13, 63, 64, 65, 257, 1_000):
        ids = torch.from_numpy(np.random.default_rng(n).integers(0, 257, n))
        found = mapped[ids]
        assert found.dtype == torch.from_numpy(x).dtype
        assert torch.equal(found, torch.from_numpy(x)[ids])
        assert found.is_contiguous()
    assert torch.equal(mapped[torch.tensor([256, 0, 256])], torch.from_numpy(x[[256, 0, 256]]))


def test_one_map_serves_all_benchmarks() -> None:
    """No benchmark maps a file by itself: one that did would be another reference."""
    users = {path.name for path in BENCHMARKS.rglob("*.py") if "MADV_RANDOM)" in path.read_text()}
    assert users == {"memmap.py"}


def test_harness(tmp_path: Path) -> None:
    (tmp_path / "harnessed.py").write_text(HARNESS)
    done = run_program(tmp_path / "harnessed.py", cwd=tmp_path, PYTHONPATH=str(BENCHMARKS.parent))
    assert done.returncode == 0, done.stderr
    first, second, third = check_lines(done.stdout)
    assert (first["value"], first["met"]) == (2.0, False)
    assert (second["value"], second["met"], second["ratio"]) == (5.0, True, None)
    assert (third["value"], third["missing"], third["ratio"], "met" in third) == (1.0, "fio", None, False)
