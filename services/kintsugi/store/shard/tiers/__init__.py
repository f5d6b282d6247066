"""Where the bytes of chunks lie: an arena in RAM, slabs on SSDs with a catalog."""
