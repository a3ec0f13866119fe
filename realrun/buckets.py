"""Sizes that graphs are captured for; a batch is padded up to the next. On their own, to be read without torch."""

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
CHUNK_BUCKETS = (64, 128, 256, 512, 768, 1024, 1536, 2048)

# products of at most so many tokens and bytes of weights run in the engine's own kernels, others in the library's
SMALL_TOKENS = 32
SMALL_BYTES = 80_000_000
