"""Published data sets as datasets of the library: each layout's files are streamed in bounded memory, and make one commit.

===================  ==============================================================================================
:func:`ogb`          Open Graph Benchmark's node property prediction: binary or CSV, one type or several
:func:`igb`          IGB and MLPerf R-GAT: arrays by type, raw ones among them, splits by position
:func:`mag240m`      MAG240M of OGB's large-scale challenge
:func:`graphbolt`    a folder with DGL GraphBolt's ``metadata.yaml``
:func:`npz`          an ``.npz`` archive, such as ``scipy.sparse.save_npz`` writes
:func:`scipy`        a sparse matrix of SciPy in memory
:mod:`.tables`       CSV, Parquet and Arrow files with ids of any kind
:func:`export`       the other way: a dataset as ``.npy`` or Parquet files
===================  ==============================================================================================

The others return a :class:`Report` of what was read. ``featstore import`` has those that
:data:`~featstore.adapters.datasets.sources.SOURCES` names.
"""

import importlib
from typing import TYPE_CHECKING, Any

from featstore.adapters.datasets.exporting import export
from featstore.adapters.datasets.graphbolt import graphbolt
from featstore.adapters.datasets.igb import igb
from featstore.adapters.datasets.mag240m import mag240m
from featstore.adapters.datasets.matrices import npz, scipy
from featstore.adapters.datasets.ogb import ogb
from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.sources import SOURCES, ImportSource, register
from featstore.adapters.datasets.tablesource import TABLE

if TYPE_CHECKING:
    from featstore.adapters.datasets import tables as tables
else:

    def __getattr__(name: str) -> Any:
        """Import ``tables`` at the first access: it needs pyarrow, which the others can do without."""
        if name != "tables":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.tables")


register(TABLE)

__all__ = ["SOURCES", "ImportSource", "Report", "export", "graphbolt", "igb", "mag240m", "npz", "ogb", "register", "scipy"]
