"""Rates that were measured on the machine of a dataset, kept in its catalog for a day."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from featstore.errors import BusyError
from featstore.storage.calls import NO_SPACE
from featstore.storage.catalog import current_catalog
from featstore.storage.lock import CANNOT_CHANGE
from featstore.storage.update import Update

__all__ = ["MOST_AGE_S", "SHARES_OF_TIME", "keep", "kept_or_measured", "kept_rates"]

Rates = TypeVar("Rates")  # a frozen dataclass of floats
MOST_AGE_S = 24 * 3600.0  # other programs may have used the drive, or it has aged; measuring again takes a second
SHARES_OF_TIME = frozenset({"write_overlap"})  # fields that are no rates


def keep(dataset: str, key: str, entry: dict[str, Any]) -> None:
    """Keep measured rates in a dataset's catalog, if the catalog can be written now; if not, they are measured again later."""
    try:
        with Update(dataset) as update:
            update.add([], extra={key: entry})
            update.commit()
    except BusyError:
        pass  # the rates are measured again next time
    except OSError as error:
        if error.errno not in CANNOT_CHANGE | NO_SPACE:
            raise


def kept_or_measured(
    dataset: str, key: str, where: dict[str, Any], kind: type[Rates], measure: Callable[[], Rates], again: bool = False
) -> Rates:
    """Get the rates under ``key`` of a dataset's catalog if :func:`kept_rates` accepts them; else measure and keep new ones."""
    rates = None if again else kept_rates(current_catalog(dataset).extra.get(key), where, kind)
    if rates is not None:
        return kind(**rates)
    found = measure()
    keep(dataset, key, {"where": where, "when": time.time(), **vars(found)})
    return found


def kept_rates(entry: dict[str, Any] | None, where: dict[str, Any], kind: type[Any]) -> dict[str, float] | None:
    """Get the rates of an entry, the fields of the dataclass ``kind``; None unless measured at ``where`` within a day.

    An entry may say that its rates last for fewer seconds, ``lasts_s``.
    """
    if entry is None or entry.get("where") != where:
        return None
    when, lasts_s = entry.get("when"), entry.get("lasts_s", MOST_AGE_S)
    if not isinstance(when, (int, float)) or not isinstance(lasts_s, (int, float)):
        return None
    if not 0 <= time.time() - when <= min(lasts_s, MOST_AGE_S):
        return None
    rates = {each.name: entry.get(each.name) for each in fields(kind)}
    if not all(isinstance(rate, (int, float)) and _may_be(name, rate) for name, rate in rates.items()):
        return None
    return {name: float(rate) for name, rate in rates.items() if rate is not None}


def _may_be(name: str, rate: float) -> bool:
    return 0 <= rate <= 1 if name in SHARES_OF_TIME else rate > 0
