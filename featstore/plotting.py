"""Helpers of all pictures; matplotlib, the extra ``plot``, is imported only when a picture is asked for."""

from __future__ import annotations

import io
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from featstore.config import check_place
from featstore.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLORS", "check_matplotlib", "check_plot", "shown_figure"]

COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")


def check_matplotlib() -> None:
    """Check that matplotlib is installed; MissingExtraError says how to install it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"a plot needs matplotlib ({error}): pip install matplotlib") from None


def check_plot(path: str | os.PathLike[str] | None) -> None:
    """Check, before any work, that a requested picture can be written to ``path``.

    MissingExtraError: matplotlib is not installed. ValueError: matplotlib lacks the format. OSError: the folder does not exist,
    or cannot be written.
    """
    if path is None:
        return
    check_matplotlib()
    from matplotlib.figure import Figure

    name = os.fspath(path)
    ending = os.path.splitext(name)[1].lstrip(".").lower()
    formats = Figure().canvas.get_supported_filetypes()
    if ending not in formats:
        raise ValueError(f"plot {name!r}: the name must end in one of {', '.join('.' + each for each in sorted(formats))}")
    check_place("the plot", name)


def shown_figure(**options: Any) -> Figure:
    """Make a figure that a notebook shows as a picture, also one in which pyplot, which does that otherwise, was not imported."""
    from matplotlib.figure import Figure

    figure = Figure(**options)
    setattr(figure, "_repr_png_", partial(_as_png, figure))  # noqa: B010  # matplotlib's type has no such name
    return figure


def _as_png(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()
