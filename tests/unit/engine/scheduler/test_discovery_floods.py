"""What floods of distinct prompts cost, and whom."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm")

from kintsugi.core.namespaces import narrow
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import TokenIds
from kintsugi.discovery.sightings import BYTES_MAX
from kintsugi.engine.scheduler.hashing import Salts
from kintsugi.store.client.ram import RamStore
from tests.contracts.store_contract import make_chunk
from tests.unit.engine.scheduler import test_discovery
from tests.unit.engine.scheduler.test_discovery import discovery_of, passage, sight, space_of

store, salts = test_discovery.store, test_discovery.salts


def distinct_prompts(count: int) -> Iterator[TokenIds]:
    """Prompts of 131 to 200 tokens, each one segment behind the prefix."""
    generator = np.random.default_rng(7)
    for _ in range(0, count, 1000):
        for ids in generator.integers(3, 1000, (1000, 200), np.uint32):
            ids[0] = 0  # the prefix
            yield TokenIds(ids[: 131 + int(ids[1]) % 70].tobytes())


@pytest.mark.full
def test_100_000_distinct_prompts_in_thousands_of_parts(
    salts: Salts, store: RamStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A client of `flood` sends another `prompt_cache_key` each time, 6,000 in turn."""
    discovery = discovery_of(salts)
    store.put(*make_chunk(passage(2), space_of("quiet/-/user")))
    for namespace in ("quiet", "quiet/-/user"):
        sight(discovery, [0, *passage(1)], namespace)
    parts = [narrow("flood", {"prompt_cache_key": str(number)}) for number in range(6000)]
    spaces = [space_of(part) for part in parts]
    counted = 0
    for number, ids in enumerate(distinct_prompts(100_000)):
        space = spaces[number % len(spaces)]
        params = KintsugiParams(space.namespace, discover=True)
        match = discovery.match(store, space, ids, None, False)
        match = discovery.sight("one", params, space, ids, match)
        discovery.request_ended("one")
        counted += match.segments_counted
        assert discovery._sightings.num_bytes <= BYTES_MAX
    assert counted == 100_000
    assert 90_000 < discovery._sightings.num_given_up < 100_000
    assert len(discovery.backlog) == 0
    assert not discovery._under_way
    (line,) = caplog.messages
    assert "than discovery has memory for" in line
    for namespace in ("quiet", "quiet/-/user"):
        match = sight(discovery, [0, *passage(1), *passage(2)], namespace, store=store)
        assert match.segments_queued == 1
        assert bool(match.spans) is (namespace != "quiet")
