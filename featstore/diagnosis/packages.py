"""Versions of packages, and the devices that torch finds, with their driver."""

from __future__ import annotations

import platform
import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from featstore.diagnosis import kernel
from featstore.diagnosis.findings import Finding

__all__ = ["devices", "packages"]

LOOKED_AT = ("featstore", "torch", "torch_geometric", "pyg-lib", "numpy", "lmdb", "xxhash", "pyarrow", "PyYAML")
OF_EXTRAS = {"torch_geometric": "pyg", "pyarrow": "import", "PyYAML": "import"}


def packages() -> Finding:
    """List the versions of Python and of packages that are installed, and packages of extras that are not."""
    found = {"python": platform.python_version()}
    missing = []
    for name in LOOKED_AT:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            missing += [f"{name} (featstore[{OF_EXTRAS[name]}])"] if name in OF_EXTRAS else []
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    return Finding("packages", "ok", text + f"; not installed: {', '.join(missing)}" * bool(missing), values=dict(found))


def devices() -> Finding:
    """List the devices that torch finds, and the driver that the kernel has."""
    driver = _driver()
    values: dict[str, Any] = {"driver": driver, "devices": []}
    of = "" if driver is None else f"; the kernel has driver {driver}"
    with warnings.catch_warnings(record=True) as told:  # torch warns where it cannot use a driver
        warnings.simplefilter("always")
        is_there = torch.cuda.is_available()
    if is_there:
        values["devices"] = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
        made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm"
        return Finding("devices", "ok", f"{made_for}: {', '.join(values['devices'])}{of}", values=values)
    if torch.version.cuda is None:
        text = f"torch is built for processors alone{of}"
        if driver is None:
            return Finding("devices", "ok", text, values=values)
        cause, remedy = "this build of torch has no CUDA", "install a build of torch for CUDA: https://pytorch.org/get-started"
        return Finding("devices", "note", text, cause, remedy, values)
    text = f"torch was built for CUDA {torch.version.cuda}, and finds no device{of}"
    if driver is None:
        cause = "the kernel has no driver of NVIDIA's, or this container does not see it"
        return Finding("devices", "note", text, cause, "install the driver; docker run --gpus all", values)
    cause = " ".join(str(told[0].message).split())[:160] if told else "no device is visible to this process"
    remedy = "nvidia-smi lists devices; docker run --gpus all; CUDA_VISIBLE_DEVICES may hide some; torch may need a newer driver"
    return Finding("devices", "note", text, cause, remedy, values)


def _driver() -> str | None:
    """Find the version of NVIDIA's driver; None without one."""
    first, _, _ = kernel.text_of("/proc/driver/nvidia/version").partition("\n")
    found = re.search(r"\d+(?:\.\d+)+", first)
    return None if found is None else found[0]
