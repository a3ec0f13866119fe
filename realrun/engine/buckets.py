"""Sizes that graphs are captured for and kernels cut to. On their own, to be read without torch."""

# a batch is padded up to the next
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
CHUNK_BUCKETS = (64, 128, 256, 512, 768, 1024, 1536, 2048)

# products up to these tokens and bytes of weights run in the engine's own kernels, others in the library's
SMALL_TOKENS = 32
SMALL_BYTES = 80_000_000

# attention packs a row's queries into a tile of at least QUERY_TILE, and cuts contexts until PROGRAMS_PER_SM programs a
# multiprocessor read them
QUERY_TILE = 16
PROGRAMS_PER_SM = 2


def most_prompts(tokens: int) -> int:
    """Most prompts in a forward with room for `tokens` prompt tokens."""
    return max(4, tokens // 16)


def packed_size(rows: int, width: int, tokens: int) -> int:
    """Tokens that the layers compute of `tokens` in `rows` of up to `width` each; 0: all of them, rows x width.

    Padded like rows, and beyond the largest batch to multiples of the rows.
    """
    sizes = (size for size in ROW_BUCKETS if size >= max(tokens, rows))
    size = next(sizes, -(-tokens // rows) * rows)
    return size if size < rows * width else 0


def packed_sizes(rows: int, width: int) -> list[int]:
    """Every size but 0 that `packed_size` has."""
    return sorted({packed_size(rows, width, tokens) for tokens in range(1, rows * width + 1)} - {0})


def query_tile(queries: int) -> int:
    """Size of a tile for `queries` queries: the next power of two."""
    return max(QUERY_TILE, 1 << (queries - 1).bit_length())
