"""The KV that layers store per token, and the attention of scattered tokens."""
