"""A Llama-family decoder written for decoding on a CPU: explicit weights, explicit caches, few and fused kernels.

``weights``   a Hugging Face folder -> stacked arrays, every key accounted for
``compiled``  how loops are compiled (numba) and where the compiled ones are kept
``matmul``    the matrix product: panels of bfloat16 weights, any number of rows, a row's bits its own
``kernels``   the other inner loops: attention, norms, rotary positions, a layer, all layers
``batch``     many sequences, one token each: the engine that answers prompts
``sequence``  one sequence, a few tokens at a time: plain and speculative decoding
"""
