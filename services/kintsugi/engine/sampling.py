"""Sampling parameters of a request, by vLLM's names, checked before vLLM sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, Strict, StrictBool

from kintsugi.core.errors import InvalidField
from kintsugi.core.schema import STRICT, load

STOPS_MAX = 16
BIASES_MAX = 1024
_Whole = Annotated[int, Strict(), Field(ge=-(1 << 63), lt=1 << 63)]
"""A 64-bit integer: the serialisation on the way to an engine's process takes no larger one."""


@dataclass(frozen=True)
class _Sampling:
    """The fields of vLLM's `SamplingParams` that a request for a single answer may set. None: the model's
    default."""

    __pydantic_config__ = STRICT

    max_tokens: _Whole | None = None
    min_tokens: _Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: _Whole | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[_Whole] | None = None
    ignore_eos: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    logit_bias: dict[Annotated[int, Field(ge=0, lt=1 << 32)], float] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidField("sampling.max_tokens", f"{self.max_tokens} must be at least 1")
        if isinstance(self.stop, list) and len(self.stop) > STOPS_MAX:
            raise InvalidField("sampling.stop", f"has {len(self.stop)} texts; send at most {STOPS_MAX}")
        if self.logit_bias is not None and len(self.logit_bias) > BIASES_MAX:
            raise InvalidField(
                "sampling.logit_bias", f"has {len(self.logit_bias)} tokens; send at most {BIASES_MAX}"
            )


def check_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for vLLM's `SamplingParams`. Raises `InvalidField`, or `UnknownField` with the
    nearest valid name.

    vLLM checks ranges itself; the caller must translate its `ValueError`.
    """
    sampling = load(_Sampling, values, where="sampling")
    return {name: value for name, value in dataclasses.asdict(sampling).items() if value is not None}
