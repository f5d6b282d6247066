"""Finds recurring passages in the token ids of prompts: segments, their sightings, the segments to save.

Pure: no clock, no I/O and no vLLM; `engine.scheduler.discovery` runs it. See docs/adr/0013.
"""
