"""Whatever a caller gives to a field: an answer, or an error of ours that names the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.foreign_input import HALF, VALUES, Field, fields_of_a_service, find_problem

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(),
    st.characters(categories=["Cs"]),
    st.binary(),
)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@pytest.fixture(scope="module")
def fields() -> Iterator[list[Field]]:
    with fields_of_a_service() as found:
        yield found


def test_every_field_names_half_an_emoji_and_another_mistake(fields: list[Field]) -> None:
    """All mistakes in all fields are a section of `benchmarks/trust.py`."""
    given = [(field, value) for n, field in enumerate(fields) for value in (HALF, VALUES[n % len(VALUES)])]
    problems = [find_problem(field, value) for field, value in given]
    assert [problem for problem in problems if problem] == []


@given(data=st.data())
def test_any_value_is_taken_or_named(fields: list[Field], data: st.DataObject) -> None:
    field: Any = data.draw(st.sampled_from(fields), label="field")
    assert find_problem(field, data.draw(ANYTHING, label="value")) is None
