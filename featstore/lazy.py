"""Properties that are computed once, at their first use."""

from __future__ import annotations

from functools import cached_property  # noqa: TID251 - the one place
from typing import TYPE_CHECKING, Any

__all__ = ["lazy"]

if TYPE_CHECKING:
    lazy = cached_property
else:

    class lazy(cached_property):
        """A :class:`functools.cached_property` without a lock; threads that are first at once may compute twice.

        Before Python 3.12 that property has a lock for all objects, held while one computes: a child that is forked meanwhile
        would wait for it forever.
        """

        def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
            if instance is None:
                return self
            return instance.__dict__.setdefault(self.attrname, self.func(instance))
