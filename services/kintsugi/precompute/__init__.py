"""Put corpora into the store: read, chunk, deduplicate, drop what is there, prefill the rest.

`sources` turns files and tables into documents and reads them on Ray Data, `chunking` cuts them, the `Ledger`
(SQLite) knows which document has which chunks, `Job` walks through it all, `pool` holds the engine workers.
The store is the only truth about what is prefilled; the ledger is what makes a corpus out of chunks.
"""
