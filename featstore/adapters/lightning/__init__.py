"""Lightning: a data module over a graph, whose loaders share the graph's memory and whose checkpoints resume within an epoch.

====================  ==============================================================================================
:class:`DataModule`   loaders for ``fit``, ``validate``, ``test`` and ``predict`` of a ``Trainer``, a rank's share each
====================  ==============================================================================================

It is for the package ``lightning``. A ``Trainer`` of ``pytorch_lightning`` has classes of its own, and does not take it.
"""

from featstore.errors import MissingExtraError

try:
    import lightning.pytorch  # noqa: F401
except ImportError as error:
    message = f"featstore.adapters.lightning needs lightning, the extra 'lightning' ({error}): pip install lightning"
    raise MissingExtraError(message) from None

from featstore.adapters.lightning.datamodule import DataModule, StageLoader

__all__ = ["DataModule", "StageLoader"]
