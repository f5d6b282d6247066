"""The fusor merges cached and recomputed KV: RoPE, codecs, selectors, planners, the blend pass.

torch, but neither the network nor vLLM: what a model can do is the protocol `stack.DecoderStack`, and
where bytes come from is an iterator.
"""
