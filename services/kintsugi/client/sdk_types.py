"""Alias of `kintsugi.sdk.types`."""

from kintsugi.client import alias_module

alias_module(__name__, "kintsugi.sdk.types")
