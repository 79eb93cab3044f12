"""Protects the first contact with a GPU: one that cannot be used is named with its reason, not passed over.
And what must not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_graphs import NothingWaits
from torch.utils._python_dispatch import TorchDispatchMode

from manylora.adapters.cache.pool import PIECE_BYTES, AdapterPool
from manylora.adapters.geometry import CacheGeometry, Layout
from manylora.errors import ConfigError
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import _check_launch, open_device
from manylora.kernels.extras import Extra, ExtraSegment, with_logits
from manylora.model.extras import adapt_head

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


def test_a_trained_head_waits_for_nothing() -> None:
    weight = torch.randn(6, 4)
    extra = Extra(weight.view(-1), (weight,), torch.tensor([0]))
    extras = with_logits([ExtraSegment(2, 5, {"head.weight": extra})], [0, 3, 4, 7])
    x, logits = torch.randn(4, 4), torch.zeros(4, 6)
    with NothingWaits():
        adapt_head(logits, x, extras, None, tied=False)
    torch.testing.assert_close(logits[1:3], x[1:3] @ weight.T)
    assert not logits[[0, 3]].any()


def test_pages_go_to_the_device_in_pieces() -> None:
    """So that a step's tables need not wait for a whole one."""
    sizes: list[int] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.name().startswith("aten::copy_"):
                sizes.append(args[1].nbytes)
            return func(*args, **(kwargs or {}))

    width = 2**20
    pool = AdapterPool(CacheGeometry(width, 5, 5, 1), 2, 2, torch.bfloat16, torch.device("meta"))
    with Copies():
        pool.load(Layout((), (5, 1)), [0, 1], [1, 0])
    assert sum(sizes) == 6 * 2 * width
    assert max(sizes) <= PIECE_BYTES


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


def test_a_machine_without_proc_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("manylora.kernels.device.Path", lambda path: tmp_path / path.lstrip("/"))
    with pytest.raises(ConfigError, match=r"/proc/meminfo .* is /proc mounted\?$"):
        open_device("cpu").free_bytes()
