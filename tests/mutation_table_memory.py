"""Mutations of the memory ledger, of the loop's stages, of the one gather and of the checks of plans."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["MEMORY"]

BUDGET = "featstore/budget.py"
PIPELINE = "featstore/load/pipeline.py"
CHECKED = "featstore/cache/checkedplans.py"
LEDGER = "tests/test_ledger.py"
REPORT = "tests/test_memory_report.py"

MEMORY: tuple[Mutation, ...] = (
    # -- the ledger
    Mutation(
        "dearest loans taken back first",
        "loans of the ledger",
        BUDGET,
        "key=lambda each: each.cost)",
        "key=lambda each: -each.cost)",
        (LEDGER,),
    ),
    Mutation(
        "refused while a loan is out",
        "loans of the ledger",
        BUDGET,
        "if self._take_back(short):",
        "if more < 20 and self._take_back(short):",
        (LEDGER,),
    ),
    Mutation(
        "loans taken back for what is optional",
        "loans of the ledger",
        BUDGET,
        "return None if n_bytes > self.available else",
        "return None if n_bytes > self.available + self.on_loan else",
        (LEDGER,),
    ),
    Mutation(
        "idle loaders added up",
        "loans of the ledger",
        BUDGET,
        "max((worker.required(idle=True) for worker in others), default=0)",
        "sum(worker.required(idle=True) for worker in others)",
        ("tests/test_needs.py::test_loaders_that_rest_need_room_for_the_largest",),
    ),
    Mutation(
        "a dead owner's memory released late",
        "budget counting",
        BUDGET,
        '''        """Bytes reserved now."""
        self._release_dead()''',
        '''        """Bytes reserved now."""''',
        (LEDGER,),
    ),
    Mutation(
        "a loan that has ended taken back",
        "loans of the ledger",
        BUDGET,
        "self._loans = [each for each in self._loans if each is not loan]",
        "self._loans = list(self._loans)",
        (LEDGER,),
    ),
    Mutation(
        "a report of several moments",
        "reports of the memory",
        BUDGET,
        "with self._lock:\n            now = time.monotonic()",
        "with contextlib.nullcontext():\n            now = time.monotonic()",
        (f"{LEDGER}::test_a_report_is_of_one_moment",),
    ),
    Mutation(
        "a loan out since it was first lent",
        "reports of the memory",
        BUDGET,
        "self.since = time.monotonic()",
        'self.since = getattr(self, "since", time.monotonic())',
        (LEDGER,),
    ),
    Mutation(
        "a loan under another name",
        "reports of the memory",
        "featstore/cache/table.py",
        "cost=LOAN_COST, of=held)",
        'cost=LOAN_COST, of="cache")',
        (f"{REPORT}::test_loans_of_a_loader",),
    ),
    Mutation(
        "memory out since before an epoch used it",
        "reports of the memory",
        "featstore/strategies/epochmemory.py",
        "            self._loan.renew()\n            self._use = None",
        "            self._use = None",
        (f"{REPORT}::test_loans_of_a_loader",),
    ),
    Mutation(
        "windows kept that were taken back",
        "loans of the ledger",
        "featstore/strategies/streamed.py",
        "self._drops.append(self._arenas.drop)",
        "pass",
        ("tests/test_streamed.py::test_extents_are_read_ahead_into_what_is_reserved",),
    ),
    Mutation(
        "extents read ahead into more than is reserved",
        "loans of the ledger",
        "featstore/strategies/streamed.py",
        "self._memory[WINDOWS].n_bytes // max(1,",
        "self.memory.granted[WINDOWS] // max(1,",
        ("tests/test_streamed.py::test_extents_are_read_ahead_into_what_is_reserved",),
    ),
    Mutation(
        "a scan reads ahead into more than it was given",
        "budget counting",
        "featstore/storage/scan.py",
        "held - pages.nbytes)",
        "held)",
        ("tests/test_scan.py::test_all_words_come_in_order_within_the_memory",),
    ),
    Mutation(
        "a scan that waits for its last read before it begins another",
        "scans that read ahead",
        "featstore/storage/scan.py",
        "// _BLOCK_SHARE // PAGE_BYTES)",
        "// PAGE_BYTES - 2)",
        ("tests/test_scan.py::test_many_reads_are_under_way_while_a_block_is_used",),
    ),
    Mutation(
        "what scoring lists holds not counted",
        "budget counting",
        "featstore/graph/listscores.py",
        "return held + _NODE_BYTES *",
        "return 0 * held * _NODE_BYTES *",
        ("tests/test_neighbor_cache.py::test_scores_of_several_blocks_are_those_of_all_nodes",),
    ),
    Mutation(
        "a subclass scored piece by piece",
        "lists that are in memory",
        "featstore/cache/base.py",
        'type(self).__dict__.get("from_degrees", False)',
        "self.from_degrees",
        ("tests/test_neighbor_cache.py::test_a_subclass_is_asked_for_all_scores_at_once",),
    ),
    Mutation(
        "every piece of scores written at the beginning",
        "lists that are in memory",
        "featstore/graph/listscores.py",
        "scores[first:stop] = ",
        "scores[: stop - first] = ",
        ("tests/test_neighbor_cache.py::test_scores_of_several_blocks_are_those_of_all_nodes",),
    ),
    Mutation(
        "rows on a device counted once they are there",
        "budget counting",
        "featstore/strategies/packed.py",
        "+ _tables_bytes(layout) + on_host",
        "+ _tables_bytes(layout)",
        ("tests/test_memory_sweep.py::test_packed_names_at_once_what_its_layout_and_its_batches_need",),
    ),
    # -- the stages
    Mutation(
        "an item too many ahead",
        "the loop's stages",
        PIPELINE,
        "limit = min(self._stop, self._taken + self._depth + self._ahead)",
        "limit = min(self._stop, self._taken + self._depth + self._ahead + 1)",
        ("tests/test_pipeline.py::test_looks_as_far_ahead_as_asked_and_no_further",),
    ),
    Mutation(
        "items made ahead kept while the loop's own does not fit",
        "the loop's stages",
        PIPELINE,
        "later = [k for k in self._ready if k > item]",
        "later = [k for k in self._ready if k > item + 9]",
        ("tests/test_pipeline.py::test_what_was_made_ahead_makes_room",),
    ),
    Mutation(
        "an error before its turn",
        "the loop's stages",
        PIPELINE,
        """            if self._third is None:
                    self._done.put""",
        """            if self._third is None or isinstance(outcome, _Failure):
                    self._done.put""",
        ("tests/test_pipeline.py::test_an_error_arrives_in_its_turn",),
    ),
    # -- the one gather
    Mutation(
        "ids read where rows are planned",
        "the one gather",
        "featstore/graph/feature.py",
        "return np.asarray(resolve_rows(mine, self.shape, self.first_row)[0])",
        "return np.asarray(mine)",
        ("tests/test_sources.py::test_planners_have_rows_not_ids[superbatch]",),
    ),
    Mutation(
        "an extent read before what may be refused",
        "the one gather",
        "featstore/gather/executor.py",
        "return len(Tier) if part.tier == Tier.PACKED else part.tier",
        "return -1 if part.tier == Tier.PACKED else part.tier",
        ("tests/test_sources.py::test_short_memory_leaves_an_extent_where_it_is",),
    ),
    Mutation(
        "a hit in a slot that was given back",
        "the one gather",
        "featstore/cache/table.py",
        "return plan.within(self.capacity, rows) if self.is_cut else plan",
        "return plan",
        ("tests/test_sources.py::test_planners_have_rows_not_ids[superbatch]",),
    ),
    Mutation(
        "all planned hits counted as lost",
        "the one gather",
        "featstore/cache/gather.py",
        "given.count(Tier.HOST) - plan.count(Tier.HOST)",
        "given.count(Tier.HOST)",
        ("tests/test_hits_lost.py",),
    ),
    Mutation(
        "a hit that no plan has brought in",
        "checks of plans",
        CHECKED,
        'if bad >= 0:\n            raise PluginError(f"{where}: row {ids[bad]} is planned',
        'if bad > 0:\n            raise PluginError(f"{where}: row {ids[bad]} is planned',
        ("tests/test_planned_plugins.py::test_in_a_simulation",),
    ),
    Mutation(
        "a wide slot number wraps round",
        "checks of plans",
        CHECKED,
        "array = array.clip(max(int(bounds.min), int(own.min)), min(int(bounds.max), int(own.max)))",
        "array = array.astype(dtype)",
        ("tests/test_planned_plugins.py::test_in_a_simulation",),
    ),
)
