"""Our kernels: `native` for CPUs, `scattered` for GPUs. Import the second only where Triton is installed."""
