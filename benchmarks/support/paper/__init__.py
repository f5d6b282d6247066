"""CacheBlend's own evaluation, repeated on the reference model."""
