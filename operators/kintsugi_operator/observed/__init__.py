"""What the operator observed of a service: views of Kubernetes' objects, pod failures, conditions. Pure."""
