"""A running service as its operator sees it: facts that are asked for, and what is decided from them."""
