"""Registries of plug-ins: classes by name, including those of installed packages' entry points; adapters by name.

A name is first looked up among the classes that this process registered, then among entry points. Built-in classes are in the
modules of one package, which are imported at the first look-up. Only the entry point of the requested name is imported, so a
broken plug-in does not affect users of other names. A built-in name cannot be registered again. An entry point with the name of
a known class gives a warning.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import operator
import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from featstore.config import listed
from featstore.errors import FeatstoreError, FeatstoreWarning, PluginError, warn

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Registry", "adapter", "cause_of", "error_text", "is_plugin", "plugin_errors", "read_only", "whole_number"]

Plugin = TypeVar("Plugin")
Array = TypeVar("Array", bound="npt.NDArray[Any]")


def read_only(array: Array) -> Array:
    """Make a view of an array that cannot be written to.

    Arrays for plug-ins that the library also uses are such views, or copies.
    """
    view = array.view()
    view.flags.writeable = False
    return view


def is_plugin(thing: object) -> bool:
    """Tell whether an object is of a class that is not the library's, so that its answers are checked."""
    return type(thing).__module__.partition(".")[0] != __name__.partition(".")[0]


def error_text(error: BaseException) -> str:
    """Describe an error, even one whose ``__str__`` raises."""
    with suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def cause_of(error: BaseException) -> BaseException | None:
    """Get the cause of a PluginError within a context manager: contextlib would raise a StopIteration again that is one."""
    return None if isinstance(error, StopIteration) else error


@contextmanager
def plugin_errors(label: str, what: str) -> Iterator[None]:
    """Turn the exceptions of a plug-in into a PluginError that begins with its ``label``.

    Errors of the system and of the library, which are no fault of the plug-in's, pass through.
    """
    try:
        yield
    except (FeatstoreError, OSError, MemoryError):
        raise
    except Exception as error:
        raise PluginError(f"{label}: {what} raised {error_text(error)}") from cause_of(error)


def whole_number(label: str, name: str, value: Any, least: int = 0) -> int:
    """Check a number of a plug-in's; PluginError unless it is whole and at least ``least``."""
    try:
        number = operator.index(value)
    except Exception:
        number = least - 1
    if not least <= number < 1 << 63:
        shown = (
            f"a {type(value).__name__}"
            if number < least and not isinstance(value, (int, float, str, type(None)))
            else repr(value)
        )
        raise PluginError(f"{label}: {name} must be a whole number, at least {least}, not {shown}")
    return number


def adapter(framework: str) -> Any:
    """Import the adapter to a framework, such as ``"pyg"``; return its module.

    Lower layers reach an adapter by name, like a plug-in. So they do not depend on it, and it is imported only when needed.

    Raises
    ------
    MissingExtraError
        The framework is not installed.
    """
    return importlib.import_module(f"featstore.adapters.{framework}")


def _described(points: list[importlib.metadata.EntryPoint]) -> str:
    return " and ".join(
        f"{point.name} = {point.value}" + (f" of {point.dist.name} {point.dist.version}" if point.dist is not None else "")
        for point in points
    )


class Registry(Generic[Plugin]):
    """Classes of one kind by name. Thread-safe.

    Parameters
    ----------
    kind : str
        The kind of the classes, such as ``"policy"``.
    base : type
        The class of which they must be subclasses.
    package : str
        The package whose modules register the built-in classes.
    plural : str
        Plural of ``kind``: the entry points' group is ``featstore.<plural>``.
    described : str
        Description of the base class in messages.
    """

    def __init__(self, kind: str, base: type[Plugin], package: str, plural: str, described: str) -> None:
        self.kind, self.base, self.group = kind, base, f"featstore.{plural}"
        self.known: dict[str, type[Plugin]] = {}
        self._package, self._described = package, described
        self._lock = threading.RLock()
        self._is_loaded = False
        self._asked: set[str] = set()

    def _load_builtins(self) -> None:
        if self._is_loaded:
            return
        # Not under the lock: another thread may hold the import lock of one of these modules, and wait for the registry's lock.
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")
        self._is_loaded = True

    def register(self, name: str) -> Callable[[type[Plugin]], type[Plugin]]:
        """Make a class decorator that registers a class under ``name``.

        Raises
        ------
        TypeError
            The class is not a subclass of the kind's base, or the name is not a string.
        ValueError
            The name is empty or taken. (A notebook cell that runs again may define the same class of ``__main__`` again.)
        """
        if not isinstance(name, str):
            raise TypeError(f"a {self.kind}'s name is a string, not {type(name).__name__}; write @register_{self.kind}('name')")
        if not name:
            raise ValueError(f"a {self.kind}'s name cannot be empty")

        def decorate(cls: type[Plugin]) -> type[Plugin]:
            if not (isinstance(cls, type) and issubclass(cls, self.base)):
                raise TypeError(f"{cls!r} is not a subclass of {self._described}")
            if not cls.__module__.startswith(f"{self._package}."):
                self._load_builtins()  # so that a clash with a built-in name is reported here
            with self._lock:
                known = self.known.get(name)
                redefined = (
                    known is not None
                    and known.__module__ == cls.__module__ == "__main__"
                    and known.__qualname__ == cls.__qualname__
                )
                if known is not None and known is not cls and not redefined:
                    raise ValueError(
                        f"a {self.kind} named {name!r} is registered already: {known.__module__}.{known.__qualname__}"
                    )
                if known is cls:
                    raise ValueError(f"{cls.__qualname__} is registered under {name!r} already")
                self.known[name] = cls
                cls._registered = name  # type: ignore[attr-defined]
            return cls

        return decorate

    def check_name(self, plugin: Plugin) -> str:
        """Check that an instance's ``name`` is text; return the label of the instance, with which its errors begin.

        PluginError: the name is not text, or reading it raised an error; see :func:`plugin_errors`.
        """
        label = f"{self.kind} {type(plugin).__module__}.{type(plugin).__qualname__}"
        with plugin_errors(label, "name"):
            name: Any = plugin.name  # type: ignore[attr-defined]
        if not isinstance(name, str):
            raise PluginError(f"{label}: name must be text, not {type(name).__name__}")
        return label

    def _entry_points(self) -> dict[str, list[importlib.metadata.EntryPoint]]:
        found: dict[str, list[importlib.metadata.EntryPoint]] = {}
        for point in importlib.metadata.entry_points(group=self.group):
            points = found.setdefault(point.name, [])
            if all(point.value != other.value for other in points):  # a distribution may be found twice on sys.path
                points.append(point)
        return found

    def names(self) -> list[str]:
        """List all names, sorted, without importing plug-ins."""
        self._load_builtins()
        with self._lock:
            return sorted({*self.known, *self._entry_points()})

    def find(self, name: str) -> type[Plugin]:
        """Find the class of a name; the class of an entry point is imported now.

        Raises
        ------
        ValueError
            No class has this name; the error lists all names.
        PluginError
            The entry point cannot be loaded, is ambiguous, or is not of this kind; the error names the entry point.

        Warns
        -----
        FeatstoreWarning
            An entry point of another package has the same name and is not used. The warning comes once for each name.
        """
        self._load_builtins()
        cls = self.known.get(name)
        if cls is None:
            return self._load_entry_point(name)
        if name not in self._asked:  # only once, as looking for entry points takes milliseconds
            self._asked.add(name)
            self._warn_of_others(name, cls)
        return cls

    def _warn_of_others(self, name: str, cls: type[Plugin]) -> None:
        """Warn if an entry point of another package has the name of a known class."""
        own = cls.__module__.partition(".")[0]
        others = [point for point in self._entry_points().get(name, []) if point.module.partition(".")[0] != own]
        if others:
            warn(
                f"the {self.kind} {name!r} is {cls.__module__}.{cls.__qualname__}, and entry point {self.group}: "
                f"{_described(others)}, which has the same name, is not used: it needs another name",
                FeatstoreWarning,
            )

    def _load_entry_point(self, name: str) -> type[Plugin]:
        points = self._entry_points().get(name, [])
        if not points:
            raise ValueError(f"no {self.kind} is named {name!r}; there are {listed(self.names())}")
        where = f"entry point {self.group}: {_described(points)}"
        if len(points) > 1:
            raise PluginError(f"several installed packages provide the {self.kind} {name!r}: {where}; uninstall all but one")
        try:
            cls: Any = points[0].load()
        except Exception as error:
            raise PluginError(f"{where} cannot be loaded: {error_text(error)}") from error
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise PluginError(f"{where} is not a subclass of {self._described}, but {cls!r}")
        with self._lock:
            if self.known.get(name) is not cls:  # loading the entry point may have run the class's own decorator
                if name in self.known:
                    raise PluginError(f"{where} registers another class under its name: {self.known[name]!r}")
                self.register(name)(cls)
        return cls
