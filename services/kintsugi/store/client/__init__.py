"""Clients of the store: in process memory, of one shard, of many shards, and of a shard on the same host."""
