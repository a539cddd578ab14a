"""Published data sets as datasets of the library: each layout's files are streamed in bounded memory, and make one commit."""

from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.sources import SOURCES, Source, register
from featstore.adapters.datasets.tablesource import TABLE

register(TABLE)

__all__ = ["SOURCES", "Report", "Source", "register"]
