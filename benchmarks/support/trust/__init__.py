"""What `benchmarks/trust.py` measures: attacks, crashes, erasure, encryption."""
