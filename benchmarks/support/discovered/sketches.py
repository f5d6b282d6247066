"""Memory of the sightings of a million distinct segments in one namespace."""

from __future__ import annotations

import os
import time

import psutil

from benchmarks.support.figures import Figure
from kintsugi.discovery.sightings import Sightings

SEGMENTS, QUICK_SEGMENTS = 1_000_000, 100_000
PROMPT_SEGMENTS = 16
BAR_MIB = 64.0


def measure(quick: bool) -> list[Figure]:
    """The larger of what the sketches say and what the process grew by."""
    segments = QUICK_SEGMENTS if quick else SEGMENTS
    process = psutil.Process()
    before = process.memory_info().rss
    sightings = Sightings(86_400.0, time.monotonic)
    digests = [os.urandom(32) for _ in range(PROMPT_SEGMENTS)]
    peak_mib, too_many = 0.0, 0
    began_s = time.process_time()
    for _ in range(0, segments, PROMPT_SEGMENTS):
        digests = [os.urandom(32) for _ in digests]
        too_many += sum(count > 1 for count in sightings.count("bench", "bench", digests))
        peak_mib = max(peak_mib, sightings.num_bytes / (1 << 20))
    us = (time.process_time() - began_s) / segments * 1e6
    grown_mib = (process.memory_info().rss - before) / (1 << 20)
    detail = (
        f"{segments:,} distinct segments; sketches {peak_mib:.1f} MiB, process {grown_mib:.1f} MiB; "
        f"{us:.2f} µs each; {too_many / segments:.4%} counted twice"
    )
    return [
        Figure.at_most(
            "discovery_memory_mib", max(peak_mib, grown_mib), None if quick else BAR_MIB, "MiB", detail
        )
    ]
