"""Every op in plain PyTorch: the specification, the oracle of the tests, and the fallback on some devices.

fp16, bf16 and fp32 inputs are computed in fp32 (fp64 in fp64), and results are rounded once, at the end. There are two
exceptions: `rope_append` computes in the dtype of its input, to be bit-equal to the rotation of transformers, and
`add_rms_norm` rounds where the normalisation of transformers does. No function reads device data on the host, so all of
them are safe to capture in a CUDA graph. The public functions, one file per op, have the types of the arguments and
check them.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
import math
import sys

import torch
from torch import Tensor

from medusa_kernels import cache_rows
from medusa_kernels.cache_rows import dequantised_rows, quantised_rows
from medusa_kernels.quantised import KINDS, dequantised, rounded

WORD = 64
"""Tree nodes per ancestor word."""


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of the arithmetic."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def ancestor_words(visible: Tensor) -> Tensor:
    """Pack ancestor sets into the bit words that `tree_attention` takes.

    Args:
        visible: bool `[..., N, N]`; entry `[i, j]` is True iff node j is an ancestor of node i, or is node i.

    Returns:
        int64 `[..., N, W]` with `W = ceil(N / 64)`: bit `j % 64` of word `j // 64` of row i is `visible[i, j]`.
    """
    nodes = visible.shape[-1]
    words = -(-nodes // WORD)
    bits = torch.nn.functional.pad(visible, (0, words * WORD - nodes)).unflatten(-1, (words, WORD)).long()
    # Bit 63 is the sign bit; the sum of distinct bits is their union, also in two's complement.
    return (bits << torch.arange(WORD, device=visible.device)).sum(-1)


def visible_nodes(ancestors: Tensor, nodes: int) -> Tensor:
    """Unpack ancestor words `[..., N, W]` into bool `[..., N, N]`, the inverse of `ancestor_words`."""
    node = torch.arange(nodes, device=ancestors.device)
    return ((ancestors[..., node // WORD] >> (node % WORD)) & 1).bool()


def tree_attention(
    q, k_cache, v_cache, cache_lens, ancestors, *, scale=None, window=None, softcap=None, slots=None
):  # fmt: skip
    """Attention of tree nodes over the cached prefix and their own ancestors; see the public `tree_attention`."""
    if slots is not None:
        k_cache, v_cache = k_cache[slots], v_cache[slots]
    k_cache, v_cache = (dequantised_rows(cache, _wide(q).dtype) for cache in (k_cache, v_cache))
    batch, nodes, heads, head_dim = q.shape
    kv_heads, rows = k_cache.shape[1:3]
    visible = _visible_rows(cache_lens, ancestors, nodes, rows, window)

    grouped = _wide(q).view(batch, nodes, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("bnhgd,bhsd->bhgns", grouped, _wide(k_cache))
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    probs = torch.where(visible[:, None, None], scores, -torch.inf).softmax(-1)
    # A probability of zero times NaN is NaN, so rows that no node sees are zeroed too.
    valid = torch.arange(rows, device=q.device) < cache_lens[:, None] + nodes
    values = torch.where(valid[:, None, :, None], _wide(v_cache), 0.0)
    out = torch.einsum("bhgns,bhsd->bnhgd", probs, values)
    return out.reshape(q.shape).to(q.dtype).contiguous()


def _visible_rows(cache_lens: Tensor, ancestors: Tensor, nodes: int, rows: int, window: int | None) -> Tensor:
    """Return bool `[B, N, S]`: which cache rows each node sees."""
    lens = cache_lens[:, None].long()
    row = torch.arange(rows, device=ancestors.device)[None]
    tree = visible_nodes(ancestors, nodes).expand(lens.shape[0], -1, -1)
    node = row - lens
    in_tree = (node >= 0) & (node < nodes)
    index = node.clamp(0, nodes - 1)
    of_tree = tree.gather(2, index[:, None].expand(-1, nodes, -1)) & in_tree[:, None]
    visible = (node < 0)[:, None] | of_tree
    if window is not None:
        depth = tree.sum(-1) - 1
        key_position = torch.where(in_tree, lens + depth.gather(1, index), row)
        visible = visible & ((lens + depth)[:, :, None] - key_position[:, None] < window)
    return visible


def rope_append(
    q, k, v, cos, sin, k_cache, v_cache, cache_lens, depths, *, q_norm=None, k_norm=None, eps=1e-6, slots=None,
    norm_offset=None,
):  # fmt: skip
    """Norm and rotate q and k, write k and v to their cache rows; see the public `rope_append`."""
    q, k, v = heads_of(q, k, v, cos.dtype, q_norm, k_norm, eps, norm_offset)
    batch, nodes = q.shape[:2]
    row = torch.arange(batch, device=q.device)[:, None]
    positions = cache_lens[:, None] + depths
    cos, sin = (t[positions] if t.dim() == 2 else t[row, positions] for t in (cos, sin))
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    targets = cache_lens[:, None] + torch.arange(nodes, device=q.device)
    slot = row if slots is None else slots[:, None]
    for cache, rows in ((k_cache, _rotated(k, cos, sin)), (v_cache, v)):
        cache[slot, :, targets] = quantised_rows(rows) if cache.dtype == torch.int8 else rows
    return _rotated(q, cos, sin).contiguous()


def heads_of(q, k, v, dtype, q_norm, k_norm, eps, norm_offset):
    """Return q, k and v `[B, N, heads, D]` with parts added up, rounded to a dtype, and q and k normed if asked."""
    q, k, v = (x if x.dim() == 4 else added(x).to(dtype) for x in (q, k, v))
    q, k = (x if norm is None else _normed(x, norm, eps, norm_offset) for x, norm in ((q, q_norm), (k, k_norm)))
    return q, k, v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R numbers of the last axis, whose halves are (a, b): (a, b) cos + (-b, a) sin."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


def heads_topk(
    hidden, w1, b1, w2, k,
    *, w2_scale=None, token_map=None, gather=False, root=None, w_root=None, temperature=1.0, noise=None,
    w2_zero=None, codes="int4", divisor=1.0, softcap=None,
):  # fmt: skip
    """Root's term, residual blocks, vocabulary projection and top-k of every head; see the public `heads_topk`."""
    states = _wide(hidden)
    if states.dim() == 2:
        states = states[:, None].expand(-1, w1.shape[0], -1)
    if root is not None:
        states = states + torch.einsum("bh,kgh->bkg", _wide(root), _wide(w_root))
    blocks = w1.unbind(1) if w1.dim() == 4 else [w1]
    biases = [None] * len(blocks) if b1 is None else b1.unbind(1) if w1.dim() == 4 else [b1]
    for block, bias in zip(blocks, biases, strict=True):
        inner = torch.einsum("bkh,kgh->bkg", states, _wide(block))
        if bias is not None:
            inner = inner + _wide(bias)
        states = states + inner * torch.sigmoid(inner)
    states = rounded(states, codes, w2)
    projection = dequantised(w2, w2_scale, w2_zero, codes, wide=states.dtype).to(states.dtype)
    if gather:
        projection = projection[..., token_map, :]
    logits = torch.einsum("bkh,vh->bkv" if w2.dim() == 2 else "bkh,kvh->bkv", states, projection)
    logits = scaled_logits(logits, divisor, softcap) / temperature
    if noise is not None:
        logits = logits + (noise if token_map is None else noise[..., token_map])[:, : w1.shape[0]]
    logprobs = logits - logits.logsumexp(-1, keepdim=True)
    best, tokens = logprobs.topk(k, dim=-1)
    return best, tokens if token_map is None else token_map[tokens]


def tree_verify(
    hidden, weight, candidates, parents=None,
    *, temperature=0.0, noise=None, noise_rows=None, want_stats=True, weight_scale=None, weight_zero=None, codes="int4",
    divisor=1.0, softcap=None,
):  # fmt: skip
    """Next token and statistics of every node; see the public `tree_verify`."""
    seen = rounded(_wide(hidden), codes, weight)
    weight = dequantised(weight, weight_scale, weight_zero, codes, wide=seen.dtype)
    logits = scaled_logits(seen @ _wide(weight).T, divisor, softcap)
    if temperature > 0:
        logits = logits / temperature
    next_tokens = (logits if temperature == 0 else logits + of_nodes(noise, noise_rows)).argmax(-1)
    if not want_stats:
        return next_tokens, logits.new_empty(0), logits.new_empty(0), logits.new_empty(0)
    return next_tokens, *verify_stats(logits, candidates, parents)


def scaled_logits(logits: Tensor, divisor: float = 1.0, softcap: float | None = None) -> Tensor:
    """Return logits / divisor, then softcap tanh(logits / softcap), without a gradient in the memory of the logits.

    Every operation rounds to the dtype of the logits.
    """
    out = None if logits.requires_grad else logits
    if divisor != 1.0:
        logits = torch.div(logits, divisor, out=out)
    if softcap is None:
        return logits
    return torch.mul(torch.tanh(torch.div(logits, softcap, out=out), out=out), softcap, out=out)


def of_nodes(noise: Tensor, noise_rows: Tensor | None) -> Tensor:
    """Return the noise `[B, N, V]` of the nodes, whose rows of noise `[B, R, V]` are given."""
    if noise_rows is None:
        return noise
    return noise[torch.arange(len(noise), device=noise.device)[:, None], noise_rows.long()]


def verify_stats(logits: Tensor, candidates: Tensor, parents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return each node's log-sum-exp and entropy, and the log-probability of its token under its parent's distribution.

    The logits `[B, N, V]`, fp32 or fp64, are divided by the temperature already; results `[B, N]` have their dtype.
    """
    batch, nodes = candidates.shape
    if parents is None:
        parents = torch.arange(-1, nodes - 1, device=logits.device)
    parents = parents.expand(batch, nodes).long()
    logsumexp = logits.logsumexp(-1)
    logprobs = logits - logsumexp[..., None]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    row = torch.arange(batch, device=logits.device)[:, None]
    of_child = logprobs[row, parents.clamp(min=0), candidates]
    return logsumexp, entropy, torch.where(parents < 0, 0.0, of_child)


def kv_compact(kv, cache_lens, path, accept_lens, *, slots=None):
    """Move the accepted rows to the end of the prefix, in every layer; see the public `kv_compact`."""
    batch, steps = path.shape
    step = torch.arange(steps, device=path.device).expand(batch, steps)
    accepted = accept_lens[:, None].long()
    # Steps after the accepted ones repeat step 0 (or move row 0 onto itself if nothing is accepted). So every target
    # gets one value in any order of writes, and no shape depends on data that the host would have to read.
    step = torch.where(step <= accepted, step, 0)
    prefix = cache_lens[:, None].long()
    source = torch.where(accepted < 0, 0, prefix + path.long().gather(1, step))
    target = torch.where(accepted < 0, 0, prefix + step)
    row = (torch.arange(batch, device=path.device) if slots is None else slots)[:, None]
    data = kv.view(torch.uint8)
    data[:, :, row, :, target] = data[:, :, row, :, source]


def decode_linear(
    x, weights, biases=None, *, gate=False, residual=None, scales=None, parts=1, zeros=None, codes="int4",
    activation="silu", factor=1.0,
):  # fmt: skip
    """Products with several weights, side by side or one gating the other; see the public `decode_linear`."""
    x = rounded(x, codes, weights[0])
    if scales is not None:
        of_each = zip(weights, scales, zeros or [None] * len(weights), strict=True)
        wide = _wide(x).dtype
        weights = [dequantised(weight, scale, zero, codes, wide=wide) for weight, scale, zero in of_each]
    if parts > 1:
        pieces = zip(*(_wide(tensor).tensor_split(parts, -1) for tensor in (x, *weights)), strict=True)
        return torch.stack(
            [decode_linear(x, w, None if i else biases, factor=factor) for i, (x, *w) in enumerate(pieces)]
        )
    products = [_wide(x) @ _wide(weight).T for weight in weights]
    for product, bias in zip(products, biases or [None] * len(products), strict=True):
        if bias is not None:
            product += _wide(bias)
    out = torch.cat(products, -1) * factor
    if residual is not None:
        out = out + _wide(residual)
    if gate:
        gating, other = out.chunk(2, -1)
        # tanh(y) = 2 sigmoid(2 y) - 1.
        inner = gating if activation == "silu" else math.sqrt(8 / math.pi) * (gating + 0.044715 * gating**3)
        out = gating * torch.sigmoid(inner) * other
    return out.to(x.dtype)


def added(parts: Tensor) -> Tensor:
    """Return the parts `[S, ...]` of a divided product added up in order."""
    return functools.reduce(torch.add, parts.unbind(0))


def add_rms_norm(x, delta, weight, eps, *, delta_norm=None, norm_offset=None):
    """Residual sum and its RMS normalisation; see the public `add_rms_norm`."""
    if delta is not None and delta.dim() > x.dim():
        delta = added(delta)
    if delta_norm is not None:
        delta = _normed(delta.to(x.dtype), delta_norm, eps, norm_offset)
    total = x if delta is None else (_wide(x) + _wide(delta)).to(x.dtype)
    return total, total if weight is None else _normed(total, weight, eps, norm_offset)


def _normed(x, weight, eps, norm_offset):
    wide, weight = _wide(x), _wide(weight)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if norm_offset is None:
        return (weight * _wide(normed.to(x.dtype))).to(x.dtype)
    return ((norm_offset + weight) * normed).to(x.dtype)


NORMS = 6
"""Norms that a layer may have."""
SLOTS = NORMS + 7 * 4
"""Tensors that a layer may have, in the order of the enum Slot of csrc/cpu/ops.h."""
KIND_BITS = 4
"""Bits of a layer's form that say what a projection's codes stand for, after those of the slots: see `codes_of`."""


def codes_of(form: int, projection: int) -> str:
    """Return what the codes of a layer's projection, 0 (q) to 6 (down), stand for, by its form: see `packed`."""
    return KINDS[form >> SLOTS + KIND_BITS * projection & 2**KIND_BITS - 1]


def layers_by(
    ops, hidden, weights, forms, kv, cos, sin, cache_lens, depths, ancestors, *, windows, eps, scale, slots=None,
    norm_offset=None, activation="silu", factor=1.0, softcap=None, tables=None, states=None,
):  # fmt: skip
    """Run the decoder layers by the ops that they are made of; see the public `decoder_layers`."""
    head_dim, kv_heads = cache_rows.head_size(kv), kv.shape[3]
    given = iter(weights)

    def normed(x, weight):
        return x if weight is None else ops.add_rms_norm(x, None, weight, eps, norm_offset=norm_offset)[1]

    def added(hidden, x, codes, projection, after):
        """Return hidden plus a projection of x, or plus its norm."""
        if after is None:
            return linear(x, codes, projection, residual=hidden, factor=factor)
        delta = linear(x, codes, projection, factor=factor)
        return ops.add_rms_norm(hidden, delta, None, eps, delta_norm=after, norm_offset=norm_offset)[0]

    def linear(x, codes, *projections, gate=False, residual=None, factor=1.0):
        matrices, biases, scales, zeros = (list(tensors) for tensors in zip(*projections, strict=True))
        of_scales, of_zeros = (given if given[0] is not None else None for given in (scales, zeros))
        return ops.decode_linear(
            x, matrices, biases, gate=gate, residual=residual, scales=of_scales, zeros=of_zeros, codes=codes,
            activation=activation, factor=factor,
        )  # fmt: skip

    after = {}
    for index, form in enumerate(forms):
        own = [next(given) if form >> slot & 1 else None for slot in range(SLOTS)]
        input_norm, post_norm, q_norm, k_norm, attention_norm, mlp_norm = own[:NORMS]
        q_proj, k_proj, v_proj, o_proj, gate, up, down = (own[first : first + 4] for first in range(NORMS, SLOTS, 4))
        own_cos, own_sin = (cos, sin) if tables is None else (cos[tables[index]], sin[tables[index]])
        qkv = linear(normed(hidden, input_norm), codes_of(form, 0), q_proj, k_proj, v_proj)
        qkv = qkv.unflatten(2, (qkv.shape[2] // head_dim, head_dim))
        sizes = [qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads]
        q, k, v = qkv.split(sizes, dim=2)
        if q_norm is not None and k_norm is not None and len(q_norm) == len(k_norm) == head_dim:
            # Both norms run over all heads, including v, whose result is unused: two launches and no copies.
            q, k = normed(qkv, q_norm).split(sizes, dim=2)[0], normed(qkv, k_norm).split(sizes, dim=2)[1]
        elif q_norm is not None:
            q, k = (normed(x.flatten(2), weight).view(x.shape) for x, weight in ((q, q_norm), (k, k_norm)))
        q = ops.rope_append(q, k, v, own_cos, own_sin, kv[index, 0], kv[index, 1], cache_lens, depths, slots=slots)
        attended = ops.tree_attention(
            q, kv[index, 0], kv[index, 1], cache_lens, ancestors, scale=scale, window=windows[index] or None,
            softcap=softcap, slots=slots,
        )  # fmt: skip
        hidden = added(hidden, attended.flatten(2), codes_of(form, 3), o_proj, attention_norm)
        gated = linear(normed(hidden, post_norm), codes_of(form, 4), gate, up, gate=True)
        hidden = after[index + 1] = added(hidden, gated, codes_of(form, 6), down, mlp_norm)
    result = normed(hidden, weights[-1])
    return torch.stack([result, *(after[number] for number in states)]) if states else result


def gumbel_noise(seeds, first, rows, vocabulary):
    """Counter-based Gumbel noise; see the public `gumbel_noise`."""
    block = torch.arange(-(-vocabulary // 4), device=seeds.device)
    zero, key = torch.zeros_like(block), [half[:, None] & _LOW for half in (seeds, seeds >> 32)]
    # Row by row: the words in 64 bits take several times the memory of the noise.
    noise = seeds.new_empty(len(seeds), rows, vocabulary, dtype=torch.float32)
    for row in range(rows):
        place = first[:, None].long() + row & _LOW
        noise[:, row] = _gumbel(torch.stack(philox([block, place, zero, zero], key), -1).flatten(-2)[:, :vocabulary])
    return noise


def _gumbel(bits: Tensor) -> Tensor:
    """Return the Gumbel number that each word of 32 random bits stands for, in fp32."""
    v = (bits.float() * 2**-32 + 2**-33).clamp(max=1 - 2**-24)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v / 6)))))
    return -torch.where(v < 1 / 16, series, -torch.log(1 - v)).log()


def draw_tokens(logits, noise, noise_rows=None, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The best of the most likely tokens with their noise; see the public `draw_tokens`."""
    scores = _wide(logits) / temperature
    ordered, tokens = scores.sort(dim=-1, stable=True)
    kept = torch.ones_like(scores, dtype=torch.bool)
    if 0 < top_k < scores.shape[-1]:
        kept = scores >= ordered[..., -top_k, None]
    if top_p < 1:
        shares = scores.masked_fill(~kept, -torch.inf).softmax(-1).gather(-1, tokens)
        goes = shares.cumsum(-1) <= 1 - top_p
        goes[..., -1] = False
        kept &= ~torch.zeros_like(kept).scatter(-1, tokens, goes)
    if min_p > 0:
        kept &= (scores - ordered[..., -1:]).exp() >= min_p
    best = scores.masked_fill(~kept, -torch.inf) + of_nodes(noise, noise_rows)
    token = best.argmax(-1, keepdim=True)
    return token[..., 0], best.gather(-1, token)[..., 0]


_LOW = 2**32 - 1


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Return the four words of Philox4x32-10 for four words of counter and two of key, all in int64."""
    for number in range(10):
        # Products of 64 bits; that int64 takes their highest bit for a sign does not change the two halves.
        even, odd = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        low, high = (half + number * step & _LOW for half, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        counter = [odd >> 32 & _LOW ^ counter[1] ^ low, odd & _LOW, even >> 32 & _LOW ^ counter[3] ^ high, even & _LOW]
    return counter


def tree_accept(
    tokens, next_tokens, hidden, depths, paths, eos, max_new, step,
    *, lengths, root, state_hidden, output, count, finished, log, check=None, report=None,
):  # fmt: skip
    """The longest right path, and what a row carries to its next step; see the public `tree_accept`."""
    (batch, nodes), places = tokens.shape, paths.shape[-1]
    row = torch.arange(batch, device=tokens.device)
    depths, paths = depths.expand(batch, nodes), paths.expand(batch, nodes, places)
    node, parent = paths[..., 1:], paths[..., :-1]
    rows = row[:, None, None]
    right = ((tokens[rows, node] == next_tokens[rows, parent]) | (node == parent)).all(-1)
    # Grows with depth and falls with the node's number.
    order = depths * (nodes + 1) - torch.arange(nodes, dtype=torch.int32, device=tokens.device)
    last = torch.where(right, order, -nodes).argmax(1)
    path, accepted = paths[row, last], depths[row, last]

    emitted = next_tokens.gather(1, path)
    place = torch.arange(places, dtype=torch.int32, device=tokens.device)
    ends = (emitted[..., None] == eos).any(-1) & (place <= accepted[:, None])
    first_end = torch.where(ends, place, places).amin(1)
    found = torch.minimum(accepted, first_end) + 1
    room = max_new - count
    ended = ((first_end < found) & (found <= room)) | (found >= room)
    found = torch.minimum(found, room).masked_fill(finished, 0).to(torch.int32)

    # Places without an emitted token write the last column's own value back to it.
    is_new = place < found[:, None]
    column = torch.where(is_new, count[:, None] + place, output.shape[1] - 1)
    output.scatter_(1, column.long(), torch.where(is_new, emitted, output[:, -1:]))
    log.scatter_(1, step.expand(batch, 1), found[:, None])
    accept_lens, old_lengths = accepted.masked_fill(finished, -1), lengths.clone()
    lengths += accept_lens + 1
    count += found
    finished |= ended
    state_hidden.copy_(hidden[row, last])
    root.copy_(next_tokens[row, last])
    if report is not None:
        numbers = torch.stack((count, finished.to(torch.int32), check.view(torch.int32)), 1)
        report[:, : 3 + places] = torch.cat((numbers, emitted.to(torch.int32)), 1)
    return path.to(torch.int32), accept_lens, old_lengths


def tree_select(tokens, logprobs, depths, paths, nodes):
    """Keep the candidates with the most probable paths; see the public `tree_select`."""
    batch, places = len(tokens), paths.shape[1]
    own = logprobs.clamp(max=0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    scores = torch.zeros_like(own)
    for place in range(1, places):
        on_path = paths[:, place] != paths[:, place - 1]
        scores = scores + torch.where(on_path, own[:, paths[:, place]], 0.0)
    # Stable: of equal scores the parent, which comes first, is taken first.
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values
    number = torch.arange(nodes, device=tokens.device).expand(batch, nodes)
    numbers = torch.zeros_like(tokens).scatter_(1, chosen, number)
    kept_depths = depths[chosen]
    kept_paths = numbers.gather(1, paths[chosen].flatten(1)).view(batch, nodes, places)
    parents = kept_paths.gather(2, (kept_depths - 1).clamp(min=0).long()[..., None])[..., 0]
    parents = torch.where(kept_depths > 0, parents, -1).to(torch.int32)
    visible = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=tokens.device)
    visible = visible.scatter(2, kept_paths, torch.ones_like(kept_paths, dtype=torch.bool))
    return tokens.gather(1, chosen), parents, kept_depths, ancestor_words(visible), kept_paths


decoder_layers = functools.partial(layers_by, sys.modules[__name__])
