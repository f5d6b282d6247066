"""Keeps the number of copies of each chunk that the shard map requires: shards send each other missing
chunks."""
