"""What clients and shards of the store agree on: the interface, the wire, errors, TLS."""
