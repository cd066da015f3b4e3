"""The kernels of tree attention: shares of the keys attended to by packed rows, and the merge of the shares.

The query heads of one KV head are packed into rows, row r being node `r // G` of head `r % G` (G heads a KV head), so
that keys and values are read for all of them at once. The keys of a batch row are cut into units: whole blocks of the
prefix, which carry no mask, then blocks that do, namely the ragged end of the prefix and the tree, whose blocks start
exactly at row `cache_lens[b]` so that each lies in one ancestor word. The units are dealt in order to at most `splits`
programs. Each writes its sum of values with the largest score and the sum of exponentials that it is relative to;
where there is one only, it writes the result. The kernels do not know what device they run on, nor how many programs
fill it.

Prefixes of names: `o_` offsets, `m_` masks, `p_` pointers.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _shares(
    length,
    nodes,
    window,
    splits,
    SINGLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE_BLOCK: tl.constexpr,
    MIN_UNITS: tl.constexpr,
):
    """Cut the keys of a batch row into units: the first block seen, whole blocks, ragged ones, all units, programs.

    A single node sees itself like one more key of the prefix, and has no tree.
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
def _depths(anc_ptr, stride_an, stride_aw, node, end, nodes):
    """Size of each node's ancestor set less one, node being < end where it is one: bits counted by halving."""
    count = tl.zeros_like(node).to(tl.int64)
    # As many words as there can be: with a loop in it, a loop over blocks would not be pipelined.
    for word in tl.static_range(4):
        m_x = node < tl.where(word * 64 < nodes, end, 0)
        x = tl.load(anc_ptr + node * stride_an + word * stride_aw, mask=m_x, other=0)
        x = x - ((x >> 1) & 0x5555555555555555)
        x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
        x = x + (x >> 8)
        x = x + (x >> 16)
        count += (x + (x >> 32)) & 0x7F
    return count.to(tl.int32) - 1


@triton.jit
def _power(x, EXACT: tl.constexpr):
    """Two to the power of x <= 0; exact to fp32 rounding on request, where the hardware's own is off by some units.

    The coefficients are the Taylor series' about 0, good to 1e-9 within half a unit of it. -inf gives 0.
    """
    if EXACT:
        whole = tl.floor(x + 0.5)
        f = x - whole
        value = 1.5252733804059841e-05
        value = value * f + 1.5403530393381608e-04
        value = value * f + 1.3333558146428443e-03
        value = value * f + 9.6181291076284772e-03
        value = value * f + 5.5504108664821580e-02
        value = value * f + 2.4022650695910071e-01
        value = value * f + 6.9314718055994531e-01
        value = value * f + 1.0
        # The power of two is made of its exponent's bits. Below the normal numbers there is only 0.
        tiny = x < -126.0
        bits = (tl.where(tiny, 0.0, whole).to(tl.int32) + 127) << 23
        power = tl.where(tiny, 0.0, value * bits.to(tl.float32, bitcast=True))
    else:
        power = tl.exp2(x)
    return power


@triton.jit
def _tanh(x):
    """Hyperbolic tangent to fp32 rounding: an odd polynomial where 1 - 2 / (exp(2x) + 1) would cancel.

    The coefficients interpolate (tanh(x) / x - 1) / x^2 at the Chebyshev points of x^2 in [0, 0.36].
    """
    t = x * x
    small = 0.002373515162616968
    small = small * t - 0.008412553928792477
    small = small * t + 0.021789107471704483
    small = small * t - 0.053961653262376785
    small = small * t + 0.13333313167095184
    small = small * t - 0.3333333432674408
    magnitude = tl.minimum(tl.abs(x), 20.0)
    large = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    return tl.where(magnitude < 0.6, x + x * (t * small), tl.where(x < 0, -large, large))


@triton.jit
def _scores(q, keys, scale, softcap, NEGATIVE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Scores of a tile, still without their scale's size; with a cap they are final."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if NEGATIVE:
        scores = -scores
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores * (scale / softcap))
    return scores


@triton.jit
def _accumulate(scores, values, acc, high, total, factor, MASKED: tl.constexpr):
    """Add one block to the running softmax: acc [M, D] and total [M], both relative to the largest score so far."""
    new_high = tl.maximum(high, tl.max(scores, 1))
    # Until a row has seen a key its largest score is -inf, and -inf less -inf would be NaN.
    base = tl.where(new_high == float("-inf"), 0.0, new_high) if MASKED else new_high
    if values.dtype == tl.float32:
        probs = _power((scores - base[:, None]) * factor, True)
    else:
        # One operation instead of two; its rounding is far below that of the probabilities to 16 bits.
        probs = _power(scores * factor - (base * factor)[:, None], False)
    shrink = _power((high - base) * factor, values.dtype == tl.float32)
    total = total * shrink + tl.sum(probs, 1)
    acc = tl.dot(probs.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, new_high, total


@triton.jit(do_not_specialize=["nodes", "groups", "splits", "window", "stride_ab", "stride_an", "stride_aw"])
def attend_kernel(
    q_ptr,  # [B, N, Hkv * G, D]
    k_ptr,  # [B, Hkv, S, D]
    v_ptr,
    lens_ptr,  # [B]
    anc_ptr,  # [B or 1, N, W]
    out_ptr,  # [B, N, Hkv * G, D], contiguous
    part_ptr,  # [B, Hkv, splits, N * G, D]
    stat_ptr,  # [B, Hkv, splits, N * G, 2]
    scale,  # its size; with NEGATIVE the scores change sign
    softcap,
    nodes,
    groups,
    splits,
    window,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_ab,
    stride_an,
    stride_aw,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE_BLOCK: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    DEEP: tl.constexpr,  # whether a path of the tree can be longer than the window
    HAS_SOFTCAP: tl.constexpr,
    NEGATIVE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of rows of one KV head against one share of its keys."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    rows = nodes * groups
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    # The tiles of one share run side by side: the first brings its keys into the L2 cache, the others find them there.
    split = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    length = tl.load(lens_ptr + batch)
    first, whole, ragged, units, used = _shares(
        length, nodes, window, splits, SINGLE, HAS_WINDOW, BLOCK_N, TREE_BLOCK, MIN_UNITS
    )
    if split >= used:
        return
    begin = split * units // used
    end = (split + 1) * units // used

    o_r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < rows
    m_d = o_d < D
    node = o_r // groups
    head = kv_head * groups + o_r % groups
    # [BLOCK_M, BLOCK_D]
    q = tl.load(
        q_ptr
        + batch.to(tl.int64) * stride_qb
        + (node.to(tl.int64) * stride_qn + head.to(tl.int64) * stride_qh)[:, None]
        + o_d[None, :] * stride_qd,
        mask=m_r[:, None] & m_d[None, :],
        other=0.0,
    )
    factor = LOG2E if HAS_SOFTCAP else scale * LOG2E
    k_base = k_ptr + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    anc_ptr += batch.to(tl.int64) * stride_ab
    if HAS_WINDOW:
        position = tl.zeros_like(node) + length
        if not SINGLE:
            position += _depths(anc_ptr, stride_an, stride_aw, node, nodes, nodes)

    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Whole blocks of the prefix: every node sees every key, but for a window.
    o_n = tl.arange(0, BLOCK_N)
    o_k = o_n[:, None] * stride_ks + o_d[None, :] * stride_kd
    o_v = o_n[:, None] * stride_vs + o_d[None, :] * stride_vd
    for unit in tl.range(tl.minimum(begin, whole), tl.minimum(end, whole), num_stages=STAGES):
        row = (first + unit) * BLOCK_N
        p_k = k_base + row.to(tl.int64) * stride_ks + o_k
        p_v = v_base + row.to(tl.int64) * stride_vs + o_v
        # [BLOCK_N, BLOCK_D]
        keys = tl.load(p_k) if D == BLOCK_D else tl.load(p_k, mask=m_d[None, :], other=0.0)
        scores = _scores(q, keys, scale, softcap, NEGATIVE, HAS_SOFTCAP)
        if HAS_WINDOW:
            scores = tl.where(position[:, None] - (row + o_n)[None, :] < window, scores, float("-inf"))
        values = tl.load(p_v) if D == BLOCK_D else tl.load(p_v, mask=m_d[None, :], other=0.0)
        acc, high, total = _accumulate(scores, values, acc, high, total, factor, HAS_WINDOW)

    # The ragged end of the prefix, then the tree.
    o_t = tl.arange(0, TREE_BLOCK)
    o_k = o_t[:, None] * stride_ks + o_d[None, :] * stride_kd
    o_v = o_t[:, None] * stride_vs + o_d[None, :] * stride_vd
    for unit in tl.range(tl.maximum(begin, whole) - whole, tl.maximum(end, whole) - whole, num_stages=STAGES):
        in_tree = unit >= ragged
        first_node = tl.where(in_tree, (unit - ragged) * TREE_BLOCK, 0)
        row = tl.where(in_tree, length + first_node, (first + whole) * BLOCK_N + unit * TREE_BLOCK)
        prefix = length + 1 if SINGLE else length
        m_t = o_t < tl.where(in_tree, length + nodes, prefix) - row
        m_kv = m_t[:, None] & m_d[None, :]
        # [TREE_BLOCK, BLOCK_D]; rows beyond the valid ones may hold NaN, which no probability of zero would silence.
        keys = tl.load(k_base + row.to(tl.int64) * stride_ks + o_k, mask=m_kv, other=0.0)
        scores = _scores(q, keys, scale, softcap, NEGATIVE, HAS_SOFTCAP)
        # [BLOCK_M, TREE_BLOCK]
        visible = m_t[None, :]
        if not SINGLE:
            # Every node sees the prefix: all bits set.
            p_word = anc_ptr + node * stride_an + first_node // 64 * stride_aw
            word = tl.load(p_word, mask=o_r < tl.where(in_tree, rows, 0), other=-1) >> (first_node % 64)
            low, high_half = word.to(tl.int32), (word >> 32).to(tl.int32)
            half = tl.where((o_t < 32)[None, :], low[:, None], high_half[:, None])
            visible = visible & (((half >> (o_t % 32)[None, :]) & 1) != 0)
        if HAS_WINDOW:
            key_position = row + o_t
            if DEEP:
                tree_end = tl.where(in_tree, nodes, 0)
                depths = _depths(anc_ptr, stride_an, stride_aw, first_node + o_t, tree_end, nodes)
                key_position = tl.where(in_tree, length + depths, key_position)
            visible = visible & (position[:, None] - key_position[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        values = tl.load(v_base + row.to(tl.int64) * stride_vs + o_v, mask=m_kv, other=0.0)
        acc, high, total = _accumulate(scores, values, acc, high, total, factor, True)

    if PDL:
        # Not before: programs of the merge would take room from those that have yet to begin.
        tl.extra.cuda.gdc_launch_dependents()
    # Indices are made anew from a zero that the compiler cannot see, or it would keep those of q over both loops.
    zero = (tl.max(total, 0) < 0).to(tl.int32)
    o_r = (tile + zero) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_r = o_r < rows
    node = o_r // groups
    head = kv_head * groups + o_r % groups
    m_out = m_r[:, None] & m_d[None, :]
    if used == 1:
        o_out = (batch.to(tl.int64) * nodes + node) * (tl.num_programs(1) * groups) + head
        result = tl.div_rn(acc, tl.zeros_like(acc) + total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + o_out[:, None] * D + o_d[None, :], result, mask=m_out)
    else:
        # A row that saw no key of this share has a total of 0 and a largest score of -inf.
        o_part = ((batch.to(tl.int64) * tl.num_programs(1) + kv_head) * splits + split) * rows + o_r
        tl.store(part_ptr + o_part[:, None] * D + o_d[None, :], acc, mask=m_out)
        tl.store(stat_ptr + o_part * 2, high, mask=m_r)
        tl.store(stat_ptr + o_part * 2 + 1, total, mask=m_r)


@triton.jit(do_not_specialize=["nodes", "groups", "splits", "window"])
def merge_kernel(
    part_ptr,  # [B, Hkv, splits, N * G, D]
    stat_ptr,  # [B, Hkv, splits, N * G, 2]
    lens_ptr,  # [B]
    out_ptr,  # [B, N, Hkv * G, D], contiguous
    factor,  # of the largest scores in the exponent, base 2
    nodes,
    groups,
    splits,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE_BLOCK: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of one row, in order; parts that no program wrote are not read."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    length = tl.load(lens_ptr + batch)
    _, _, _, _, used = _shares(length, nodes, window, splits, SINGLE, HAS_WINDOW, BLOCK_N, TREE_BLOCK, MIN_UNITS)
    if used == 1:
        return
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    high = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    base = (batch.to(tl.int64) * tl.num_programs(1) + kv_head) * splits
    for start in range(0, used, CHUNK):
        o_s = start + tl.arange(0, CHUNK)
        m_s = o_s < used
        o_part = (base + o_s) * (nodes * groups) + row
        highs = tl.load(stat_ptr + o_part * 2, mask=m_s, other=float("-inf"))
        totals = tl.load(stat_ptr + o_part * 2 + 1, mask=m_s, other=0.0)
        # [CHUNK, BLOCK_D]
        parts = tl.load(part_ptr + o_part[:, None] * D + o_d[None, :], mask=m_s[:, None] & m_d[None, :], other=0.0)
        new_high = tl.maximum(high, tl.max(highs, 0))
        base_score = tl.where(new_high == float("-inf"), 0.0, new_high)
        weights = _power((highs - base_score) * factor, out_ptr.dtype.element_ty == tl.float32)
        shrink = _power((high - base_score) * factor, out_ptr.dtype.element_ty == tl.float32)
        total = total * shrink + tl.sum(weights * totals, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * parts, 0)
        high = new_high
    node = row // groups
    o_out = (batch.to(tl.int64) * nodes + node) * (tl.num_programs(1) * groups) + kv_head * groups + row % groups
    result = tl.div_rn(acc, tl.zeros_like(acc) + total)
    tl.store(out_ptr + o_out * D + o_d, result.to(out_ptr.dtype.element_ty), mask=m_d)
