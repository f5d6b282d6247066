"""Which blends are parked: bounded, in order, and no two for the same blocks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kintsugi.engine.scheduler.requests import Parking, is_parked

MANY = 1_000_000


def parked(parking: Parking, *requests: tuple[str, int]) -> list[str]:
    """Ask for the requests in order, park those that are admitted, and return their ids."""
    admitted = []
    for request_id, num_tokens in requests:
        if parking.admits(request_id, num_tokens):
            parking.park(request_id, num_tokens, None)
            admitted.append(request_id)
    parking.step_began()
    return admitted


def test_no_more_are_parked_than_there_are_places() -> None:
    parking = Parking(2, MANY)
    assert parked(parking, ("a", 10), ("b", 10), ("c", 10)) == ["a", "b"]
    parking.settle("a")
    assert parked(parking, ("c", 10)) == [], "it still waits for a seat with its blocks"
    parking.leave("a")
    assert parked(parking, ("c", 10), ("d", 10)) == ["c"]


def test_parked_prompts_fill_half_of_the_cache() -> None:
    parking = Parking(8, 1000)
    assert parked(parking, ("a", 300), ("b", 200), ("c", 1)) == ["a", "b"]


def test_a_prompt_longer_than_half_the_cache_is_parked_alone() -> None:
    parking = Parking(8, 1000)
    assert parked(parking, ("long", 900), ("short", 1)) == ["long"]


def test_short_prompts_do_not_overtake_a_long_one_that_waits_for_room() -> None:
    parking = Parking(8, 1000)
    parked(parking, ("a", 300))
    assert parked(parking, ("long", 900), ("short", 1)) == []
    parking.leave("a")
    assert parked(parking, ("long", 900), ("short", 1)) == ["long"]


def test_who_is_parked_keeps_its_place() -> None:
    parking = Parking(1, MANY)
    parked(parking, ("a", 10))
    assert parking.admits("a", 11)
    assert not parking.admits("b", 10)


def test_a_blend_in_flight_leads_those_who_want_its_blocks() -> None:
    parking = Parking(2, MANY)
    parking.park("a", 10, b"name")
    parking.park("b", 10, None)
    assert parking.leader_of(b"name") == "a"
    assert parking.leader_of(b"other") is None
    parking.settle("a")
    assert parking.leader_of(b"name") is None
    parking.park("b", 10, b"name")
    parking.leave("b")
    assert parking.leader_of(b"name") is None


@pytest.mark.parametrize("seed", range(20))
def test_everybody_is_served_and_nobody_is_passed_for_ever(seed: int) -> None:
    """Random lengths, lookups and ends: whoever is first of those that are ready is never passed."""
    generator = random.Random(seed)
    parking = Parking(generator.randint(1, 8), 1000)
    queue = [(f"{index}", generator.randint(1, 1000)) for index in range(60)]
    ready_at = {name: generator.randint(0, 5) for name, _ in queue}
    running: list[str] = []
    served: list[str] = []
    for step in range(10_000):
        ready = [one for one in queue if ready_at[one[0]] <= step]
        admitted = parked(parking, *ready)
        assert admitted == [name for name, _ in ready[: len(admitted)]]
        queue = [one for one in queue if one[0] not in admitted]
        running += admitted
        for name in [one for one in running if generator.random() < 0.5]:
            running.remove(name)
            served.append(name)
            parking.leave(name)
        if not queue and not running:
            break
    assert len(served) == 60


class Asked:
    """As much of vLLM's request as parking looks at."""

    def __init__(self, status: RequestStatus, num_computed_tokens: int) -> None:
        self.status = status
        self.num_computed_tokens = num_computed_tokens


@pytest.mark.parametrize(
    ("status", "computed", "parked"),
    [
        (RequestStatus.WAITING_FOR_REMOTE_KVS, 0, True),
        (RequestStatus.WAITING, 64, True),  # its blocks have arrived
        (RequestStatus.PREEMPTED, 64, True),  # blended again, and promoted
        (RequestStatus.PREEMPTED, 0, False),
        (RequestStatus.RUNNING, 64, False),
    ],
)
def test_a_preempted_request_gives_its_place_back(status: RequestStatus, computed: int, parked: bool) -> None:
    request: Any = Asked(status, computed)
    assert is_parked(request) is parked
