"""What acts: the API server, the Lease, the work queue, the reconciler, metrics and the log reader."""
