"""``device_cache=`` of a loader: its options, the number of rows on the device, and their addition to the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from featstore.cache.base import Policy, StaticPolicy, get_policy
from featstore.cache.sizes import Columns, in_proportion
from featstore.config import parse_cache_size, parse_size
from featstore.errors import BudgetError, OptionError
from featstore.strategies.context import Context, OnDevice
from featstore.strategies.devicefill import DEVICE_POLICY, FilledLater, make_tiers

__all__ = ["DeviceCache", "describe", "device_rows", "rows_of_columns", "with_tier"]


@dataclass(frozen=True)
class DeviceCache:
    """Feature rows on the training device.

    Parameters
    ----------
    size : int, str or float
        Size for all features together: bytes (``"8GiB"``), or a share of the rows (``"10%"`` or ``0.1``). 0: no rows. Features
        of types that do not share their rows get the same share of them.
        ``"auto"``: the device's memory that the first step leaves free, filled beside the loop; not for packs.
    policy : str, Policy or class, optional
        A static policy, by default ``"degree"``. For a pack it must not be given: the pack's layout has chosen the rows.
    reserve : int or str
        Bytes of the device that ``"auto"`` leaves free.

    Raises
    ------
    OptionError
        The policy is not static.
    ValueError, TypeError
        Not a size; no such policy.

    References
    ----------
    Bai et al., PaGraph, TPDS 2021, section 3.1.

    Examples
    --------
    >>> loader = featstore.Loader(g, sampler, seeds, device="cuda", device_cache=featstore.DeviceCache("8GiB", policy="degree"))
    """

    size: int | float | str = "auto"
    policy: str | Policy | type[Policy] | None = None
    reserve: int | str = "1GiB"

    def __post_init__(self) -> None:
        parse_size(self.reserve, "reserve")
        if self.size != "auto":
            parse_cache_size(self.size, "device_cache")
        if self.policy is not None:
            policy = get_policy(self.policy)
            if not isinstance(policy, StaticPolicy):
                raise OptionError(
                    "device_cache", f"rows on the device do not change: policy {policy.name!r} is not static; use 'degree'"
                )

    @classmethod
    def of(cls, given: DeviceCache | int | float | str) -> DeviceCache:
        """Make the options of a ``device_cache=`` argument."""
        return given if isinstance(given, DeviceCache) else cls(given)

    @property
    def static_policy(self) -> StaticPolicy:
        """The policy that chooses the rows, without a pack."""
        policy = get_policy(DEVICE_POLICY if self.policy is None else self.policy)
        assert isinstance(policy, StaticPolicy)
        return policy

    def rows(self, num_nodes: int, row_bytes: Mapping[str, int]) -> int:
        """Compute the number of rows of every feature in the tier; see :func:`device_rows`."""
        return device_rows(parse_cache_size(self.size, "device_cache"), num_nodes, row_bytes)


def device_rows(size: int | float | str, num_nodes: int, row_bytes: Mapping[str, int]) -> int:
    """Compute the number of rows of every feature in a tier of ``size``: bytes for all features, or a share of the rows.

    Raises
    ------
    ValueError
        Not a size; a share outside 0 … 1.
    BudgetError
        The size is not 0, and has no room for one row.
    """
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(f"device_cache as a share of the rows must lie in (0, 1], not {size}; bytes are an int or '1GiB'")
        return min(num_nodes, max(1, round(size * num_nodes)))
    n_bytes, width = parse_size(size), max(1, sum(row_bytes.values()))
    if 0 < n_bytes < width:
        raise BudgetError(f"a device cache of one row takes {width} bytes, not {n_bytes}", width)
    return min(num_nodes, n_bytes // width)


def rows_of_columns(size: int | float | str, columns: Sequence[Columns]) -> tuple[int, ...]:
    """Divide a tier of ``size`` among columns; return the rows of every feature of each, as of :func:`device_rows`.

    All columns get the same share of their rows. One that has no room for a row gets none. BudgetError: none has.
    """
    if len(columns) == 1:
        return (device_rows(size, *columns[0]),)
    if isinstance(size, float):
        return tuple(device_rows(size, *each) for each in columns)
    n_bytes, widths = parse_size(size), [sum(row_bytes.values()) for _, row_bytes in columns]
    each = in_proportion(n_bytes, [n * width for (n, _), width in zip(columns, widths, strict=True)])
    found = [of // max(1, width) for of, width in zip(each, widths, strict=True)]
    there = [at for at, (n, _) in enumerate(columns) if n]
    if n_bytes and there and not any(found):  # the narrowest row has room, or the error says what it needs
        narrowest = min(there, key=widths.__getitem__)
        found[narrowest] = device_rows(n_bytes, *columns[narrowest])
    return tuple(found)


def with_tier(context: Context, cache: DeviceCache) -> Context:
    """Add the filled tiers to the context of a loader; for a pack, the numbers of device rows that its layouts must have.

    ``size="auto"`` adds tiers that are sized and filled later.

    Raises
    ------
    OptionError
        ``"auto"`` or a policy is given for a pack.
    BudgetError
        There is no memory for the tiers.
    PluginError
        The policy failed.
    RuntimeError
        torch has no memory on the device.
    """
    if cache.size == "auto":
        if context.pack is not None:
            raise OptionError(
                "device_cache", "the layout of a pack is made for so many rows on the device: give a size"
            )  # decision 0013
        if not context.features or not context.nodes.n:
            return context
        return replace(context, on_device=FilledLater(cache.static_policy, parse_size(cache.reserve)))
    n_rows = rows_of_columns(parse_cache_size(cache.size, "device_cache"), context.nodes.columns)
    if context.pack is not None:
        if cache.policy is not None:
            raise OptionError(
                "device_cache", "the layout of a pack has chosen its rows: give a size alone, and policy= to Packed"
            )
        return replace(context, device_rows=n_rows)
    if not any(n_rows) or not context.features:
        return context
    with context.timer.time("cache"):
        tiers = make_tiers(context, cache.static_policy, n_rows)
        return replace(context, on_device=OnDevice(tiers or ()))


def describe(on_device: OnDevice | None) -> dict[str, Any]:
    """Return the tiers' entry of :meth:`featstore.Loader.stats`."""
    if on_device is None:
        return {}
    n_rows, why = on_device.n_rows, on_device.why
    if not n_rows:
        return {"device_cache": {"rows": 0, "bytes": 0, "why": why}}
    return {"device_cache": {"rows": sum(n_rows), "bytes": on_device.nbytes}}
