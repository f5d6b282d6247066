"""Erasure of chunks: what an erasure covers, which calls it cuts, and the records of erasures."""
