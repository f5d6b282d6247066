"""Alias of `kintsugi.sdk.llama_index`."""

from kintsugi.client import alias_module

alias_module(__name__, "kintsugi.sdk.llama_index")
