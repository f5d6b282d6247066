"""Finds recurring passages in prompts, over token ids: segments, their sightings, and the segments to save.

Pure: no clock, no I/O and no vLLM; `engine.scheduler.discovery` runs it. See docs/adr/0013.
"""
