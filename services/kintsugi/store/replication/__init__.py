"""Keeps as many copies of each chunk as the shard map asks for: a shard sends others what they lack."""
