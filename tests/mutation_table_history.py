"""Mutations of historical embeddings, batches that wait and caches of edge features; see :mod:`tests.mutation_table`."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["HISTORY"]

LATEST = ("tests/test_history.py::test_every_row_is_the_latest_push",)
LATE = ("tests/test_history_gradients.py::test_no_gradient_is_lost_or_counted_twice",)

HISTORY: tuple[Mutation, ...] = (
    Mutation(
        "a table on CUDA that may not be zeroed yet",
        "historical embeddings",
        "featstore/load/history.py",
        "            settle(device)\n        except",
        "        except",
        ("tests/test_history.py::test_a_table_on_cuda_is_made_before_the_loop_has_it",),
    ),
    Mutation(
        "a table's memory used again before the loop's stream is done",
        "historical embeddings",
        "featstore/load/history.py",
        "        record_here(table, self._sums)\n",
        "",
        ("tests/test_history.py::test_a_table_stays_until_the_loops_stream_is_done",),
    ),
    # -- which rows are pulled
    Mutation(
        "rows used beyond their staleness",
        "historical embeddings",
        "featstore/sampling/historical.py",
        " & (step - pushed <= self._times.staleness)",
        "",
        LATEST,
    ),
    Mutation(
        "a row that is pulled is as new as one that was computed",
        "historical embeddings",
        "featstore/sampling/historical.py",
        "self._pushed[slots[is_candidate & ~pulled]] = step",
        "self._pushed[slots[is_candidate]] = step",
        LATEST,
    ),
    Mutation(
        "seeds pulled",
        "historical embeddings",
        "featstore/sampling/historical.py",
        "pulled[:n_seeds] = False",
        "pulled[:0] = False",
        LATEST,
    ),
    # -- the table
    Mutation(
        "pulled from places in the batch, not from slots",
        "historical embeddings",
        "featstore/load/history.py",
        "table.index_select(0, rows.pull_slots)",
        "table.index_select(0, rows.pull % len(table))",
        LATEST,
    ),
    Mutation(
        "pushed to places in the batch, not to slots",
        "historical embeddings",
        "featstore/load/history.py",
        "table.index_copy_(0, rows.push_slots,",
        "table.index_copy_(0, rows.push % len(table),",
        LATEST,
    ),
    # -- gradients
    Mutation(
        "gradients that were passed on wait once more",
        "historical embeddings",
        "featstore/load/lategradients.py",
        "sums.index_fill_(0, rows.push_slots, 0)",
        "pass",
        LATE,
    ),
    Mutation(
        "gradients of pulled rows replace those that wait",
        "historical embeddings",
        "featstore/load/lategradients.py",
        "sums.index_add_(0, rows.pull_slots,",
        "sums.index_copy_(0, rows.pull_slots,",
        LATE,
    ),
    Mutation(
        "gradients that wait are not in the state",
        "historical embeddings",
        "featstore/load/history.py",
        "self._zeros(len(ids), device).copy_(sums)",
        "self._zeros(len(ids), device)",
        ("tests/test_history_gradients.py::test_a_state_brings_what_waits",),
    ),
    Mutation(
        "pushes of a table's nodes not counted",
        "budget counting",
        "featstore/load/history.py",
        "return on_host + n * PushTimes.NODE_BYTES",
        "return on_host",
        ("tests/test_history.py::test_the_table_is_in_the_budget",),
    ),
    # -- batches that wait
    Mutation(
        "the next batches are lent, too",
        "batches that wait",
        "featstore/load/waiting.py",
        "self._batches[self._least :]",
        "self._batches[0:]",
        ("tests/test_waiting.py::test_the_first_keep_their_rows_and_small_ones_are_not_lent",),
    ),
    Mutation(
        "batches that lost their rows are delivered without",
        "batches that wait",
        "featstore/load/waiting.py",
        "        self._refill(batch)\n",
        "",
        ("tests/test_waiting.py::test_another_gets_what_was_made_ahead",),
    ),
    # -- the split of the memory, and lists by what they save
    Mutation(
        "lists are judged without the memory that counting holds",
        "historical embeddings",
        "featstore/strategies/savedsplit.py",
        "_more_while_sampling(memory, room - held.n_bytes)",
        "_more_while_sampling(memory, room)",
        ("tests/test_history_auto.py::test_lists_are_judged_by_the_memory_that_they_get",),
    ),
    Mutation(
        "lists are counted that get no memory",
        "historical embeddings",
        "featstore/strategies/savedsplit.py",
        "has_lists = in_turn and cache is not None and bool(setup.features) and graph.neighbor_cache is None",
        "has_lists = in_turn",
        ("tests/test_history_auto.py::test_lists_that_get_no_memory_are_not_counted",),
    ),
    Mutation(
        "long lists cost no more than short ones",
        "historical embeddings",
        "featstore/cache/saved_io.py",
        "context.counts / (context.in_degree + 1)",
        "context.counts / 1",
        ("tests/test_savedio.py::test_lists_are_chosen_by_the_edges_drawn_for_their_bytes",),
    ),
    # -- caches of edge features
    Mutation(
        "an edge of several hops has the row of another",
        "caches of edge features",
        "featstore/plan/edgetrace.py",
        "places.astype(np.int32))",
        "np.sort(places).astype(np.int32))",
        ("tests/test_edge_caches.py::test_planned",),
    ),
    Mutation(
        "edges of the next superbatch do not count",
        "caches of edge features",
        "featstore/plan/edgeplans.py",
        "for each in (superbatch, ahead) if",
        "for each in (superbatch, None) if",
        ("tests/test_edge_caches.py::test_plans_load_what_belady_loads",),
    ),
)
