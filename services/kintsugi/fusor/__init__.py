"""The fusor merges cached and recomputed KV: RoPE, codecs, selectors, planners, the blend pass.

It uses torch but knows neither the network nor vLLM: the model is a `stack.DecoderStack` (a protocol), and
stored bytes arrive through an iterator.
"""
