"""Options of strategies: dataclass fields that declare how a value is checked, and how it is parsed from text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from featstore.cache.base import OnlinePolicy, Policy, StaticPolicy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.config import check_at_least, parse_cache_size, parse_disk, parse_size, user_path
from featstore.errors import OptionError

__all__ = [
    "CACHE",
    "DISK",
    "EDGE_CACHE",
    "EDGE_CACHE_HELP",
    "EPOCHS",
    "LENGTH",
    "PACK",
    "RUN_DIR",
    "Kind",
    "check_fields",
    "check_managed",
    "number_of",
    "option",
    "options_of",
    "policy_of",
]

_KEY = "featstore"


@dataclass(frozen=True)
class Kind:
    """A kind of values.

    Parameters
    ----------
    check : callable (value) -> value
        Returns the value that is kept, or raises ValueError or TypeError; never called with the default.
    parse : callable (str) -> value
        Parses a value from the text of a command line; raises ValueError.
    metavar : str
        Placeholder of a value in a list of options.
    """

    check: Callable[[Any], Any]
    parse: Callable[[str], Any]
    metavar: str


def option(default: Any, kind: Kind, help: str) -> Any:
    """Declare a strategy's option: a dataclass field.

    Parameters
    ----------
    default : object
    kind : Kind
    help : str
        One line, which the command line shows.
    """
    return dataclasses.field(default=default, metadata={_KEY: (kind, help)})


def options_of(cls: type) -> dict[str, tuple[Kind, str, Any]]:
    """Return the kind, help and default of each option of a strategy's class, by name."""
    return {each.name: (*each.metadata[_KEY], each.default) for each in dataclasses.fields(cls) if _KEY in each.metadata}


def check_fields(strategy: Any) -> None:
    """Check every option of a strategy, and keep the checked values.

    Raises
    ------
    OptionError, TypeError
        A value is out of range; a value is of the wrong type. Both errors name the option.
    """
    for name, (kind, _, default) in options_of(type(strategy)).items():
        value = getattr(strategy, name)
        if value is default:
            continue
        try:
            object.__setattr__(strategy, name, kind.check(value))
        except OptionError:
            raise
        except ValueError as error:
            raise OptionError(name, str(error)) from None
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None


def check_managed(strategy: Any, policy: str, cache: str, example: str) -> None:
    """Raise OptionError if the option ``policy`` is given, but no size for the ``cache`` that it would manage."""
    if getattr(strategy, cache) is None and getattr(strategy, policy) != options_of(type(strategy))[policy][2]:
        raise OptionError(policy, f"there is no cache that it could manage: give its size, too, such as {cache}={example}")


def _cache(size: Any) -> int | float | str | None:
    if size is None or (isinstance(size, str) and size == "auto"):
        return size
    found = parse_cache_size(size)
    is_bytes = found != 0 and not isinstance(found, float)
    kept: int | float | str = size if is_bytes else found  # bytes keep their unit
    return kept


def _cache_text(text: str) -> int | float | str:
    if text == "auto":
        return text
    if "." in text and text.replace(".", "", 1).isdigit():
        return float(text)  # on a command line 0.1 is a share, as the float is in Python
    found = parse_cache_size(text)
    return found if isinstance(found, float) else text


def _edge_cache(size: Any) -> int | float | str | None:
    if isinstance(size, str) and size == "auto":
        raise ValueError("a cache of edge features has a size: bytes ('1GiB') or a share of the edges ('10%', 0.1)")
    return _cache(size)


def number_of(what: str) -> Kind:
    """Make the kind of values that are whole numbers, at least 1; ``what`` is the noun in messages."""

    def check(number: Any) -> int:
        return check_at_least(f"the number of {what}", number, 1)

    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"{text!r} is not a positive number")
        return int(text)

    return Kind(check, parse, "N")


def _length(length: Any) -> int | str:
    if isinstance(length, str) and length != "auto":
        raise ValueError(f"a number of batches, or 'auto', not {length!r}")
    checked: int | str = length if length == "auto" else _BATCHES.check(length)
    return checked


def _disk(size: Any) -> int | str | None:
    if size is not None:
        parse_disk(size, 0)
    return size if size is None or isinstance(size, str) else int(size)


def _disk_text(text: str) -> int | str:
    parse_disk(text, 0)
    return text if text.strip().lower().endswith("x") else parse_size(int(text) if text.isdigit() else text)


def _run_dir(path: Any) -> str | None:
    if path is None:
        return None
    if not os.fsdecode(path):
        raise ValueError("an empty name: name a directory, or leave it out")
    return os.path.abspath(user_path(path))  # the working directory may change later


def _pack(pack: Any) -> Any:
    if isinstance(pack, (str, os.PathLike)):
        if not os.fsdecode(pack):
            raise ValueError("an empty name: name the directory of a pack")
        return os.path.abspath(user_path(pack))
    return pack


CACHE = Kind(_cache, _cache_text, "SIZE")
EDGE_CACHE_HELP = "rows of edges in memory: bytes (1GiB) or a share (10%, 0.1)"
EDGE_CACHE = Kind(_edge_cache, lambda text: _edge_cache(_cache_text(text)), "SIZE")
_BATCHES = number_of("batches")
LENGTH = Kind(_length, lambda text: text if text == "auto" else _BATCHES.parse(text), "N")
DISK = Kind(_disk, _disk_text, "SIZE")
RUN_DIR = Kind(_run_dir, _run_dir, "DIR")
EPOCHS = number_of("epochs")
PACK = Kind(_pack, user_path, "PACK")

_WORDS = {StaticPolicy: "a static policy", OnlinePolicy: "an online policy", PlannedPolicy: "a planned policy such as 'belady'"}


def policy_of(*kinds: type[Policy], auto: bool = False) -> Kind:
    """Make the kind of values that are policies of these kinds: a name, a class or an instance; with ``auto`` also ``"auto"``."""

    def check(policy: Any) -> Any:
        if auto and isinstance(policy, str) and policy == "auto":
            return policy
        chosen = get_policy(policy)
        if not isinstance(chosen, kinds):
            taken = " or ".join(_WORDS[each] for each in kinds)
            raise ValueError(f"{chosen.name!r} is none that this strategy can follow: it takes {taken}")
        return policy

    return Kind(check, str, "NAME")
