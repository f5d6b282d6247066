"""What the operator decides: functions of a spec, a status, an observation and the time. Pure."""
