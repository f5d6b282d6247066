"""The gateway: one answer pipeline behind two fronts, and what is known of texts.

It turns what a client names into token ids and spans, sends them to an engine and passes the answer on. It
holds no KV and plans nothing.
"""
