"""A Llama-family decoder written for decoding on a CPU: explicit weights, explicit caches, few and fused kernels.

``weights``   a Hugging Face folder -> stacked arrays, every key accounted for
``kernels``   the inner loops (numba): attention with one query, matrix times a few rows, norms, rotary positions
``batch``     many sequences, one token each: the engine that answers prompts
``sequence``  one sequence, a few tokens at a time: plain and speculative decoding
"""
