"""Eviction and placement: which chunk leaves a tier, and which tier takes a new chunk."""
