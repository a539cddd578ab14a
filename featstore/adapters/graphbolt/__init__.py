"""DGL's GraphBolt: features of a dataset on disk, in the place of its ``TorchBasedFeature`` and ``DiskBasedFeature``.

=======================  ===========================================================================================
:class:`StoreFeature`    one store as a ``dgl.graphbolt.Feature``, for any pipeline of GraphBolt's
:func:`features`         all features of nodes and edges of a dataset, by the keys of a ``BasicFeatureStore``
=======================  ===========================================================================================

A GraphBolt dataset becomes one of the library by :func:`featstore.adapters.datasets.graphbolt`, which does not need DGL.
"""

import torch

from featstore.errors import MissingExtraError

try:
    import dgl.graphbolt  # noqa: F401
except (ImportError, OSError) as error:  # it has a compiled library for each release of torch, or no such file
    raise MissingExtraError(
        f"featstore.adapters.graphbolt needs dgl with a GraphBolt that is built for torch {torch.__version__} ({error}): "
        "install one from DGL's own index, as PyPI's last, 2.1.0, is for torch 2.0 to 2.2"
    ) from None

from featstore.adapters.graphbolt.feature import StoreFeature, features

__all__ = ["StoreFeature", "features"]
