"""Clients of the store: one shard over gRPC, many shards, memory shared with a shard on the same host."""
