"""Sections of `benchmarks/trust.py`. Each has `measure(*, quick, seed)`, which returns its figures."""
