"""The connector's side in vLLM's scheduler: looks chunks up, plans, names blocks."""
