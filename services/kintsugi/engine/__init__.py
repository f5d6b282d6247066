"""The vLLM plugin: a KV connector that plans, loads, blends and saves.

Only here are internals of vLLM known.
"""
