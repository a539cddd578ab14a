"""Features whose rows lie on several machines."""

from featstore.distributed.sharded import Sharded

__all__ = ["Sharded"]
