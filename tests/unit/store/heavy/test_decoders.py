"""Every decoder of the wire and of the disk, on bytes of all kinds. `scripts/fuzz.py` goes deeper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decoders import DECODERS, seeds


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """A well-formed input with a piece of it replaced."""
    data = draw(st.sampled_from(seeds(name)))
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 16)))
    return data[:start] + draw(st.binary(max_size=16)) + data[stop:]


@pytest.mark.parametrize("name", DECODERS)
def test_any_bytes_are_read_soundly_or_refused(name: str) -> None:
    @given(st.one_of(st.binary(max_size=400), damaged(name)))
    def run(data: bytes) -> None:
        DECODERS[name](data)

    run()


@pytest.mark.parametrize("name", DECODERS)
def test_well_formed_bytes_are_read(name: str) -> None:
    for seed in seeds(name):
        DECODERS[name](seed)
