"""The last scheduled time (tick) of a cron schedule: five fields as in crontab(5), in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cronsim import CronSim, CronSimError

from kintsugi.core.errors import InvalidField

FIELDS = ("minute", "hour", "day-of-month", "month", "day-of-week")


def check_schedule(schedule: str) -> None:
    """Raise `InvalidField` for an invalid schedule, such as one with an impossible date (30 February)."""
    _ticks_before(schedule, datetime(2000, 1, 1, tzinfo=UTC))


def last_tick(schedule: str, now: datetime) -> datetime | None:
    """The latest tick at or before `now` (UTC); None if the last 50 years had none.

    Raises as `check_schedule` does.
    """
    return next(_ticks_before(schedule, now.replace(microsecond=0) + timedelta(seconds=1)), None)


def _ticks_before(schedule: str, moment: datetime) -> CronSim:
    # The library would accept a sixth field as seconds.
    if len(fields := schedule.split()) != len(FIELDS):
        raise InvalidField("spec.schedule", f"{schedule!r} has {len(fields)} fields, not {' '.join(FIELDS)}")
    try:
        return CronSim(schedule, moment, reverse=True)
    except CronSimError as error:
        raise InvalidField("spec.schedule", f"{schedule!r}: {error}; see crontab(5)") from None
