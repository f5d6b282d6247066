"""A shard of the chunk KV store: tiers, eviction, catalog and the gRPC server. No torch."""
