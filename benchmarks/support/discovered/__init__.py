"""Sections of `benchmarks/discovery.py`: passages that recur and that nobody declares."""
