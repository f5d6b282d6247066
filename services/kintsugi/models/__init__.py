"""Models: checkpoints, hub names, models in packages, fingerprints, declines, and prompt forms."""
