"""Finds what recurs in prompts, over token ids: segments, their sightings, and those to save.

Pure: no clock, no I/O and no vLLM; `engine.scheduler.discovery` runs it. See docs/adr/0013.
"""
