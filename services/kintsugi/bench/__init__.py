"""The load generator behind `kintsugi bench serve`: profiles, runs, reports, plots."""
