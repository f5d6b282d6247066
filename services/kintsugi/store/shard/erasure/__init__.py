"""Erasing chunks: what it covers, who shares the work, and what is remembered of it."""
