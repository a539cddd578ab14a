"""Devices that are not here are refused when a loader is made, in the library's words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.cli.training import train
from featstore.gather.device import check_device, record_here, settle

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no CUDA")


def loader(g: Any, device: Any) -> featstore.Loader:
    return featstore.Loader(g, lambda seeds: None, [1, 2], device=device)


@NO_CUDA
def test_cuda_that_is_not_here(small: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is read or made, in the API and on the command line."""
    said = r"device='cuda(:1)?': CUDA is not available: .*, or use device='cpu'"
    with featstore.open(small.path, memory="64MB") as g:
        used = g.budget.used
        for device in ("cuda", "cuda:1", torch.device("cuda")):
            with pytest.raises(RuntimeError, match=said):
                loader(g, device)
            with pytest.raises(RuntimeError, match=said):
                train(g, None, 1, loader_options={"device": device})
        assert g.budget.used == used
    with pytest.raises(SystemExit) as caught:
        main(["train", str(small.path), "--device", "cuda"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert ": --device: device='cuda': CUDA is not available: " in error
    assert "or use --device cpu" in error


@pytest.mark.parametrize(("built", "said"), [(None, "was built without it"), ("12.8", "finds no GPU that it can use")])
def test_why_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch, built: str | None, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(RuntimeError, match=said):
        check_device("cuda")


def test_numbers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_device("cuda:1") == torch.device("cuda", 1)
    assert check_device("cuda") == torch.device("cuda")
    with pytest.raises(RuntimeError, match="device='cuda:2': the highest number of a CUDA device here is 1"):
        check_device("cuda:2")


def test_what_is_no_device(small: SimpleNamespace) -> None:
    assert check_device("cpu") == torch.device("cpu")
    assert check_device("meta") == torch.device("meta")
    with featstore.open(small.path, memory="64MB") as g:
        with pytest.raises(ValueError, match="device='gpu' is not a device"):
            loader(g, "gpu")
        with pytest.raises(RuntimeError, match=r"device='mps' is not available.*use device='cpu'"):
            loader(g, "mps")


def test_memory_that_another_stream_may_still_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for CUDA: what is on the CPU, or not there, is nothing to CUDA."""
    log: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: log.append("settled"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (log.append(device), stream)[1])
    there = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), record_stream=log.append)
    record_here(None, torch.zeros(2), there)
    assert log == [torch.device("cuda", 1), stream]
    log.clear()
    settle(torch.device("cpu"))
    assert log == []
    settle(torch.device("cuda", 2))
    assert log == [torch.device("cuda", 2), "settled"]
