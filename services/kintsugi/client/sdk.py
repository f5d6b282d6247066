"""Alias of `kintsugi.sdk.client`."""

from kintsugi.client import alias_module

alias_module(__name__, "kintsugi.sdk.client")
