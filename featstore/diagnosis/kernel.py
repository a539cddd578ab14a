"""Facts and limits of the kernel: its own files, and rings of reads (io_uring)."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
from pathlib import Path

import numpy as np

from featstore._core.descriptor import close, dup_fd, memory_fd
from featstore._core.io import Engine, File
from featstore.config import format_size
from featstore.diagnosis.findings import Finding
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagedsums import MIN_ARENA_BYTES

__all__ = ["release", "rings", "text_of"]

DISABLED = "/proc/sys/kernel/io_uring_disabled"  # there since Linux 6.6, if the kernel has rings
READS_SINCE, NOT_LOCKED_SINCE, SETTING_SINCE = (5, 6), (5, 12), (6, 6)
CALLS = "io_uring_setup, io_uring_enter and io_uring_register"


def text_of(path: str) -> str:
    """Read a file of the kernel's; empty if it is not there or may not be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""


def release() -> tuple[int, int]:
    """Find the kernel's version, such as (6, 1)."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def rings() -> Finding:
    """Make a ring as readers do, and read a page by it."""
    name, kernel, chosen = "io_uring", platform.release(), os.environ.get("FEATSTORE_BACKEND", "auto")
    values: dict[str, object] = {"kernel": kernel, "usable": False}
    if chosen == "pread":
        cause = "the variable FEATSTORE_BACKEND is 'pread'"
        return Finding(name, "warning", "not used: reads go through threads of pread", cause, "unset FEATSTORE_BACKEND", values)
    try:
        ring = Engine("io_uring", 8, MIN_ARENA_BYTES)
    except OSError as error:
        cause, remedy = _refusal(error)
        values["errno"], what = error.errno, os.strerror(error.errno or 0)
        if chosen == "io_uring":
            text = f"refused ({what}), and FEATSTORE_BACKEND=io_uring demands it: no dataset can be opened"
            return Finding(name, "error", text, cause, f"{remedy}; or unset FEATSTORE_BACKEND", values)
        return Finding(name, "warning", f"refused ({what}): reads go through threads of pread", cause, remedy, values)
    try:
        _read_page(ring)
    except OSError as error:
        values["errno"] = error.errno
        text = f"rings can be made, but reads by them fail ({error.strerror})"
        cause, remedy = f"kernel {kernel} does not read by rings", "a kernel of 5.6 or later, or FEATSTORE_BACKEND=pread"
        return Finding(name, "error", text, cause, remedy, values)
    finally:
        ring.close()
    return Finding(name, "ok", f"the kernel allows rings ({kernel})", values={**values, "usable": True})


def _read_page(ring: Engine) -> None:
    """Read a page of a file in memory, so that no file system has a say."""
    fd = memory_fd("featstore-doctor")
    try:
        os.truncate(fd, PAGE_BYTES)
        file = File("a page in memory", PAGE_BYTES, 1, PAGE_BYTES, 1, 0, PAGE_BYTES, False, dup_fd(fd))
        try:
            ring.read(file, 0, 1, np.empty((1, PAGE_BYTES), np.uint8))
        finally:
            file.close()
    finally:
        close(fd)


def _refusal(error: OSError) -> tuple[str, str]:
    """Say why the kernel refuses rings, by the error's number, and what to change."""
    kernel, disabled = platform.release(), text_of(DISABLED)
    is_filtered = "Seccomp:\t2" in text_of("/proc/self/status")
    profile = f"docker run --security-opt seccomp=profile.json, with {CALLS} allowed, or seccomp=unconfined"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many files are open", "ulimit -n 65536"
    if error.errno == errno.ENOMEM:
        if release() >= NOT_LOCKED_SINCE:
            cause = "there is no memory for the ring: the machine's, or the control group's, is used up"
            return cause, "raise the limit of the control group, or end other programs"
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
        cause = f"rings take memory that is locked, of which the limit is {limit}"
        return cause, "ulimit -l unlimited; docker run --ulimit memlock=-1"
    if error.errno == errno.EPERM and disabled in ("1", "2"):
        cause, remedy = f"the setting kernel.io_uring_disabled is {disabled}", "as root: sysctl -w kernel.io_uring_disabled=0"
        if disabled == "1":
            remedy += ", or add the user to the group of kernel.io_uring_group"
        if is_filtered:  # either may be what refuses
            return f"{cause}; a seccomp filter is in force, too", f"{remedy}; then, if it is still refused, {profile}"
        return cause, remedy
    is_left_out = error.errno == errno.ENOSYS and (not is_filtered or (not disabled and release() >= SETTING_SINCE))
    if is_left_out or release() < READS_SINCE:
        return f"kernel {kernel} has no io_uring", "a kernel of 5.6 or later, built with CONFIG_IO_URING"
    if is_filtered:
        return "a seccomp filter refuses it, as those of containers do", profile
    cause = "a security module (SELinux, AppArmor) refuses it"
    return cause, "allow io_uring in its policy; dmesg and ausearch -m avc have what it refused"
