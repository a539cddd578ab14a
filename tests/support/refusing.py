"""Calls that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refuses(
    error: type[BaseException] | tuple[type[BaseException], ...], words: str, call: Callable[[], object]
) -> pytest.ExceptionInfo[Any]:
    """Assert that a call raises an error whose message has these words, a regular expression; "" is any message."""
    with pytest.raises(error, match=words or None) as caught:
        call()
    try:
        return caught
    finally:
        del caught  # or this frame, which the error refers to, would keep it, and all that its frames hold
