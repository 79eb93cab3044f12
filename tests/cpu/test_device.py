"""Protects the first contact with a GPU: one that cannot be used is named with its reason, not passed over.
And what must not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from manylora.errors import ConfigError
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import _check_launch, open_device

OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver."


def broken(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def init() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_that_cannot_be_used_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, OLD)
    with pytest.raises(ConfigError, match=r"too old \(found version 11040\). Please update.*device cpu$"):
        open_device(name)


def test_no_gpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "No CUDA GPUs are available")
    assert open_device("auto").torch.type == "cpu"
    with pytest.raises(ConfigError, match="no CUDA GPU is available"):
        open_device("cuda:0")


def test_a_kernel_is_launched_when_the_device_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = CudaOps()
    _check_launch(ops, torch.device("cpu"))

    def fails(*arguments: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(ops, "rms_norm", fails)
    with pytest.raises(ConfigError, match=r"Failed to find C compiler.*python3-dev"):
        _check_launch(ops, torch.device("cpu"))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_no_more_threads_than_processors_that_the_groups_allow(
    monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    monkeypatch.setattr("manylora.kernels.device.usable_processors", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    torch.set_num_threads(5)
    assert open_device("cpu").name == "CPU (5 threads)", "the user has said so"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert open_device("cpu").name == "CPU (3 threads)"
    torch.set_num_threads(2)
    assert open_device("cpu").name == "CPU (2 threads)"
