"""Sections of `benchmarks/trust.py`: one module each, with `measure`."""
