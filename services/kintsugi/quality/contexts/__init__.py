"""Chooses one of several contexts before a calibration."""
