"""Counts callers' mistakes that no error names, in every field of the SDK, gRPC and HTTP.

Each field gets each of the values of `tests.fakes.foreign_input`, from an SDK or a plain client of a gateway
over a stub engine. An answer is right if it is an answer, or an error of our tree that names the field.
"""

from __future__ import annotations

import logging
from random import Random

from benchmarks.support.figures import Figure
from tests.fakes.foreign_input import VALUES, fields_of_a_service, find_problem

QUICK_VALUES = 3
SHOWN = 5


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """Count the values that end otherwise."""
    random, problems, inputs = Random(seed), [], 0
    logging.getLogger("kintsugi").setLevel(logging.CRITICAL)  # refusals are logged
    with fields_of_a_service() as fields:
        for field in fields:
            values = random.sample(VALUES, QUICK_VALUES) if quick else VALUES
            problems += [problem for value in values if (problem := find_problem(field, value))]
            inputs += len(values)
    detail = f"{inputs} inputs to {len(fields)} fields; {'; '.join(problems[:SHOWN])}".removesuffix("; ")
    return [Figure.at_most("foreign_input_errors", len(problems), 0, "inputs", detail)]
