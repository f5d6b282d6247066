"""The chunk KV store: what clients and shards agree on, the clients, the shard. No torch."""
