"""Kintsugi: CacheBlend as a chunk KV-cache service for retrieval-augmented generation.

Import layers, top to bottom (checked by import-linter)::

    cli · serving · precompute, quality · engine, store · client, fusor, checkpoints · core
"""

__version__ = "0.1.0"
