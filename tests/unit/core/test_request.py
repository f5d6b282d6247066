"""What a request may ask: every bad input is a typed error that names its field."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.errors import InvalidField, InvalidSpan, UnknownField
from kintsugi.core.plan import Selection, apply_options, make_trial, selection_of
from kintsugi.core.request import (
    OPTION_NAMES,
    PARAMS_KEY,
    SPANS_MAX,
    TTL_S_MAX,
    BlendOptions,
    KintsugiParams,
    Op,
    SelectorName,
    check_foreign,
    check_spans,
    longest_ttl,
)
from kintsugi.core.spaces import ChunkKey, Span

KEY = ChunkKey(bytes(range(32)))


def parse(**values: Any) -> KintsugiParams:
    return KintsugiParams.from_mapping({"namespace": "acme", **values})


def test_defaults_leave_the_choice_to_the_engine() -> None:
    assert parse() == KintsugiParams("acme")
    assert parse().op is Op.BLEND
    assert parse(ratio=None, selector=None, spans=None) == parse()


def test_everything_is_read() -> None:
    found = parse(
        version=1,
        op="blend",
        spans=[[3, 9], [9, 20, KEY.hex]],
        ratio=0,
        selector="random",
        explain=True,
    )
    assert found == KintsugiParams(
        "acme",
        Op.BLEND,
        (Span(3, 9), Span(9, 20, KEY)),
        ratio=0.0,
        selector=SelectorName.RANDOM,
        explain=True,
    )


@pytest.mark.parametrize(
    ("values", "field", "right"),
    [
        ({"ratio": -0.01}, "kintsugi.ratio", r"\[0, 1\]"),
        ({"ratio": 1.01}, "kintsugi.ratio", r"\[0, 1\]"),
        ({"ratio": float("nan")}, "kintsugi.ratio", r"\[0, 1\]"),
        ({"ratio": float("inf")}, "kintsugi.ratio", r"\[0, 1\]"),
        ({"ratio": True}, "kintsugi.ratio", "number"),
        ({"ratio": "0.5"}, "kintsugi.ratio", "number"),
        ({"selector": "hkdv"}, "kintsugi.selector", "hkvd, hkvd_gradual, chunk_head, query"),
        ({"selector": 3}, "kintsugi.selector", "string"),
        ({"op": "blnd"}, "kintsugi.op", "'blend', 'save', 'audit' or 'off'"),
        ({"version": 2}, "kintsugi.version", "is not 1"),
        ({"version": True}, "kintsugi.version", "integer"),
        ({"explain": "maybe"}, "kintsugi.explain", "boolean"),
        ({"timeline": 1}, "kintsugi.timeline", "boolean"),
        ({"ttl_s": 0}, "kintsugi.ttl_s", "above 0 and at most 315360000 seconds"),
        ({"ttl_s": -1.0}, "kintsugi.ttl_s", "leave it out"),
        ({"ttl_s": 1e9}, "kintsugi.ttl_s", "ten years"),
        ({"ttl_s": float("nan")}, "kintsugi.ttl_s", "finite number"),
        ({"ttl_s": "60"}, "kintsugi.ttl_s", "number"),
        ({"namespace": ""}, "kintsugi.namespace", "mandatory"),
        ({"namespace": None}, "kintsugi.namespace", "string"),
        ({"namespace": "a b"}, "kintsugi.namespace", "letters, digits"),
        ({"spans": "all"}, "kintsugi.spans", "list"),
        ({"spans": [7]}, "kintsugi.spans[0]", r"\[start, end\]"),
        ({"spans": [[0, 5], [7]]}, "kintsugi.spans[1]", r"\[start, end\]"),
        ({"spans": [[0, 5, KEY.hex, 1]]}, "kintsugi.spans[0]", r"\[start, end\]"),
        ({"spans": [[0, 5.0]]}, "kintsugi.spans[0]", r"\[start, end\]"),
        ({"spans": [[False, 5]]}, "kintsugi.spans[0]", r"\[start, end\]"),
        ({"spans": [[0, 5, 3]]}, "kintsugi.spans[0]", "hexadecimal"),
        ({"spans": [[0, 5, "xyz"]]}, "kintsugi.spans[0]", "64 hexadecimal digits"),
        ({"spans": [[0, 5], [5, 9, "00"]]}, "kintsugi.spans[1]", "64 hexadecimal digits"),
        ({"spans": [[0, 1]] * (SPANS_MAX + 1)}, "kintsugi.spans", f"at most {SPANS_MAX}"),
        ({"op": "save"}, "kintsugi.spans", "exactly one span"),
        ({"op": "save", "spans": []}, "kintsugi.spans", "exactly one span"),
        ({"op": "audit"}, "kintsugi.spans", "op=audit needs exactly one span"),
        ({"op": "save", "spans": [[0, 1], [1, 2]]}, "kintsugi.spans", "exactly one span"),
    ],
)
def test_bad_input_is_named(values: dict[str, Any], field: str, right: str) -> None:
    with pytest.raises(InvalidField, match=right) as raised:
        parse(**values)
    assert raised.value.field == field


def test_an_unknown_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownField) as raised:
        parse(selecter="hkvd")
    assert raised.value.nearest == "selector"
    with pytest.raises(UnknownField, match="namespace"):
        KintsugiParams.from_mapping({"namespce": "acme"})


def test_no_namespace_finds_nothing() -> None:
    with pytest.raises(InvalidField, match="mandatory") as raised:
        KintsugiParams.from_mapping({})
    assert raised.value.field == "kintsugi.namespace"


@pytest.mark.parametrize(
    ("spans", "index", "problem"),
    [
        ([(0, 5), (4, 9)], 1, "before the previous span ends at 5"),
        ([(5, 9), (0, 5)], 1, "before the previous span ends at 9"),
        ([(0, 5), (0, 5)], 1, "before the previous"),
        ([(3, 3)], 0, "is empty"),
        ([(4, 3)], 0, "is empty"),
        ([(-1, 3)], 0, "leaves the prompt of 10"),
        ([(0, 11)], 0, "leaves the prompt of 10"),
        ([(0, 10**30)], 0, "leaves the prompt of 10"),
    ],
)
def test_impossible_spans_are_named(spans: list[tuple[int, int]], index: int, problem: str) -> None:
    with pytest.raises(InvalidSpan, match=problem) as raised:
        check_spans([Span(*span) for span in spans], num_tokens=10)
    assert raised.value.field == f"spans[{index}]"


def test_no_span_fits_an_empty_prompt() -> None:
    check_spans([], num_tokens=0)
    with pytest.raises(InvalidSpan, match="prompt of 0"):
        check_spans([Span(0, 1)], num_tokens=0)


def test_adjacent_spans_and_gaps_are_fine() -> None:
    check_spans([Span(0, 3), Span(3, 5), Span(7, 10)], num_tokens=10)


@given(st.lists(st.integers(0, 40), max_size=10, unique=True).map(sorted))
def test_ordered_bounds_make_valid_spans(bounds: list[int]) -> None:
    spans = [Span(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    check_spans(spans, num_tokens=40)
    assert parse(spans=[[s.start, s.end] for s in spans]).spans == tuple(spans)


keys = st.none() | st.binary(min_size=32, max_size=32).map(ChunkKey)
spans = st.builds(Span, st.integers(0, 2**40), st.integers(0, 2**40), keys)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", fullmatch=True)


@st.composite
def params(draw: st.DrawFn) -> KintsugiParams:
    op = draw(st.sampled_from(Op))
    one = op.prefills_chunk
    chosen = st.lists(spans, min_size=int(one), max_size=1 if one else 5).map(tuple)
    return KintsugiParams(
        namespace=draw(names),
        op=op,
        spans=draw(chosen if one else st.none() | chosen),
        ratio=draw(st.none() | st.floats(0.0, 1.0)),
        selector=draw(st.none() | st.sampled_from(SelectorName)),
        explain=draw(st.booleans()),
        timeline=draw(st.booleans()),
        ttl_s=draw(st.none() | st.floats(0.001, TTL_S_MAX)),
    )


@given(params())
def test_json_round_trip(given_params: KintsugiParams) -> None:
    wire = json.loads(json.dumps(given_params.to_mapping()))
    assert list(wire) == [PARAMS_KEY]
    assert KintsugiParams.from_mapping(wire[PARAMS_KEY]) == given_params


@pytest.mark.parametrize("owner", [KintsugiParams, Selection])
def test_an_option_has_one_name_wherever_it_passes(owner: Any) -> None:
    """Whatever is between the wire and the planner converts by field name."""
    assert {field.name for field in fields(BlendOptions)} <= {field.name for field in fields(owner)}


@given(params())
def test_the_options_are_the_parameters_of_the_same_names(given_params: KintsugiParams) -> None:
    options = given_params.options
    assert vars(options) == {name: getattr(given_params, name) for name in OPTION_NAMES}
    assert BlendOptions.from_mapping(given_params.to_mapping()[PARAMS_KEY]) == options
    assert BlendOptions(**options.chosen) == options


def test_a_selection_takes_what_a_request_chooses() -> None:
    ours = Selection(0.15, SelectorName.QUERY, check_layer=3)
    assert apply_options(ours, BlendOptions()) == ours
    assert apply_options(ours, BlendOptions(ratio=0.0)) == replace(ours, ratio=0.0)
    chosen = BlendOptions(0.4, SelectorName.RANDOM)
    assert apply_options(ours, chosen) == Selection(0.4, SelectorName.RANDOM, 3)


def test_no_lifetime_is_the_longest() -> None:
    assert longest_ttl(60.0, 5.0) == 60.0
    assert longest_ttl(60.0, None) is longest_ttl(None, 60.0) is None


def test_a_trial_is_of_exactly_one_configuration() -> None:
    selection = Selection(0.4, SelectorName.QUERY, 3, (1, 2))
    trial = make_trial(selection)
    assert selection_of(trial) == selection
    params = KintsugiParams("acme", trial=replace(trial, answer_tokens=31))
    text = json.dumps(params.to_mapping())
    assert KintsugiParams.from_mapping(json.loads(text)[PARAMS_KEY]) == params


def test_only_the_engine_itself_requests_audits_and_trials() -> None:
    check_foreign(parse())
    with pytest.raises(InvalidField, match="op: audit is for the engine itself"):
        check_foreign(KintsugiParams("acme", Op.AUDIT, (Span(0, 2),)))
    with pytest.raises(InvalidField, match="trial: is for the engine itself"):
        check_foreign(KintsugiParams("acme", trial=make_trial(Selection(0.4))))
