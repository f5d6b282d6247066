"""What layers store of a token, and who computes the attention of scattered tokens."""
