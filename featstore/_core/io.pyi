import os
from collections.abc import Sequence
from typing import Protocol, type_check_only

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

PAGE_BYTES: int
SUMS_PER_PAGE: int
MAX_SORTED_ROWS: int
MAX_ROWS: int

def direct_mode(fd: int) -> str: ...
def direct_alignment(fd: int) -> int | None: ...

@type_check_only
class SumsLoader(Protocol):
    capacity: int
    def load(self, wanted: Sequence[int]) -> None: ...

class File:
    direct: bool
    mode: str
    path: str
    data_offset: int
    row_bytes: int
    group_rows: int
    group_bytes: int
    n_rows: int
    size: int
    n_sums_pages: int
    def __new__(
        cls,
        path: str | os.PathLike[str],
        row_bytes: int,
        group_rows: int,
        group_bytes: int,
        n_rows: int,
        data_offset: int,
        expected_bytes: int,
        direct: bool = True,
        fd: int = -1,
        mode: str | None = None,
    ) -> Self: ...
    def pages(self) -> File: ...
    def use_sums(self, seed: int) -> None: ...
    def set_sums_page(self, number: int, page: npt.NDArray[np.uint64] | None) -> None: ...
    def drop_sums(self) -> None: ...
    @property
    def fd_number(self) -> int: ...
    def close(self) -> None: ...

class Engine:
    arena_bytes: int
    pid: int
    backend: str
    def __new__(cls, backend: str, depth: int, arena_bytes: int) -> Self: ...
    def inject(self, script: bytes | None) -> None: ...
    def set_scratch(self, n_rows: int) -> None: ...
    def drop_scratch(self) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def read(self, file: File, first: int, n: int, out: npt.NDArray[np.uint8]) -> tuple[int, int]: ...
    def gather(
        self,
        file: File,
        rows: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
        positions: npt.NDArray[np.int64] | None,
        gap_bytes: int,
        sums_loader: SumsLoader | None = None,
    ) -> tuple[int, int]: ...
    def close(self) -> None: ...
