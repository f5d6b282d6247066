"""What an erasure in a namespace takes from the stream: the prompts that wait for their twins."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.quality.heavy.test_stream import DECLINED, PARAMS, PROMPT, Life


@pytest.mark.parametrize("erased", ["tenant", "common"])
def test_an_erased_namespace_takes_its_waiting_prompts_along(erased: str) -> None:
    life = Life()
    part = dataclasses.replace(PARAMS, namespace="tenant/-/one", shared="common")
    other = dataclasses.replace(PARAMS, namespace="tenant-of-another-name")
    assert life.serve(DECLINED, dataclasses.replace(PROMPT, params=part))
    assert life.serve(DECLINED, dataclasses.replace(PROMPT, params=other))
    life.stream.forget({erased, "nobody"})
    assert (life.stream.pending, life.stream.counts.dropped) == (1, {1: 1})


def test_a_prompt_that_is_erased_while_its_twin_runs_is_not_run_again() -> None:
    life = Life()
    life.twins.arrival = lambda: life.stream.forget({"tenant"})
    life.serve(DECLINED)
    life.run()
    assert (life.stream.pending, life.stream.counts.pairs, life.stream.counts.dropped) == (0, 0, {1: 1})
