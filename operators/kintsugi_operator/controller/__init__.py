"""All I/O: the API server's client, watches, the Lease, the work queue, the reconciler and metrics."""
