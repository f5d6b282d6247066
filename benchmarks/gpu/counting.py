"""Counts waits and copies from pageable memory per layer of a blend, without a GPU.

The blend runs over a pretended device (`tests.fakes.pretend_cuda`), which computes on the CPU. The difference
between two depths is per layer: what happens once a pass is not in it.
"""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.gpu import blending
from kintsugi.core.plan import Selection
from tests.fakes.pretend_cuda import CUDA, PretendCuda

CONTEXT = 200
FEW, MANY = 3, 5
"""Layers."""


def count_per_layer(selection: Selection) -> tuple[float, float]:
    """How often a layer makes the host wait, and copies between the device and pageable memory."""
    counts = []
    for layers in (FEW, MANY):
        with PretendCuda() as device, torch.inference_mode():
            shape = dataclasses.replace(blending.TINY, layers=layers)
            prompt, stack = blending.scene_of(shape, CONTEXT, CUDA)
            device.clear()
            blending.blend(prompt, stack, selection)
            counts.append((device.syncs.total(), device.pageable.total()))
    (few_waits, few_copies), (waits, copies) = counts
    return (waits - few_waits) / (MANY - FEW), (copies - few_copies) / (MANY - FEW)
