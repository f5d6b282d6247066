"""What the gateway knows of texts: segments, chunks seen before, documents of a ledger."""
