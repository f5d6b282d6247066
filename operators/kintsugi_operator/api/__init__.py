"""What a user may ask for and what the operator answers: specs, statuses, their bounds and their CRDs."""
