"""Ray Serve: replicas of engines, gateways and shards, their directory, routing and autoscaling."""
