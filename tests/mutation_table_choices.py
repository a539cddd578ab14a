"""Mutations of choices left to ``"auto"``: estimates, measured rates, lengths, windows; and of what they rest on."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["CHOICES"]

COPIES = "featstore/plan/copies.py"
DRIVE = "featstore/storage/drive.py"
LENGTH = "featstore/strategies/length.py"
PACKING = "featstore/pack/packing.py"
TURNS = "featstore/sampling/turns.py"
ESTIMATES, RATES, LENGTHS, WINDOWS = "estimates of strategies", "measured rates", "lengths of superbatches", "windows of an epoch"

CHOICES: tuple[Mutation, ...] = (
    # -- estimates
    Mutation(
        "an estimate is inherited",
        ESTIMATES,
        "featstore/strategies/estimates.py",
        'if "estimate" not in vars(cls):',
        "if cls.estimate is None:",
        ("tests/test_auto_plugins.py::test_what_a_base_class_estimates_is_not_inherited",),
    ),
    Mutation(
        "all superbatches are as long as the workload's",
        ESTIMATES,
        "featstore/strategies/estimates.py",
        "seen = workload if length is None else replace(workload, superbatch=length.n_batches)",
        "seen = workload",
        ("tests/test_auto_plugins.py::test_an_estimate_is_of_superbatches_as_long_as_foreseen",),
    ),
    Mutation(
        "no memory for superbatches ends the choice",
        ESTIMATES,
        "featstore/strategies/estimates.py",
        "except BudgetError:\n                length = Length(1, len(setup.batches))",
        "except ZeroDivisionError:\n                length = Length(1, len(setup.batches))",
        ("tests/test_auto_plugins.py::test_an_estimate_is_of_superbatches_as_long_as_foreseen",),
    ),
    Mutation(
        "first touch charged to all",
        ESTIMATES,
        "featstore/strategies/estimates.py",
        "each if each.hides_first_touch else replace",
        "replace",
        ("tests/test_cost.py::test_filling_a_cache_is_paid_once",),
    ),
    Mutation(
        "missed rows of tables cost nothing",
        ESTIMATES,
        "featstore/strategies/packedestimate.py",
        " + m.missed_table_s * loads",
        "",
        ("tests/test_tablespeed.py::test_a_layout_that_is_not_there_pays_for_its_tables",),
    ),
    # -- rates
    Mutation(
        "a missed row of tables pays twice for its look-up",
        RATES,
        "featstore/pack/tablespeed.py",
        "_time_static(batches[0], none) - static)",
        "_time_static(batches[0], none))",
        ("tests/test_tablespeed.py::test_seconds_are_those_of_a_row",),
    ),
    Mutation(
        "the first slice decides",
        RATES,
        DRIVE,
        "return statistics.median_high(found)",
        "return found[0]",
        ("tests/test_drive.py::test_a_probe_ends_when_it_is_stable_or_its_time_is_over",),
    ),
    Mutation(
        "a probe without end",
        RATES,
        DRIVE,
        "return is_stable or (len(found) >= LEAST_SLICES and time.perf_counter() >= end)",
        "return is_stable",
        ("tests/test_drive.py::test_a_probe_ends_when_it_is_stable_or_its_time_is_over",),
    ),
    Mutation(
        "a stream timed with its beginning",
        RATES,
        DRIVE,
        "return (last - first) / (now - begin) if last > first else n_bytes / seconds",
        "return n_bytes / seconds",
        ("tests/test_drive.py::test_a_stream_is_timed_once_it_flows",),
    ),
    Mutation(
        "overlap of writes by the longer one",
        RATES,
        DRIVE,
        "(read_s + write_s - both_s) / min(read_s, write_s)",
        "(read_s + write_s - both_s) / max(read_s, write_s)",
        ("tests/test_drive.py::test_overlap_is_what_the_shorter_one_gains",),
    ),
    Mutation(
        "overlap of writes is always whole",
        RATES,
        DRIVE,
        "return min(1.0, max(0.0, (read_s",
        "return max(1.0, max(0.0, (read_s",
        ("tests/test_drive.py::test_overlap_is_what_the_shorter_one_gains",),
    ),
    Mutation(
        "syncing a file takes no time",
        RATES,
        DRIVE,
        "rate = done / (done / rate + sync())",
        "sync()",
        ("tests/test_drive.py::test_a_slow_drive_is_written_no_longer_than_its_share",),
    ),
    Mutation(
        "the same rows copied again",
        RATES,
        COPIES,
        "chosen = ((rows + number * len(rows)) % n)",
        "chosen = (rows % n)",
        ("tests/test_copies.py::test_copies_are_measured_of_rows_that_no_cache_has",),
    ),
    Mutation(
        "fresh memory that was touched",
        RATES,
        COPIES,
        "some(untouched, np.resize(rows, n_slice))",
        "some(out, np.resize(rows, n_slice))",
        ("tests/test_copies.py::test_rates_of_copies_are_those_of_their_memory",),
    ),
    Mutation(
        "a batch's copy with nothing beside it",
        RATES,
        COPIES,
        "            while not self._stop.is_set():\n                self._runs.set()",
        "            while False:\n                self._runs.set()",
        ("tests/test_copies.py::test_rates_of_copies_are_those_of_their_memory",),
    ),
    Mutation(
        "copies kept for any width",
        RATES,
        COPIES,
        '"row_bytes": row_bytes, "threads"',
        '"row_bytes": 0, "threads"',
        ("tests/test_copies.py::test_copies_are_kept_by_width_and_threads",),
    ),
    # -- lengths, and counts of packing
    Mutation(
        "a disk that does not limit superbatches",
        LENGTHS,
        LENGTH,
        "min(longest_auto(planning, n_batches), _by_disk(planning, stored)), graph.budget.total",
        "longest_auto(planning, n_batches), graph.budget.total",
        ("tests/test_length.py::test_a_disk_limits_the_length",),
    ),
    Mutation(
        "cheap passes do not shorten superbatches",
        LENGTHS,
        LENGTH,
        "return size if passes is None else min(size, -(-n_batches // passes.cheap))",
        "return size",
        ("tests/test_length.py::test_cheap_passes_make_several_superbatches",),
    ),
    Mutation(
        "the planner's share never doubles",
        LENGTHS,
        LENGTH,
        "for share in (PLANNER_SHARE, PLANNER_SHARE // 2, PLANNER_SHARE // 4):",
        "for share in (PLANNER_SHARE,):",
        ("tests/test_length.py",),
    ),
    Mutation(
        "memory advised that does not suffice",
        LENGTHS,
        LENGTH,
        "needed = 2 * planner_bytes(",
        "needed = 0 * planner_bytes(",
        ("tests/test_length.py",),
    ),
    Mutation(
        "what was granted does not limit superbatches",
        LENGTHS,
        "featstore/strategies/superbatch.py",
        "if needed(size) > granted:",
        "if needed(size) > granted + size * (1 << 40):",
        ("tests/test_needs.py::test_superbatches_are_foreseen_as_they_run",),
    ),
    Mutation(
        "passes of packing that ran are not counted",
        LENGTHS,
        PACKING,
        "counts.done + 1, counts.passes + n_passes",
        "counts.done + 1, counts.passes + 1",
        ("tests/test_streamed.py::test_packing_in_several_passes_is_said",),
    ),
    Mutation(
        "superbatches that were not packed are not counted",
        LENGTHS,
        PACKING,
        "counts.done + 1, counts.unpacked + 1",
        "counts.done + 1, counts.unpacked",
        ("tests/test_streamed.py",),
    ),
    Mutation(
        "memory named that packs in no fewer passes",
        LENGTHS,
        PACKING,
        "needed = whole_memory(extents, 4 if base.n_rows < 2**31 else 8) + writer.nbytes",
        "needed = writer.nbytes",
        ("tests/test_streamed.py::test_packing_in_several_passes_is_said",),
    ),
    # -- windows
    Mutation(
        "many windows are not said",
        WINDOWS,
        "featstore/strategies/windows.py",
        "if found.n >= MANY:",
        "if found.n < MANY:",
        ("tests/test_epoch_windows.py",),
    ),
    Mutation(
        "a disk that does not limit windows",
        WINDOWS,
        TURNS,
        "min(self._n, held // self._each, disk // self._stored)",
        "min(self._n, held // self._each)",
        ("tests/test_epoch_windows.py",),
    ),
    # -- what they rest on
    Mutation(
        "a simulation that plans every slot",
        "early end of simulations",
        "featstore/plan/simulate.py",
        "if not checked.is_checked and len(foreseen) == len(trace):",
        "if not checked.is_checked and len(foreseen) < 0:",
        ("tests/test_belady.py::test_a_simulation_ends_when_misses_are_known",),
    ),
    Mutation(
        "a simulation that believes what is foreseen",
        "early end of simulations",
        "featstore/plan/simulate.py",
        "if not checked.is_checked and len(foreseen) == len(trace):",
        "if len(foreseen) == len(trace):",
        ("tests/test_belady.py::test_a_simulation_does_not_believe_what_a_plug_in_foresees",),
    ),
    Mutation(
        "offsets that descend between blocks",
        "offsets block by block",
        "featstore/graph/topology.py",
        "before = int(array[first - 1]) if first else 0",
        "before = 0",
        ("tests/test_offset_blocks.py",),
    ),
    Mutation(
        "offsets of later blocks not checked",
        "offsets block by block",
        "featstore/graph/topology.py",
        "_check_offsets(array[first : first + len(block)], first, before, num_nodes, num_edges, indptr.path)",
        "_check_offsets(array[: len(block)], 0, 0, num_nodes, num_edges, indptr.path)",
        ("tests/test_offset_blocks.py",),
    ),
)
