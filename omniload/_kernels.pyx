# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loops that numpy cannot take over: one value per document, or several arrays filled in one pass.

Optional (see `omniload.kernels`): `omniload.planner.pack` and `omniload.fill` hold the same functions in Python, which say
what they do and give the same results to the bit; what is here only does it faster, and without the interpreter lock.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE, PyObject_GetBuffer, PyBuffer_Release
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memmove, memset


cdef int64_t _NUMBER = 0xFFFFFFFF  # of a pack, in the lower half of an entry


def best_fit(const int64_t[::1] lengths not None, int64_t capacity, int64_t[::1] pack not None):
    """The pack of each piece; see `omniload.planner.pack.best_fit_decreasing`, whose order `lengths` are in."""
    cdef Py_ssize_t n = lengths.shape[0]
    # Open packs as room << 32 | number, ascending.
    cdef int64_t *open_packs = <int64_t *> malloc(max(n, 1) * sizeof(int64_t))
    if open_packs == NULL:
        raise MemoryError
    with nogil:
        _best_fit(&lengths[0] if n else NULL, n, capacity, &pack[0] if n else NULL, open_packs)
    free(open_packs)


cdef Py_ssize_t _first_not_below(const int64_t *values, Py_ssize_t count, int64_t wanted) noexcept nogil:
    cdef Py_ssize_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


cdef void _best_fit(
    const int64_t *lengths, Py_ssize_t n, int64_t capacity, int64_t *pack, int64_t *open_packs
) noexcept nogil:
    cdef Py_ssize_t i, at, to, count = 0
    cdef int64_t entry, num_packs = 0
    for i in range(n):
        at = _first_not_below(open_packs, count, lengths[i] << 32)
        if at < count:
            entry = open_packs[at]
            pack[i] = entry & _NUMBER
            entry -= lengths[i] << 32
            if entry >> 32:  # it has less room now, so it moves to the front, and what it passes up by one
                to = _first_not_below(open_packs, at, entry)
                memmove(open_packs + to + 1, open_packs + to, (at - to) * sizeof(int64_t))
                open_packs[to] = entry
            else:
                count -= 1
                memmove(open_packs + at, open_packs + at + 1, (count - at) * sizeof(int64_t))
        else:
            entry = capacity << 32 | num_packs
            pack[i] = num_packs
            num_packs += 1
            entry -= lengths[i] << 32
            if entry >> 32:
                to = _first_not_below(open_packs, count, entry)
                memmove(open_packs + to + 1, open_packs + to, (count - to) * sizeof(int64_t))
                open_packs[to] = entry
                count += 1


def draw(
    int64_t[::1] deficits not None,
    const int64_t[::1] weights not None,
    list lengths not None,
    bint by_samples,
    int64_t seq_len,
    int64_t tokens_wanted,
    int64_t pieces_wanted,
    list drawn not None,
):
    """Draw samples until enough are there, a source has no more ready, or one might not fit 64 bits; see `omniload.planner.mix.Mixer.draw_ready`.

    Args:
        deficits: what each source is owed; changed.
        weights: of each; 0 for those that are not drawn.
        lengths: of each, ``int64[n]`` tokens of its samples at hand.
        by_samples: whether weights are shares of samples.
        seq_len: longest piece.
        tokens_wanted: stop when that many are drawn,
        pieces_wanted: or that many pieces.
        drawn: sources in the order drawn are appended.

    Returns:
        Tokens and pieces drawn.
    """
    cdef Py_ssize_t n = deficits.shape[0], i, best
    cdef int64_t total_weight = 0, tokens = 0, pieces = 0, length, amount, largest
    cdef const int64_t[::1] of_source
    cdef const int64_t **samples = <const int64_t **> malloc(max(n, 1) * sizeof(void *))
    cdef int64_t *counts = <int64_t *> malloc(max(n, 1) * sizeof(int64_t))
    cdef int64_t *at = <int64_t *> calloc(max(n, 1), sizeof(int64_t))
    if samples == NULL or counts == NULL or at == NULL:
        free(samples)
        free(counts)
        free(at)
        raise MemoryError
    try:
        for i in range(n):
            of_source = lengths[i]  # the list keeps the memory
            counts[i] = of_source.shape[0]
            samples[i] = &of_source[0] if counts[i] else NULL
            total_weight += weights[i]
        while tokens < tokens_wanted and pieces < pieces_wanted:
            best = -1
            for i in range(n):
                if weights[i] and (best < 0 or deficits[i] > deficits[best]):
                    best = i
            if best < 0 or at[best] >= counts[best]:
                break
            length = samples[best][at[best]]
            amount = min(length, 1) if by_samples else length
            largest = deficits[best]
            if (
                amount > _MOST_TOKENS
                or largest > _MOST_DEFICIT
                or largest - total_weight * amount < -_MOST_DEFICIT
            ):
                break
            for i in range(n):
                deficits[i] += weights[i] * amount
            deficits[best] -= total_weight * amount
            at[best] += 1
            tokens += length
            pieces += (length + seq_len - 1) // seq_len
            drawn.append(best)
        return tokens, pieces
    finally:
        free(samples)
        free(counts)
        free(at)


cdef int64_t _MOST_TOKENS = 1 << 28
cdef int64_t _MOST_DEFICIT = <int64_t> 1 << 61


ctypedef fused token_t:
    uint8_t
    uint16_t
    uint32_t
    int8_t
    int16_t
    int32_t
    int64_t  # and unsigned: no id needs the last bit


cdef struct Piece:
    const void *tokens
    const uint8_t *mask
    int64_t available  # tokens in the array: those of the piece, and the one after it where the sample goes on
    int kind  # bytes of a token; negative if signed


cdef struct Out:
    int64_t *input_ids
    int64_t *wanted
    int64_t *position_ids
    int32_t *segment_ids


cdef int _kind(const Py_buffer *view) except 0:
    cdef char code = view.format[0] if view.format != NULL else b"B"
    if code == b"<" or code == b"=" or code == b"@":
        code = view.format[1]
    if code == b"?" or code == b"B" or code == b"H" or code == b"I" or code == b"L" or code == b"Q":
        return <int> view.itemsize
    if code == b"b" or code == b"h" or code == b"i" or code == b"l" or code == b"q":
        return -<int> view.itemsize
    raise TypeError(f"tokens of buffer format {view.format.decode()}, not integers")


cdef void _copy(
    const token_t *tokens, const Piece *piece, Out *out, int64_t start, int64_t count, bint shifted, int32_t number
) noexcept nogil:
    cdef int64_t j
    cdef int64_t *ids = out.input_ids + start
    cdef int64_t *wanted
    for j in range(count):
        ids[j] = tokens[j]
    if out.wanted != NULL:
        wanted = out.wanted + start
        if shifted:
            for j in range(count - 1):
                wanted[j] = tokens[j + 1]
            wanted[count - 1] = tokens[count] if piece.available > count else -100
            if piece.mask != NULL:
                for j in range(min(count, piece.available - 1)):
                    if not piece.mask[j + 1]:
                        wanted[j] = -100
        else:
            for j in range(1, count):
                wanted[j] = tokens[j]
            wanted[0] = -100
            if piece.mask != NULL:
                for j in range(count):
                    if not piece.mask[j]:
                        wanted[j] = -100
    _place(out, start, count, number)


cdef void _place(Out *out, int64_t start, int64_t count, int32_t number) noexcept nogil:
    cdef int64_t j
    if out.position_ids != NULL:
        for j in range(count):
            out.position_ids[start + j] = j
    if out.segment_ids != NULL:
        for j in range(count):
            out.segment_ids[start + j] = number


cdef void _fill_one(
    const Piece *piece, Out *out, int64_t start, int64_t count, bint shifted, int32_t number
) noexcept nogil:
    if piece.kind == 1:
        _copy(<const uint8_t *> piece.tokens, piece, out, start, count, shifted, number)
    elif piece.kind == 2:
        _copy(<const uint16_t *> piece.tokens, piece, out, start, count, shifted, number)
    elif piece.kind == 4:
        _copy(<const uint32_t *> piece.tokens, piece, out, start, count, shifted, number)
    elif piece.kind == -1:
        _copy(<const int8_t *> piece.tokens, piece, out, start, count, shifted, number)
    elif piece.kind == -2:
        _copy(<const int16_t *> piece.tokens, piece, out, start, count, shifted, number)
    elif piece.kind == -4:
        _copy(<const int32_t *> piece.tokens, piece, out, start, count, shifted, number)
    else:
        _copy(<const int64_t *> piece.tokens, piece, out, start, count, shifted, number)


def fill(
    list tokens not None,
    list masks not None,
    const int64_t[::1] starts not None,
    const int64_t[::1] lengths not None,
    const int64_t[::1] numbers not None,
    const int64_t[::1] padding_starts not None,
    const int64_t[::1] padding_lengths not None,
    int64_t[::1] input_ids not None,
    int64_t[::1] wanted,
    int64_t[::1] position_ids,
    int32_t[::1] segment_ids,
    bint shifted,
):
    """Fill the arrays of some packs; see `omniload.fill`. An array that is None is not wanted."""
    cdef Py_ssize_t n = len(tokens), num_views = 0, i
    cdef int64_t total = input_ids.shape[0], j
    cdef Out out
    out.input_ids = &input_ids[0]
    out.wanted = &wanted[0] if wanted is not None else NULL
    out.position_ids = &position_ids[0] if position_ids is not None else NULL
    out.segment_ids = &segment_ids[0] if segment_ids is not None else NULL
    cdef Py_buffer *views = <Py_buffer *> malloc(max(2 * n, 1) * sizeof(Py_buffer))
    cdef Piece *pieces = <Piece *> calloc(max(n, 1), sizeof(Piece))
    if views == NULL or pieces == NULL:
        free(views)
        free(pieces)
        raise MemoryError
    try:
        for i in range(n):
            PyObject_GetBuffer(tokens[i], &views[num_views], PyBUF_FORMAT)
            num_views += 1
            pieces[i].tokens = views[num_views - 1].buf
            pieces[i].kind = _kind(&views[num_views - 1])
            pieces[i].available = views[num_views - 1].len // views[num_views - 1].itemsize
            if masks[i] is not None:
                PyObject_GetBuffer(masks[i], &views[num_views], PyBUF_SIMPLE)
                num_views += 1
                pieces[i].mask = <const uint8_t *> views[num_views - 1].buf
                assert views[num_views - 1].len >= min(pieces[i].available, lengths[i] + 1)
            assert 0 < lengths[i] <= pieces[i].available
            assert 0 <= starts[i] and starts[i] + lengths[i] <= total
        with nogil:
            for i in range(n):
                _fill_one(&pieces[i], &out, starts[i], lengths[i], shifted, <int32_t> numbers[i])
            for i in range(padding_starts.shape[0]):
                memset(out.input_ids + padding_starts[i], 0, padding_lengths[i] * sizeof(int64_t))
                if out.wanted != NULL:
                    for j in range(padding_starts[i], padding_starts[i] + padding_lengths[i]):
                        out.wanted[j] = -100
                _place(&out, padding_starts[i], padding_lengths[i], 0)
    finally:
        for i in range(num_views):
            PyBuffer_Release(&views[i])
        free(views)
        free(pieces)
