"""The gateway: one answer pipeline behind two front ends, and the texts of known chunks.

It resolves the segments that a client names into token ids and spans, sends them to an engine and forwards
the answer. It holds no KV and makes no blend decisions.
"""
