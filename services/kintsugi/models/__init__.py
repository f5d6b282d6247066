"""Models: checkpoints, hub names, models in packages, fingerprints, layers, and prompt forms."""
