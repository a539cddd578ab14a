"""featstore: a tensor-like, out-of-core store for the features and adjacency of graphs larger than memory.

>>> import featstore
>>> g = featstore.open("graph", memory="4GiB")
>>> g.features["x"][ids]
"""

# ruff: noqa: F403, F405

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featstore._public import *

    __version__: str

__all__ = [
    "Aggregate",
    "Auto",
    "Batch",
    "Batches",
    "Block",
    "BudgetError",
    "BusyError",
    "Changeset",
    "ClosedError",
    "CommittedError",
    "Context",
    "CorruptionError",
    "DeviceCache",
    "Diagnosis",
    "Edges",
    "EpochBatches",
    "EpochRun",
    "EpochSampler",
    "Estimate",
    "FeatstoreError",
    "FeatstoreWarning",
    "FeatureStore",
    "Finding",
    "FormatError",
    "Ginex",
    "GraphStream",
    "HeteroMiniBatch",
    "History",
    "Horizon",
    "LaborSampler",
    "LayerSampler",
    "Loader",
    "Machine",
    "MemoryReport",
    "MiniBatch",
    "NeighborSampler",
    "NextAccess",
    "Nodes",
    "OnDemand",
    "OnlinePolicy",
    "OptionError",
    "OutOfCoreGraph",
    "Pack",
    "Packed",
    "PackedGraph",
    "PartBatches",
    "PartitionBatches",
    "Partitioner",
    "PerformanceWarning",
    "PlannedBatch",
    "PlannedPolicy",
    "PluginError",
    "PolicyContext",
    "RandomBatches",
    "Runner",
    "SampledBatch",
    "SampledBatches",
    "Sampler",
    "ShadowSampler",
    "StaleError",
    "StaticPolicy",
    "Strategy",
    "Streamed",
    "Superbatch",
    "UnknownNameError",
    "VersionError",
    "Workload",
    "available_partitioners",
    "available_policies",
    "available_strategies",
    "convert",
    "create",
    "doctor",
    "export",
    "get_policy",
    "infer",
    "open",
    "options",
    "partition",
    "register_partitioner",
    "register_policy",
    "register_strategy",
    "sample_offline",
    "simulate",
]


if not TYPE_CHECKING:  # for a type checker a module __getattr__ would define every name

    def __getattr__(name: str) -> Any:
        """Import all public names at the first access: importing torch takes seconds, and the command line may not need it."""
        if name == "__version__":
            from importlib.metadata import version

            return version("featstore")
        if not name.startswith("_"):
            from featstore._compiled import importing

            with importing():
                import featstore._public as public

            for each in __all__:
                globals().setdefault(each, getattr(public, each))
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'featstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    packages = {"adapters", "distributed", "testing"} & globals().keys()
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *packages, "__version__"})
