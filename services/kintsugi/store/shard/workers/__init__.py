"""The threads of a shard: they do its I/O, and report to the table how it ended."""
