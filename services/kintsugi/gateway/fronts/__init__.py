"""The fronts of the gateway: gRPC and OpenAI-compatible HTTP."""
