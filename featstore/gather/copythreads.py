"""Number of threads that copy rows while a stream needs cores, too; it is measured as batches run."""

from __future__ import annotations

__all__ = ["CopyThreads"]

BLOCK = 4  # batches timed together: one batch's copy delays the extent that the next batch waits for
EVERY = 16  # blocks; then the slower number is timed again, as other work comes and goes
WEIGHT = 0.5  # of a new block's rate in the mean rate


class CopyThreads:
    """Choose between all ``n_threads`` and two fewer, by the rate of whole batches under each. One thread at a time.

    On some processors one thread copies as fast as two, and the second only delays the stream. On others two are nearly twice
    as fast. The batches' seconds show this, and how busy the cores are. Both numbers are tried for :data:`BLOCK` batches. Then
    the quicker one is used, and the other is tried again once in :data:`EVERY` blocks.
    """

    def __init__(self, n_threads: int) -> None:
        fewer = max(1, n_threads - 2)
        self._choices = (fewer, n_threads) if fewer < n_threads else (n_threads,)
        self._rates = [0.0] * len(self._choices)  # bytes a second; 0: not known
        self._at = 0
        self._n_blocks = self._n_batches = 0
        self._n_bytes, self._seconds = 0, 0.0

    @property
    def now(self) -> int:
        """Threads for the next batch."""
        return self._choices[self._at]

    def ran(self, n_bytes: int, seconds: float) -> None:
        """Record the bytes and seconds of a batch copied by :attr:`now` threads: the whole gather, waits included."""
        self._n_bytes += n_bytes
        self._seconds += seconds
        self._n_batches += 1
        if self._n_batches < BLOCK or len(self._choices) == 1:
            return
        rate, known = self._n_bytes / max(1e-9, self._seconds), self._rates[self._at]
        self._rates[self._at] = rate if not known else (1 - WEIGHT) * known + WEIGHT * rate
        self._n_batches, self._n_bytes, self._seconds = 0, 0, 0.0
        self._n_blocks += 1
        best = max(range(len(self._choices)), key=lambda each: self._rates[each])
        unknown = [each for each, known in enumerate(self._rates) if not known]
        if unknown:
            self._at = unknown[0]
        elif self._n_blocks % EVERY == 0:
            self._at = 1 - best
        else:
            self._at = best
