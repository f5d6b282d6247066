"""What counts as a case of a posed run."""

from __future__ import annotations

from benchmarks.posed import COMPOSED, read_figures


def case(name: str, inside: str = "", composed: str = "") -> str:
    properties = (
        f'<properties><property name="composed" value="{composed}"/></properties>' if composed else ""
    )
    return f'<testcase name="{name}">{properties}{inside}</testcase>'


def report_of(cases: list[str]) -> str:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def test_skipped_tests_are_no_cases_and_one_failure_spoils_a_feature() -> None:
    declined = [case(name, composed=name) for name in COMPOSED[:2]]
    cases = [
        *(case(name, composed=name) for name in COMPOSED[2:]),
        case("paused again", '<failure message="no"/>', "pause"),
        case("no set-up", '<error message="no engine"/>'),
        case("left out", '<skipped message="no AVX-512"/>'),
    ]
    share, run, composed = read_figures(report_of(cases), report_of(declined))
    assert (share.value, share.holds) == (3 / 5, False)
    assert share.detail == "3 of 5; failed: paused again, no set-up"
    assert (run.value, run.holds) == (5, False)
    assert (composed.value, composed.holds, composed.detail) == (4, False, "missing: pause")


def test_a_feature_that_no_test_showed_is_missing() -> None:
    cases = [case(str(index), composed=COMPOSED[index % 4]) for index in range(20)]
    share, run, composed = read_figures(report_of(cases), report_of([]))
    assert (share.holds, run.holds, composed.holds) == (True, True, False)
