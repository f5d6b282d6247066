"""Puts corpora into the store: reads, chunks and deduplicates documents, and prefills missing chunks.

`sources` reads files as documents on Ray Data, `chunking` cuts them, the `Ledger` (SQLite) records which
document has which chunks, `Job` runs the steps, `pool` holds the engine workers. The ledger knows which
chunks belong to a corpus; only the store knows which chunks are prefilled.
"""
