"""Alias of `kintsugi.precompute.chunking`."""

from kintsugi.client import alias_module

alias_module(__name__, "kintsugi.precompute.chunking")
