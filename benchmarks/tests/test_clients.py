"""What is counted as a failure of a client."""

from __future__ import annotations

from benchmarks.clients import Tally, read_tally

REPORT = """<testsuites><testsuite>
<testcase name="one"/>
<testcase name="two"><system-out>said</system-out></testcase>
<testcase name="three"><failure message="no"/></testcase>
<testcase name="four"><error message="no service"/></testcase>
<testcase name="five"><skipped message="not installed"/></testcase>
</testsuite></testsuites>"""


def test_failures_errors_and_clients_that_are_missing_are_told_apart() -> None:
    assert read_tally(REPORT) == Tally(2, ("three", "four"), ("five",))


def test_a_client_that_was_not_run_does_not_hold() -> None:
    failures, not_run, passed = Tally(7, (), ("five",)).figures
    assert (failures.value, failures.holds) == (0, True)
    assert (not_run.value, not_run.holds, not_run.detail) == (1, False, "five")
    assert passed.value == 7
    many = Tally(0, tuple(f"t{index}" for index in range(8)), ()).figures[0]
    assert (many.value, many.holds) == (8, False)
    assert many.detail.endswith("t4 and 3 more")
