"""What the objects look like that the operator applies: names, pods, Ray clusters, policies. Pure."""
