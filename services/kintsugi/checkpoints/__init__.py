"""Random-weight checkpoints of every supported architecture, and the passages they are shown with.

`passages` is light; `shapes`, `weights`, `vocabulary` and `factory` import torch and transformers.
"""
