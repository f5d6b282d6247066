"""Cron: the last tick before a time. Five fields, UTC, as in crontab(5): lists, ranges, steps, names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta

from kintsugi.core.errors import InvalidField

DAYS_MAX = 366 * 8 + 1
"""Between two 29ths of February there may be eight years."""

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_PART = re.compile(r"(?P<first>\*|\w+)(?:-(?P<last>\w+))?(?:/(?P<every>\d+))?")


@dataclass(frozen=True)
class Schedule:
    """When something is to happen."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    any_day: bool
    """Whether the day of month was `*`: then weekdays alone decide, as crontab(5) has it."""
    any_weekday: bool

    @staticmethod
    def parse(text: str) -> Schedule:
        """Raises `InvalidField` that says which part is wrong."""
        fields = text.split()
        if len(fields) != 5:
            raise InvalidField(
                "spec.schedule",
                f"{text!r} has {len(fields)} fields, not 5: minute hour day month weekday",
            )
        minute, hour, day, month, weekday = fields
        return Schedule(
            _values(minute, "minute", 0, 59),
            _values(hour, "hour", 0, 23),
            _values(day, "day", 1, 31),
            _values(month, "month", 1, 12, _MONTHS, 1),
            frozenset(one % 7 for one in _values(weekday, "weekday", 0, 7, _WEEKDAYS)),
            day.startswith("*"),
            weekday.startswith("*"),
        )

    def on(self, day: date) -> bool:
        """Whether anything happens on a day."""
        if day.month not in self.months:
            return False
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        if self.any_day or self.any_weekday:
            return in_month and in_week
        return in_month or in_week

    def last_tick(self, now: datetime) -> datetime | None:
        """The latest at or before `now`; None where there is none, as on a 30th of February."""
        for back in range(DAYS_MAX):
            day = (now - timedelta(days=back)).date()
            if not self.on(day):
                continue
            latest = now.time().replace(second=0, microsecond=0) if back == 0 else time(23, 59)
            for hour in sorted(self.hours, reverse=True):
                for minute in sorted(self.minutes, reverse=True):
                    if time(hour, minute) <= latest:
                        return datetime.combine(day, time(hour, minute), tzinfo=now.tzinfo)
        return None


def _values(
    text: str, name: str, least: int, most: int, words: tuple[str, ...] = (), base: int = 0
) -> frozenset[int]:
    """The numbers that one field stands for."""

    def number(word: str) -> int:
        if word.lower() in words:
            return words.index(word.lower()) + base
        if not word.isdecimal() or not least <= int(word) <= most:
            raise InvalidField("spec.schedule", f"{name} {word!r} is not between {least} and {most}")
        return int(word)

    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise InvalidField("spec.schedule", f"{name} {part!r} is no number, range or step")
        every = int(match["every"] or 1)
        if every < 1:
            raise InvalidField("spec.schedule", f"{name} {part!r} steps by 0")
        if match["first"] == "*":
            first, last = least, most
        else:
            first = number(match["first"])
            last = number(match["last"]) if match["last"] else (most if match["every"] else first)
        if first > last:
            raise InvalidField("spec.schedule", f"{name} {part!r} runs backwards")
        found.update(range(first, last + 1, every))
    return frozenset(found)
