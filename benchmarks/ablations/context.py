"""More than one state: what heads gain if they also read earlier positions, or states of earlier layers.

In front of the heads of two ways is an addition to the last state: a linear map of the states after layers 10, 20 and
30 (one third, two thirds and all of them), or what one layer of attention (as many heads as the model has, all of H
wide) finds in these states of the last 128 positions, prompts included. Both start at zero. They and the heads, also
the control's, learn on from the same positions in the same order; "as it is" learns nothing. Data, trees and walks are
those of `selector`:

    python -m benchmarks.ablations context --records RECORDS --judged FILE
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ablations import selector
from benchmarks.ablations.selector import (
    CONTROL,
    STRETCH,
    Ranking,
    Term,
    Texts,
    Trunk,
    Way,
    batches,
    compare,
    gradient,
    ranked,
    timed,
    weighted,
)
from medusa_decoding.tuning.calibration import NONE, Calibration

NAME = "context"
WINDOW = 128  # positions that attention sees, its own included
AS_IT_IS = "as it is"
WAYS = (AS_IT_IS, CONTROL, "attention", "linear map")


class Attention(nn.Module):
    """One layer of attention over the last positions, whose scores have a learnt bias for each head and distance."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.keys = nn.Linear(width, hidden, bias=False), nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        nn.init.zeros_(self.out.weight)
        slopes = 2.0 ** -torch.arange(heads)[:, None]  # as ALiBi's, from a few positions to all
        self.bias = nn.Parameter(-slopes * torch.arange(WINDOW))

    def project(self, features: Tensor) -> Tensor:
        """Return keys and values [2, S, heads, T, H / heads] of features [S, T, width]."""
        return self.keys(features).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, features: Tensor, keys: Tensor, allowed: Tensor, distance: Tensor) -> Tensor:
        """Return the addition [S, Q, H] to positions with features [S, Q, width].

        Args:
            features: see above.
            keys: from `project`.
            allowed: bool [S, Q, T], which positions each one sees.
            distance: [Q, T], how far they are before it.
        """
        query = self.query(features).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores = query @ keys[0].transpose(-1, -2) * query.shape[-1] ** -0.5
        scores = scores + self.bias[:, distance.clamp(0, WINDOW - 1)]
        found = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1) @ keys[1]
        return self.out(found.transpose(1, 2).flatten(2))


class Reader(Trunk):
    """A trunk whose heads learn, and read what a way adds to the state."""

    def __init__(self, trunk: Trunk, way: str) -> None:
        vars(self).update(vars(trunk))
        self.heads, hidden = copy.deepcopy(trunk.heads).requires_grad_(), trunk.heads.hidden_size
        self.width = 3 * hidden
        self.addition: nn.Module | None = None
        if way == "attention":
            self.addition = Attention(self.width, hidden, self.config.num_attention_heads).to(self.device)
        elif way == "linear map":
            self.addition = nn.Linear(self.width, hidden, bias=False).to(self.device)
            nn.init.zeros_(self.addition.weight)

    def parameters(self) -> list[nn.Parameter]:
        """Return what learns."""
        return [*self.heads.parameters(), *(() if self.addition is None else self.addition.parameters())]

    def inputs(self, texts: Texts, rows: Tensor) -> Tensor:
        """Return the states with the addition, [B, H]; rows are `stretches`."""
        states = super().inputs(texts, rows)
        if self.addition is None:
            return states
        if not isinstance(self.addition, Attention):
            return states + self.addition(texts.features[rows].float())
        first, back = rows.view(-1, STRETCH)[:, :1], torch.arange(1 - WINDOW, STRETCH, device=self.device)
        features = texts.features[(first + back).clamp(0, len(texts.states) - 1)].float()
        distance = back[WINDOW - 1 :, None] - back
        allowed = (distance >= 0) & (distance < WINDOW) & (first + back >= texts.begins[first])[:, None]
        keys = self.addition.project(features)
        return states + self.addition(features[:, WINDOW - 1 :], keys, allowed, distance).flatten(0, 1)

    def added(self) -> Callable[[Tensor], int]:
        """Return what is added to a step on a CPU: a function of features [1, 1, 3 H] of its position."""
        here = copy.deepcopy(self.addition).cpu() if self.addition is not None else nn.Identity()
        if not isinstance(here, Attention):
            return lambda features: len(here(features))
        cached = here.project(torch.randn(1, WINDOW, self.width))
        seen, distance = torch.ones(1, 1, WINDOW, dtype=torch.bool), torch.arange(WINDOW)[None]

        def attend(features: Tensor) -> int:
            return len(here.project(features)) + len(here(features, cached, seen, distance))

        return attend


def train(readers: Mapping[str, Reader], texts: Texts, prompts: Sequence[range], args: argparse.Namespace) -> None:
    """Train heads and additions of all ways on the same stretches of answers."""
    optimizer = torch.optim.Adam([weight for reader in readers.values() for weight in reader.parameters()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.rate, args.steps, cycle_momentum=False)
    trunk = readers[CONTROL]
    for rows in batches(prompts, args):
        parents, targets = trunk.tokens(texts, rows)
        weights = weighted(targets != NONE)
        with torch.no_grad():
            taught = trunk.taught(texts, rows)
        optimizer.zero_grad()
        for reader in readers.values():
            tokens, mix, candidates = reader.heads.parent_term
            with torch.autocast(trunk.device.type, torch.bfloat16):
                mixed = torch.bmm(F.embedding(parents, tokens), mix)
                logits = reader.states(texts, rows) @ reader.weight.t() + mixed @ candidates.t()
            logits.backward(gradient(logits, taught, weights))
        optimizer.step()
        schedule.step()


def learn(trunk: Trunk, args: argparse.Namespace, texts: Texts, prompts: Sequence[range]) -> Ranking:
    """Train all ways; return what ranks texts with each."""
    readers = {way: Reader(trunk, way) for way in WAYS}
    train({way: one for way, one in readers.items() if way != AS_IT_IS}, texts, prompts, args)

    def rank(texts: Texts, prompts: Sequence[range]) -> dict[str, Calibration]:
        each = (ranked(one, {way: Term(one.heads, Way(None))}, texts, prompts) for way, one in readers.items())
        return {way: found for of_way in each for way, found in of_way.items()}

    return rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    selector.add_arguments(parser)
    parser.set_defaults(rate=1e-3)


def run(args: argparse.Namespace) -> int:
    """Train and judge all ways with each seed, and write the record."""
    return compare(NAME, args, selector.load(args), WAYS, learn, costs)


def costs(trunk: Trunk) -> dict[str, dict[str, float]]:
    """Return the microseconds that each addition takes in a step."""
    inputs = [torch.randn(1, 1, 3 * trunk.heads.hidden_size) for _ in range(500)]
    return timed({way: Reader(trunk, way).added() for way in WAYS}, inputs)
