"""The sections of `benchmarks/trust.py`, a module each, with `measure(*, quick, seed)`."""
