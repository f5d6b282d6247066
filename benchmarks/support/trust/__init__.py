"""Sections of the benchmark of trust: attacks, and what they cost."""
