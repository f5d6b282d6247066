"""Builds the manifests that the operator applies: pods, Ray clusters, policies. Pure."""
