# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loops that numpy cannot take over: one value per document, or several arrays filled in one pass.

Optional (see `omniload.kernels`): the modules that call them hold the same functions in Python, which say what they do
and give the same results to the bit; what is here only does it faster.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE, PyObject_GetBuffer, PyBuffer_Release
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove

cdef extern from *:
    """
    /* The arrays of a step are larger than the caches, and are read when other steps have been made. Stores that go
       past the caches need no read of the line before, which halves the traffic. All x86-64 processors have them. */
    #include <stdint.h>
    #include <string.h>
    #if defined(__x86_64__) || defined(_M_X64)
    #include <emmintrin.h>
    static void omniload_stream(char *to, const char *from, int64_t num_bytes) {  /* of elements of 4 or 8 bytes */
        for (; num_bytes > 0 && ((uintptr_t) to & 15); to += 4, from += 4, num_bytes -= 4) {
            int one;
            memcpy(&one, from, 4);
            _mm_stream_si32((int *) to, one);
        }
        for (; num_bytes >= 16; to += 16, from += 16, num_bytes -= 16)
            _mm_stream_si128((__m128i *) to, _mm_loadu_si128((const __m128i *) from));
        for (; num_bytes > 0; to += 4, from += 4, num_bytes -= 4) {
            int one;
            memcpy(&one, from, 4);
            _mm_stream_si32((int *) to, one);
        }
    }
    #define OMNILOAD_STREAMED() _mm_sfence()
    #else
    #define omniload_stream(to, from, num_bytes) memcpy(to, from, num_bytes)
    #define OMNILOAD_STREAMED() ((void) 0)
    #endif
    /* Documents lie all over a window that is larger than the caches: the first bytes of one are called for while
       some before it are copied, and the processor goes on by itself from there. */
    static void omniload_prefetch(const char *from, int64_t num_bytes) {
    #if defined(__GNUC__)
        for (int64_t at = 0; at < num_bytes; at += 64)
            __builtin_prefetch(from + at);
    #endif
    }
    """
    void omniload_prefetch(const char *from_, int64_t num_bytes) noexcept nogil
    void omniload_stream(char *to, const char *from_, int64_t num_bytes) noexcept nogil
    void OMNILOAD_STREAMED() noexcept nogil


cdef int64_t _NUMBER = 0xFFFFFFFF  # of a pack, in the lower half of an entry
cdef enum:
    _AHEAD = 4  # documents whose first bytes are called for,
    _AHEAD_BYTES = 2048  # so many
    _ENTRIES = 128  # of a block
    _GROUP = 16  # sources whose deficits are looked at together


cdef struct Block:
    int64_t last  # its largest entry
    int64_t most  # the largest room for patches in it
    Py_ssize_t count
    int64_t *entries


cdef struct OpenPacks:
    # Packs with room, as room << 32 | number, ascending: in blocks, so that little moves when one is put in.
    Block *blocks
    Py_ssize_t num_blocks
    Py_ssize_t num_made
    int64_t *memory
    int64_t **spare
    Py_ssize_t num_spare
    const int64_t *patch_room  # of each pack by number, or NULL


def best_fit(
    const int64_t[::1] lengths not None,
    int64_t capacity,
    const int64_t[::1] patches,
    int64_t patch_capacity,
    int64_t[::1] pack not None,
):
    """The pack of each piece; see `omniload.planner.packing.decreasing.best_fit_in_python`."""
    cdef Py_ssize_t n = lengths.shape[0]
    if n == 0:
        return
    assert pack.shape[0] == n
    assert patches is None or patches.shape[0] == n
    cdef OpenPacks packs
    # A block is split when it is full, so all but the first were once half full; those that empty are used again.
    cdef Py_ssize_t most_blocks = n // (_ENTRIES // 2) + 2
    packs.num_blocks = packs.num_made = packs.num_spare = 0
    packs.blocks = <Block *> malloc(most_blocks * sizeof(Block))
    packs.memory = <int64_t *> malloc(most_blocks * _ENTRIES * sizeof(int64_t))
    packs.spare = <int64_t **> malloc(most_blocks * sizeof(int64_t *))
    cdef int64_t *patch_room = NULL
    if patches is not None:
        patch_room = <int64_t *> malloc(n * sizeof(int64_t))
    try:
        if packs.blocks == NULL or packs.memory == NULL or packs.spare == NULL:
            raise MemoryError
        if patches is not None and patch_room == NULL:
            raise MemoryError
        packs.patch_room = patch_room
        with nogil:
            _best_fit(
                &lengths[0],
                n,
                capacity,
                &patches[0] if patch_room != NULL else NULL,
                patch_capacity,
                &pack[0],
                &packs,
                patch_room,
            )
    finally:
        free(packs.blocks)
        free(packs.memory)
        free(packs.spare)
        free(patch_room)


cdef void _best_fit(
    const int64_t *lengths,
    Py_ssize_t n,
    int64_t capacity,
    const int64_t *patches,
    int64_t patch_capacity,
    int64_t *pack,
    OpenPacks *packs,
    int64_t *patch_room,
) noexcept nogil:
    cdef Py_ssize_t i, block, at = 0
    cdef int64_t entry, num_packs = 0, wanted
    for i in range(n):
        wanted = lengths[i] << 32
        block = _block_not_below(packs, wanted)
        if patches == NULL or patches[i] == 0:
            if block < packs.num_blocks:
                at = _first_not_below(packs.blocks[block].entries, packs.blocks[block].count, wanted)
        else:
            block = _with_room_for(packs, block, wanted, patches[i], &at)
        if block < packs.num_blocks:
            entry = packs.blocks[block].entries[at]
            _remove(packs, block, at)
        else:
            entry = capacity << 32 | num_packs
            if patches != NULL:
                patch_room[num_packs] = patch_capacity
            num_packs += 1
        pack[i] = entry & _NUMBER
        if patches != NULL:
            patch_room[entry & _NUMBER] -= patches[i]
        entry -= wanted
        if entry >> 32:
            _insert(packs, entry)


cdef Py_ssize_t _first_not_below(const int64_t *values, Py_ssize_t count, int64_t wanted) noexcept nogil:
    cdef Py_ssize_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


cdef Py_ssize_t _block_not_below(const OpenPacks *packs, int64_t wanted) noexcept nogil:
    """The first block that has an entry not below ``wanted``; the number of blocks if there is none."""
    cdef Py_ssize_t low = 0, high = packs.num_blocks, middle
    while low < high:
        middle = (low + high) // 2
        if packs.blocks[middle].last < wanted:
            low = middle + 1
        else:
            high = middle
    return low


cdef Py_ssize_t _with_room_for(
    const OpenPacks *packs, Py_ssize_t block, int64_t wanted, int64_t patches, Py_ssize_t *at
) noexcept nogil:
    """From ``block`` on, the first block with an entry not below ``wanted`` whose pack has room for the patches too."""
    cdef Py_ssize_t i
    cdef const Block *one
    while block < packs.num_blocks:
        one = &packs.blocks[block]
        if one.most >= patches:
            for i in range(one.count):
                if one.entries[i] >= wanted and packs.patch_room[one.entries[i] & _NUMBER] >= patches:
                    at[0] = i
                    return block
        block += 1
    return block


cdef void _remove(OpenPacks *packs, Py_ssize_t block, Py_ssize_t at) noexcept nogil:
    cdef Block *one = &packs.blocks[block]
    one.count -= 1
    memmove(one.entries + at, one.entries + at + 1, (one.count - at) * sizeof(int64_t))
    if one.count == 0:
        packs.spare[packs.num_spare] = one.entries
        packs.num_spare += 1
        packs.num_blocks -= 1
        memmove(one, one + 1, (packs.num_blocks - block) * sizeof(Block))
    else:
        _describe(packs, one)


cdef void _insert(OpenPacks *packs, int64_t entry) noexcept nogil:
    cdef Py_ssize_t block = _block_not_below(packs, entry), at
    cdef Block *one
    if block == packs.num_blocks:  # larger than all: at the end of the last, if there is one
        if block:
            block -= 1
        else:
            _open_block(packs, 0)
    one = &packs.blocks[block]
    if one.count == _ENTRIES:
        _open_block(packs, block + 1)
        one = &packs.blocks[block]
        memmove(
            one[1].entries, one.entries + _ENTRIES // 2, (_ENTRIES - _ENTRIES // 2) * sizeof(int64_t)
        )
        one.count = _ENTRIES // 2
        one[1].count = _ENTRIES - _ENTRIES // 2
        _describe(packs, one)
        _describe(packs, one + 1)
        if entry > one.last:
            one += 1
    at = _first_not_below(one.entries, one.count, entry)
    memmove(one.entries + at + 1, one.entries + at, (one.count - at) * sizeof(int64_t))
    one.entries[at] = entry
    one.count += 1
    one.last = one.entries[one.count - 1]
    if packs.patch_room != NULL:
        one.most = max(one.most, packs.patch_room[entry & _NUMBER])


cdef void _open_block(OpenPacks *packs, Py_ssize_t block) noexcept nogil:
    memmove(packs.blocks + block + 1, packs.blocks + block, (packs.num_blocks - block) * sizeof(Block))
    packs.num_blocks += 1
    if packs.num_spare:
        packs.num_spare -= 1
        packs.blocks[block].entries = packs.spare[packs.num_spare]
    else:
        packs.blocks[block].entries = packs.memory + packs.num_made * _ENTRIES
        packs.num_made += 1
    packs.blocks[block].count = 0
    packs.blocks[block].most = -1


cdef void _describe(const OpenPacks *packs, Block *one) noexcept nogil:
    cdef Py_ssize_t i
    one.last = one.entries[one.count - 1]
    if packs.patch_room != NULL:
        one.most = -1
        for i in range(one.count):
            one.most = max(one.most, packs.patch_room[one.entries[i] & _NUMBER])


def first_fit(
    const int64_t[::1] lengths not None,
    const uint8_t[::1] cuttable not None,
    int64_t[::1] room not None,
    int64_t[::1] piece not None,
    int64_t[::1] pack not None,
    int64_t[::1] part not None,
):
    """The parts of the pieces; see `omniload.planner.packing.first_fit.first_fit_in_python`."""
    cdef Py_ssize_t n = lengths.shape[0], leaves = room.shape[0] // 2, num_parts = 0, i, node
    cdef int64_t left, wanted, placed
    assert cuttable.shape[0] == n and pack.shape[0] == piece.shape[0] and part.shape[0] == piece.shape[0]
    with nogil:
        for i in range(n):
            left = lengths[i]
            while left:
                wanted = 1 if cuttable[i] else left
                node = 1
                while node < leaves:
                    node *= 2
                    if room[node] < wanted:
                        node += 1
                placed = min(left, room[node])
                piece[num_parts] = i
                pack[num_parts] = node - leaves
                part[num_parts] = placed
                num_parts += 1
                left -= placed
                room[node] -= placed
                while node > 1:
                    node //= 2
                    room[node] = max(room[2 * node], room[2 * node + 1])
    return num_parts


def place(
    const int64_t[:, ::1] load not None,
    const int64_t[::1] cost not None,
    const int64_t[::1] cap not None,
    int64_t[:, ::1] packs not None,
    int64_t[::1] pack not None,
):
    """The pack of each document; see `omniload.planner.packing.workload.place`.

    Args:
        load: ``[k, n]``.
        cost: ``[n]``.
        cap: ``[k]``.
        packs: ``[packs, k + 2]`` of zeros; for the cost and the documents of each pack, and its loads.
        pack: ``[n]``, filled in.
    """
    cdef Py_ssize_t n = cost.shape[0], num_packs = packs.shape[0], num_loads = load.shape[0], i, j, number, best
    assert load.shape[1] == n and pack.shape[0] == n
    assert cap.shape[0] == num_loads and packs.shape[1] == num_loads + 2
    with nogil:
        for i in range(n):
            best = -1
            for number in range(num_packs):
                if best >= 0 and (
                    packs[number, 0] > packs[best, 0]
                    or (packs[number, 0] == packs[best, 0] and packs[number, 1] >= packs[best, 1])
                ):
                    continue
                for j in range(num_loads):
                    if packs[number, j + 2] + load[j, i] > cap[j]:
                        break
                else:
                    best = number
            pack[i] = best
            if best >= 0:
                packs[best, 0] += cost[i]
                packs[best, 1] += 1
                for j in range(num_loads):
                    packs[best, j + 2] += load[j, i]


def draw(
    int64_t[::1] deficits not None,
    const int64_t[::1] weights not None,
    const int64_t[::1] by_weight not None,
    more,
    int64_t[::1] taken not None,
    uint16_t[::1] drawn not None,
    bint by_samples,
    int64_t seq_len,
    int64_t tokens_wanted,
    int64_t pieces_wanted,
    int64_t[::1] emitted,
    const int64_t[::1] caps not None,
    int64_t total,
):
    """Draw samples until enough are there; see `omniload.planner.mix.Mixer.draw_ready`.

    Ends also before a draw that might not fit 64 bits, from a source that is spent, or for which there is no room.

    What a source is owed grows by its weight times what is drawn, so it is kept as a line over the total drawn, and
    only the line of the source drawn moves. Sources of like weight form a group, and a group is looked at only if its
    largest deficit, when last looked at, can have become the largest of all by the largest weight in it.

    Args:
        deficits: what each source is owed; changed.
        weights: of each, which add up to 2³².
        by_weight: the sources that have a weight, by falling weight.
        more: called with a source and the number of samples it gave since the last call, gives ``int64[n]`` tokens of
            its next samples; empty if it is spent.
        taken: for each source 0; becomes the number of samples it gave since the last call of ``more``.
        drawn: becomes the sources in the order drawn.
        by_samples: whether weights are shares of samples.
        seq_len: longest piece.
        tokens_wanted: stop when that many are drawn,
        pieces_wanted: or that many pieces.
        emitted: tokens of each source so far; changed. None if there are no caps.
        caps: most of all tokens that may be each one's, in parts of 2³².
        total: tokens of all sources so far.

    Returns:
        Draws, tokens and pieces.
    """
    cdef Py_ssize_t n = deficits.shape[0], i, group, best, source, num_drawn = 0
    cdef int64_t tokens = 0, pieces = 0, length, amount, largest, value, most
    cdef bint change
    cdef const int64_t[::1] of_source
    cdef list kept = [None] * n  # what the pointers point into
    cdef const int64_t **samples = <const int64_t **> malloc(max(n, 1) * sizeof(void *))
    cdef int64_t *counts = <int64_t *> calloc(max(n, 1), sizeof(int64_t))
    cdef Lines lines
    lines.count = by_weight.shape[0]
    lines.num_groups = (lines.count + _GROUP - 1) // _GROUP
    lines.base = <uint64_t *> malloc(max(lines.count, 1) * sizeof(uint64_t))
    lines.slope = <uint64_t *> calloc(max(lines.count, 1), sizeof(uint64_t))
    lines.is_out = <uint8_t *> calloc(max(lines.count, 1), sizeof(uint8_t))
    lines.by_index = <Py_ssize_t *> malloc(max(n, 1) * sizeof(Py_ssize_t))
    lines.bound = <int64_t *> malloc(max(lines.num_groups, 1) * sizeof(int64_t))
    lines.seen_at = <uint64_t *> malloc(max(lines.num_groups, 1) * sizeof(uint64_t))
    lines.steepest = <uint64_t *> malloc(max(lines.num_groups, 1) * sizeof(uint64_t))
    lines.at = 0
    try:
        if (
            samples == NULL
            or counts == NULL
            or lines.base == NULL
            or lines.slope == NULL
            or lines.is_out == NULL
            or lines.by_index == NULL
            or lines.bound == NULL
            or lines.seen_at == NULL
            or lines.steepest == NULL
        ):
            raise MemoryError
        for i in range(n):
            lines.by_index[i] = -1
        for i in range(lines.count):
            source = by_weight[i]
            lines.by_index[source] = i
            lines.base[i] = deficits[source]
            lines.is_out[i] = emitted is not None and _is_over(emitted[source], caps[source], total)
        _set_slopes(&lines, n, &weights[0] if n else NULL)
        while num_drawn < drawn.shape[0] and tokens < tokens_wanted and pieces < pieces_wanted:
            best = -1
            largest = 0
            for group in range(lines.num_groups):
                value = <int64_t> (
                    <uint64_t> lines.bound[group] + lines.steepest[group] * (lines.at - lines.seen_at[group])
                )
                if lines.bound[group] != _UNSEEN and best >= 0 and value < largest:
                    continue
                most = -_UNSEEN
                for i in range(group * _GROUP, min((group + 1) * _GROUP, lines.count)):
                    if lines.is_out[i]:
                        continue
                    value = <int64_t> (lines.base[i] + lines.slope[i] * lines.at)
                    most = max(most, value)
                    if best < 0 or value > largest or (value == largest and by_weight[i] < by_weight[best]):
                        best, largest = i, value
                lines.bound[group] = most
                lines.seen_at[group] = lines.at
            if best < 0:
                break
            source = by_weight[best]
            if taken[source] == counts[source]:
                of_source = kept[source] = more(source, taken[source])
                counts[source] = of_source.shape[0]
                taken[source] = 0
                if counts[source] == 0:
                    break
                samples[source] = &of_source[0]
            length = samples[source][taken[source]]
            amount = min(length, 1) if by_samples else length
            if amount > _MOST_TOKENS or largest > _MOST_DEFICIT or largest - (amount << 32) < -_MOST_DEFICIT:
                break
            lines.at += amount
            lines.base[best] -= <uint64_t> amount << 32
            taken[source] += 1
            tokens += length
            pieces += (length + seq_len - 1) // seq_len
            drawn[num_drawn] = source
            num_drawn += 1
            if emitted is not None:
                emitted[source] += length
                change = False
                for i in range(lines.count):
                    if lines.is_out[i] or i == best:
                        lines.is_out[i] = _is_over(emitted[by_weight[i]], caps[by_weight[i]], total + tokens)
                        change = change or lines.is_out[i] == (i == best)
                if change:
                    _set_slopes(&lines, n, &weights[0])
        for i in range(lines.count):
            deficits[by_weight[i]] = <int64_t> (lines.base[i] + lines.slope[i] * lines.at)
        return num_drawn, tokens, pieces
    finally:
        free(samples)
        free(counts)
        free(lines.base)
        free(lines.slope)
        free(lines.is_out)
        free(lines.by_index)
        free(lines.bound)
        free(lines.seen_at)
        free(lines.steepest)


cdef int64_t _MOST_TOKENS = 1 << 28
cdef int64_t _MOST_DEFICIT = <int64_t> 1 << 61
cdef int64_t _UNSEEN = 0x7FFFFFFFFFFFFFFF  # in place of the bound of a group


cdef struct Lines:
    # What is owed, base + slope * at: without sign, so that it may wrap on the way. By falling weight.
    uint64_t at  # drawn so far
    Py_ssize_t count
    uint64_t *base
    uint64_t *slope
    uint8_t *is_out  # over its cap
    Py_ssize_t *by_index  # of each source, its line, or -1
    Py_ssize_t num_groups
    int64_t *bound  # of each group, the largest that was owed
    uint64_t *seen_at  # when that was
    uint64_t *steepest  # its largest slope


cdef void _set_slopes(Lines *lines, Py_ssize_t n, const int64_t *weights) noexcept nogil:
    """Give the lines the weights of the sources that are not out, as `omniload.weights.renormalised` makes them."""
    cdef Py_ssize_t i, line
    cdef uint64_t total = 0, left = <uint64_t> 1 << 32, slope
    for i in range(n):
        line = lines.by_index[i]
        if line >= 0 and not lines.is_out[line]:
            total += weights[i]
    for i in range(n):
        line = lines.by_index[i]
        if line >= 0:
            slope = 0
            if not lines.is_out[line]:
                slope = weights[i] if total >> 32 else (<uint64_t> weights[i] << 32) // total
            left -= slope
            lines.base[line] += (lines.slope[line] - slope) * lines.at
            lines.slope[line] = slope
    for i in range(n):
        line = lines.by_index[i]
        if line >= 0 and lines.slope[line] and left:
            lines.base[line] -= lines.at
            lines.slope[line] += 1
            left -= 1
    for i in range(lines.num_groups):
        lines.bound[i] = _UNSEEN
        lines.seen_at[i] = lines.at
        lines.steepest[i] = 0
        for line in range(i * _GROUP, min((i + 1) * _GROUP, lines.count)):
            lines.steepest[i] = max(lines.steepest[i], lines.slope[line])


cdef bint _is_over(uint64_t emitted, uint64_t cap, uint64_t total) noexcept nogil:
    """Whether emitted * 2³² > cap * total, for cap up to 2³² and the others below 2⁶³; no product needs more than 64 bits."""
    if cap >> 32:
        return False
    return emitted > cap * (total >> 32) + (cap * (total & _NUMBER) >> 32)


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
    int64_t available  # tokens from there on: those of the piece, and the one after it where the sample goes on
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


cdef enum:
    # Elements made in the nearest cache, where loops are vectorised, and streamed from there. As a number in the steps of
    # loops below, since Cython wants to know their sign.
    _CHUNK = 256


cdef void _copy(
    const token_t *tokens, const Piece *piece, Out *out, int64_t start, int64_t count, bint shifted, int32_t number
) noexcept nogil:
    cdef int64_t first, size, following, j
    cdef const token_t *of_chunk
    cdef const uint8_t *mask
    cdef int64_t chunk[_CHUNK]
    for first in range(0, count, 256):
        size = min(_CHUNK, count - first)
        of_chunk = tokens + first
        for j in range(size):
            chunk[j] = of_chunk[j]
        omniload_stream(<char *> (out.input_ids + start + first), <const char *> chunk, size * 8)
        if out.wanted == NULL:
            continue
        following = size
        if shifted:  # the target of a token is the next one of its sample
            of_chunk += 1
            following = max(min(size, piece.available - 1 - first), 0)
        mask = NULL if piece.mask == NULL else piece.mask + (of_chunk - tokens)
        if mask == NULL:
            for j in range(following):
                chunk[j] = of_chunk[j]
        else:
            for j in range(following):
                chunk[j] = of_chunk[j] if mask[j] else -100
        for j in range(following, size):
            chunk[j] = -100
        if not shifted and first == 0:
            chunk[0] = -100
        omniload_stream(<char *> (out.wanted + start + first), <const char *> chunk, size * 8)
    _place(out, start, count, number)


cdef void _pad(Out *out, int64_t start, int64_t count) noexcept nogil:
    _repeat_64(out.input_ids + start, 0, count)
    if out.wanted != NULL:
        _repeat_64(out.wanted + start, -100, count)
    _place(out, start, count, 0)


cdef void _repeat_64(int64_t *to, int64_t value, int64_t count) noexcept nogil:
    cdef int64_t first, j
    cdef int64_t chunk[_CHUNK]
    for j in range(min(_CHUNK, count)):
        chunk[j] = value
    for first in range(0, count, 256):
        omniload_stream(<char *> (to + first), <const char *> chunk, min(_CHUNK, count - first) * 8)


cdef void _place(Out *out, int64_t start, int64_t count, int32_t number) noexcept nogil:
    cdef int64_t first, size, j
    cdef int64_t positions[_CHUNK]
    cdef int32_t segments[_CHUNK]
    if out.position_ids != NULL:
        for first in range(0, count, 256):
            size = min(_CHUNK, count - first)
            for j in range(size):
                positions[j] = first + j
            omniload_stream(
                <char *> (out.position_ids + start + first), <const char *> positions, size * 8
            )
    if out.segment_ids != NULL:
        for j in range(min(_CHUNK, count)):
            segments[j] = number
        for first in range(0, count, 256):
            size = min(_CHUNK, count - first)
            omniload_stream(<char *> (out.segment_ids + start + first), <const char *> segments, size * 4)


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
    list values not None,
    list masks not None,
    const int64_t[::1] arrays not None,
    const int64_t[::1] begins not None,
    const int64_t[::1] ends not None,
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
    cdef Py_ssize_t n = arrays.shape[0], num_arrays = len(values), num_views = 0, i
    cdef int64_t total = input_ids.shape[0]
    cdef Out out
    cdef Piece *piece
    out.input_ids = &input_ids[0]
    out.wanted = &wanted[0] if wanted is not None else NULL
    out.position_ids = &position_ids[0] if position_ids is not None else NULL
    out.segment_ids = &segment_ids[0] if segment_ids is not None else NULL
    cdef Py_buffer *views = <Py_buffer *> malloc(max(2 * num_arrays, 1) * sizeof(Py_buffer))
    cdef Piece *whole = <Piece *> calloc(max(num_arrays, 1), sizeof(Piece))
    cdef Piece *pieces = <Piece *> malloc(max(n, 1) * sizeof(Piece))
    try:
        if views == NULL or whole == NULL or pieces == NULL:
            raise MemoryError
        for i in range(num_arrays):
            PyObject_GetBuffer(values[i], &views[num_views], PyBUF_FORMAT)
            num_views += 1
            whole[i].tokens = views[num_views - 1].buf
            whole[i].kind = _kind(&views[num_views - 1])
            whole[i].available = views[num_views - 1].len // views[num_views - 1].itemsize
            if masks[i] is not None:
                PyObject_GetBuffer(masks[i], &views[num_views], PyBUF_SIMPLE)
                num_views += 1
                whole[i].mask = <const uint8_t *> views[num_views - 1].buf
                assert views[num_views - 1].len == whole[i].available
        for i in range(n):
            assert 0 <= arrays[i] < num_arrays
            piece = &whole[arrays[i]]
            assert 0 <= begins[i] and begins[i] + lengths[i] <= ends[i] <= piece.available and lengths[i] > 0
            assert 0 <= starts[i] and starts[i] + lengths[i] <= total
            pieces[i].tokens = <const char *> piece.tokens + begins[i] * abs(piece.kind)
            pieces[i].mask = NULL if piece.mask == NULL else piece.mask + begins[i]
            pieces[i].available = ends[i] - begins[i]
            pieces[i].kind = piece.kind
        with nogil:
            for i in range(n):
                if i + _AHEAD < n:
                    piece = &pieces[i + _AHEAD]
                    omniload_prefetch(
                        <const char *> piece.tokens, min(_AHEAD_BYTES, lengths[i + _AHEAD] * abs(piece.kind))
                    )
                _fill_one(&pieces[i], &out, starts[i], lengths[i], shifted, <int32_t> numbers[i])
            for i in range(padding_starts.shape[0]):
                _pad(&out, padding_starts[i], padding_lengths[i])
            OMNILOAD_STREAMED()
    finally:
        for i in range(num_views):
            PyBuffer_Release(&views[i])
        free(views)
        free(whole)
        free(pieces)


def join_parts(list values not None, const int64_t[:, ::1] places not None, joined not None):
    """Copy parts of arrays end to end; see `omniload.joining`. All are C-contiguous and of one item size.

    Args:
        values: the arrays.
        places: ``[3, n]``: the array that each part lies in, and its bounds there.
        joined: as long as the parts together; filled in.
    """
    cdef Py_ssize_t n = places.shape[1], num_arrays = len(values), num_views = 0, i
    cdef int64_t at = 0, length
    cdef Py_ssize_t item
    cdef char *to
    assert places.shape[0] == 3
    cdef Py_buffer *views = <Py_buffer *> malloc((num_arrays + 1) * sizeof(Py_buffer))
    try:
        if views == NULL:
            raise MemoryError
        PyObject_GetBuffer(joined, &views[0], PyBUF_FORMAT | PyBUF_WRITABLE)
        num_views = 1
        item = views[0].itemsize
        for i in range(num_arrays):
            PyObject_GetBuffer(values[i], &views[i + 1], PyBUF_FORMAT)
            num_views += 1
            assert views[i + 1].itemsize == item
        for i in range(n):
            assert 0 <= places[0, i] < num_arrays
            assert 0 <= places[1, i] <= places[2, i] <= views[places[0, i] + 1].len // item
            at += places[2, i] - places[1, i]
        assert at * item == views[0].len
        to = <char *> views[0].buf
        with nogil:
            for i in range(n):
                if i + _AHEAD < n:
                    omniload_prefetch(
                        <const char *> views[places[0, i + _AHEAD] + 1].buf + places[1, i + _AHEAD] * item,
                        min(_AHEAD_BYTES, (places[2, i + _AHEAD] - places[1, i + _AHEAD]) * item),
                    )
                length = (places[2, i] - places[1, i]) * item
                memcpy(to, <const char *> views[places[0, i] + 1].buf + places[1, i] * item, length)
                to += length
    finally:
        for i in range(num_views):
            PyBuffer_Release(&views[i])
        free(views)


def join_lists(
    const uint8_t[::1] data not None,
    const int64_t[::1] bounds not None,
    const int64_t[::1] fixed not None,
    Py_ssize_t column,
    int64_t item_bytes,
    bint has_shape,
    int64_t num_items,
    int64_t[::1] ends not None,
    uint8_t[::1] bad not None,
    uint8_t[::1] joined not None,
):
    """Copy the items of one column of MDS samples end to end; see `omniload.sources.mds_lists`.

    Args:
        data: bytes of the samples.
        bounds: ``[n + 1]`` of each sample in them, ascending.
        fixed: ``[columns]`` bytes of the values of each; 0 if each has its own.
        column: which.
        item_bytes: of each item.
        has_shape: whether each value begins with the number of its dimensions and their sizes.
        num_items: of each value without a shape; -1 if they differ.
        ends: ``[n]``: becomes where the items of each sample end in ``joined``.
        bad: ``[n]``: becomes whether a sample has no such list; it has no items then.
        joined: as long as the samples together; its beginning is filled in.
    """
    cdef Py_ssize_t n = bounds.shape[0] - 1, num_columns = fixed.shape[0], num_stored = 0, i, j
    cdef int64_t total = 0, at, stored, start, size, width, count
    cdef uint32_t own
    assert n >= 0 and 0 <= column < num_columns and item_bytes > 0
    assert ends.shape[0] == n and bad.shape[0] == n
    assert 0 <= bounds[0] and bounds[n] <= data.shape[0] and bounds[n] - bounds[0] <= joined.shape[0]
    for i in range(n):
        assert bounds[i] <= bounds[i + 1]
    for j in range(num_columns):
        assert 0 <= fixed[j] <= <int64_t> 1 << 40
        num_stored += fixed[j] == 0
    with nogil:
        for i in range(n):
            bad[i] = True
            ends[i] = total
            stored = bounds[i]
            at = stored + 4 * num_stored
            if at > bounds[i + 1]:
                continue
            start = size = 0
            for j in range(num_columns):
                if j == column:
                    start = at
                if fixed[j]:
                    at += fixed[j]
                else:
                    memcpy(&own, &data[stored], 4)
                    stored += 4
                    at += own
                if j == column:
                    size = at - start
                if at > bounds[i + 1]:  # so that no sum wraps round
                    break
            if at != bounds[i + 1]:
                continue
            if has_shape:
                if size == 0:
                    continue
                width = 1 << (data[start] & 3)
                size -= 1 + width
                if data[start] >> 2 != 1 or size < 0 or size % item_bytes:
                    continue
                count = 0
                memcpy(&count, &data[start + 1], width)
                if count != size // item_bytes:
                    continue
                start += 1 + width
            elif size % item_bytes or (num_items >= 0 and size // item_bytes != num_items):
                continue
            if size:
                memcpy(&joined[total], &data[start], size)
            total += size
            ends[i] = total
            bad[i] = False
