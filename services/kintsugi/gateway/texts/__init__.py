"""Texts of prompts: segments, chunks seen before, and documents of a ledger."""
