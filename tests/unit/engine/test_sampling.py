"""Sampling parameters of untrusted callers."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.engine.local import BIASES_MAX, STOPS_MAX, check_sampling


def test_what_is_given_passes_and_nothing_else() -> None:
    values = {"temperature": 0, "max_tokens": 8, "stop": ["\n"], "logit_bias": {"5": 1.0}}
    assert check_sampling(values) == {
        "temperature": 0.0,
        "max_tokens": 8,
        "stop": ["\n"],
        "logit_bias": {5: 1.0},
    }
    assert check_sampling({}) == {}


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"max_tokens": "8"}, "sampling.max_tokens"),
        ({"max_tokens": True}, "sampling.max_tokens"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop": ["x"] * (STOPS_MAX + 1)}, "sampling.stop"),
        ({"logit_bias": dict.fromkeys(range(BIASES_MAX + 1), 0.0)}, "sampling.logit_bias"),
        ({"ignore_eos": "yes"}, "sampling.ignore_eos"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidField) as raised:
        check_sampling(values)
    assert raised.value.field.startswith(where)


@pytest.mark.parametrize(
    "name", ["temprature", "n", "output_kind", "extra_args", "prompt_logprobs", "logprobs"]
)
def test_what_an_answer_cannot_carry_is_unknown(name: str) -> None:
    with pytest.raises(UnknownField, match=f"sampling.{name}"):
        check_sampling({name: 1})


@pytest.mark.parametrize(
    "values", [{"seed": 1 << 63}, {"stop_token_ids": [1 << 70]}, {"logit_bias": {1 << 70: 1.0}}]
)
def test_numbers_that_no_message_carries_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=rf"sampling\.{next(iter(values))}"):
        check_sampling(values)
