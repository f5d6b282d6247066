"""The connector's side in vLLM's workers: runs passes over the model's own layers."""
