"""Corpora into the store: read, chunk, deduplicate, drop what is there, prefill the rest.

`files` and `readers` turn a source into documents, `scan` reads and chunks them on Ray Data, the `Ledger`
(SQLite) knows which document has which chunks, `Job` walks through it all, `pool` holds the engine workers.
The store is the only truth about what is prefilled; the ledger is what makes a corpus out of chunks.
"""
