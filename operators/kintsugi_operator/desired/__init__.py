"""Decisions: pure functions of a spec, a status, an observation and the time."""
