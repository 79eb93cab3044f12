"""Checks the kernels against the reference on tiny models before anything is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from gpu_report import Report
from gpu_world import ALL, EXPERTS, World
from torch import Tensor

from manylora.kernels.device import Device
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.transfer import to_device
from manylora.model.decoder import Decoder

CASES = (("tiny", ALL, None), ("tiny experts", EXPERTS, None), ("tiny windows", ALL, torch.float8_e4m3fn))
BATCHES = ([1, 1, 1], [5, 1, 20])


def check(device: Device, dtype: torch.dtype, report: Report) -> None:
    """Check in float32, where only the order of sums may differ, and in the dtype that is measured. Raises
    SystemExit if a kernel is wrong."""
    for kind, tolerance in dict.fromkeys(
        ((torch.float32, 1e-3), (dtype, 1e-3 if dtype == torch.float32 else 0.05))
    ):
        for shape, modules, kv_dtype in CASES:
            worst = _distance(shape, modules, kv_dtype, device, kind)
            report.add("Check", model=shape, dtype=str(kind), distance=worst, allowed=tolerance)
            if not worst <= tolerance:
                raise SystemExit(f"the kernels are wrong: {shape} in {kind}: logits differ by {worst:.3g}")


def _distance(
    shape: str, modules: tuple[int, ...], kv_dtype: torch.dtype | None, device: Device, dtype: torch.dtype
) -> float:
    """The largest difference between two logits, divided by the largest logit."""
    torch.manual_seed(0)
    world = World(shape, device, dtype, 3, 24, kv_dtype)
    adapters = world.adapters(2, (8, 24), modules)
    twin, worst = Decoder(world.config, world.weights, dtype, ReferenceOps()), 0.0
    for lengths in BATCHES:
        for lora in (None, world.batch(adapters, lengths)):
            inputs = world.inputs(lengths, lora)
            got = world.decoder.forward(to_device(inputs.plan(device.ops), device.torch), world.kv)
            want = _reference(twin, inputs, device, world.kv)
            worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    return worst


def _reference(twin: Decoder, inputs: Any, device: Device, kv: Tensor) -> Tensor:
    plain: Any = SimpleNamespace(plan=ReferenceOps().plan)
    return twin.forward(to_device(inputs.plan(plain), device.torch), kv)
