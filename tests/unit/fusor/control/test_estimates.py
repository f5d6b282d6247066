"""Estimates follow what was observed, and are not thrown by one bad measurement."""

from __future__ import annotations

import random

import pytest

from kintsugi.core.plan import ChunkSource
from kintsugi.fusor.control.estimates import Estimates, Fit, Transfer, blend_prior

RAM, SSD = ChunkSource("a:1", "ram"), ChunkSource("a:1", "ssd")


def transfer(bytes_per_s: float, source: ChunkSource = RAM, opening_s: float = 0.0) -> Transfer:
    size = 1 << 20
    return Transfer(source, opening_s + size / bytes_per_s, size, 3 * size / bytes_per_s, 3 * size)


def test_nothing_is_known_at_first() -> None:
    measured = Estimates().snapshot()
    assert measured.step is None
    assert measured.blend is None
    assert not measured.links


def test_each_source_has_its_own_speed_and_opening() -> None:
    estimates = Estimates()
    for _ in range(3):
        estimates.observe_transfer(transfer(1e9))
        estimates.observe_transfer(transfer(1e8, SSD, opening_s=0.02))
    links = estimates.snapshot().links
    assert links[RAM].s_per_byte == pytest.approx(1e-9)
    assert links[RAM].opening_s == pytest.approx(0, abs=1e-9)
    assert links[SSD].s_per_byte == pytest.approx(1e-8)
    assert links[SSD].opening_s == pytest.approx(0.02)


def test_a_stream_of_one_frame_counts_as_slow_rather_than_far() -> None:
    estimates = Estimates()
    estimates.observe_transfer(Transfer(RAM, 0.5, 1000, 0.0, 0))
    link = estimates.snapshot().links[RAM]
    assert link.s_per_byte == 0.5 / 1000
    assert link.opening_s == 0


def test_one_pause_is_no_slow_store_but_a_slow_store_is_noticed() -> None:
    estimates = Estimates()
    for _ in range(10):
        estimates.observe_transfer(transfer(1e9))
    estimates.observe_transfer(transfer(1e6))
    assert estimates.snapshot().links[RAM].s_per_byte < 2e-9
    for _ in range(4):
        estimates.observe_transfer(transfer(1e6))
    assert estimates.snapshot().links[RAM].s_per_byte > 0.5e-6


def test_a_store_that_became_fast_is_noticed() -> None:
    estimates = Estimates()
    for rate in (1e6, 1e6, *[1e9] * 5):
        estimates.observe_transfer(transfer(rate))
    assert estimates.snapshot().links[RAM].s_per_byte < 2e-8


def test_a_prefill_is_learnt_from_steps_of_any_size() -> None:
    estimates, generator = Estimates(), random.Random(3)
    for _ in range(40):
        tokens = generator.randrange(20, 2000)
        pairs = tokens * tokens / 2
        noise = generator.uniform(0.95, 1.05)
        estimates.observe_step(tokens, pairs, noise * (0.004 + 2e-4 * tokens + 1e-8 * pairs))
    step = estimates.snapshot().step
    assert step is not None
    for tokens in (100, 700, 2000):
        predicted = step[0] + step[1] * tokens + step[2] * tokens * tokens / 2
        assert predicted == pytest.approx(0.004 + 2e-4 * tokens + 1e-8 * tokens * tokens / 2, rel=0.06)


def test_decodes_say_nothing_about_prefills() -> None:
    estimates = Estimates()
    for _ in range(10):
        estimates.observe_step(1, 500.0, 0.01)
    assert estimates.snapshot().step is None


def test_the_first_pass_of_an_engine_prepares_kernels() -> None:
    estimates = Estimates()
    terms = (1.0, 1000.0, 1e5, 1e4, 1000.0)
    estimates.observe_blend(terms, 4, 100.0)
    for _ in range(3):
        estimates.observe_blend(terms, 4, 0.1)
    blend = estimates.snapshot().blend
    assert blend is not None
    assert sum(a * b for a, b in zip(blend, terms, strict=True)) == pytest.approx(0.1, rel=0.05)


def test_what_passes_have_not_shown_yet_is_believed_to_be_as_in_steps() -> None:
    """Two like passes cannot tell work from a constant; what steps cost decides."""
    estimates = Estimates()
    for tokens in (50, 400, 1000):
        estimates.observe_step(tokens, 1.0, 0.001 + 1e-3 * tokens)
    terms = (1.0, 4000.0, 10.0, 10.0, 1000.0)
    for _ in range(3):
        estimates.observe_blend(terms, 4, 1.0)
    blend = estimates.snapshot().blend
    assert blend is not None
    prior = blend_prior(estimates.snapshot().step or (), 4)
    assert blend[1] == pytest.approx(prior[1], rel=0.1)
    assert blend[0] < 0.1


def test_no_coefficient_is_negative() -> None:
    fit, generator = Fit(3), random.Random(5)
    for _ in range(60):
        fit.add((1.0, generator.random(), generator.random()), generator.uniform(0.1, 2.0))
        assert min(fit.value) >= 0


def test_a_fit_forgets() -> None:
    fit = Fit(2)
    for scale in (1.0, 3.0):
        for amount in range(1, 200):
            fit.add((1.0, float(amount % 20 + 1)), scale * (amount % 20 + 1))
    assert fit.value[1] == pytest.approx(3.0, rel=0.1)


def test_decoding_is_counted_per_byte() -> None:
    estimates = Estimates()
    estimates.observe_decode(900.0, 1000)  # of the first pass
    estimates.observe_blend((1.0, 4000.0, 10.0, 10.0, 1000.0), 4, 1.0)
    assert estimates.snapshot().decode_s_per_byte == 0
    estimates.observe_decode(0.0, 0)
    estimates.observe_decode(30.0, 1000)
    assert estimates.snapshot().decode_s_per_byte == 30.0 / 1000
    estimates.observe_decode(0.5, 1000)
    assert estimates.snapshot().decode_s_per_byte == 0.5 / 1000


def test_the_tail_is_never_negative() -> None:
    estimates = Estimates()
    estimates.observe_tail(-1.0)
    assert estimates.snapshot().tail_s == 0


def test_a_pause_does_not_make_far_what_was_near() -> None:
    """Where the way there takes no time, nothing is a multiple of it."""
    estimates = Estimates()
    for _ in range(10):
        estimates.observe_transfer(transfer(1e9))
        estimates.observe_tail(0.0)
    estimates.observe_transfer(transfer(1e9, opening_s=1.0))
    estimates.observe_tail(1.0)
    assert estimates.snapshot().links[RAM].opening_s < 2e-3
    assert estimates.snapshot().tail_s < 2e-3
    for _ in range(4):
        estimates.observe_transfer(transfer(1e9, opening_s=1.0))
    assert estimates.snapshot().links[RAM].opening_s > 0.5, "a change is believed"


def test_a_first_transfer_that_had_to_connect_is_forgotten_at_once() -> None:
    estimates = Estimates()
    estimates.observe_transfer(transfer(1e9, opening_s=0.5))
    estimates.observe_transfer(transfer(1e9, opening_s=0.001))
    assert estimates.snapshot().links[RAM].opening_s == pytest.approx(0.001)


def test_the_tail_of_the_first_pass_does_not_count() -> None:
    estimates = Estimates()
    terms = (1.0, 1000.0, 1e5, 1e4, 1000.0)
    for tail_s in (5.0, 0.01, 0.01):
        estimates.observe_blend(terms, 4, 0.1)
        estimates.observe_tail(tail_s)
    assert estimates.snapshot().tail_s == pytest.approx(0.01)


def step_of(tokens: int, estimates: Estimates) -> float:
    step = estimates.snapshot().step
    assert step is not None
    return step[0] + step[1] * tokens + step[2] * tokens * tokens / 2


def test_a_step_that_seemed_short_does_not_outweigh_all_others() -> None:
    """Its end was noticed together with that of the one before. Relative errors would give it the weight of
    a million others."""
    estimates = Estimates()
    for _ in range(10):
        estimates.observe_step(1000, 5e5, 0.1)
    estimates.observe_step(1000, 5e5, 0.0001)
    assert step_of(1000, estimates) > 0.03
    for _ in range(20):
        estimates.observe_step(1000, 5e5, 0.1)
    assert step_of(1000, estimates) > 0.06
    for _ in range(5):
        estimates.observe_step(1000, 5e5, 0.001)
    assert step_of(1000, estimates) < 0.002, "a machine that became faster is"
