"""Cron, read backwards."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.core.errors import InvalidField
from kintsugi_operator.desired.schedule import check_schedule, last_tick

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)  # a Saturday


def last(text: str, now: datetime = NOON) -> str:
    tick = last_tick(text, now)
    return "never" if tick is None else tick.strftime("%Y-%m-%d %H:%M")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("* * * * *", "2026-11-21 12:00"),
        ("*/15 * * * *", "2026-11-21 12:00"),
        ("30 * * * *", "2026-11-21 11:30"),
        ("0 2 * * *", "2026-11-21 02:00"),
        ("0 18 * * *", "2026-11-20 18:00"),
        ("0 2 * * mon-fri", "2026-11-20 02:00"),
        ("0 2 * * 0", "2026-11-15 02:00"),
        ("0 2 * * 7", "2026-11-15 02:00"),
        ("0 0 1 * *", "2026-11-01 00:00"),
        ("0 0 29 2 *", "2024-02-29 00:00"),
        # As in crontab(5): with both days given, either will do.
        ("0 0 1 * fri", "2026-11-20 00:00"),
        ("5,35 0-6/2 * jan,nov *", "2026-11-21 06:35"),
    ],
)
def test_the_last_tick(text: str, expected: str) -> None:
    assert last(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("* * * *", "has 4 fields"),
        ("60 * * * *", "'60 \\* \\* \\* \\*': Bad minute"),
        ("* 24 * * *", "Bad hour"),
        ("* * 0 * *", "Bad day-of-month"),
        ("* * * 13 *", "Bad month"),
        ("* * * * 8", "Bad day-of-week"),
        ("*/0 * * * *", "Bad minute"),
        ("5-3 * * * *", "Bad minute"),
        ("a b c d e", "Bad minute"),
        ("@daily", "has 1 fields"),
        ("0 * * * * *", "has 6 fields"),
        ("0 0 30 2 *", "Bad day-of-month"),
        ("1--2 * * * *", "Bad minute"),
    ],
)
def test_what_is_no_schedule_says_why(text: str, says: str) -> None:
    with pytest.raises(InvalidField, match=says):
        check_schedule(text)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["*/7 */5 * * *", "0 3 * * 1,4", "15 10 5-25/5 * *", "59 23 * 2,11 *"]),
    st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1)),
)
def test_a_tick_is_its_own_last_tick(text: str, moment: datetime) -> None:
    now = moment.replace(tzinfo=UTC)
    tick = last_tick(text, now)
    assert tick is not None
    assert tick <= now
    assert last_tick(text, tick) == tick
    # Nothing was left out: the one before a minute earlier is another.
    earlier = last_tick(text, tick - timedelta(minutes=1))
    assert earlier is not None
    assert earlier < tick
