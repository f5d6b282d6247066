"""How priors are written: in the order of the scores, to within a step, whatever the scores are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.layout import Codec, KVLayout
from kintsugi.fusor.priors import MIDDLE, PRIOR, STEPS_PER_OCTAVE, encode_scores, has_prior, read_scores
from tests.fakes.toy_chunks import manifest_of

SCORES = st.floats(2.0**-15, 2.0**15, width=32)
LAYOUT = KVLayout(1, 1, 8, "float32")


@given(st.lists(SCORES, min_size=1, max_size=50))
def test_a_byte_tells_a_score_to_half_a_step(scores: list[float]) -> None:
    stored = encode_scores(torch.tensor(scores)).tolist()
    for score, byte in zip(scores, stored, strict=True):
        assert abs(math.log2(score) - (byte - MIDDLE) / STEPS_PER_OCTAVE) <= 0.5001 / STEPS_PER_OCTAVE
    in_order = [byte for _, byte in sorted(zip(scores, stored, strict=True))]
    assert in_order == sorted(stored)


@pytest.mark.parametrize(
    ("score", "byte"), [(0.0, 0), (1e-30, 0), (1.0, MIDDLE), (2.0, 136), (1e30, 255), (math.inf, 255)]
)
def test_scores_beyond_the_scale_are_stored_as_the_nearest(score: float, byte: int) -> None:
    assert encode_scores(torch.tensor([score])).tolist() == [byte]


def test_a_score_that_is_no_number_is_stored_as_any_other() -> None:
    """A model that computes nothing but NaN must not keep its chunks from being saved."""
    assert encode_scores(torch.tensor([math.nan])).tolist() == [MIDDLE]


def test_the_row_is_found_among_others() -> None:
    frame, layers = (
        memoryview(bytes([1, 2, 3, 40, 50, 60])),
        [memoryview(bytes(LAYOUT.chunk_bytes(Codec.RAW, 3)))],
    )
    one = manifest_of([5, 6, 7], LAYOUT, layers, prior=frame[3:])
    both = replace(one, priors=("other", PRIOR))
    assert read_scores(frame, both).tolist() == [40, 50, 60]
    assert read_scores(frame[3:], one).tolist() == [40, 50, 60]
    assert has_prior(both)
    assert not has_prior(replace(one, priors=("other",)))
    assert not has_prior(manifest_of([5, 6, 7], LAYOUT, layers))
