"""The operator's API: specs that users write, statuses that the operator writes, their bounds and their
CRDs."""
