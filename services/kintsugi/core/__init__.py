"""Types and pure decisions shared by every part: no I/O, no torch, no network."""
