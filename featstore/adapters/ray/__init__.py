"""Ray: training under Ray Train that goes on after a worker is lost; Ray Data as rows of a dataset, and the other way round.

=======================  ===========================================================================================
:func:`training`         a training function for ``TorchTrainer``, whose workers open their machine's dataset
:class:`Machine`         what chooses a machine's directory: node id, host name, address, labels
:func:`columns`          columns of a Ray ``Dataset`` as features or node data of ``create``, streamed
:func:`edges`            two columns of a Ray ``Dataset`` as edges of ``from_edge_index``, streamed
:func:`rows`             rows of a feature, such as the output of :func:`featstore.infer`, as a Ray ``Dataset``
=======================  ===========================================================================================
"""

from featstore.errors import MissingExtraError

try:
    import ray.data
    import ray.train.torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError(f"featstore.adapters.ray needs ray ({error}): pip install 'ray[data,train]'") from None

from featstore.adapters.ray.data import columns, edges, rows
from featstore.adapters.ray.training import Machine, training

__all__ = ["Machine", "columns", "edges", "rows", "training"]
