"""What leaves a tier first, and where a new chunk goes."""
