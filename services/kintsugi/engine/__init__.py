"""The vLLM plugin: a KV connector that plans, loads, blends and saves.

Only this package knows internals of vLLM.
"""
