r"""A selector: the parents' term gated by the state, and learnt on the candidates that it ranks.

DFlash 2 ranks a head's best 16 tokens b after their predecessor a by U(b) + <A(a) * H(h), B(b)>, with h the hidden
state: this package's parents' term, A[parent] M_k C[candidate], with a gate. Its loss is the cross-entropy among these
candidates, given the true predecessor. Here the trunks of trained heads stay as they are, so that a step computes
their logits once for the terms of all ways. These start equal and see the same positions in the same order.

Tokens per step are walked as steps do: along a right path of a static tree every parent is the text's own token, so
ranks after true parents determine the steps. Texts are ranked without the noise of draws.

The data are records of `medusa distill --only-data`; the model runs over them once for their states:

    medusa distill --config recipes/smollm2-135m/heads.yaml --only-data --set data.train="[{path: PROMPTS}]" \
        --set generation.temperature=0 --set output.folder=runs/selector/greedy
    python -m benchmarks.ablations selector --records runs/selector/greedy/generated/records.jsonl --judged FILE
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from benchmarks import harness
from medusa_decoding.demo import HEADS
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.own_text import RANKS
from medusa_decoding.heads import MAX_TOP_K, MedusaHeads
from medusa_decoding.linears.reading import plain_weight
from medusa_decoding.model import MedusaModel
from medusa_decoding.tuning.calibration import NONE, Calibration
from medusa_decoding.tuning.replay import walk
from medusa_decoding.tuning.search import walked_tree

NAME = "selector"
SIZES = (8, 16)  # nodes of the trees
TOGETHER = 16  # texts that are ranked together
STRETCH = 32  # positions of a text that follow each other where texts are read in pieces
DECAY = 0.8  # weight of a head's loss over that of the one before, as in training
STATE_NORM = 20.0  # of the states that a gate sees, so that it moves about as fast as the rest of a term does


class Way(NamedTuple):
    """A term and what it learns."""

    loss: str | None  # "kl" as in the recipe; "best", the text's token among the head's best candidates; None: nothing
    gated: bool = False
    alone: bool = False  # the gate is all that learns
    rank: int = 0  # at least that of the heads


CONTROL = "trained on"
WAYS = {
    "as it is": Way(None),
    CONTROL: Way("kl"),
    "gated": Way("kl", gated=True),
    "gated, best candidates": Way("best", gated=True),
    "gate alone, best candidates": Way("best", gated=True, alone=True),
    "best candidates": Way("best"),
    "larger rank": Way("kl", rank=128),
}


class Term(nn.Module):
    """A parents' term that starts equal to that of heads: what a larger rank adds has zeros for candidates."""

    def __init__(self, heads: MedusaHeads, way: Way) -> None:
        super().__init__()
        tokens, mix, candidates = (weight.detach().float() for weight in heads.parent_term)
        rank = tokens.shape[1]
        more = max(0, way.rank - rank)
        new = torch.randn(len(tokens), more).to(tokens) * (rank + more) ** -0.5
        self.tokens = nn.Parameter(torch.cat([tokens, new], dim=1))
        self.mix = nn.Parameter(F.pad(mix, (0, more, 0, more)))
        self.mix.data[:, rank:, rank:] = torch.eye(more).to(mix)
        self.candidates = nn.Parameter(F.pad(candidates, (0, more)))
        self.gate = nn.Parameter(mix.new_zeros(len(mix), rank + more, heads.hidden_size)) if way.gated else None
        for weight in (self.tokens, self.mix, self.candidates):
            weight.requires_grad_(not way.alone)

    def mixed(self, parents: Tensor, states: Tensor) -> Tensor:
        """Return what candidates are multiplied by: rows of A [K, P], states [K, P, H] (or 1 for P) -> [K, P, rank]."""
        found = torch.bmm(F.embedding(parents, self.tokens), self.mix)
        return found if self.gate is None else found * (1 + torch.bmm(states, self.gate.transpose(1, 2)))

    def scores(self, mixed: Tensor, candidates: Tensor) -> Tensor:
        """Return the term of candidates [K, P, C], rows of C: mixed [K, P, rank] -> [K, P, C]."""
        return torch.einsum("kpr,kpcr->kpc", mixed, F.embedding(candidates, self.candidates))


class Texts(NamedTuple):
    """N tokens, text after text: prompts with their answers.

    Attributes:
        states: [N, H], after the final norm.
        features: [N, (layers + 1) H], states of earlier layers and these, each with a root mean square of 1.
        later: [N, K + 1], the tokens after each; NONE beyond the end, and without targets before an answer.
        begins: [N], the first row of each one's text.
        prompts: the rows of each answer; a text's last token has none.
    """

    states: Tensor
    features: Tensor
    later: Tensor
    begins: Tensor
    prompts: list[range]


@torch.no_grad()
def read(files: Sequence[Path], model: MedusaModel, layers: Sequence[int] = ()) -> Texts:
    """Read the first answer of each record, and run the model over its prompt and it."""
    assert model.heads is not None
    ids, prompts, end, reach = [], [], 0, model.heads.num_heads
    for record in (json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()):
        first, last = record["learnt"][0]
        if last - first > reach:
            ids.append(torch.tensor(record["input_ids"][:last]))
            prompts.append(range(end + first - 1, end + last - 1))
            end += last
    if not ids:
        raise ValueError(f"{files[0]}: expected answers of more than {reach} tokens, got none")
    device, hidden = model.backbone.device, model.heads.hidden_size
    tokens, lengths = torch.cat(ids), torch.tensor([len(one) for one in ids])
    starts = lengths.cumsum(0) - lengths
    begins, ends = (one.repeat_interleave(lengths) for one in (starts, starts + lengths))
    ahead = torch.arange(end)[:, None] + torch.arange(1, reach + 2)
    later = tokens[ahead.clamp(max=end - 1)].where(ahead < ends[:, None], NONE)
    answered = torch.zeros(end, dtype=torch.bool)
    answered[torch.cat([torch.arange(one.start, one.stop) for one in prompts])] = True
    later[~answered, 1:] = NONE
    tokens, found = tokens.to(device), torch.empty(end, hidden, dtype=model.backbone.dtype, device=device)
    features = found.new_empty(end, (len(layers) + 1) * hidden if layers else 0)
    together = 4 if device.type == "cpu" else 64  # texts that the model reads together; on a CPU few are faster
    for some in lengths.argsort().split(together):
        # Padding is at the end, which no other position of a causal model sees.
        rows = [torch.arange(starts[i], starts[i] + lengths[i]) for i in some]
        places = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=NONE).to(device)
        made = model.backbone.decoder(tokens[places.clamp(min=0)], use_cache=False, output_hidden_states=bool(layers))
        real, last = places >= 0, made.last_hidden_state
        found[places[real]] = last[real]
        if layers:
            each = *(made.hidden_states[i] for i in layers), last
            scaled = [F.rms_norm(one[real].float(), [hidden]) for one in each]
            features[places[real]] = torch.cat(scaled, -1).to(features)
    return Texts(found, features, later.to(device), begins.to(device), prompts)


def stretches(answer: range) -> Tensor:
    """Return the rows of an answer that have targets, [n, STRETCH]; the last one repeats a row without targets."""
    starts = torch.arange(answer.start, answer.stop - 1, STRETCH)
    return (starts[:, None] + torch.arange(STRETCH)).clamp(max=answer.stop - 1)


def batches(prompts: Sequence[range], args: argparse.Namespace) -> Iterable[Tensor]:
    """Return the rows of each training step, [B]: stretches of answers in random order."""
    pieces, several = torch.cat([stretches(one) for one in prompts]), args.positions // STRETCH
    order = torch.cat([torch.randperm(len(pieces)) for _ in range(-(-args.steps * several // len(pieces)))])
    steps = pieces[order].to(args.device).flatten().split(several * STRETCH)
    return tqdm(steps[: args.steps], mininterval=10)


class Trunk:
    """What stays as it is: a model's embedding and lm_head, and the blocks of its heads."""

    def __init__(self, model: MedusaModel) -> None:
        weight, self.device = plain_weight(model.backbone.lm_head), model.backbone.device
        assert model.heads is not None
        assert weight is not None  # not quantised
        self.config: Any = model.backbone.config
        self.heads, self._embed = model.heads.float().eval(), model.backbone.embed_tokens.requires_grad_(False)
        of_map = self.heads.token_map
        tokens = torch.arange(self.heads.vocab_size, device=self.device) if of_map is None else of_map
        self.weight = weight.detach().float()[tokens]
        # The last one is for what is beyond a text's end.
        self._rows = torch.full((self.heads.vocab_size + 1,), NONE, device=self.device)
        self._rows[tokens] = torch.arange(len(tokens), device=self.device)

    def inputs(self, texts: Texts, rows: Tensor) -> Tensor:
        """Return what the heads read at B positions, [B, H]."""
        return texts.states[rows].float()

    def states(self, texts: Texts, rows: Tensor) -> Tensor:
        """Return the heads' states at B positions, [K, B, H]."""
        root = self._embed(texts.later[rows, 0].clamp(min=0)).float() if self.heads.root_rank else None
        return self.heads.residual(self.inputs(texts, rows), root).transpose(0, 1)

    def tokens(self, texts: Texts, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return of B positions the parents' rows of A and the targets, [K, B].

        A target is a place in the heads' vocabulary, NONE outside it.
        """
        later = texts.later[rows]
        return self.heads.parent_rows(later[:, :-1].clamp(min=0)).t(), self._rows[later[:, 1:]].t()

    def __call__(self, texts: Texts, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return of B positions: logits [K, B, V'], states for gates [K, B, H], and `tokens`."""
        states = self.states(texts, rows)
        return states @ self.weight.t(), STATE_NORM * F.normalize(states, dim=-1), *self.tokens(texts, rows)

    def taught(self, texts: Texts, rows: Tensor) -> Tensor:
        """Return the model's own distributions of the heads' targets of S stretches, [K, S, STRETCH, V'].

        Those of a stretch's neighbouring positions are the same but for one, so this is a view of fewer.
        """
        ahead = torch.arange(1, STRETCH + self.heads.num_heads, device=self.device)
        places = (rows.view(-1, STRETCH)[:, :1] + ahead).clamp(max=len(texts.states) - 1)
        found = (texts.states[places].float() @ self.weight.t()).softmax(-1)
        return found.unfold(1, STRETCH, 1).permute(1, 0, 3, 2)


def train(trunk: Trunk, texts: Texts, prompts: Sequence[range], args: argparse.Namespace) -> dict[str, Term]:
    """Train the terms of all ways on the same positions."""
    terms = {name: Term(trunk.heads, way) for name, way in WAYS.items()}
    optimizer = torch.optim.Adam([weight for term in terms.values() for weight in term.parameters()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.rate, args.steps, cycle_momentum=False)
    for rows in batches(prompts, args):
        with torch.no_grad():
            base, states, parents, targets = trunk(texts, rows)
            taught, best = trunk.taught(texts, rows), base.topk(min(MAX_TOP_K, base.shape[-1]))
        hits = best.indices == targets[..., None]
        optimizer.zero_grad()
        for name, term in terms.items():
            if (loss := WAYS[name].loss) is None:
                continue
            weights = weighted(targets != NONE if loss == "kl" else hits.any(-1))
            with torch.autocast(trunk.device.type, torch.bfloat16):
                mixed = term.mixed(parents, states)
                if loss == "kl":
                    found = base + mixed @ term.candidates.t()
                else:
                    scores = best.values + term.scores(mixed, best.indices)
                    found = -(scores.log_softmax(-1) * hits * weights[..., None]).sum()
            found.backward(gradient(found, taught, weights) if loss == "kl" else None)
        optimizer.step()
        schedule.step()
    return terms


def weighted(counted: Tensor) -> Tensor:
    """Return what positions weigh in the loss, [K, B]: equally among those of a head that count, bool [K, B]."""
    decay = DECAY ** torch.arange(len(counted), device=counted.device)
    return counted * (decay / counted.sum(1).clamp(min=1))[:, None]


@torch.no_grad()
def gradient(logits: Tensor, taught: Tensor, weights: Tensor) -> Tensor:
    """Return that of the weighted sum of KL(taught, softmax(logits)) for logits [K, B, V']."""
    found = logits.softmax(-1, dtype=torch.float32)
    found.view(taught.shape).sub_(taught)
    return found.mul_(weights[..., None]).to(logits)


@torch.no_grad()
def ranked(trunk: Trunk, terms: dict[str, Term], texts: Texts, prompts: Sequence[range]) -> dict[str, Calibration]:
    """Rank the texts' tokens as `propose_children` does, after their true parents, with each term."""
    found: dict[str, list[Any]] = {name: [] for name in terms}
    for start in range(0, len(prompts), TOGETHER):
        some = prompts[start : start + TOGETHER]
        rows = [stretches(one).flatten() for one in some]
        base, states, parents, targets = trunk(texts, torch.cat(rows).to(trunk.device))
        best = base.topk(min(MAX_TOP_K, base.shape[-1]))
        for name, term in terms.items():
            scores = best.values + term.scores(term.mixed(parents, states), best.indices)
            order = best.indices.gather(-1, scores.sort(descending=True, stable=True).indices[..., :RANKS])
            hits = order == targets[..., None]
            ranks = hits.int().argmax(-1).where(hits.any(-1), NONE)
            of_prompts = ranks.t().cpu().split([len(one) for one in rows])
            found[name] += [
                [tuple(map(tuple, ranks[: len(one) - 1].tolist()))] for one, ranks in zip(some, of_prompts, strict=True)
            ]
    return {name: Calibration(trunk.heads.num_heads, RANKS, of_way) for name, of_way in found.items()}


Ranking = Callable[[Texts, Sequence[range]], dict[str, Calibration]]
"""Ranks the tokens of answers in texts with each way."""


def timed(ways: Mapping[str, Callable[[Any], int]], inputs: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Return the median of each way's microseconds per input, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = harness.interleaved(ways, inputs)
    torch.set_num_threads(threads)
    return {name: {"median_us": 1e6 * statistics.median(seconds for _, seconds in one)} for name, one in found.items()}


def costs(trunk: Trunk) -> dict[str, dict[str, float]]:
    """Return what ranking 32 candidates after 32 parents takes: multiplications, bytes in bfloat16, microseconds."""
    heads = copy.deepcopy(trunk.heads).cpu()
    parents = torch.arange(min(MAX_TOP_K, heads.num_candidates)).expand(heads.num_heads, -1)

    def rank(term: Term, state: Tensor) -> int:
        scores = term.mixed(parents, state) @ term.candidates[parents].transpose(1, 2)
        return len(scores.sort(dim=-1, descending=True, stable=True))

    terms = {name: Term(heads, way) for name, way in WAYS.items()}
    states = [torch.randn(heads.num_heads, 1, heads.hidden_size) for _ in range(500)]
    found = timed({name: partial(rank, term) for name, term in terms.items()}, states)
    for name, term in terms.items():
        pairs, size, gate = parents.numel(), term.mix.shape[-1], 0 if term.gate is None else term.gate.numel()
        found[name]["multiplications"] = pairs * size * (size + parents.shape[1]) + gate
        found[name]["bytes"] = 2 * (2 * pairs * size + term.mix.numel() + gate)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--records", type=Path, nargs="+", required=True, metavar="FILE", help="to learn from")
    parser.add_argument("--judged", type=Path, nargs="+", required=True, metavar="FILE", help="of other prompts")
    parser.add_argument("--model", default=str(HEADS["smollm2"]), help="heads with a parent_rank (default: smollm2's)")
    parser.add_argument("--device", default="cpu", help="of training and ranking (default: cpu); costs are a CPU's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the split and the order")
    parser.add_argument("--steps", type=int, default=1200, help="of training (default: 1200)")
    parser.add_argument("--positions", type=int, default=256, help=f"per step, a multiple of {STRETCH}")
    parser.add_argument("--rate", type=float, default=2e-4, help="peak of one cycle")
    parser.add_argument("--held-out", type=int, default=200, help="prompts of the records that trees are chosen on")


def load(args: argparse.Namespace) -> MedusaModel:
    """Return the model with its heads."""
    torch.backends.cuda.matmul.allow_tf32 = True
    return MedusaModel.from_pretrained(args.model, dtype=torch.bfloat16, device_map=args.device)


def learn(trunk: Trunk, args: argparse.Namespace, texts: Texts, prompts: Sequence[range]) -> Ranking:
    """Train all ways; return what ranks texts with each."""
    return partial(ranked, trunk, train(trunk, texts, prompts, args))


def run(args: argparse.Namespace) -> int:
    """Train and judge all ways with each seed, and write the record."""
    return compare(NAME, args, load(args), list(WAYS), learn, costs)


def compare(
    name: str,
    args: argparse.Namespace,
    model: MedusaModel,
    ways: Sequence[str],
    learn: Callable[[Trunk, argparse.Namespace, Texts, Sequence[range]], Ranking],
    costs: Callable[[Trunk], dict[str, dict[str, float]]],
) -> int:
    """Train all ways of an ablation and walk their trees, with each seed; write the record."""
    if args.positions < 1 or args.positions % STRETCH:
        raise ValueError(f"--positions: expected a multiple of {STRETCH}, got {args.positions}")
    layers = len(model.backbone.decoder.layers)
    of_layers = () if name == NAME else (layers // 3, 2 * layers // 3)
    texts = read(args.records, model, of_layers)
    judged = {file.parent.parent.name: read([file], model, of_layers) for file in args.judged}
    trunk = Trunk(model)
    cells = [(where, way, str(size)) for where in judged for way in ways for size in SIZES]
    steps = dict.fromkeys(cells, torch.zeros(()))
    figures: dict[str, Any] = {where: {way: {"by_seed": []} for way in ways} for where in judged}
    for seed in args.seeds:
        torch.manual_seed(seed)
        prompts = random.Random(seed).sample(texts.prompts, len(texts.prompts))
        rank = learn(trunk, args, texts, prompts[args.held_out :])
        chosen_on = rank(texts, prompts[: args.held_out])
        trees = {(way, str(size)): walked_tree(found, size) for way, found in chosen_on.items() for size in SIZES}
        found = {where: rank(of, of.prompts) for where, of in judged.items()}
        for where, way, size in cells:
            paths, by_seed = found[where][way], figures[where][way]["by_seed"]
            walked = walk(paths, trees[way, size])
            steps[where, way, size] = steps[where, way, size] + torch.tensor(walked.by_prompt)
            if size == str(SIZES[0]):
                by_seed.append({f"top_{n}": [row[n - 1] / paths.positions for row in paths.hits] for n in (1, 5)})
            by_seed[-1][size] = walked.tokens_per_step
    for where, way, size in cells:
        pairs = torch.cat([steps[where, way, size], steps[where, CONTROL, size]], dim=1).tolist()
        both = {"tokens_per_step": interval.ratio(pairs), "over_control": interval.ratio_of_rates(pairs)}
        figures[where][way][size] = {what: asdict(one) for what, one in both.items() if one is not None}
        print(where, way, size, *(f"{what} {interval.as_text(one)}" for what, one in both.items()))
    lengths = {where: list(map(len, of.prompts)) for where, of in {**judged, "learnt": texts}.items()}
    sizes = {where: {"answers": len(of), "tokens": sum(of)} for where, of in lengths.items()}
    names = ("model", "device", "seeds", "steps", "positions", "rate", "held_out")
    given = {one: getattr(args, one) for one in names}
    conditions = {**given, "texts": sizes, "threads": torch.get_num_threads(), "intervals": interval.WORDS}
    print(harness.write_record(name, {**conditions, "ways": figures, "cost": costs(trunk)}))
    return 0
