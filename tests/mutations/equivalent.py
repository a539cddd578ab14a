"""Mutations that change nothing that anyone was promised: the file, its lines before and after, and why."""

from __future__ import annotations

__all__ = ["EQUIVALENT"]

EQUIVALENT: dict[tuple[str, str, str], str] = {}
