"""The architecture matrix: tiny models of vLLM's decoder classes, and whether blending is exact on each."""
