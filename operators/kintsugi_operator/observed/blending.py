"""Whether a service blends, according to an engine's metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from kintsugi_operator.api.status import Condition
from kintsugi_operator.observed import conditions as c

PREFIX = "kintsugi_quality_"
STEP = 10
"""The number of missing prompts is rounded up to multiples of this, so that few reconciliations write a
status."""


def describe_blending(page: str) -> Condition | None:
    """Return the condition `Blending` from the page of an engine's metrics; None if the page says nothing,
    because the engine does not learn or does not answer."""
    values = _read_values(page)
    if "open" not in values:
        return None
    loss = f"a mean loss of {values['loss']:.2f}" if "loss" in values else "an unknown loss"
    if values["open"]:
        cost = f"{values['cost']:.0%}" if "cost" in values else "part"
        return c.true(c.BLENDING, "Open", f"blends compute {cost} of a full prefill, with {loss}")
    missing = values.get("pairs_missing")
    if missing is None:
        message = (
            f"prompts are prefilled in full: blends have {loss}, too much to pass, or nothing was measured"
        )
        return c.false(c.BLENDING, "Learning", message)
    rounded = math.ceil(missing / STEP) * STEP
    message = f"prompts are prefilled in full until about {rounded} more of them are measured"
    return c.false(c.BLENDING, "Learning", message)


def _read_values(page: str) -> Mapping[str, float]:
    """Return the metrics of the evidence that have no labels, by name without the prefix."""
    try:
        families = list(text_string_to_metric_families(page))
    except ValueError:  # another program's page
        return {}
    samples = [sample for family in families for sample in family.samples]
    return {
        sample.name.removeprefix(PREFIX): sample.value
        for sample in samples
        if sample.name.startswith(PREFIX) and not sample.labels and math.isfinite(sample.value)
    }
