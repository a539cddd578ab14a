"""Calls that must be refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refuses(error: type[BaseException] | tuple[type[BaseException], ...], words: str, call: Callable[[], object]) -> None:
    """Assert that a call raises an error whose message has these words, a regular expression; "" is any message."""
    with pytest.raises(error, match=words or None):
        call()
