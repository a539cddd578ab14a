"""The runs of pages that are read for some nodes' lists, against a replay page by page in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore._core.listruns import count_runs, find_runs
from featstore.topology.liststream import GAP_PAGES, list_runs, pass_pages


@given(st.data())
def test_runs_hold_the_pages_of_all_lists_and_no_others_but_short_gaps(data: st.DataObject) -> None:
    degrees = data.draw(st.lists(st.sampled_from([0, 1, 7, 500, 1024, 3000, 20_000]), max_size=40))
    indptr = np.concatenate([[0], np.cumsum(degrees, dtype=np.int64)]).astype(np.int64)
    nodes = np.array(sorted(data.draw(st.sets(st.integers(0, max(0, len(degrees) - 1)), max_size=len(degrees)))), np.int64)
    id_bytes = data.draw(st.sampled_from([4, 8]))
    where, begins, lengths, found_runs, first_lists = list_runs(indptr, nodes, id_bytes)
    wanted = [(i, int(indptr[v]), degrees[v]) for i, v in enumerate(nodes) if degrees[v]]
    assert list(zip(where.tolist(), begins.tolist(), lengths.tolist(), strict=True)) == wanted
    runs: list[list[int]] = []
    firsts = []
    for k, (_, begin, degree) in enumerate(wanted):
        first, last = begin * id_bytes // 4096, ((begin + degree) * id_bytes - 1) // 4096
        if runs and first <= runs[-1][1] + GAP_PAGES:
            runs[-1][1] = last + 1
        else:
            runs.append([first, last + 1])
            firsts.append(k)
    assert found_runs.tolist() == runs
    assert first_lists.tolist() == firsts
    assert pass_pages(indptr, nodes, id_bytes) == (sum(stop - first for first, stop in runs), len(runs))


def test_outputs_that_are_too_short_and_ids_of_other_sizes_are_refused() -> None:
    indptr, nodes = np.array([0, 3, 5]), np.array([0, 1])
    good, short, pairs = np.zeros(2, np.int64), np.zeros(1, np.int64), np.zeros((2, 2), np.int64)
    with pytest.raises(ValueError, match="outputs of 2 nodes have 2 rows"):
        find_runs(indptr, nodes, 4, 0, good, good, short, pairs, good)
    with pytest.raises(ValueError, match="outputs of 2 nodes have 2 rows"):
        find_runs(indptr, nodes, 4, 0, good, good, good, np.zeros((2, 1), np.int64), good)
    with pytest.raises(ValueError, match="ids have 4 or 8 bytes, not 2"):
        count_runs(indptr, nodes, 2, 0)
