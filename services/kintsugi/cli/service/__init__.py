"""The state of a running service: facts requested from its gateway, and the status derived from them."""
