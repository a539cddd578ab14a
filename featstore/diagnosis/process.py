"""Limits of the process: memory, processors, open files."""

from __future__ import annotations

import os
import resource

import psutil

from featstore.config import Options, available_memory, format_size, memory_limit, processor_quota
from featstore.diagnosis.findings import Finding

__all__ = ["SPARE_BYTES", "descriptors", "memory", "processors"]

SPARE_BYTES = 64 << 20  # by which a process may exceed its budget
BESIDE_BYTES = SPARE_BYTES + (448 << 20)  # that, and an interpreter with torch
LEAST_DESCRIPTORS = 1024
RAISE = "docker run --memory, limits.memory of Kubernetes, Slurm's --mem and systemd's MemoryMax raise it"


def memory(asked: int | str | None) -> Finding:
    """Compare a budget with what the machine, and a control group, leave; ``values["suggested"]`` is what they have room for."""
    total, available, limit = int(psutil.virtual_memory().total), available_memory(), memory_limit()
    budget = Options.resolve(asked).memory
    room = max(0, available - SPARE_BYTES)  # this process has its interpreter and torch already
    if limit is not None:
        room = min(room, max(0, limit - BESIDE_BYTES))
    values = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit, "memory": budget, "suggested": room}
    of = f"{format_size(available)} of {format_size(total)} are available"
    group = "" if limit is None else f", and a control group allows {format_size(limit)}"
    text = f"{of}{group}; memory={format_size(budget)}{' by default' if asked is None else ''}"
    if budget <= room:
        return Finding("memory", "ok", text, values=values)
    is_group = limit is not None and limit - BESIDE_BYTES <= room
    whose = "the control group's limit" if is_group else "what is available"
    remedy = f"memory={format_size(room, down=True)!r} keeps within {whose}, beside an interpreter with torch"
    if not room:
        remedy = f"no memory= keeps within {whose} beside an interpreter with torch: there must be more"
    remedy += f"; {RAISE}" * is_group
    if budget > (most := total if limit is None else min(total, limit)):
        cause = f"the budget exceeds the {format_size(most)} that {'the control group allows' if is_group else 'the machine has'}"
        return Finding("memory", "error", text, f"{cause}: the kernel kills the process once it fills up", remedy, values)
    cause = f"the budget and an interpreter with torch do not fit into {whose}"
    return Finding("memory", "warning", text, cause, remedy, values)


def processors() -> Finding:
    """Compare the processors that the process may use with a control group's share of them."""
    n = len(os.sched_getaffinity(0))
    quota = processor_quota()
    values = {"processors": n, "quota": quota}
    if quota is not None and quota < n:
        text, threads = f"{n} processors, of which {quota:g} may be used at a time", max(1, int(quota))
        remedy = f"FEATSTORE_THREADS={threads} and OMP_NUM_THREADS={threads}; docker run --cpus raises it"
        return Finding("processors", "note", text, "a control group has a quota of processors", remedy, values)
    return Finding("processors", "ok", f"{n} processors", values=values)


def descriptors() -> Finding:
    """Look at the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = {"soft": soft, "hard": hard}
    if 0 <= soft < LEAST_DESCRIPTORS:
        remedy = f"ulimit -n {min(65536, hard) if hard > 0 else 65536}"
        return Finding("open files", "warning", f"{soft} at most", "the limit RLIMIT_NOFILE is low", remedy, values)
    return Finding("open files", "ok", "unlimited" if soft < 0 else f"{soft:,} at most", values=values)
