"""The tiers that store chunks: an arena in RAM, slabs and catalogs on SSDs, a bucket."""
