"""Alias of `kintsugi.sdk.langchain`."""

from kintsugi.client import alias_module

alias_module(__name__, "kintsugi.sdk.langchain")
