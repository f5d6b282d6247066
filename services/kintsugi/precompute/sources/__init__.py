"""Sources of documents: files and tables, read and scanned."""
