from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from kintsugi.engine.protocol import StepMetadata


def test_metadata_without_work_is_empty() -> None:
    assert StepMetadata().is_empty


def test_a_step_that_only_prefills_has_no_work_for_the_worker() -> None:
    assert StepMetadata(prefills=True).is_empty


@pytest.mark.parametrize("name", [one.name for one in fields(StepMetadata) if one.name != "prefills"])
def test_metadata_with_any_other_field_set_is_not_empty(name: str) -> None:
    work: Any = 1 if name == "idle_tokens" else ["work"]

    assert not replace(StepMetadata(), **{name: work}).is_empty
