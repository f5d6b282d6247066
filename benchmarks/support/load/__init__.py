"""The open-loop load generator of the benchmarks: profiles, runs, reports."""
