"""The front ends of the gateway: gRPC and OpenAI-compatible HTTP."""
