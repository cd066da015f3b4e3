"""A row of the engine: one generation, checked as `generate` checks it, and followed as a single one is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from medusa_decoding.checks import token_list, whole
from medusa_decoding.decode.adaptive.copying import LENGTHS
from medusa_decoding.decode.runtime.progress import STEPS_LATE, Progress, RowReader
from medusa_decoding.decode.selection.processors import LogitsProcessors
from medusa_decoding.decode.selection.rows import temperature_of_row
from medusa_decoding.decode.selection.typical import TypicalAcceptance
from medusa_decoding.decode.verify import TokenSelector
from medusa_decoding.generation.inputs import whole_seed
from medusa_decoding.generation.request import Request, check_request, row_seed
from medusa_decoding.generation.selectors import token_selector
from medusa_decoding.model import MedusaModel
from medusa_decoding.serving.prompt_scores import PromptScores
from medusa_decoding.serving.ticket import Delta, Finish, Ticket, TokenLogprobs
from medusa_decoding.trees.tree import Tree

logger = logging.getLogger(__name__)

MOST_NODES = 64
"""Nodes that a tree may have, root included."""
MOST_LOGPROBS = 20
OWN = {
    "num_return_sequences": 1, "stop_strings": [], "output_scores": False, "output_logits": False,
    "output_attentions": False, "output_hidden_states": False,
}  # fmt: skip
"""Fields of a model's own generation config that an engine's callers decide, or that ask for what they cannot see."""

Kind = tuple[Tree | Literal["auto"] | None, object]
"""What rows of one step must have in common: the tree that was asked for, and typical acceptance's settings."""


@dataclass(eq=False, kw_only=True)
class Row(RowReader):
    """One generation in the engine; `ended` means that the caller has got its last delta.

    What a server alone needs is here: end tokens of single requests, the time limit, cancelling, and why a row ended.
    Stop strings and tool calls need the text, and are left to `http.answers`.

    Attributes:
        ticket: of its caller.
        request: checked, of this row alone.
        selector: how its tokens are picked, as if it were alone.
        kind: see `Kind`.
        seed: key of its random numbers.
        began: when its first token came.
        text: the prompt's tokens, then those emitted.
        scores: collects the log-probabilities of the prompt's tokens, or None.
        told: log-probabilities that the caller has got.
    """

    ticket: Ticket
    request: Request
    selector: TokenSelector
    kind: Kind
    seed: int
    began: float = 0.0
    text: list[int] = field(default_factory=list)
    scores: PromptScores | None = None
    told: int = 0

    @property
    def budget(self) -> int:
        """New tokens that it may get."""
        return self.request.limits.budgets[0]

    @property
    def temperature(self) -> float:
        """Its temperature, 0 if nothing is drawn."""
        return temperature_of_row(self.selector)

    def take(
        self, progress: Progress, place: int, error: BaseException | None = None, state: torch.Tensor | None = None
    ) -> Finish | None:
        """Read a step's tokens, deliver them, and return why the row has ended, if it has.

        Args:
            progress: after the step, or the prefill.
            place: of the row in it.
            error: what went wrong with this row, whose tokens are then dropped.
            state: that from which a single token was predicted, to deliver with it.
        """
        if error is None and progress.broken[place]:
            got = f"got NaN or infinity after {self.count} new tokens"
            error = FloatingPointError(f"model: expected finite logits, {got}")
        if error is not None:
            self.end(Delta([], "error", error=error))
            return "error"
        tokens = self.read(progress, place)
        self.began = self.began or time.monotonic()
        self.text += tokens
        finish: Finish | None = None
        if self.stopped:
            finish = "stop"
        elif self.ended or self._late:
            finish = "length"
        self.ended = finish is not None
        self.ticket.deliver(Delta(tokens, finish, self._logprobs(len(tokens)), state=state))
        return finish

    def end(self, delta: Delta) -> None:
        """Deliver a last delta, unless there was one."""
        if not self.ended:
            self.ended = True
            self.ticket.deliver(delta)

    @property
    def _late(self) -> bool:
        seconds = self.request.config.max_time
        return seconds is not None and time.monotonic() - self.began >= seconds

    def _logprobs(self, count: int) -> list[TokenLogprobs] | None:
        if self.request.top_logprobs is None or not isinstance(self.selector, LogitsProcessors):
            return None
        first, self.told = self.told, self.told + count
        return [TokenLogprobs(*entry) for entry in self.selector.rows[0].logprobs[first : self.told]]


@dataclass(frozen=True)
class Submission:
    """What all choices of a request have in common; see `Engine.submit`."""

    prompt: list[int]
    deliver: Callable[[int, Delta], None]
    ends: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tree: Tree | Literal["auto"] | None = None


def own_stop_strings(model: MedusaModel) -> list[str]:
    """Return the stop strings of the model's own generation config, which an engine leaves to its callers."""
    own = model.backbone.causal_lm.generation_config.stop_strings
    strings = [own] if isinstance(own, str) else list(own or ())
    if not all(isinstance(text, str) and text for text in strings):
        raise ValueError(f"stop_strings: expected one or more non-empty strings, got {strings!r}")
    return strings


def check_own_config(model: MedusaModel, context: int) -> None:
    """Raise `ValueError` if the model's own generation config would fail every request, or all those that sample."""
    probe = Submission([0], lambda choice, delta: None)
    for settings in ({}, {"do_sample": True, "temperature": 1.0}):
        try:
            own_stop_strings(model)
            check_rows(model, context, probe, 1, 0, None, {"max_new_tokens": None, **settings})
        except ValueError as error:
            raise ValueError(
                f"model: its own generation config cannot be served; change it in generation_config.json: {error}"
            ) from error


def check_rows(
    model: MedusaModel,
    context: int,
    asked: Submission,
    n: int,
    seed: int | None,
    make_processors: Callable[[], list[Any]] | None,
    settings: dict[str, Any],
) -> list[Row]:
    """Check a request, and make the row of each of its `n` choices."""
    prompt, room = asked.prompt, context - len(asked.prompt)
    new = whole("max_new_tokens", settings["max_new_tokens"])
    if room < 1:
        raise ValueError(f"prompt: expected fewer than {context} tokens (the context), got {len(prompt)}")
    if new is not None and new > room:
        counted = f"a context of {context} tokens less {len(prompt)} of the prompt"
        raise ValueError(f"max_new_tokens: expected at most {room} ({counted}), got {new}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n: expected a whole number of at least 1, got {n!r}")
    for name, count in (("logprobs", asked.logprobs), ("prompt_logprobs", asked.prompt_logprobs)):
        if count is not None and not 0 <= count <= min(MOST_LOGPROBS, model.backbone.vocab_size):
            raise ValueError(f"{name}: expected 0 to {MOST_LOGPROBS}, got {count}")
    if asked.tree is not None:
        model.check_tree(asked.tree)
        if isinstance(asked.tree, Tree):
            check_tree(asked.tree, model.backbone.device)
    unset = dict.fromkeys(("do_sample", "temperature", "top_p", "top_k"))
    names = ("acceptance", "posterior_threshold", "posterior_alpha")  # fields of no generation config
    acceptance = {name: settings.pop(name) for name in names if name in settings}
    changes = unset | OWN | settings | {"return_dict_in_generate": True} | _limits(model, asked, settings, room)
    rows = []
    for number in range(n):
        request = check_request(
            model.backbone, torch.tensor([prompt], dtype=torch.int64), None, None, dict(changes), **acceptance,
            logits_processor=make_processors() if make_processors is not None else None, seed=seed,
        )  # fmt: skip
        if seed is None and request.config.do_sample:
            seed = int(torch.randint(2**63 - 1, ()))  # one for all choices
        request.top_logprobs = asked.logprobs
        rows.append(_row(model, request, asked, number, row_seed(whole_seed(seed) or 0, number)))
    if asked.prompt_logprobs is not None:
        rows[0].scores = PromptScores(model.backbone, prompt, asked.prompt_logprobs)
        rows[0].ticket.prompt_logprobs = rows[0].scores.found
    return rows


def _limits(model: MedusaModel, asked: Submission, settings: dict[str, Any], room: int) -> dict[str, Any]:
    """Return the settings of a row's length and end, of which the model's own generation config is the default."""
    own = model.backbone.causal_lm.generation_config
    new, least, eos = (settings.get(name) for name in ("max_new_tokens", "min_new_tokens", "eos_token_id"))
    new = whole("max_new_tokens", min(own.max_new_tokens or room, room) if new is None else new) or 0
    found: dict[str, Any] = {"max_new_tokens": new}
    least = whole("min_new_tokens", own.min_new_tokens if least is None else least)
    if least is not None:
        found["min_new_tokens"] = min(least, new)
    found["eos_token_id"] = [*token_list(own.eos_token_id if eos is None else eos), *asked.ends]
    if settings.get("top_k") is None and own.top_k == -1:  # vLLM's and llama.cpp's word for all tokens
        found["top_k"] = 0
    return found


def _row(model: MedusaModel, request: Request, asked: Submission, number: int, seed: int) -> Row:
    if any(request.limits.min_new) and request.limits.eos:
        # A step on the device has one minimum and one list of EOS tokens for all rows. With a processor, even one that
        # does nothing, the host selects the row's tokens, by transformers' processors for it alone.
        if request.acceptance == "typical":
            raise ValueError("min_new_tokens: expected 0 with acceptance='typical', got more")
        request.processors = [*request.processors, lambda text, scores: scores]
    backbone = model.backbone
    selector = token_selector(backbone.causal_lm, request, [request.prompts[0].to(backbone.device)])
    if isinstance(selector, LogitsProcessors):
        selector.shared = True
    typical = selector.key if isinstance(selector, TypicalAcceptance) else None
    # Rows that name the default run with those that name nothing.
    tree = None if asked.tree == "auto" == model.tree else asked.tree
    ticket = Ticket(asked.prompt, _guarded(asked.deliver, number))
    return Row(
        ticket=ticket, accepted=ticket.accepted, request=request, selector=selector, kind=(tree, typical),
        ends=frozenset(request.limits.eos), seed=seed, text=list(asked.prompt),
    )  # fmt: skip


def _guarded(deliver: Callable[[int, Delta], None], number: int) -> Callable[[Delta], None]:
    """Return what delivers to one caller, whose errors must not end other callers' generations."""

    def guarded(delta: Delta) -> None:
        try:
            deliver(number, delta)
        except Exception:
            logger.exception("engine: a caller could not take what was delivered")

    return guarded


def check_tree(tree: Tree, device: torch.device) -> None:
    """Raise `ValueError` for a tree that rows of several callers cannot share on a device."""
    if tree.num_nodes > MOST_NODES:
        raise ValueError(f"tree: expected at most {MOST_NODES} nodes in an engine, got {tree.num_nodes}")
    most = most_copied(device)
    if tree.lookup > most:
        where = f"in an engine on {device.type}"
        raise ValueError(f"tree: expected at most {most} tokens copied from the text {where}, got {tree.lookup}")


def most_copied(device: torch.device) -> int:
    """Return the most tokens that a step copies from the text: none on a GPU, whose tokens the host reads too late."""
    return 0 if device.type in STEPS_LATE else LENGTHS[-1]
