"""Versions, devices and their driver."""

from __future__ import annotations

import platform
import warnings
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pytest

from featstore.diagnosis import packages
from tests.diagnosis.test_kernel import says

DRIVER = "NVRM version: NVIDIA UNIX {}  580.65.06  Release Build  (root@x)\nGCC version:  gcc version 12.3.0 (Debian)\n"


def test_versions() -> None:
    found = packages.packages()
    assert found.values["python"] == platform.python_version()
    assert found.values["torch"] == version("torch")
    assert f"torch {version('torch')}" in found.text
    assert all(text == version(name) for name, text in found.values.items() if name != "python")


def test_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version_of(name: str) -> str:
        if name in ("PyYAML", "torch_geometric", "lmdb"):
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(packages, "version", version_of)
    found = packages.packages()
    assert found.text.endswith("pyarrow 1; not installed: torch_geometric (featstore[pyg]), PyYAML (featstore[import])")
    assert not {"PyYAML", "torch_geometric", "lmdb"} & set(found.values)
    monkeypatch.setattr(packages, "version", lambda name: "1")
    assert packages.packages().text.endswith("PyYAML 1")


@pytest.mark.parametrize(("built", "names"), [(None, []), ("13.0", []), ("13.0", ["H100"]), (None, ["MI300"])])
@pytest.mark.parametrize("driver", ["", "Open Kernel Module for x86_64", "x86_64 Kernel Module"])
def test_devices(built: str | None, names: list[str], driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: bool(names), device_count=lambda: len(names))
    cuda.get_device_name = names.__getitem__
    monkeypatch.setattr(packages, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda=built)))
    texts = {"/proc/driver/nvidia/version": driver and DRIVER.format(driver)}
    monkeypatch.setattr(packages.kernel, "text_of", says(texts))
    found = packages.devices()
    is_as_it_should_be = names or (built is None and not driver)
    assert found.status == ("ok" if is_as_it_should_be else "note")
    assert bool(found.cause) == bool(found.remedy) == (not is_as_it_should_be)
    assert all(each in found.text for each in names)
    assert found.text.endswith("; the kernel has driver 580.65.06") == bool(driver)
    assert found.values == {"driver": "580.65.06" if driver else None, "devices": names}


def test_a_driver_that_torch_finds_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old\n(found version 11040).", stacklevel=1)
        return False

    cuda = SimpleNamespace(is_available=is_available)
    monkeypatch.setattr(packages, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0")))
    monkeypatch.setattr(packages.kernel, "text_of", says({"/proc/driver/nvidia/version": DRIVER.format("x86_64 Kernel Module")}))
    found = packages.devices()
    assert found.status == "note"
    assert found.cause == "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
    assert "nvidia-smi" in found.remedy
