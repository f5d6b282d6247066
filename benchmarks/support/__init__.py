"""Code that benchmarks share: figures and their report, prompts of chunks, engines in this process."""
