"""Puts corpora into the store: read, chunk, deduplicate, skip chunks that the store has, prefill the rest.

`sources` reads files and tables as documents on Ray Data, `chunking` cuts them, the `Ledger` (SQLite) records
which document has which chunks, `Job` runs the steps, `pool` holds the engine workers. Only the store knows
what is prefilled; the ledger knows which chunks make up a corpus.
"""
