"""PyTorch Geometric: its loaders over a dataset on disk, batches as its ``Data``, and its data as a dataset.

========================  ==========================================================================================
:class:`NeighborLoader`   the library's loader, which takes PyG's keywords and yields PyG's ``Data``
:func:`stores`            a dataset as PyG's ``FeatureStore`` and ``GraphStore``, for PyG's own loaders
:class:`Sampler`          a sampler of the library as PyG's ``BaseSampler``: PyG's loaders then need no compiled package
:func:`to_data`           one :class:`~featstore.MiniBatch` as PyG's ``Data``
:func:`to_hetero_data`    one :class:`~featstore.HeteroMiniBatch` as PyG's ``HeteroData``
:func:`create`            a dataset from PyG's ``Data`` or ``HeteroData``
:func:`inference_layer`   a convolution as a layer of :func:`featstore.infer` that runs in blockwise passes
========================  ==========================================================================================
"""

from featstore.errors import MissingExtraError

try:
    import torch_geometric  # noqa: F401
except ImportError as error:
    raise MissingExtraError(f"featstore.adapters.pyg needs torch_geometric ({error}): pip install torch_geometric") from None

from featstore.adapters.pyg.create import create
from featstore.adapters.pyg.data import to_data, to_hetero_data
from featstore.adapters.pyg.inference import inference_layer
from featstore.adapters.pyg.loader import NeighborLoader
from featstore.adapters.pyg.sampler import Sampler
from featstore.adapters.pyg.stores import EdgeStore, NodeStore, stores

__all__ = [
    "EdgeStore",
    "NeighborLoader",
    "NodeStore",
    "Sampler",
    "create",
    "inference_layer",
    "stores",
    "to_data",
    "to_hetero_data",
]
