"""The cache of pages that say where lists begin: which pages stay, against a walk; and what reading lists costs, counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from featstore.budget import Budget
from tests.support.array_graphs import chunked
from tests.topology.test_chunks import graph_with


class Clock:
    """Pages in slots, taken by a hand that passes over those that were used since it came by."""

    def __init__(self, n_slots: int) -> None:
        self.pages: list[int] = []
        self.used: list[bool] = []
        self.n_slots, self.hand = n_slots, 0

    def ask(self, wanted: set[int]) -> None:
        for page in wanted & {*self.pages}:
            self.used[self.pages.index(page)] = True
        missing, taken = sorted(wanted - {*self.pages}), list[int]()
        if len(missing) > max(self.n_slots - len(self.pages), self.n_slots // 2):
            return  # too many: words are read, and nothing is kept
        while missing and len(self.pages) < self.n_slots:
            taken.append(len(self.pages))
            self.pages.append(missing.pop(0))
            self.used.append(False)  # until all have come
        while missing:
            if self.used[self.hand]:
                self.used[self.hand] = False
            elif self.hand not in taken:
                taken.append(self.hand)
                self.pages[self.hand] = missing.pop(0)
            self.hand = (self.hand + 1) % self.n_slots
        for slot in taken:
            self.used[slot] = True


@pytest.mark.parametrize("n_slots", [2, 4, 9])
def test_pages_are_those_of_a_clock(n_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a walk: what was used since the hand came by stays, and more than half of the pages are never driven out at once."""
    monkeypatch.setattr("featstore.topology.offsetpages._LEAST_PAGES", n_slots)
    indptr, ids = graph_with([1] * 40_000, np.int32)
    topology = chunked(indptr, ids, 16384, Budget(64 * 4096 * n_slots))
    file: Any = topology.chunks
    pages, words, rng = topology._pages, file.rows.view(np.int32).ravel(), np.random.default_rng(n_slots)
    first_page, clock, n_hits = pages._first_page, Clock(n_slots), 0
    n_pages = int(first_page[-1])
    assert n_pages > 4 * n_slots
    for step in range(3000):
        n = 1 if step % 3 else int(rng.integers(1, n_slots + 2))
        page = np.minimum(rng.geometric(1.5 / n_slots, n) - 1 + step // 500, n_pages - 1)
        chunk = np.searchsorted(first_page[1:], page, side="right")
        word = (page - first_page[chunk]) * 1024 + rng.integers(0, 8, n)
        file.n_gathers = 0
        assert np.array_equal(pages.words(chunk, word), words[4096 * chunk + word])
        n_hits += file.n_gathers == 0
        clock.ask({*page.tolist()})
        assert sorted(np.flatnonzero(pages._slot_of_page >= 0)) == sorted(clock.pages), step
    assert n_hits > 300
    topology.close()


def test_pages_that_are_closed_lend_nothing_and_hold_nothing() -> None:
    indptr, ids = graph_with([1] * 200_000, np.int32)
    budget = Budget(64 << 20)
    topology = chunked(indptr, ids, 16384, budget)
    pages = topology._pages
    assert budget.on_loan > 0
    pages.close()
    assert pages._loan not in budget._loans
    topology.close()
    assert budget.used == 0, budget.report()


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5])
def test_costs_are_those_of_the_chunks_that_hold_edges(share: float) -> None:
    """Whole chunks, and a read begun for each run of them; beside them a page, and a read begun, for each node looked up."""
    rng = np.random.default_rng(0)
    indptr, ids = graph_with(rng.choice([0, 1, 3, 60, 4000], 3000, p=[0.2, 0.3, 0.3, 0.19, 0.01]).tolist(), np.int32)
    topology = chunked(indptr, ids, 8192, Budget(1 << 24))
    nodes, d = np.flatnonzero(rng.random(3000) < share), topology.directory
    chunks = set[int]()
    for node in nodes:
        begin, end = indptr[node : node + 2]
        own = int(np.searchsorted(d.first_node[1:], node, side="right"))  # where the list begins, if it is empty, too
        chunks |= {own} | {k for k in range(d.n_chunks) if d.first_edge[k] < end and d.first_edge[k + 1] > begin}
    n_runs = sum(k - 1 not in chunks for k in chunks)
    assert 1 <= n_runs <= len(chunks) <= d.n_chunks
    assert topology.pass_cost(nodes) == 8192 * len(chunks) + topology.gap_bytes * n_runs
    assert topology.lookup_cost(nodes) == (4096 + topology.gap_bytes) * len(nodes)
    assert topology.pass_cost(nodes[:0]) == topology.lookup_cost(nodes[:0]) == 0
