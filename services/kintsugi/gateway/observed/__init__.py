"""What others learn of a gateway's work: routers of chunks, traces of answers."""
