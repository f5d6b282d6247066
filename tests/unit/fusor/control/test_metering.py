"""What a stream is said to have taken, by a clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterator

from kintsugi.core.exchange import ChunkLost, LayerFrame
from kintsugi.core.plan import ChunkSource
from kintsugi.fusor.control.estimates import Meter, Transfer

NEAR, FAR = ChunkSource("a:1", "ram"), ChunkSource("b:1", "ssd")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def frames(clock: Clock, layers: int, wait_s: float) -> Iterator[LayerFrame | ChunkLost]:
    """Two chunks per layer; the second comes from ten times as far."""
    clock.now_s += 5.0  # opening
    for layer in range(layers):
        for chunk, factor in ((0, 1), (1, 10)):
            clock.now_s += factor * wait_s
            yield LayerFrame(chunk, layer, memoryview(bytes(100)))


def test_waits_belong_to_sources_and_the_rest_to_decoding() -> None:
    clock = Clock()
    meter = Meter([NEAR, FAR], layers_max=3, clock=clock)
    for _ in meter.measure(frames(clock, 6, 1.0)):
        clock.now_s += 0.25
    assert meter.transfers == [Transfer(NEAR, 6.0, 100, 2.0, 200), Transfer(FAR, 10.0, 100, 20.0, 200)]
    assert (meter.decode_s, meter.decode_bytes) == (1.0, 400)


def test_a_lost_chunk_is_passed_on_and_counts_for_nothing() -> None:
    clock = Clock()
    meter = Meter([NEAR], layers_max=3, clock=clock)
    lost = ChunkLost(0, 0, "absent")
    assert list(meter.measure(iter([lost]))) == [lost]
    assert meter.transfers == []


def test_a_stream_that_is_left_early_is_closed() -> None:
    clock, closed = Clock(), []

    def tracked() -> Iterator[LayerFrame | ChunkLost]:
        try:
            yield from frames(clock, 6, 1.0)
        finally:
            closed.append(True)

    reading = Meter([NEAR, FAR], 3, clock).measure(tracked())
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert closed
