"""Texts of prompts: segments, known chunks, and documents of a ledger."""
