"""The mutations of :mod:`tests.mutations`: what each breaks, and which tests must notice."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTATIONS", "Mutation"]


@dataclass(frozen=True)
class Mutation:
    """One way to break the library.

    Parameters
    ----------
    name : str
    mechanism : str
        What is broken, as docs/contributing.md lists it.
    file : str
        Path in the tree.
    old, new : str
        ``old`` is in the file exactly once; ``new`` takes its place.
    tests : tuple of str
        The quickest tests that should notice, as pytest takes them.
    """

    name: str
    mechanism: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_compiled(self) -> bool:
        """Whether the core has to be built anew."""
        return self.file.startswith("src_cython/") and not self.tests[0].startswith("tests/test_ring_refill.py")

    def changed(self, text: str) -> str:
        """Return the file's text with the mutation in it.

        Raises
        ------
        ValueError
            The text is not there, or more than once.
        """
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(
                f"mutation {self.name!r}: {self.file} has its text {count} times, not once; adapt tests/mutations.py"
            )
        return text.replace(self.old, self.new)


SAME_BATCHES = "tests/test_superbatch.py::test_the_same_batches"
AHEAD = "tests/test_superbatch.py::test_the_next_superbatch_is_planned_while_one_runs"
POWER_CUT = "tests/test_faults_storage.py::test_a_power_cut_after_create_loses_nothing_and_each_fsync_is_needed"
ORDER = "tests/test_format.py::test_order_of_a_commit"
DURABLE = "tests/test_durability.py"
SUPERBATCH = "featstore/plan/superbatches.py"
CORE = "src_cython/featstore/_core/"

MUTATIONS: tuple[Mutation, ...] = (
    # -- looking ahead
    Mutation(
        "superbatch planned late",
        "look-ahead",
        SUPERBATCH,
        "return self._reached >= k - 1 if self._switch is None",
        "return self._reached >= k if self._switch is None",
        (AHEAD,),
    ),
    Mutation(
        "next superbatch's uses ignored",
        "look-ahead",
        SUPERBATCH,
        "self._plan_and_pack(k, superbatch, sampled.get(k + 1))",
        "self._plan_and_pack(k, superbatch, None)",
        (AHEAD,),
    ),
    Mutation(
        "serial schedule not serial",
        "look-ahead",
        SUPERBATCH,
        "self._reached >= k and self._n_passed >= first",
        "self._reached >= k - 1",
        ("tests/test_serial.py::test_one_memory_for_both_caches",),
    ),
    Mutation(
        "misses read ahead into one half",
        "reading ahead",
        "featstore/gather/ahead.py",
        "group = self._load(rows, n_groups % HALVES)",
        "group = self._load(rows, 0)",
        ("tests/test_ahead.py",),
    ),
    # -- neighbour cache
    Mutation(
        "sampler without neighbour cache",
        "neighbour cache",
        "featstore/sampling/neighbor.py",
        "g, hops, cache = self._g, scratch.hops, self._g.neighbor_cache",
        "g, hops, cache = self._g, scratch.hops, None",
        ("tests/test_neighbor_cache.py::test_the_sampler_reads_only_lists_that_are_not_in_the_cache",),
    ),
    # -- initial fill
    Mutation(
        "serial schedule begins with an empty cache",
        "initial fill",
        SUPERBATCH,
        "rows = window.first_rows(self._capacity)",
        "rows = window.first_rows(0)",
        ("tests/test_serial.py::test_loads_are_those_of_the_initial_prefetch_and_belady",),
    ),
    Mutation(
        "static cache filled by half",
        "initial fill",
        "featstore/cache/select.py",
        "        rows = top_rows(scores, capacity)\n",
        "        rows = top_rows(scores, capacity // 2)\n",
        ("tests/test_cache_table.py::test_static_rows_are_the_best_of_equals_the_lowest",),
    ),
    # -- reads
    Mutation(
        "gaps never read over",
        "gap merging",
        CORE + "rowio.h",
        "if (a - p1 > job->gap_pages || end > limit || j < k) break;",
        "if (a - p1 > 0 || end > limit || j < k) break;",
        ("tests/test_reader.py::test_gaps_up_to_the_stated_one_are_read_over",),
    ),
    Mutation(
        "gaps always read over",
        "gap merging",
        CORE + "rowio.h",
        "if (a - p1 > job->gap_pages || end > limit || j < k) break;",
        "if (end > limit || j < k) break;",
        ("tests/test_reader.py::test_gaps_up_to_the_stated_one_are_read_over",),
    ),
    Mutation(
        "ring refilled when empty",
        "ring refill",
        CORE + "backends.h",
        "while (!atomic_load_explicit(&job->stop, memory_order_relaxed) && in_flight < u->depth && head - tail < FS_WINDOW) {",
        "for (const int begins = !in_flight; begins && in_flight < u->depth && head - tail < FS_WINDOW;) {",
        ("tests/test_ring_refill.py",),
    ),
    Mutation(
        "ring half full",
        "ring refill",
        CORE + "backends.h",
        "in_flight < u->depth && head - tail < FS_WINDOW) {",
        "in_flight < u->depth / 2 && head - tail < FS_WINDOW) {",
        ("tests/test_ring_refill.py",),
    ),
    Mutation(
        "short reads not continued",
        "short reads",
        CORE + "backends.h",
        "            done += (uint64_t)res;\n",
        "            done = res > 0 ? len : done;\n",
        ("tests/test_faults.py::test_pread_gather_meets_errors_and_short_reads",),
    ),
    # -- checksums
    Mutation(
        "pages of scattered rows unchecked",
        "checksums: features",
        CORE + "rowio.h",
        "for (p = p > checked ? p : checked; p <= last; p++)",
        "for (p = last + 1; p <= last; p++)",
        ("tests/test_reader.py::test_a_flipped_bit_is_found",),
    ),
    Mutation(
        "pages of sequential reads unchecked",
        "checksums: topology, node data and saved caches, which are read in sequence",
        CORE + "rowio.h",
        "for (; checked < op->page1; checked++)",
        "for (; checked < op->page0; checked++)",
        ("tests/test_graph_caches.py::test_a_saved_neighbour_cache_is_loaded_again", "tests/test_damaged_dataset.py"),
    ),
    Mutation(
        "extents unchecked",
        "checksums: extents",
        CORE + "pagestream.h",
        "    if (s->job.sums)\n        for (uint64_t p = 0;",
        "    if (0)\n        for (uint64_t p = 0;",
        ("tests/test_extents.py::test_damage_is_found",),
    ),
    Mutation(
        "samples and plans unchecked",
        "checksums: samples, plans, traces (sections)",
        "featstore/storage/sections.py",
        "if _sum(part, self._seed, first + i) != expected:",
        "if _sum(part, self._seed, first + i) < 0:",
        ("tests/test_belady.py::test_every_damage_to_a_section_file_is_found",),
    ),
    Mutation(
        "index of sections unchecked",
        "checksums: samples, plans, traces (sections)",
        "featstore/storage/sections.py",
        "if _sum(index, self._seed, _MASK) != index_sum:",
        "if _sum(index, self._seed, _MASK) < 0:",
        ("tests/test_belady.py::test_every_damage_to_a_section_file_is_found",),
    ),
    Mutation(
        "table of checksums unchecked",
        "checksums: the tables themselves",
        "featstore/storage/rowfile.py",
        'if found != int(words[SUMS_PER_PAGE].astype("<u8")):',
        "if found < 0:",
        ("tests/test_reader.py::test_a_flipped_bit_in_the_table_of_checksums_is_the_tables",),
    ),
    Mutation(
        "catalog unchecked",
        "checksums: catalog",
        "featstore/storage/catalog.py",
        "if xxhash.xxh3_128_digest(body) != digest:",
        'if xxhash.xxh3_128_digest(body) == b"":',
        ("tests/test_catalog.py",),
    ),
    Mutation(
        "entries of the catalog unchecked",
        "checksums: catalog",
        "featstore/storage/catalog.py",
        "if len(data) < 8 or _U64.unpack_from(data)[0] != xxhash.xxh3_64_intdigest(key + text):",
        "if len(data) < 8:",
        ("tests/test_catalog.py",),
    ),
    Mutation(
        "saved neighbour cache of another topology accepted",
        "checksums: topology, node data and saved caches, which are read in sequence",
        "featstore/graph/topology.py",
        '            if bad >= 0:\n                raise ValueError(f"the record of node {bad} is not this topology\'s")',
        '            if bad >= 2**62:\n                raise ValueError(f"the record of node {bad} is not this topology\'s")',
        ("tests/test_neighbor_cache.py::test_a_cache_of_another_topology_is_refused",),
    ),
    Mutation(
        "ids of neighbours unchecked",
        "bounds of neighbour ids",
        "featstore/sampling/neighbor.py",
        "            if bad >= 0:\n                raise topology.bad_id(",
        "            if bad >= 2**62:\n                raise topology.bad_id(",
        ("tests/test_sampler.py::test_an_id_in_the_file_that_is_no_node",),
    ),
    # -- commits
    Mutation(
        "row file not flushed",
        "fsync: row files",
        "featstore/storage/writer.py",
        "            for fd, path in zip(self._fds, self._temporary, strict=True):\n                fsync_fd(fd, path)\n",
        "",
        (ORDER,),
    ),
    Mutation(
        "directory of a row file not flushed",
        "fsync: row files",
        "featstore/storage/writer.py",
        "            fsync_directory(self._directory)\n",
        "",
        (ORDER,),
    ),
    Mutation(
        "small file not flushed",
        "fsync: catalog",
        "featstore/storage/writer.py",
        "            fsync_fd(fd, temporary)\n",
        "            pass\n",
        (ORDER,),
    ),
    Mutation(
        "directory of a small file not flushed",
        "fsync: catalog",
        "featstore/storage/writer.py",
        '    make_durable(os.path.dirname(name) or ".", name)\n',
        "",
        (ORDER,),
    ),
    Mutation(
        "build directory not flushed",
        "fsync: a new dataset or pack",
        "featstore/storage/builddir.py",
        "        fsync_directory(self.path)\n",
        "",
        (POWER_CUT, DURABLE),
    ),
    Mutation(
        "parent of a new dataset not flushed",
        "fsync: a new dataset or pack",
        "featstore/storage/builddir.py",
        '        self._confirm(lambda: os.rename(self.target, self.path))\n        self.path = ""\n',
        '        self.path = ""\n',
        (POWER_CUT, DURABLE),
    ),
    Mutation(
        "parent of a replaced dataset not flushed",
        "fsync: a replaced dataset or pack",
        "featstore/storage/builddir.py",
        "self._confirm(lambda: _renameat2(self.path, self.target, _RENAME_EXCHANGE))\n",
        "pass\n",
        (DURABLE,),
    ),
    Mutation(
        "parent of a dataset replaced in two steps not flushed",
        "fsync: a replaced dataset or pack",
        "featstore/storage/builddir.py",
        "            self._confirm(lambda: os.rename(self.target, self.path))\n        except CommittedError:",
        "        except CommittedError:",
        (DURABLE,),
    ),
    Mutation(
        "samples not flushed",
        "fsync: packs",
        "featstore/storage/sections.py",
        "                fsync_fd(self._fd, self._temporary)\n",
        "                pass\n",
        (DURABLE,),
    ),
    Mutation(
        "directory of samples not flushed",
        "fsync: packs",
        "featstore/storage/sections.py",
        "                    fsync_directory(folder)\n",
        "                    pass\n",
        (DURABLE,),
    ),
    Mutation(
        "extents not flushed",
        "fsync: layouts",
        "featstore/storage/extents.py",
        "                        fsync_fd(fd, path)\n",
        "                        pass\n",
        (DURABLE,),
    ),
    Mutation(
        "directory of extents not flushed",
        "fsync: layouts",
        "featstore/storage/extents.py",
        '                fsync_directory(os.path.dirname(self.path) or ".")\n',
        "                pass\n",
        (DURABLE,),
    ),
    Mutation(
        "pack of a layout not flushed",
        "fsync: layouts",
        "featstore/pack/makelayout.py",
        "    make_durable(pack.path, target)\n",
        "",
        (DURABLE,),
    ),
    Mutation(
        "extents not flushed before a checkpoint",
        "fsync: checkpoints of layouts",
        "featstore/storage/extents.py",
        "        fsync_fd(self._fd, self._temporary[0])\n        write_checkpoint(",
        "        write_checkpoint(",
        (DURABLE,),
    ),
    Mutation(
        "checkpoint's name not flushed",
        "fsync: checkpoints of layouts",
        "featstore/storage/checkpoint.py",
        '    fsync_directory(os.path.dirname(path) or ".")\n',
        "",
        (DURABLE,),
    ),
    # -- caches
    Mutation(
        "admissions before hits",
        "changeset order",
        "featstore/cache/gather.py",
        "            cache.apply(changes, out)\n",
        "            cache.apply(changes, out)\n            execute(plan, sources, out, _MEMORY)\n",
        (SAME_BATCHES + "[True-0.1-3]",),
    ),
    Mutation(
        "planned rows not copied into the cache",
        "cache admission",
        "featstore/cache/table.py",
        "                    copy_rows(out, changes.in_positions, self.array, changes.in_slots)\n",
        "                    pass\n",
        (SAME_BATCHES + "[True-0.1-3]",),
    ),
    Mutation(
        "online policies admit nothing",
        "cache admission",
        "featstore/cache/slots.py",
        "        if self._is_broken or not len(rows):\n            return None\n        new_rows",
        "        if len(rows) >= 0:\n            return None\n        new_rows",
        (
            "tests/test_cache_table.py::test_rows_of_any_width_come_back",
            "tests/test_cache_table.py::test_any_batches_any_capacity",
        ),
    ),
    Mutation(
        "online hits not told",
        "cache admission",
        "featstore/cache/slots.py",
        "                self.policy.hit(_read_only(distinct[:n]))\n",
        "                pass\n",
        ("tests/test_contract_suites.py::test_faulty_online_policies_fail",),
    ),
    Mutation(
        "evicted rows still found",
        "eviction",
        "featstore/cache/slots.py",
        "            self._rows.release(out_rows)\n            self._rows.hold",
        "            self._rows.hold",
        ("tests/test_cache_table.py::test_any_batches_any_capacity",),
    ),
    Mutation(
        "planned evictions ignored",
        "eviction",
        "featstore/cache/slots.py",
        "self._rows.exchange(changes.out_rows, rows, changes.in_slots",
        "self._rows.exchange(changes.out_rows[:0], rows, changes.in_slots",
        (SAME_BATCHES + "[True-0.1-3]",),
    ),
    Mutation(
        "lru empties the wrong slots",
        "eviction",
        "featstore/cache/lru.py",
        "        _core.lru_use(slots, False, self._log, self._last_use, self._state)\n",
        "",
        ("tests/test_policies.py::test_victims_equal_the_reference",),
    ),
    Mutation(
        "rows beyond the epoch are kept",
        "Belady's plan",
        "featstore/cache/belady.py",
        "        bits.start(first_use[first_use < length])\n",
        "        bits.start(first_use[:0])\n",
        (
            "tests/test_belady.py::test_rolling_windows_stay_consistent",
            "tests/test_belady.py::test_seeing_further_does_not_load_more",
        ),
    ),
    # -- memory
    Mutation(
        "checksum tables not counted",
        "budget counting",
        "featstore/storage/rowfile.py",
        'budget.reserve("checksum tables", n_pages * PAGE_BYTES)',
        'budget.reserve("checksum tables", 0)',
        ("tests/test_reader.py::test_the_table_of_checksums_is_counted",),
    ),
    Mutation(
        "feature cache not counted",
        "budget counting",
        "featstore/cache/table.py",
        "budget.reserve(name, self.least_bytes(capacity, row_bytes, n, policy))",
        "budget.reserve(name, 0)",
        ("tests/test_cache_table.py::test_memory_is_reserved_before_it_is_taken",),
    ),
    Mutation(
        "sampler's scratch not counted",
        "budget counting",
        "featstore/sampling/neighbor.py",
        "        self.room = room\n        self._reservation.resize(n_bytes)\n",
        "        self.room = room\n        self._reservation.resize(0)\n",
        ("tests/test_sampler.py::test_scratch_is_counted_and_given_back",),
    ),
    Mutation(
        "batches not counted",
        "budget counting",
        "featstore/gather/buffers.py",
        "        reservation = self.budget.try_reserve(HOLDER, size)\n        while",
        "        reservation = self.budget.try_reserve(HOLDER, 0)\n        while",
        ("tests/test_feature.py", "tests/test_loader.py"),
    ),
    Mutation(
        "offsets not counted",
        "budget counting",
        "featstore/graph/topology.py",
        'budget.reserve("indptr", huge_bytes(n_bytes))',
        'budget.reserve("indptr", 0)',
        ("tests/test_sampler.py::test_a_topology_loads_its_offsets",),
    ),
    Mutation(
        "whole neighbour cache not counted",
        "budget counting",
        "featstore/graph/topology.py",
        'budget.reserve("neighbor cache", whole_bytes)',
        'budget.reserve("neighbor cache", 0)',
        ("tests/test_neighbor_cache.py::test_a_whole_cache_is_counted",),
    ),
    # -- draws
    Mutation(
        "same draws every epoch",
        "draws' key",
        "featstore/sampling/rng.py",
        "return absorb(absorb(absorb(0, seed), epoch), index)",
        "return absorb(absorb(absorb(0, seed), 0), index)",
        ("tests/test_sampler.py::test_a_batch_differs_by_seed_epoch_and_index_alone",),
    ),
    Mutation(
        "same draws every hop",
        "draws' key",
        "featstore/sampling/neighbor.py",
        "absorb(key, hop)",
        "absorb(key, 0)",
        ("tests/test_sampler.py::test_a_larger_graph_equals_the_oracle",),
    ),
    Mutation(
        "draws never take the last neighbour",
        "draws' key",
        CORE + "draws.h",
        "    return (uint64_t)(((unsigned __int128)word * n) >> 64);",
        "    return (uint64_t)(((unsigned __int128)word * (n > 1 ? n - 1 : n)) >> 64);",
        ("tests/test_sampler.py::test_a_larger_graph_equals_the_oracle", "tests/test_draws.py"),
    ),
    # -- PyG
    Mutation(
        "nodes that draw once draw anew",
        "edges of PyG's batches",
        "featstore/sampling/neighbor.py",
        "scratch.degree[:n_dst] = 0",
        "scratch.degree[:0] = 0",
        ("tests/test_sampler.py::test_nodes_that_draw_once_in_a_larger_graph",),
    ),
    Mutation(
        "edges drawn anew stay in the list",
        "edges of PyG's batches",
        "featstore/adapters/pyg/data.py",
        "[_first_of(hop.dst, before.n_dst) for",
        "[0 * _first_of(hop.dst, before.n_dst) for",
        ("tests/test_pyg_loader.py::test_other_samplers_blocks",),
    ),
    Mutation(
        "edges turned around",
        "edges of PyG's batches",
        "featstore/adapters/pyg/data.py",
        "_stacked(outer.src, outer.dst)",
        "_stacked(outer.dst, outer.src)",
        ("tests/test_pyg_loader.py::test_whole_neighbourhoods_are_the_batches_of_pyg",),
    ),
    Mutation(
        "a repeated seed has no neighbours",
        "edges of PyG's batches",
        "featstore/adapters/pyg/sampler.py",
        "degree = starts.diff()[number]",
        "degree = starts.diff()[number] * (first[number] == torch.arange(n_seeds))",
        ("tests/test_pyg_sampler.py::test_seeds_given_more_than_once_have_their_neighbours_each_time",),
    ),
    # -- writers
    Mutation(
        "two writers at once",
        "locks",
        "featstore/storage/update.py",
        "        lock = FileLock(os.path.join(root, WRITER_LOCK), exclusive=True, patience_s=patience_s)\n",
        "        lock = FileLock(os.path.join(root, WRITER_LOCK), exclusive=False, patience_s=patience_s)\n",
        ("tests/test_catalog.py::test_one_update_at_a_time",),
    ),
)
