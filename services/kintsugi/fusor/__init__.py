"""The blend pass and what it needs: torch, but no network and no inference engine."""
