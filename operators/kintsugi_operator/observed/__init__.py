"""What the operator has seen of a service: views of Kubernetes' objects, troubles, conditions. Pure."""
