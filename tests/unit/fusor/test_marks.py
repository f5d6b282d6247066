"""What a GPU took, read from events in its queue."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from kintsugi.fusor.sliced import Mark, Stopwatch, reached_s
from tests.fakes.pretend_cuda import CUDA, PretendCuda
from tests.waiting import wait_until


@pytest.fixture
def device() -> Iterator[PretendCuda]:
    with PretendCuda() as device:
        yield device


def mark(device: PretendCuda, device_s: float, queued_s: float) -> Mark:
    """A mark that the host queues at one time and the device gets to at another, each by its own clock."""
    device.device_s = device_s
    return Mark(Mark.of(CUDA).event, queued_s)


def test_a_mark_that_found_the_device_idle_tells_when_the_others_were_reached(device: PretendCuda) -> None:
    """The device is a second behind at the first, has caught up at the second, and is behind again."""
    marks = [mark(device, 51.0, 10.0), mark(device, 54.0, 14.0), mark(device, 59.0, 15.0)]
    assert reached_s(marks) == pytest.approx([11.0, 14.0, 19.0])


def test_a_watch_adds_up_its_laps_alone(device: PretendCuda) -> None:
    watch = Stopwatch(CUDA)
    watch.start()
    device.device_s += 3.0
    watch.stop()
    watch.stop()
    device.device_s += 100.0
    watch.start()
    device.device_s += 4.0
    watch.stop()
    assert watch.seconds() == pytest.approx(7.0)
    assert not device.syncs


def test_a_watch_keeps_the_laps_that_the_device_has_not_finished(device: PretendCuda) -> None:
    watch = Stopwatch(CUDA)
    device.is_behind = True
    for _ in range(3):
        watch.start()
        device.device_s += 2.0
        watch.stop()
    assert watch.seconds() == 0.0
    device.is_behind = False
    assert watch.seconds() == pytest.approx(6.0)


def test_a_thread_that_waits_for_the_device_goes_on_once_it_has_caught_up(device: PretendCuda) -> None:
    device.is_behind = True
    event = Mark.of(CUDA).event
    thread = threading.Thread(target=event.synchronize)
    thread.start()
    wait_until(lambda: device.num_waiting == 1, within_s=10.0)
    device.is_behind = False
    thread.join(10.0)
    assert not thread.is_alive()


def test_on_a_cpu_a_watch_knows_nothing() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    watch.stop()
    assert watch.seconds() is None
