"""Errors cross processes: Ray pickles them."""

from __future__ import annotations

import pickle

import pytest

from kintsugi.core.errors import (
    BelowMinimum,
    InvalidField,
    KintsugiError,
    NotBlendable,
    Unavailable,
    UnknownField,
)


@pytest.mark.parametrize(
    "error",
    [
        InvalidField("ratio", "2 is outside [0, 1]"),
        UnknownField("store.ram", ["ram_gib", "tiers"]),
        BelowMinimum("ratio", "too low"),
        NotBlendable("lora", "chunk KV belongs to the base model"),
        Unavailable("the shard does not answer"),
    ],
)
def test_an_error_arrives_as_it_left(error: KintsugiError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
