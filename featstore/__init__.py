"""featstore: a tensor-like, out-of-core store for the features and adjacency of graphs larger than memory.

>>> import featstore
>>> g = featstore.open("graph", memory="4GiB")
>>> g.features["x"][ids]
"""

from featstore.cache.base import (
    OnlinePolicy,
    PolicyContext,
    StaticPolicy,
    available_policies,
    get_policy,
    register_policy,
)
from featstore.cache.planned import NextAccess, PlannedBatch, PlannedPolicy, Window
from featstore.errors import (
    BudgetError,
    BusyError,
    ClosedError,
    CorruptionError,
    FeatstoreError,
    FormatError,
    PluginError,
    StaleError,
    VersionError,
)
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.feature import FeatureStore
from featstore.plan.offline import Pack, sample_offline
from featstore.plan.packgraph import PackedGraph
from featstore.plan.simulate import simulate
from featstore.run.batch import MiniBatch
from featstore.run.loader import Loader
from featstore.sampling.batch import Block, SampledBatch, Sampler
from featstore.sampling.neighbor import NeighborSampler

__all__ = [
    "Block",
    "BudgetError",
    "BusyError",
    "ClosedError",
    "CorruptionError",
    "FeatstoreError",
    "FeatureStore",
    "FormatError",
    "Loader",
    "MiniBatch",
    "NeighborSampler",
    "NextAccess",
    "OnlinePolicy",
    "OutOfCoreGraph",
    "Pack",
    "PackedGraph",
    "PlannedBatch",
    "PlannedPolicy",
    "PluginError",
    "PolicyContext",
    "SampledBatch",
    "Sampler",
    "StaleError",
    "StaticPolicy",
    "VersionError",
    "Window",
    "available_policies",
    "get_policy",
    "open",
    "register_policy",
    "sample_offline",
    "simulate",
]

open = OutOfCoreGraph.open
