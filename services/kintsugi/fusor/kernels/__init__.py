"""Triton kernels. Import a module here only where Triton is installed: `fusor.attention` does so lazily."""
