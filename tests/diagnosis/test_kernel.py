"""Rings: made and read by as readers do; and why the kernel refuses them, by the number of its error."""

from __future__ import annotations

import errno
import functools
import os
import platform
from collections.abc import Callable

import pytest

from featstore.diagnosis import kernel
from featstore.testing.faults import deny_syscalls, forked
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

FILTERED, FREE = "Name:\tpython\nSeccomp:\t2\n", "Name:\tpython\nSeccomp:\t0\n"


def says(texts: dict[str, str]) -> Callable[[str], str]:
    """Files of the kernel's as they would be elsewhere."""
    really = kernel.text_of
    return lambda path: texts[path] if path in texts else really(path)


def test_this_machine_has_rings() -> None:
    found = kernel.rings()
    assert (found.status, found.cause, found.remedy) == ("ok", "", "")
    assert found.values == {"kernel": os.uname().release, "usable": True}


def refused(call: str, error: int) -> None:
    deny_syscalls([call], error)
    found = kernel.rings()
    assert (found.status, found.values["usable"], found.values["errno"]) == ("warning", False, error)
    assert found.text == f"refused ({os.strerror(error)}): reads go through threads of pread"
    if error == errno.ENOMEM:
        assert "control group" in found.cause
    else:
        assert found.cause == "a seccomp filter refuses it, as those of containers do"
        assert found.remedy.startswith("docker run --security-opt seccomp=profile.json")
        assert call in found.remedy


def each_refusal() -> None:
    for call in ("io_uring_setup", "io_uring_enter"):
        for error in (errno.EPERM, errno.ENOSYS, errno.EACCES, errno.ENOMEM):
            assert forked(functools.partial(refused, call, error)) is None, (call, errno.errorcode[error])


def test_a_seccomp_filter_of_either_call_is_named() -> None:
    run_in_fork(each_refusal)


@pytest.mark.parametrize(
    ("error", "release", "disabled", "status", "cause", "remedy"),
    [
        (errno.EPERM, "6.8.0-31-generic", "2", FREE, "io_uring_disabled is 2", "as root: sysctl -w kernel.io_uring_disabled=0"),
        (errno.EPERM, "6.8.0", "1", FREE, "io_uring_disabled is 1", "the group of kernel.io_uring_group"),
        (
            errno.EPERM,
            "6.8.0",
            "2",
            FILTERED,
            "a seccomp filter is in force, too",
            "then, if it is still refused, docker run",
        ),
        (errno.EPERM, "6.8.0", "0", FILTERED, "a seccomp filter refuses it", "seccomp=unconfined"),
        (errno.EPERM, "5.15.0", "", FILTERED, "a seccomp filter refuses it", "seccomp=unconfined"),
        (errno.ENOSYS, "5.15.0", "", FILTERED, "a seccomp filter refuses it", "seccomp=unconfined"),
        (errno.ENOSYS, "6.8.0", "0", FILTERED, "a seccomp filter refuses it", "seccomp=unconfined"),
        (errno.ENOSYS, "6.8.0", "", FILTERED, "kernel 6.8.0 has no io_uring", "CONFIG_IO_URING"),
        (errno.ENOSYS, "6.8.0", "", FREE, "kernel 6.8.0 has no io_uring", "CONFIG_IO_URING"),
        (errno.ENOSYS, "4.4.0", "", FILTERED, "kernel 4.4.0 has no io_uring", "a kernel of 5.6 or later"),
        (errno.EPERM, "5.5.0", "", FREE, "kernel 5.5.0 has no io_uring", "a kernel of 5.6 or later"),
        (errno.EPERM, "5.6.0", "", FREE, "a security module", "dmesg"),
        (errno.EPERM, "6.8.0", "0", FREE, "a security module", "dmesg"),
        (errno.EACCES, "6.8.0", "2", FREE, "a security module", "dmesg"),
        (errno.ENOMEM, "5.4.0", "", FREE, "memory that is locked", "ulimit -l unlimited; docker run --ulimit memlock=-1"),
        (errno.ENOMEM, "5.12.0", "", FREE, "there is no memory for the ring", "the limit of the control group"),
        (errno.EMFILE, "6.8.0", "0", FREE, "too many files are open", "ulimit -n 65536"),
        (errno.ENOSYS, "unknown", "", FREE, "kernel unknown has no io_uring", "CONFIG_IO_URING"),
    ],
)
def test_causes_by_the_errors_number(
    error: int, release: str, disabled: str, status: str, cause: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "text_of", says({kernel.DISABLED: disabled, "/proc/self/status": status}))
    monkeypatch.setattr(platform, "release", lambda: release)
    found = kernel._refusal(OSError(error, os.strerror(error)))
    assert cause in found[0]
    assert remedy in found[1]


def demanded() -> None:
    deny_syscalls(["io_uring_setup"])
    os.environ["FEATSTORE_BACKEND"] = "io_uring"
    found = kernel.rings()
    assert found.status == "error"
    assert "FEATSTORE_BACKEND=io_uring demands it" in found.text
    assert found.remedy.endswith("or unset FEATSTORE_BACKEND")


def test_a_demand_that_is_refused_is_an_error() -> None:
    run_in_fork(demanded)


def test_a_variable_that_rules_rings_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATSTORE_BACKEND", "pread")
    found = kernel.rings()
    assert (found.status, found.remedy, found.values["usable"]) == ("warning", "unset FEATSTORE_BACKEND", False)


def test_rings_that_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Linux 5.6: making one succeeds, and a read fails with EINVAL."""

    def fails(_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(kernel, "_read_page", fails)
    found = kernel.rings()
    assert (found.status, found.values["errno"]) == ("error", errno.EINVAL)
    assert found.remedy == "a kernel of 5.6 or later, or FEATSTORE_BACKEND=pread"


def test_files_of_the_kernel() -> None:
    assert kernel.text_of("/proc/sys/kernel/ostype") == "Linux"
    assert kernel.text_of("/proc/sys/kernel/no-such-setting") == ""
    assert "{}.{}".format(*kernel.release()) == ".".join(os.uname().release.split(".")[:2])
