"""Strategies by name, also of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from featstore.errors import FeatstoreError, PluginError
from featstore.registry import Registry, error_text
from featstore.strategies.base import Strategy

__all__ = ["available_strategies", "find_strategy", "get_strategy", "register_strategy"]

StrategyType = TypeVar("StrategyType", bound=type[Strategy])

STRATEGIES = Registry("strategy", Strategy, "featstore.strategies", "strategies", "Strategy")  # type: ignore[type-abstract]


def register_strategy(name: str) -> Callable[[StrategyType], StrategyType]:
    """Register the decorated class as the strategy ``name``.

    Raises
    ------
    TypeError
        The class is not a subclass of Strategy, or the name is not a string.
    ValueError
        The name is empty or taken.
    """
    return cast(Callable[[StrategyType], StrategyType], STRATEGIES.register(name))


def available_strategies() -> list[str]:
    """Return the names of all strategies, sorted; imports no plug-in."""
    return STRATEGIES.names()


def find_strategy(name: str) -> type[Strategy]:
    """Return the class of a strategy: a registered one, or one from an entry point of the group ``featstore.strategies``.

    Raises
    ------
    ValueError
        No strategy has that name; the error lists all names.
    PluginError
        The entry point cannot be loaded, is ambiguous or is no strategy.
    """
    return STRATEGIES.find(name)


def get_strategy(strategy: str | Strategy | type[Strategy]) -> Strategy:
    """Return an instance of a strategy: of a name or a class with its default options; an instance is returned as it is.

    Raises
    ------
    ValueError, PluginError
        See :func:`find_strategy`; the class cannot be instantiated.
    TypeError
        The argument is no name, strategy or strategy class.
    """
    if isinstance(strategy, Strategy):
        return _checked(strategy)
    if isinstance(strategy, str):
        cls = find_strategy(strategy)
    elif isinstance(strategy, type) and issubclass(strategy, Strategy):
        cls = strategy
    else:
        raise TypeError(f"a strategy is a name, a strategy instance or a strategy class, not {strategy!r}")
    try:
        made = cls()
    except FeatstoreError:
        raise  # an option without a default that can be used
    except Exception as error:
        what = f"strategy {cls.__module__}.{cls.__qualname__} cannot be made with its defaults"
        raise PluginError(f"{what}: {error_text(error)}") from error
    return _checked(made)


def _checked(strategy: Strategy) -> Strategy:
    """Check what a strategy says of itself: a name that is text, as messages and states need it, and methods; return it."""
    label = STRATEGIES.check_name(strategy)
    for method in ("run", "batches", "estimate", "estimate_length"):
        if not callable(getattr(strategy, method)):
            raise PluginError(f"{label}: {method} must be a method, not a {type(getattr(strategy, method)).__name__}")
    return strategy
