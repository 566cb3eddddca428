"""How a kernel's rows are split where it works by chunks. Knows nothing else of kernels."""


def row_chunks(tokens: int, chunk_size: int | None) -> list[slice]:
    """Slices of at most `chunk_size` rows, in order; all rows in one for None.

    At least one, if an empty one: the results of no rows still hang on the graph.
    """
    size = chunk_size or max(1, tokens)
    return [slice(start, min(start + size, tokens)) for start in range(0, max(1, tokens), size)]
