"""The public names, which :mod:`featstore` imports at its first use; ``as`` exports them to type checkers."""

# ruff: noqa: I001

from featstore.budget import MemoryReport as MemoryReport
from featstore.cache.base import (
    OnlinePolicy as OnlinePolicy,
    PolicyContext as PolicyContext,
    StaticPolicy as StaticPolicy,
    available_policies as available_policies,
    get_policy as get_policy,
    register_policy as register_policy,
)
from featstore.cache.planned import (
    NextAccess as NextAccess,
    PlannedBatch as PlannedBatch,
    PlannedPolicy as PlannedPolicy,
    Horizon as Horizon,
)
from featstore.creation.typed import Edges as Edges, Nodes as Nodes
from featstore.diagnosis.examine import doctor as doctor
from featstore.diagnosis.findings import Diagnosis as Diagnosis, Finding as Finding
from featstore.errors import (
    BudgetError as BudgetError,
    BusyError as BusyError,
    ClosedError as ClosedError,
    CommittedError as CommittedError,
    CorruptionError as CorruptionError,
    FeatstoreError as FeatstoreError,
    FeatstoreWarning as FeatstoreWarning,
    FormatError as FormatError,
    OptionError as OptionError,
    PerformanceWarning as PerformanceWarning,
    PluginError as PluginError,
    StaleError as StaleError,
    UnknownNameError as UnknownNameError,
    VersionError as VersionError,
)
from featstore.gather.plan import Changeset as Changeset
from featstore.graph.convert import convert as convert
from featstore.graph.dataset import OutOfCoreGraph as OutOfCoreGraph
from featstore.partitioning.export import export as export
from featstore.graph.matrix import create as create
from featstore.graph.feature import FeatureStore as FeatureStore
from featstore.inference.infer import infer as infer
from featstore.inference.layers import Aggregate as Aggregate
from featstore.pack.offline import (
    Pack as Pack,
    sample_offline as sample_offline,
)
from featstore.pack.packgraph import PackedGraph as PackedGraph
from featstore.partitioning.assign import partition as partition
from featstore.partitioning.base import (
    GraphStream as GraphStream,
    Partitioner as Partitioner,
    available_partitioners as available_partitioners,
    register_partitioner as register_partitioner,
)
from featstore.estimate.cost import (
    Estimate as Estimate,
    Machine as Machine,
    Workload as Workload,
)
from featstore.plan.simulate import simulate as simulate
from featstore.load.heterobatch import HeteroMiniBatch as HeteroMiniBatch
from featstore.load.history import History as History
from featstore.load.minibatch import MiniBatch as MiniBatch
from featstore.load.loader import Loader as Loader
from featstore.sampling.batch import (
    Block as Block,
    SampledBatch as SampledBatch,
    Sampler as Sampler,
)
from featstore.sampling.batches import (
    Batches as Batches,
    RandomBatches as RandomBatches,
)
from featstore.sampling.sampledbatches import (
    EpochBatches as EpochBatches,
    SampledBatches as SampledBatches,
)
from featstore.sampling.epochwide import EpochSampler as EpochSampler
from featstore.sampling.labor import LaborSampler as LaborSampler
from featstore.sampling.layer import LayerSampler as LayerSampler
from featstore.sampling.partbatches import PartBatches as PartBatches
from featstore.sampling.partitionbatches import PartitionBatches as PartitionBatches
from featstore.sampling.neighbor import NeighborSampler as NeighborSampler
from featstore.sampling.shadow import ShadowSampler as ShadowSampler
from featstore.strategies import options as options
from featstore.strategies.auto import Auto as Auto
from featstore.strategies.base import (
    EpochRun as EpochRun,
    Batch as Batch,
    Runner as Runner,
    Strategy as Strategy,
)
from featstore.strategies.devicecache import DeviceCache as DeviceCache
from featstore.strategies.ginex import Ginex as Ginex
from featstore.strategies.ondemand import OnDemand as OnDemand
from featstore.strategies.packed import Packed as Packed
from featstore.strategies.registry import (
    available_strategies as available_strategies,
    register_strategy as register_strategy,
)
from featstore.strategies.context import Context as Context
from featstore.strategies.streamed import Streamed as Streamed
from featstore.strategies.superbatch import Superbatch as Superbatch

open = OutOfCoreGraph.open
