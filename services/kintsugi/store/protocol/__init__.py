"""Code that clients and shards of the store share: the interface, the wire format, errors, TLS, access."""
