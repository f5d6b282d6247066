"""vLLM's own OpenAI handlers, with chunks tokenised alone."""
