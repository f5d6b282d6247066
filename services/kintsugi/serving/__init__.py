"""Serving on Ray Serve: gateway, engine replicas, routing, autoscaling."""
