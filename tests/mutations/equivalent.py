"""Mutations that change nothing that anyone was promised: the file, its lines before and after, and why."""

from __future__ import annotations

__all__ = ["EQUIVALENT"]

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "featstore/idmaps/idmap.py",
        "more = 0 if n_bytes <= _BLOCK_BYTES else 4 * n_bytes  # of a name that is longer than a block",
        "more = 0 if (n_bytes < _BLOCK_BYTES) else 4 * n_bytes  # of a name that is longer than a block",
    ): "names of exactly one block are counted twice while they are read: more memory than is needed, for a moment",
    (
        "featstore/estimate/batchsize.py",
        "EDGES = 8  # per row of a pack's batch, if no batch can be read: a generous guess",
        "EDGES = (7)  # per row of a pack's batch, if no batch can be read: a generous guess",
    ): "a guess, and says so",
    (
        "featstore/estimate/batchsize.py",
        "EDGES = 8  # per row of a pack's batch, if no batch can be read: a generous guess",
        "EDGES = (9)  # per row of a pack's batch, if no batch can be read: a generous guess",
    ): "a guess, and says so",
    (
        "featstore/topology/chunks.py",
        "return ListBlock(node, offsets, first_start, ids[skipped:]) if skipped < len(ids) else None",
        "return ListBlock(node, offsets, first_start, ids[skipped:]) if (skipped <= len(ids)) else None",
    ): "a piece without ids, of lists that are empty",
    (
        "featstore/gather/patchedrows.py",
        "bits = np.zeros(-(-n_blocks // 8), np.uint8)",
        "bits = np.zeros(-(-n_blocks // (7)), np.uint8)",
    ): "bytes that no block has a bit in",
    (
        "featstore/gather/patchedrows.py",
        "if begin < stop:",
        "if (begin <= stop):",
    ): "no pages are read of a file that has none of them",
    (
        "featstore/partitioning/trainparts.py",
        "self._held.resize(fixed + 8 * (n_lists + 1) + n_ids * (self._topology.id_bytes + _ID_BYTES))",
        "self._held.resize(fixed + 8 * ((n_lists - 1)) + n_ids * (self._topology.id_bytes + _ID_BYTES))",
    ): "16 bytes of what is counted",
    (
        "featstore/storage/directory.py",
        "directory.close()",
        "pass",
    ): "the next one takes its name, and what is dropped is closed; the line before an error's is the same, and has a test",
    (
        "featstore/creation/extsort.py",
        "if len(key) < _LEAST_BY_RADIX:",
        "if (len(key) <= _LEAST_BY_RADIX):",
    ): "both sort; one key more or less is sorted by the slower one",
    (
        "featstore/changes/append.py",
        "end = (record.parts[0].at or 0) + record.n_rows",
        "end = (record.parts[(-1)].at or 0) + record.n_rows",
    ): "a field of nodes is of one part",
    (
        "featstore/distributed/exchange.py",
        "self.piece_rows = max(1, min(self.MOST_ROWS, piece_bytes // max(1, row_bytes)))",
        "self.piece_rows = max((0), min(self.MOST_ROWS, piece_bytes // max(1, row_bytes)))",
    ): "a piece has the bytes of a row at least",
    (
        "featstore/testing/policies.py",
        "n = draw(st.integers(0, 50))",
        "n = draw(st.integers(0, (51)))",
    ): "a suite's examples may have a row more",
    (
        "featstore/testing/policies.py",
        "n = draw(st.integers(0, 50))",
        "n = draw(st.integers(0, (49)))",
    ): "a suite's examples may have a row less",
    (
        "featstore/strategies/packed.py",
        'on_host = layout.device_rows * part.part.width if context.device.type == "cpu" else 0',
        'on_host = layout.device_rows * part.part.width if context.device.type == "cpu" else (1)',
    ): "a byte of what is counted",
}
