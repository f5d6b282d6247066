"""A store shard: tiers, the life of an entry, its gRPC service."""
