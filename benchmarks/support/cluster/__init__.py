"""A bed of several hosts in network namespaces, and what happens to a service on it."""
