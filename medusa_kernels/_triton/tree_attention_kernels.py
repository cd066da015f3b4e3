"""The kernels of tree attention: attend to shares of the keys, and merge the shares.

The query heads of one KV head are packed into rows, so that keys and values are read once for all of them: row r is
node `r // G` of head `r % G` (G query heads per KV head). The keys of a batch row are divided into units: whole blocks
of the prefix, which need no mask, then blocks that do, namely the ragged end of the prefix and the tree. The blocks of
the tree start exactly at row `cache_lens[b]`, so that each is within one ancestor word. Units go in order to at most
`splits` programs. Each stores its sum of values, its largest score and its sum of exponentials; a single program stores
the result. A second kernel merges the shares. The kernels do not know what device they run on, nor how many programs
fill it.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _shares(
    length, nodes, window, splits,
    SINGLE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, TREE_BLOCK: tl.constexpr, MIN_UNITS: tl.constexpr,
):  # fmt: skip
    """Divide the keys of a batch row into units: the first visible block, whole blocks, ragged ones, units, programs.

    A single node has no tree: it is one more key of the prefix.
    """
    prefix = length + 1 if SINGLE else length
    # The root, which has the lowest position, sees the lowest keys.
    first = tl.maximum(length + 1 - window, 0) // BLOCK_N if HAS_WINDOW else 0
    whole = prefix // BLOCK_N - first
    ragged = (prefix % BLOCK_N + TREE_BLOCK - 1) // TREE_BLOCK
    units = whole + ragged
    if not SINGLE:
        units += (nodes + TREE_BLOCK - 1) // TREE_BLOCK
    used = tl.minimum(splits, tl.maximum(units // MIN_UNITS, 1))
    return first, whole, ragged, units, used


@triton.jit
def _depths(ancestors, stride_ancestors_n, stride_ancestors_w, o_node, end, nodes):
    """Return the depth of nodes below `end`: the size of the ancestor set less one, bits counted by halving."""
    b_count = tl.zeros_like(o_node).to(tl.int64)
    # As many words as there can be: an inner loop would keep a loop over blocks from being pipelined.
    for word in tl.static_range(4):
        m_x = o_node < tl.where(word * 64 < nodes, end, 0)
        # the shape of o_node
        b_x = tl.load(ancestors + o_node * stride_ancestors_n + word * stride_ancestors_w, mask=m_x, other=0)
        b_x = b_x - ((b_x >> 1) & 0x5555555555555555)
        b_x = (b_x & 0x3333333333333333) + ((b_x >> 2) & 0x3333333333333333)
        b_x = (b_x + (b_x >> 4)) & 0x0F0F0F0F0F0F0F0F
        b_x = b_x + (b_x >> 8)
        b_x = b_x + (b_x >> 16)
        b_count += (b_x + (b_x >> 32)) & 0x7F
    return b_count.to(tl.int32) - 1


@triton.jit
def _power(b_x, EXACT: tl.constexpr):
    """Return 2^x for x <= 0, on request exact to fp32 rounding, where the hardware is off by a few units.

    The coefficients are the Taylor series' about 0, good to 1e-9 within half a unit of it. -inf gives 0.
    """
    if EXACT:
        b_whole = tl.floor(b_x + 0.5)
        b_f = b_x - b_whole
        b_value = 1.5252733804059841e-05
        b_value = b_value * b_f + 1.5403530393381608e-04
        b_value = b_value * b_f + 1.3333558146428443e-03
        b_value = b_value * b_f + 9.6181291076284772e-03
        b_value = b_value * b_f + 5.5504108664821580e-02
        b_value = b_value * b_f + 2.4022650695910071e-01
        b_value = b_value * b_f + 6.9314718055994531e-01
        b_value = b_value * b_f + 1.0
        # The bits of the exponent are the power of two. Below the normal numbers the result is 0.
        m_tiny = b_x < -126.0
        b_bits = (tl.where(m_tiny, 0.0, b_whole).to(tl.int32) + 127) << 23
        b_power = tl.where(m_tiny, 0.0, b_value * b_bits.to(tl.float32, bitcast=True))
    else:
        b_power = tl.exp2(b_x)
    return b_power


@triton.jit
def tanh(b_x):
    """Return the tanh to fp32 rounding: an odd polynomial for small x, where 1 - 2 / (exp(2x) + 1) would cancel.

    The coefficients interpolate (tanh(x) / x - 1) / x^2 at the Chebyshev points of x^2 in [0, 0.36]. NaN gives NaN.
    """
    b_t = b_x * b_x
    b_small = 0.002373515162616968
    b_small = b_small * b_t - 0.008412553928792477
    b_small = b_small * b_t + 0.021789107471704483
    b_small = b_small * b_t - 0.053961653262376785
    b_small = b_small * b_t + 0.13333313167095184
    b_small = b_small * b_t - 0.3333333432674408
    b_magnitude = tl.abs(b_x)
    b_large = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(b_magnitude, 20.0)) + 1.0)
    return tl.where(b_magnitude >= 0.6, tl.where(b_x < 0, -b_large, b_large), b_x + b_x * (b_t * b_small))


@triton.jit
def _row_scales(base, first, stride, o_n, m_n, D: tl.constexpr, EIGHT_BITS: tl.constexpr, MASKED: tl.constexpr):
    """Return the scales of cache rows `first + o_n` in 8 bits, fp32 [n], which lie after the rows' D numbers."""
    if EIGHT_BITS:
        p_scale = (base + first.to(tl.int64) * stride + o_n * stride + D).to(tl.pointer_type(tl.float32), bitcast=True)
        # [n]
        b_scale = tl.load(p_scale, mask=m_n, other=0.0) if MASKED else tl.load(p_scale)
    else:
        b_scale = 1.0
    return b_scale


@triton.jit
def _scores(
    b_q, b_k, b_k_scale, scale, softcap, NEGATIVE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EIGHT_BITS: tl.constexpr
):  # fmt: skip
    """Return softcap tanh(q k^T scale / softcap), or without a cap +-q k^T, whose scale comes later: fp32 [M, n]."""
    if EIGHT_BITS:
        b_k = b_k.to(tl.float32).to(b_q.dtype)
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if EIGHT_BITS:
        b_scores = b_scores * b_k_scale[None, :]
    if NEGATIVE:
        b_scores = -b_scores
    if HAS_SOFTCAP:
        b_scores = softcap * tanh(b_scores * (scale / softcap))
    return b_scores


@triton.jit
def _softmax(b_scores, b_high, factor, EXACT: tl.constexpr, MASKED: tl.constexpr):
    """Return the probabilities p = 2^((score - new high) factor) of one block, their sums, shrink and the new high.

    high [M] is the largest score before this block, new high [M] the largest with it. p is [M, n]; shrink [M] is
    2^((high - new high) factor), by which earlier sums are multiplied. All fp32.
    """
    b_new_high = tl.maximum(b_high, tl.max(b_scores, 1))
    # Until a row has seen a key its largest score is -inf, and -inf less -inf would be NaN.
    b_base = tl.where(b_new_high == float("-inf"), 0.0, b_new_high) if MASKED else b_new_high
    if EXACT:
        b_p = _power((b_scores - b_base[:, None]) * factor, True)
    else:
        # One operation instead of two; its rounding is far below that of the probabilities to 16 bits.
        b_p = _power(b_scores * factor - (b_base * factor)[:, None], False)
    return b_p, tl.sum(b_p, 1), _power((b_high - b_base) * factor, EXACT), b_new_high


@triton.jit
def _product(b_p, b_v, b_acc, b_shrink):
    """Return acc shrink + p v, fp32 [M, D]; the probabilities p are rounded to the dtype of v."""
    return tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")


@triton.jit
def _accumulate(
    b_scores, b_v, b_v_scale, b_acc, b_high, b_sum, factor,
    DTYPE: tl.constexpr, MASKED: tl.constexpr, EIGHT_BITS: tl.constexpr,
):  # fmt: skip
    """Add one block to the running softmax: acc = sum p v [M, D], the largest score and sum p [M]; see `_softmax`.

    Values in 8 bits are first multiplied by their scales: a probability times a scale may be too small for float16.
    """
    b_p, b_part, b_shrink, b_high = _softmax(b_scores, b_high, factor, tl.float32 == DTYPE, MASKED)
    if EIGHT_BITS:
        b_v = (b_v.to(tl.float32) * b_v_scale[:, None]).to(DTYPE)
    return _product(b_p, b_v, b_acc, b_shrink), b_high, b_sum * b_shrink + b_part


@triton.jit(
    do_not_specialize=[
        "nodes", "groups", "splits", "window", "stride_ancestors_b", "stride_ancestors_n", "stride_ancestors_w"
    ]
)  # fmt: skip
def attend_kernel(
    q, k_cache, v_cache, cache_lens, ancestors, out, parts, stats, slots, scale, softcap,
    nodes, groups, splits, window,
    stride_q_b, stride_q_n, stride_q_h, stride_q_d, stride_k_b, stride_k_h, stride_k_s, stride_k_d,
    stride_v_b, stride_v_h, stride_v_s, stride_v_d, stride_ancestors_b, stride_ancestors_n, stride_ancestors_w,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TREE_BLOCK: tl.constexpr,
    MIN_UNITS: tl.constexpr, SINGLE: tl.constexpr, HAS_WINDOW: tl.constexpr, DEEP: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, NEGATIVE: tl.constexpr, OVERLAP: tl.constexpr, STAGES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, EIGHT_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute softmax(q k^T scale) v for one tile of rows of one KV head and one share of its keys.

    q [B, N, Hkv * G, D], k_cache and v_cache [C, Hkv, S, D], cache_lens [B], ancestors [B or 1, N, W]. HAS_SLOTS:
    slots [B] name the sequence of the caches that belongs to each row, otherwise row b has sequence b. A single share
    gives out [B, N, Hkv * G, D], rounded once; otherwise parts [B, Hkv, splits, N * G, D] get the sums of values and
    stats [B, Hkv, splits, N * G, 2] the largest score and the sum of exponentials, all fp32. Scores are fp32;
    probabilities are rounded to the dtype of v, of q with EIGHT_BITS. NEGATIVE: scale is negative, its absolute value
    is passed. DEEP: a path of the tree can be longer than the window. OVERLAP: products run during exponentials, 16-bit
    only. EIGHT_BITS: the caches [C, Hkv, S, D + 4] are int8, see `medusa_kernels.cache_rows`.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    rows = nodes * groups
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    # The tiles of one share run next to each other: the first loads its keys into the L2 cache for the others.
    i_split = tl.program_id(0) // tiles
    i_tile = tl.program_id(0) % tiles
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    length = tl.load(cache_lens + i_b)
    first, whole, ragged, units, used = _shares(
        length, nodes, window, splits, SINGLE, HAS_WINDOW, BLOCK_N, TREE_BLOCK, MIN_UNITS
    )
    if i_split >= used:
        return
    begin = i_split * units // used
    end = (i_split + 1) * units // used

    o_r = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < rows
    m_d = o_d < D
    o_node = o_r // groups
    o_head = i_h * groups + o_r % groups
    m_q = m_r[:, None] & m_d[None, :]
    p_q = (
        q
        + i_b.to(tl.int64) * stride_q_b
        + (o_node.to(tl.int64) * stride_q_n + o_head.to(tl.int64) * stride_q_h)[:, None]
        + o_d[None, :] * stride_q_d
    )
    # [BLOCK_M, BLOCK_D]
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    DTYPE: tl.constexpr = b_q.dtype
    if EIGHT_BITS:
        # What the compiler cannot see otherwise, as only multiples of 16 are in an argument's type.
        stride_k_s, stride_v_s = tl.multiple_of(stride_k_s, 4), tl.multiple_of(stride_v_s, 4)
        stride_k_h, stride_v_h = tl.multiple_of(stride_k_h, 4), tl.multiple_of(stride_v_h, 4)
        stride_k_b, stride_v_b = tl.multiple_of(stride_k_b, 4), tl.multiple_of(stride_v_b, 4)
    factor = LOG2E if HAS_SOFTCAP else scale * LOG2E
    slot = (tl.load(slots + i_b) if HAS_SLOTS else i_b).to(tl.int64)
    k_base = k_cache + slot * stride_k_b + i_h.to(tl.int64) * stride_k_h
    v_base = v_cache + slot * stride_v_b + i_h.to(tl.int64) * stride_v_h
    ancestors += i_b.to(tl.int64) * stride_ancestors_b
    if HAS_WINDOW:
        b_position = tl.zeros_like(o_node) + length
        if not SINGLE:
            b_position += _depths(ancestors, stride_ancestors_n, stride_ancestors_w, o_node, nodes, nodes)

    b_high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Whole blocks of the prefix: every node sees every key within the window.
    o_n = tl.arange(0, BLOCK_N)
    o_k = o_n[:, None] * stride_k_s + o_d[None, :] * stride_k_d
    o_v = o_n[:, None] * stride_v_s + o_d[None, :] * stride_v_d
    start, stop = tl.minimum(begin, whole), tl.minimum(end, whole)
    if OVERLAP:
        # The product with the values of a block runs during the exponentials of the next block. So there is one
        # iteration more than blocks: the first product is of zeros, and the last exponentials are not used. The last
        # iteration reads the last block again, so it does not change `b_high`. Keeping the value of the iteration
        # before (`b_high = b_next`) would not work: if both begin as one value, Triton takes `b_high` for unchanged and
        # does not carry it, and if not, the carried value is two iterations old and Triton does not pipeline the loop.
        b_p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_part, b_shrink = b_sum, b_sum
        for unit in tl.range(start, tl.where(start < stop, stop + 1, start), num_stages=STAGES):
            row = (first + tl.minimum(unit, stop - 1)) * BLOCK_N
            row_v = (first + tl.maximum(unit - 1, start)) * BLOCK_N
            p_k = k_base + row.to(tl.int64) * stride_k_s + o_k
            p_v = v_base + row_v.to(tl.int64) * stride_v_s + o_v
            # [BLOCK_N, BLOCK_D]
            b_k = tl.load(p_k) if D == BLOCK_D else tl.load(p_k, mask=m_d[None, :], other=0.0)
            b_scores = _scores(b_q, b_k, 1.0, scale, softcap, NEGATIVE, HAS_SOFTCAP, False)
            # [BLOCK_N, BLOCK_D]
            b_v = tl.load(p_v) if D == BLOCK_D else tl.load(p_v, mask=m_d[None, :], other=0.0)
            b_acc = _product(b_p, b_v, b_acc, b_shrink)
            if HAS_WINDOW:
                b_scores = tl.where(b_position[:, None] - (row + o_n)[None, :] < window, b_scores, float("-inf"))
            b_sum = b_sum * b_shrink + b_part
            b_p, b_part, b_shrink, b_high = _softmax(b_scores, b_high, factor, b_v.dtype == tl.float32, HAS_WINDOW)
    else:
        for unit in tl.range(start, stop, num_stages=STAGES):
            row = (first + unit) * BLOCK_N
            p_k = k_base + row.to(tl.int64) * stride_k_s + o_k
            p_v = v_base + row.to(tl.int64) * stride_v_s + o_v
            # [BLOCK_N, BLOCK_D]
            b_k = tl.load(p_k) if D == BLOCK_D else tl.load(p_k, mask=m_d[None, :], other=0.0)
            b_k_scale = _row_scales(k_base, row, stride_k_s, o_n, None, D, EIGHT_BITS, False)
            b_scores = _scores(b_q, b_k, b_k_scale, scale, softcap, NEGATIVE, HAS_SOFTCAP, EIGHT_BITS)
            if HAS_WINDOW:
                b_scores = tl.where(b_position[:, None] - (row + o_n)[None, :] < window, b_scores, float("-inf"))
            # [BLOCK_N, BLOCK_D]
            b_v = tl.load(p_v) if D == BLOCK_D else tl.load(p_v, mask=m_d[None, :], other=0.0)
            b_v_scale = _row_scales(v_base, row, stride_v_s, o_n, None, D, EIGHT_BITS, False)
            b_acc, b_high, b_sum = _accumulate(
                b_scores, b_v, b_v_scale, b_acc, b_high, b_sum, factor, DTYPE, HAS_WINDOW, EIGHT_BITS
            )

    # The ragged end of the prefix, then the tree.
    o_t = tl.arange(0, TREE_BLOCK)
    o_k = o_t[:, None] * stride_k_s + o_d[None, :] * stride_k_d
    o_v = o_t[:, None] * stride_v_s + o_d[None, :] * stride_v_d
    for unit in tl.range(tl.maximum(begin, whole) - whole, tl.maximum(end, whole) - whole, num_stages=STAGES):
        in_tree = unit >= ragged
        first_node = tl.where(in_tree, (unit - ragged) * TREE_BLOCK, 0)
        row = tl.where(in_tree, length + first_node, (first + whole) * BLOCK_N + unit * TREE_BLOCK)
        prefix = length + 1 if SINGLE else length
        count = tl.where(in_tree, length + nodes, prefix) - row
        m_t = o_t < count
        m_kv = m_t[:, None] & m_d[None, :]
        # [TREE_BLOCK, BLOCK_D]; rows past the valid ones may hold NaN, which a probability of zero would not remove.
        b_k = tl.load(k_base + row.to(tl.int64) * stride_k_s + o_k, mask=m_kv, other=0.0)
        b_k_scale = _row_scales(k_base, row, stride_k_s, o_t, m_t, D, EIGHT_BITS, True)
        b_scores = _scores(b_q, b_k, b_k_scale, scale, softcap, NEGATIVE, HAS_SOFTCAP, EIGHT_BITS)
        # [BLOCK_M, TREE_BLOCK]
        if SINGLE:
            m_visible = m_t[None, :]
        else:
            p_word = ancestors + o_node * stride_ancestors_n + first_node // 64 * stride_ancestors_w
            # [BLOCK_M]; every node sees the prefix: all bits set.
            b_word = tl.load(p_word, mask=o_r < tl.where(in_tree, rows, 0), other=-1) >> (first_node % 64)
            b_word &= tl.where(count < 64, (1 << tl.minimum(count, 63).to(tl.int64)) - 1, -1)
            b_low, b_upper = b_word.to(tl.int32), (b_word >> 32).to(tl.int32)
            b_half = tl.where((o_t < 32)[None, :], b_low[:, None], b_upper[:, None])
            m_visible = (b_half & (1 << (o_t % 32))[None, :]) != 0
        if HAS_WINDOW:
            b_key_position = row + o_t
            if DEEP:
                tree_end = tl.where(in_tree, nodes, 0)
                b_depth = _depths(ancestors, stride_ancestors_n, stride_ancestors_w, first_node + o_t, tree_end, nodes)
                b_key_position = tl.where(in_tree, length + b_depth, b_key_position)
            m_visible = m_visible & (b_position[:, None] - b_key_position[None, :] < window)
        b_scores = tl.where(m_visible, b_scores, float("-inf"))
        # [TREE_BLOCK, BLOCK_D]
        b_v = tl.load(v_base + row.to(tl.int64) * stride_v_s + o_v, mask=m_kv, other=0.0)
        b_v_scale = _row_scales(v_base, row, stride_v_s, o_t, m_t, D, EIGHT_BITS, True)
        b_acc, b_high, b_sum = _accumulate(
            b_scores, b_v, b_v_scale, b_acc, b_high, b_sum, factor, DTYPE, True, EIGHT_BITS
        )

    if PDL:
        # Programs of the next kernel would take the room of those that have not started.
        tl.extra.cuda.gdc_launch_dependents()
    # Compute the indices again from a zero that the compiler cannot see, or it would keep those of q over both loops.
    zero = (tl.max(b_sum, 0) < 0).to(tl.int32)
    o_r = (i_tile + zero) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_r = o_r < rows
    o_node = o_r // groups
    o_head = i_h * groups + o_r % groups
    m_out = m_r[:, None] & m_d[None, :]
    i_out = i_b.to(tl.int64) * tl.num_programs(1) + i_h
    if used == 1:
        o_out = (i_b.to(tl.int64) * nodes + o_node) * (tl.num_programs(1) * groups) + o_head
        b_out = tl.div_rn(b_acc, tl.zeros_like(b_acc) + b_sum[:, None]).to(out.dtype.element_ty)
        tl.store(out + o_out[:, None] * D + o_d[None, :], b_out, mask=m_out)
    else:
        # A row that saw no key of this share has a sum of 0 and a largest score of -inf.
        o_m = tl.arange(0, BLOCK_M)
        first_part = (i_out * splits + i_split) * rows + i_tile * BLOCK_M
        tl.store(parts + first_part * D + o_m[:, None] * D + o_d[None, :], b_acc, mask=m_out)
        tl.store(stats + first_part * 2 + o_m * 2, b_high, mask=m_r)
        tl.store(stats + first_part * 2 + o_m * 2 + 1, b_sum, mask=m_r)


@triton.jit(do_not_specialize=["nodes", "groups", "splits", "window"])
def merge_kernel(
    parts, stats, cache_lens, out, scale, nodes, groups, splits, window,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TREE_BLOCK: tl.constexpr, MIN_UNITS: tl.constexpr,
    SINGLE: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute sum(w part) / sum(w sum) with w = e^((high - max high) scale) over the shares of one row.

    scale is 1 with a softcap. Times log2(e) it is rounded here as in `attend_kernel`, so that the results are the same.
    parts [B, Hkv, splits, N * G, D] and stats [B, Hkv, splits, N * G, 2] as `attend_kernel` stores them; shares that no
    program stored are not read. out [B, N, Hkv * G, D] is rounded once from fp32.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_h, i_b = tl.program_id(1), tl.program_id(2)
    length = tl.load(cache_lens + i_b)
    _, _, _, _, used = _shares(length, nodes, window, splits, SINGLE, HAS_WINDOW, BLOCK_N, TREE_BLOCK, MIN_UNITS)
    if used <= 1:
        return
    EXACT: tl.constexpr = out.dtype.element_ty == tl.float32
    factor, rows, row = scale * LOG2E, nodes * groups, tl.program_id(0)
    first_part = (i_b.to(tl.int64) * tl.num_programs(1) + i_h) * splits * rows + row
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    high, total = float("-inf"), 0.0
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, used, CHUNK):
        # [CHUNK], [CHUNK, BLOCK_D]: all loads of a chunk are under way at once.
        o_s = start + tl.arange(0, CHUNK)
        m_s = o_s < used
        o_part = first_part + o_s * rows
        b_highs = tl.load(stats + o_part * 2, mask=m_s, other=float("-inf"))
        b_sums = tl.load(stats + o_part * 2 + 1, mask=m_s, other=0.0)
        b_parts = tl.load(parts + o_part[:, None] * D + o_d[None, :], mask=m_s[:, None] & m_d[None, :], other=0.0)
        new_high = tl.maximum(high, tl.max(b_highs, 0))
        base = tl.where(new_high == float("-inf"), 0.0, new_high)
        shrink, b_weights = _power((high - base) * factor, EXACT), _power((b_highs - base) * factor, EXACT)
        total = total * shrink + tl.sum(b_weights * b_sums, 0)
        b_acc = b_acc * shrink + tl.sum(b_weights[:, None] * b_parts, 0)
        high = new_high
    o_out = (i_b.to(tl.int64) * nodes + row // groups) * (tl.num_programs(1) * groups) + i_h * groups + row % groups
    b_out = tl.div_rn(b_acc, tl.zeros_like(b_acc) + total)
    tl.store(out + o_out * D + o_d, b_out.to(out.dtype.element_ty), mask=m_d)
