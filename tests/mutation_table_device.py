"""Mutations of rows on the device, of reads that embeddings save, and of subgraphs; see :mod:`tests.mutation_table`."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["DEVICE"]

FILL = "featstore/strategies/devicefill.py"
SHADOW = "featstore/sampling/shadow.py"

DEVICE: tuple[Mutation, ...] = (
    # -- rows on the device
    Mutation(
        "slots of the device in another order",
        "rows on the device",
        "featstore/cache/devicetier.py",
        "self.map.assign(rows, np.arange(len(rows), dtype=np.int32))",
        "self.map.assign(rows[::-1].copy(), np.arange(len(rows), dtype=np.int32))",
        ("tests/test_device_cache.py::test_split_and_rest",),
    ),
    Mutation(
        "rows of the device planned, too",
        "rows on the device",
        "featstore/cache/devicetier.py",
        "return ids[np.take(self.map.slot_of_row, ids) < 0]",
        "return ids",
        ("tests/test_device_cache.py::test_a_planned_cache_sees_the_other_accesses_alone",),
    ),
    Mutation(
        "the map of the device kept",
        "rows on the device",
        "featstore/cache/devicetier.py",
        "        while self._held:\n            self._held.pop().release()\n",
        "",
        ("tests/test_device_cache.py::test_split_and_rest",),
    ),
    Mutation(
        "rows of the device in each other's places",
        "rows on the device",
        "featstore/gather/device.py",
        "copy_rows(_as_bytes(self.rows), part.slots,",
        "copy_rows(_as_bytes(self.rows), part.slots[::-1].copy(),",
        ("tests/test_device_cache.py::test_batches_whatever_the_device_holds",),
    ),
    Mutation(
        "rows of the device not counted in the budget",
        "rows on the device",
        "featstore/gather/device.py",
        'n_bytes if device.type == "cpu" else 0,',
        "0,",
        ("tests/test_device_fill.py::test_batches_before_and_after_it_is_there",),
    ),
    Mutation(
        "memory of other processes taken",
        "rows on the device",
        FILL,
        "max_memory_reserved(device) - others - reserve)",
        "max_memory_reserved(device) - reserve)",
        ("tests/test_device_fill.py::test_what_a_device_has_left",),
    ),
    Mutation(
        "a device filled after its loader",
        "rows on the device",
        FILL,
        "lambda: not self._is_over)",
        "lambda: True)",
        ("tests/test_device_fill.py::test_the_memory_goes_back_while_it_fills",),
    ),
    Mutation(
        "damage found while a device is filled is not said",
        "rows on the device",
        FILL,
        "self._failure = None if self._is_over else error",
        "self._failure = None",
        ("tests/test_device_fill.py::test_damage_is_raised_in_the_loop",),
    ),
    Mutation(
        "the device that is current in another thread",
        "rows on the device",
        "featstore/load/loader.py",
        "numbered(check_device(device))",
        "check_device(device)",
        ("tests/test_device_fill.py::test_the_device_is_the_one_that_was_current",),
    ),
    Mutation(
        "pinned memory unlocked by way of any device",
        "rows on the device",
        "featstore/gather/pinned.py",
        "            with torch.cuda.device(self._device):\n                self._unregister(self._address)\n",
        "            self._unregister(self._address)\n",
        ("tests/test_pinned.py::test_memory_is_unlocked_by_way_of_its_own_device",),
    ),
    Mutation(
        "idle pinned memory handed to whoever asks",
        "rows on the device",
        "featstore/gather/buffers.py",
        "            alike = [block for block in fitting if isinstance(block, PinnedBlock) == pinned]\n",
        "            alike = fitting\n",
        ("tests/test_pinned.py::test_only_what_is_copied_to_a_device_is_locked",),
    ),
    Mutation(
        "batches for the device in ordinary memory",
        "rows on the device",
        "featstore/load/stages.py",
        'return stage_of if device.type == "cuda" else partial(stage, run)',
        "return partial(stage, run)",
        ("tests/test_pinned.py::test_a_loader_for_cuda_locks_what_it_copies_there",),
    ),
    Mutation(
        "an error of pinning left to the next kernel",
        "rows on the device",
        "featstore/gather/pinned.py",
        "            _forget_error()\n",
        "",
        ("tests/test_pinned.py::test_a_refusal_is_not_the_next_kernels_error",),
    ),
    Mutation(
        "batches ahead beyond the device's memory",
        "rows on the device",
        "featstore/load/stages.py",
        "return on_device is None or on_device >= needed",
        "return True",
        ("tests/test_overlap.py::test_without_memory_on_the_device_it_looks_no_further",),
    ),
    Mutation(
        "a device's bytes lost to Ctrl-C",
        "rows on the device",
        "featstore/gather/device.py",
        'device.type == "cpu" else 0, owner=self)',
        'device.type == "cpu" else 0)',
        ("tests/test_device_fill.py::test_the_memory_goes_back_wherever_ctrl_c_comes",),
    ),
    # -- reads that embeddings save
    Mutation(
        "seeds credited with what they draw",
        "reads that embeddings save",
        "featstore/plan/savedio.py",
        "        pulled[: sampled.n_seeds] = False\n",
        "",
        ("tests/test_savedio.py::test_counts_are_those_of_loops",),
    ),
    Mutation(
        "the last node that drew another is credited",
        "reads that embeddings save",
        "featstore/plan/savedio.py",
        "first[src[::-1]] = dst[::-1]",
        "first[src] = dst",
        ("tests/test_savedio.py::test_counts_are_those_of_loops",),
    ),
    Mutation(
        "embeddings beyond the memory",
        "reads that embeddings save",
        "featstore/plan/savedio.py",
        "kept = min(len(sums) - 1, of_embeddings // embedding_bytes)",
        "kept = min(len(sums) - 1, of_embeddings // embedding_bytes + 1)",
        ("tests/test_savedio.py::test_the_split_is_that_of_enumeration",),
    ),
    Mutation(
        "an edge costs the inverse",
        "reads that embeddings save",
        "featstore/strategies/savedsplit.py",
        "return (sample_s / max(1, n_edges)) / (gather_s / n_rows)",
        "return (gather_s / n_rows) / (sample_s / max(1, n_edges))",
        ("tests/test_savedio.py::test_beta_is_the_ratio_of_measured_seconds",),
    ),
    Mutation(
        "lists of a macro-batch cost reads",
        "reads that embeddings save",
        "featstore/strategies/savedsplit.py",
        "        found &= ~place < graph.topology.num_edges\n",
        "",
        ("tests/test_savedio.py::test_lists_at_hand_cost_nothing",),
    ),
    # -- subgraphs of all layers
    Mutation(
        "numbers of a piece's edges overwritten by the next",
        "subgraphs of all layers",
        SHADOW,
        "kept_positions.append(_copy(positions[:n_kept], pool))",
        "kept_positions.append(positions[:n_kept])",
        ("tests/test_edge_pos.py::test_edges_of_lists_in_pieces",),
    ),
    Mutation(
        "the last piece of edges alone",
        "subgraphs of all layers",
        SHADOW,
        "        first, end = end, end + found.shape[1]\n",
        "        first, end = 0, found.shape[1]\n",
        ("tests/test_shadow_sampler.py::test_a_larger_graph_in_pieces",),
    ),
)
