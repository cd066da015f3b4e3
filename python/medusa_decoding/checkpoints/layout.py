"""Pack the named tensors of single heads into `MedusaHeads`, after every check, and name them again.

The names are the paper's: `{h}.{l}.linear.weight`, `{h}.{l}.linear.bias`, `{h}.{L}.weight` for head h, residual block l
of L. This package adds `token_map`, `{h}.{L}.weight_scale` of projections in 8 bits, `parent_tokens`,
`candidate_tokens` and `{h}.parent_mix`, `root_down` and `{h}.root_up`, and `feature_map` with the int64 numbers
`feature_layers`. A format with other names maps them to these.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from medusa_decoding.checkpoints.tensor_files import StoredTensor, listed
from medusa_decoding.heads import STORED, MedusaHeads, Storage

TOKEN_MAP = "token_map"
PARENTS, CANDIDATES, ROOT = "parent_tokens", "candidate_tokens", "root_down"
FEATURES, FEATURE_LAYERS = "feature_map", "feature_layers"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

NUMBER = r"(0|[1-9][0-9]{0,2})"
_BLOCK = re.compile(rf"{NUMBER}\.{NUMBER}\.linear\.(weight|bias)")
_PROJECTION = re.compile(rf"{NUMBER}\.{NUMBER}\.weight")
_MIX = re.compile(rf"{NUMBER}\.parent_mix")
_ROOT_UP = re.compile(rf"{NUMBER}\.root_up")


@dataclass(frozen=True)
class HeadTensors:
    """The heads' tensors that a format found, under the paper's names.

    Attributes:
        tensors: by the paper's name.
        prefix: of these names in the file, for messages about missing tensors.
        notes: remarks for the user, such as files that were not read.
    """

    tensors: Mapping[str, StoredTensor]
    prefix: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Layout:
    """The sizes that a complete and consistent set of tensors has.

    Attributes:
        num_heads: K.
        num_layers: L, residual blocks per head.
        hidden_size: H.
        bias: whether the residual blocks have biases.
        rows: V' of the projections; None if the base model's lm_head is shared.
        trimmed: length of the token_map; None without one.
        dtype: of all weights except projections in 8 bits and their scales.
        storage: of the projections.
        parent_rank: r of the parents' term; 0 without it.
        root_rank: of the heads' input from the root token; 0 without it.
        features: F, feature layers; 0 without a map of them.
        parents: rows of parent_tokens: V, or V' + 1 with a token_map; 0 without it.
        vocab_size: V, if the tensors tell it: projections without a token_map do, and parent_tokens of V rows.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    bias: bool
    rows: int | None
    trimmed: int | None
    dtype: torch.dtype
    storage: Storage
    parent_rank: int
    root_rank: int
    features: int
    parents: int
    vocab_size: int | None

    def expected(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Yield name, shape and dtype of every weight, head by head."""
        hidden, rank = self.hidden_size, self.parent_rank
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                yield f"{head}.{layer}.linear.weight", (hidden, hidden), self.dtype
                if self.bias:
                    yield f"{head}.{layer}.linear.bias", (hidden,), self.dtype
            if self.rows is not None:
                name = f"{head}.{self.num_layers}.weight"
                yield name, (self.rows, hidden), STORED.get(self.storage, self.dtype)
                if self.storage != "float":
                    yield f"{name}_scale", (self.rows,), torch.float32
            if rank:
                yield f"{head}.parent_mix", (rank, rank), self.dtype
            if self.root_rank:
                yield f"{head}.root_up", (hidden, self.root_rank), self.dtype
        if rank:
            candidates = self.rows or self.trimmed or self.vocab_size or 0
            yield PARENTS, (self.parents, rank), self.dtype
            yield CANDIDATES, (candidates, rank), self.dtype
        if self.root_rank:
            yield ROOT, (self.root_rank, hidden), self.dtype
        if self.features:
            yield FEATURE_LAYERS, (self.features,), torch.int64
            yield FEATURES, (hidden, (1 + self.features) * hidden), self.dtype


def examine(found: HeadTensors) -> Layout:
    """Check names, shapes and dtypes, and return the sizes. No tensor is read.

    Weights are float16, bfloat16 or float32, all in one dtype; projections may also be int8 or float8_e4m3fn.
    """
    tensors = found.tensors
    blocks = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    projections = [match for name in tensors if (match := _PROJECTION.fullmatch(name))]
    mixes = [match for name in tensors if (match := _MIX.fullmatch(name))]
    roots = [match for name in tensors if (match := _ROOT_UP.fullmatch(name))]
    num_heads = 1 + max((int(match[1]) for match in blocks + projections + mixes + roots), default=0)
    num_layers = 1 + max((int(match[2]) for match in blocks), default=0)
    has_bias = any(match[3] == "bias" for match in blocks)
    conditioned = bool(mixes) or PARENTS in tensors or CANDIDATES in tensors
    stored = {tensors[match.string].dtype for match in projections}
    # If any projection is in 8 bits, all have to be: those of another dtype are refused below.
    storage: Storage = next((kind for kind in STORED if STORED[kind] in stored), "float")
    owned = 0 if projections else None
    # Sizes are not known yet: only the names of this one are used.
    rooted = bool(roots) or ROOT in tensors
    mapped = FEATURES in tensors or FEATURE_LAYERS in tensors
    kind = torch.float32, storage, int(conditioned), int(rooted), int(mapped)
    names = Layout(num_heads, num_layers, 0, has_bias, owned, None, *kind, 0, None)
    _check_names(found, (name for name, *_ in names.expected()))

    first = tensors["0.0.linear.weight"]
    _check_matrix(first, "[H, H]")
    rows = None
    if projections:
        projection = tensors[f"0.{num_layers}.weight"]
        _check_matrix(projection, f"[V', {first.shape[0]}]")
        rows = projection.shape[0]
    if first.dtype not in DTYPES or isinstance(first.dtype, str):
        raise first.refused("dtype float16, bfloat16 or float32", _word(first.dtype))
    trimmed = _examine_token_map(tensors, rows)
    rank, of_parents, vocab_size = 0, 0, None if trimmed is not None else rows
    if conditioned:
        parents = tensors[PARENTS]
        _check_matrix(parents, "[V, r]")
        rank, of_parents = parents.shape[1], vocab_size or parents.shape[0]
        if trimmed is None or of_parents != trimmed + 1:
            vocab_size = of_parents
    root_rank = 0
    if rooted:
        _check_matrix(tensors[ROOT], "[r, H]")
        root_rank = tensors[ROOT].shape[0]
        if root_rank > first.shape[0]:
            raise tensors[ROOT].refused(f"at most {first.shape[0]} rows (the hidden size)", root_rank)
    features = 0
    if mapped:
        _check_matrix(tensors[FEATURES], "[H, (1 + F) H]")
        features = max(1, tensors[FEATURES].shape[1] // first.shape[0] - 1)
    kind = first.dtype, storage, rank, root_rank, features
    layout = Layout(num_heads, num_layers, first.shape[0], has_bias, rows, trimmed, *kind, of_parents, vocab_size)
    for name, shape, dtype in layout.expected():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise tensor.refused(f"shape {list(shape)}", list(tensor.shape))
        if tensor.dtype != dtype:
            like = f" like {first.name}" if dtype == first.dtype and not name.endswith("_scale") else ""
            raise tensor.refused(f"dtype {_word(dtype)}{like}", _word(tensor.dtype))
    return layout


def check_base(found: HeadTensors, layout: Layout, hidden_size: int | None, vocab_size: int | None) -> None:
    """Check the sizes against the base model's."""
    tensors, rows = found.tensors, f"{vocab_size} rows (the base model's vocabulary)"
    if hidden_size is not None and layout.hidden_size != hidden_size:
        wanted = f"hidden size {hidden_size} (the base model's)"
        raise tensors["0.0.linear.weight"].refused(wanted, layout.hidden_size)
    if vocab_size is not None and layout.rows is not None and layout.trimmed is None and layout.rows != vocab_size:
        raise tensors[f"0.{layout.num_layers}.weight"].refused(rows, f"{layout.rows} and no {TOKEN_MAP}")
    if vocab_size is not None and layout.vocab_size not in (None, vocab_size):
        few = "" if layout.trimmed is None else f" or {layout.trimmed + 1} (the {TOKEN_MAP}'s and one)"
        raise tensors[PARENTS].refused(rows + few, layout.vocab_size)


def pack(
    found: HeadTensors, layout: Layout, vocab_size: int, dtype: torch.dtype | None, device: torch.device | str
) -> MedusaHeads:
    """Read the tensors one at a time into packed heads, in eval mode and without gradients.

    `layout` is what `examine` returned for them. A dtype of None keeps the file's; projections in 8 bits and their
    scales stay as they are.

    NaN and Inf, also after the conversion, are a `ValueError`.
    """
    if layout.trimmed is not None and layout.trimmed > vocab_size:
        raise found.tensors[TOKEN_MAP].refused(f"at most {vocab_size} ids (the vocabulary)", layout.trimmed)
    if layout.parents > vocab_size:
        raise found.tensors[PARENTS].refused(f"at most {vocab_size} rows (the vocabulary)", layout.parents)
    with torch.random.fork_rng(devices=[]):  # the random initial weights are replaced at once
        heads = MedusaHeads(
            layout.hidden_size,
            vocab_size,
            layout.num_heads,
            layout.num_layers,
            shared_projection=layout.rows is None,
            bias=layout.bias,
            token_map=None if layout.trimmed is None else found.tensors[TOKEN_MAP].load(),
            storage=layout.storage,
            parent_rank=layout.parent_rank,
            root_rank=layout.root_rank,
            feature_layers=found.tensors[FEATURE_LAYERS].load().tolist() if layout.features else (),
            all_parents=layout.parents == vocab_size,
            dtype=layout.dtype if dtype is None else dtype,
            device=device,
        )
    heads.requires_grad_(False)
    for name, target in unpack(heads).items():
        if name in (TOKEN_MAP, FEATURE_LAYERS):
            continue
        stored = found.tensors[name]
        source = stored.load()
        check_finite(stored, source)
        target.copy_(source)
        if target.dtype != source.dtype:
            check_finite(stored, target, f" after conversion from {_word(source.dtype)} to {_word(target.dtype)}")
    return heads.eval()


def unpack(heads: MedusaHeads) -> dict[str, torch.Tensor]:
    """Return every tensor of packed heads by name: views of the packed weights, not copies."""
    named = {}
    for head in range(heads.num_heads):
        for layer in range(heads.num_layers):
            named[f"{head}.{layer}.linear.weight"] = heads.w1.detach()[head, layer]
            if heads.b1 is not None:
                named[f"{head}.{layer}.linear.bias"] = heads.b1.detach()[head, layer]
        if heads.w2 is not None:
            named[f"{head}.{heads.num_layers}.weight"] = heads.w2.detach()[head]
        if heads.w2_scale is not None:
            named[f"{head}.{heads.num_layers}.weight_scale"] = heads.w2_scale[head]
        if heads.parent_mix is not None:
            named[f"{head}.parent_mix"] = heads.parent_mix.detach()[head]
        if heads.root_up is not None:
            named[f"{head}.root_up"] = heads.root_up.detach()[head]
    whole: dict[str, torch.Tensor | None] = {
        PARENTS: heads.parent_tokens, CANDIDATES: heads.candidate_tokens, ROOT: heads.root_down,
        FEATURES: heads.feature_map, TOKEN_MAP: heads.token_map,
        FEATURE_LAYERS: torch.tensor(heads.feature_layers) if heads.feature_layers else None,
    }  # fmt: skip
    return named | {name: tensor.detach() for name, tensor in whole.items() if tensor is not None}


def check_finite(stored: StoredTensor, values: torch.Tensor, when: str = "") -> None:
    """Raise `ValueError` naming the tensor if any value is NaN or Inf."""
    # Both extremes are finite exactly when all values are. This needs no mask of the tensor's size.
    if values.dtype == STORED["fp8"]:  # for which PyTorch has no aminmax
        values = torch.stack([torch.stack(torch.aminmax(part.float())) for part in values.split(4096)])
    low, high = (float(extreme) for extreme in torch.aminmax(values))
    if not (float("-inf") < low and high < float("inf")):
        raise stored.refused("finite weights", f"values from {low} to {high}{when}")


def _check_names(found: HeadTensors, expected: Iterable[str]) -> None:
    # One tensor named 999.999.linear.weight would ask for two million others, so the list is cut. A cut list has more
    # names than there are tensors, so some are missing.
    most = len(found.tensors) + 100
    wanted = list(itertools.islice(expected, most))
    cut = len(wanted) == most
    missing = [found.prefix + name for name in wanted if name not in found.tensors]
    known = {*wanted, TOKEN_MAP}
    extra = [] if cut else [tensor.name for name, tensor in found.tensors.items() if name not in known]
    if missing or extra:
        parts = [f"missing {'at least ' if cut else ''}{listed(missing)}"] if missing else []
        parts += [f"unexpected {listed(sorted(extra))}"] if extra else []
        files = sorted({str(tensor.file) for tensor in found.tensors.values()})
        where = f"{', '.join(files)}: " if files else ""
        raise ValueError(f"{where}expected the tensors of complete heads, got {'; '.join(parts)}")


def _check_matrix(tensor: StoredTensor, shape: str) -> None:
    if len(tensor.shape) != 2 or min(tensor.shape) < 1:
        raise tensor.refused(f"shape {shape}", list(tensor.shape))


def _examine_token_map(tensors: Mapping[str, StoredTensor], rows: int | None) -> int | None:
    token_map = tensors.get(TOKEN_MAP)
    if token_map is None:
        return None
    length = token_map.shape[0] if len(token_map.shape) == 1 else 0
    if length < 1 or token_map.dtype != torch.int64 or (rows is not None and length != rows):
        wanted = "at least 1" if rows is None else rows
        raise token_map.refused(
            f"int64 [{wanted}], one id per projection row", f"{_word(token_map.dtype)} {list(token_map.shape)}"
        )
    return length


def _word(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
