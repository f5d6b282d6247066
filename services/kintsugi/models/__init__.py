"""Models: checkpoints, hub names, models in packages, fingerprints, reasons not to blend, prompt forms."""
