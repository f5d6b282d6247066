"""vLLM's own OpenAI handlers, with each chunk tokenised separately."""
