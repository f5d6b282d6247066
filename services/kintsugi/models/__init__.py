"""Models: checkpoints, hub names, the reference model, fingerprints, and small random checkpoints."""
