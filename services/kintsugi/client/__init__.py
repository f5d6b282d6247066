"""Clients: the chunk store's interface and its implementations, checkpoints' fingerprints. No torch."""
