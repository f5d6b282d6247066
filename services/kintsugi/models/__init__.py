"""Models: checkpoints, hub names, fingerprints, and the small ones that are made here."""
