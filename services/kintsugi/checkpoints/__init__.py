"""Random-weight checkpoints of every supported architecture, and the passages they are shown with.

`passages` and `cache` are light; the other modules import torch and transformers.
"""
