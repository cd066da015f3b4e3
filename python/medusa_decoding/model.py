"""MedusaModel: a base model and its heads, generating.

This is the public face: it checks what it is given, then runs the loop. It does not know checkpoint formats (see
`checkpoints`), how settings become rules (see `settings`) or how a step is made (see `decode`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from medusa_decoding.backbone import bypassed
from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.tensor_parallel import Peers
from medusa_decoding.checkpoints import find_base_model, find_base_revision, load_base_model, read_heads, tuning_file
from medusa_decoding.checkpoints.base import stated_sizes
from medusa_decoding.checks import check_streamer, check_truth, index, plain, shown, split_prompts
from medusa_decoding.decode.adaptive.acceptance import AcceptanceModel, TreeSet
from medusa_decoding.decode.adaptive.policy import Adaptive, Fixed, Policy
from medusa_decoding.decode.adaptive.step_times import StepTimes
from medusa_decoding.decode.loop import Hooks, Run, run
from medusa_decoding.decode.runtime.steps import Backend, Steps, resolve_backend
from medusa_decoding.decode.runtime.streaming import Follow, StreamObserver
from medusa_decoding.decode.selection.processors import Processed
from medusa_decoding.decode.state import Rules
from medusa_decoding.decode.verify import TokenSelector
from medusa_decoding.generation import settings
from medusa_decoding.generation.metrics import GenerationMetrics
from medusa_decoding.generation.session import Session
from medusa_decoding.heads import MAX_TOP_K, MedusaHeads
from medusa_decoding.provenance import fingerprint
from medusa_decoding.trees.published import published_tree
from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.select import CALIBRATION, Accuracies, find_accuracies, published

DEFAULT_TREE_FILE = "medusa_tree.json"
logger = logging.getLogger(__name__)
# What sampling alone looks at, with the value that changes nothing.
_OF_SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "top_h": None,
}  # fmt: skip


@dataclass
class MedusaOutput(GenerateDecoderOnlyOutput):
    """What `MedusaModel.generate` returns: transformers' own output of `generate`, with more fields after its own.

    Fields are found by name, by key, and by place among those that are not None (the sequences first). `attentions`,
    `hidden_states` and `past_key_values` are always None.

    Attributes:
        sequences: int64 [B, prompt + new]: the prompt as given (padding included), then the new tokens, padded on the
            right with the pad token; a row ends at its EOS token, as in transformers.
        scores: with `output_scores`: processed scores fp32 [B, V] of each new token, as in transformers; zeros in rows
            that had ended.
        logits: with `output_logits`: the model's logits likewise.
        accept_lengths: one list a row: accepted tokens below the root, a number a step (prefill is not a step). A last
            step cut short by EOS, a stopping criterion or the budget counts what was kept.
        new_tokens: new tokens of each row.
        metrics: with `metrics=True`.
    """

    sequences: torch.Tensor  # type: ignore[assignment]  # transformers says LongTensor, and tuples of one
    scores: tuple[torch.Tensor, ...] | None = None  # type: ignore[assignment]
    logits: tuple[torch.Tensor, ...] | None = None  # type: ignore[assignment]
    accept_lengths: list[list[int]] = None  # type: ignore[assignment]  # ModelOutput asks for defaults
    new_tokens: list[int] = None  # type: ignore[assignment]
    metrics: GenerationMetrics | None = None

    @property
    def steps(self) -> int:
        """Steps summed over the rows, each row's own."""
        return sum(len(row) for row in self.accept_lengths)

    @property
    def tokens_per_step(self) -> float:
        """Committed tokens / steps, the acceleration rate; the prefill's token is not counted. NaN without a step."""
        committed = sum(sum(row) + len(row) for row in self.accept_lengths)
        return committed / self.steps if self.steps else float("nan")


@dataclass
class Request:
    """One call of `generate`, checked.

    Attributes:
        input_ids: int64 [B, T] as given, rows repeated for `num_return_sequences`.
        prompts: int64 [T_b] a row, without padding, on the host.
        config: the generation config in force.
        rule: how tokens are chosen.
        limits: how long rows get.
        criteria: stopping criteria that the host evaluates.
        streamer: a transformers streamer or None.
        seed: of sampling; one a row makes its numbers those of a batch of its own; None draws one from torch's
            generator on the CPU.
        metrics: whether metrics are wanted.
        session: holds the cache between calls, or None.
    """

    input_ids: torch.Tensor
    prompts: list[torch.Tensor]
    config: GenerationConfig
    rule: settings.Rule
    limits: settings.Limits
    criteria: Sequence[Any] = ()
    streamer: Any = None
    seed: int | Sequence[int] | None = None
    metrics: bool = False
    session: Session | None = None


class MedusaModel:
    """A Llama-family model with Medusa heads.

    Any number of threads may call `generate` of one MedusaModel, or of several with one base model: their generations
    run one after the other, each with the text that it would have alone. Streamers, stopping criteria and logits
    processors may generate with the model themselves. Weights, adapters and modes are not to be changed while another
    thread generates.

    Args:
        base: a causal language model as loaded by transformers (quantised or LoRA-wrapped is fine). Its attention
            modules are swapped until `undo` (or the end of a `with` block); its own forward and `generate` keep
            working meanwhile.
        heads: its heads; None for plain decoding only.
        tree: what `generate` verifies by default, a Tree or "auto"; None for the 64-node tree of `default_tree`.
        backend: how steps run. "eager"; "compiled": through torch.compile, at the first use of each tree; "graph":
            captured as a CUDA graph at the first use of each tree and cache size; "auto": "graph" on CUDA, else
            "eager". Captured steps keep their caches between generations, see `free`.

    Raises:
        ValueError: an unsupported model, heads of another size, or a tree the heads cannot fill. The base model is left
            as it was.
    """

    def __init__(
        self,
        base: nn.Module,
        heads: MedusaHeads | None = None,
        tree: Tree | Literal["auto"] | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.base: Any = base
        self._suspended: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None
        self.backbone = Backbone(base)
        try:
            if heads is not None:
                self._check_heads(heads)
            self._heads = heads
            self.tree = tree if tree is not None else default_tree(heads, self.backbone.config._name_or_path)
            self._check_tree(self.tree)
            self.backend = backend
            self._steps = Steps(self.backbone, heads)
            self._adaptive: Adaptive | None = None
            self._under_way = 0
            self._accuracies: Accuracies | None = None
            self._tuning: tuning_file.Tuning | None = None
            self._tuned_tree: Tree | None = None
        except BaseException:
            self.backbone.swap.undo()
            raise

    @classmethod
    def from_pretrained(
        cls,
        heads: str | Path,
        base_model: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        tree: Tree | Literal["auto"] | None = None,
        backend: Backend = "auto",
        **hf_kwargs: Any,
    ) -> MedusaModel:
        """Load heads and their base model.

        Args:
            heads: folder or hub id in any supported format (see `checkpoints`).
            base_model: folder or hub id; overrides the checkpoint's `base_model_name_or_path`.
            dtype: of the base model; "auto" keeps the checkpoint's. The heads follow the base model.
            device_map: passed to transformers.
            tree: as in the constructor. By default what `medusa tune` has stored beside the heads: in each generation
                the tree chosen for the nearest batch and prefix length. It holds for the device, model, heads, dtype
                and backend that it was measured with; elsewhere a warning says what has changed, and the default is the
                checkpoint's `medusa_tree.json` if it has one. "auto" starts from the step times stored there, under the
                same conditions, and from the accuracies that stand beside the heads.
            backend: as in the constructor.
            **hf_kwargs: passed to `AutoModelForCausalLM.from_pretrained`. Remote code is never run.

        Raises:
            ValueError: an unreadable checkpoint, or one that does not fit the base model; it names what is wrong.
        """
        if hf_kwargs.pop("trust_remote_code", False):
            raise ValueError("trust_remote_code: expected False, got True; remote code is never run")
        # The base model's sizes are checked before the heads take memory; and heads that share lm_head do not say V.
        # A hub is not asked twice: only folders are looked into here unless a base model is given.
        named, sizes = base_model, {}
        if named is None and isinstance(heads, (str, Path)) and os.path.isdir(os.path.expanduser(heads)):
            found = find_base_model(heads)
            named = found if found is not None and os.path.isdir(found) else None
        if named is not None:
            revision = hf_kwargs.get("revision") or find_base_revision(heads, base_model=named)
            sizes = stated_sizes(str(named), revision)
        checkpoint = read_heads(heads, hidden_size=sizes.get("hidden_size"), vocab_size=sizes.get("vocab_size"))
        base = load_base_model(checkpoint, base_model, dtype=dtype, device_map=device_map, **hf_kwargs)
        tree_file = checkpoint.path / DEFAULT_TREE_FILE
        stated = Tree.load(tree_file) if tree is None and tree_file.is_file() else tree
        norm = base.model.norm.weight
        model = cls(base.eval(), checkpoint.heads.place(norm.device, norm.dtype), stated, backend)
        model._recall(checkpoint.path, tree)
        return model

    def _recall(self, folder: Path, asked: Tree | Literal["auto"] | None) -> None:
        """Take over what was measured before: step times and trees chosen by them, and how often heads are right."""
        assert self.heads is not None
        try:
            self._accuracies = find_accuracies(
                folder,
                self.heads.num_heads,
                min(MAX_TOP_K, self.heads.num_candidates),
                fingerprint(self.heads) if (folder / CALIBRATION).is_file() else None,
                str(self.backbone.dtype).removeprefix("torch."),
            )
        except (ValueError, OSError) as error:
            logger.warning("accuracies refused, published ones of other heads serve: %s", error)
        # Who asks for a tree of their own need not be told that another one is refused.
        level = logging.INFO if isinstance(asked, Tree) else logging.WARNING
        self._tuning = tuning_file.recall(folder / tuning_file.FILE, self, level)
        if self._tuning is not None and asked is None:
            self.tree = self._tuned_tree = self._tuning.cases[0].tree

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int | None = None,
        tree: Tree | Literal["auto"] | None = None,
        acceptance: Literal["lossless", "typical"] = "lossless",
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        posterior_threshold: float = 0.09,
        posterior_alpha: float = 0.3,
        *,
        streamer: Any = None,
        stopping_criteria: Sequence[Any] | None = None,
        logits_processor: Sequence[Any] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
        stop_strings: str | list[str] | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        return_dict_in_generate: bool = True,
        metrics: bool = False,
        session: Session | None = None,
        generation_config: GenerationConfig | None = None,
        **generation: Any,
    ) -> MedusaOutput | torch.Tensor:
        """Continue each prompt: the text the base model alone would write, or with `do_sample` would draw.

        Each row of a batch gets the text that it would get alone, also with processors that count padding in
        transformers' own `generate`. docs/generate.md lists which settings are obeyed, ignored and refused.

        Settings come from the arguments, then from `generation_config`, then from the base model's own generation
        config; only `do_sample` is never taken from the latter, so that greedy decoding is the default.

        Args:
            input_ids: int64 [B, T] prompts, left- or right-padded where lengths differ.
            attention_mask: [B, T], 1 for tokens and 0 for padding; None if nothing is padded.
            max_new_tokens: new tokens a row, at least 1; obeyed as transformers does, even past the declared context.
                None without one in the configs either: 256, or what the context leaves.
            tree: verified each step; `Tree([])` decodes plainly; "auto" chooses anew before each step, among plain
                decoding and trees of several sizes, from measured step times and the acceptance seen so far. None for
                the model's own.
            acceptance: "lossless": the model's own next token is found or drawn at every node, and the child that
                carries it is followed. "typical": the paper's typical acceptance (section 2.3.1), which keeps drafts
                that are likely enough; LOSSY, the text is not the model's own.
            do_sample: draw from the model's processed distribution instead of taking the likeliest token.
            temperature: of sampling, or of typical acceptance.
            top_p: nucleus of sampling.
            top_k: likeliest tokens to sample from; 0 for all, also where nothing says otherwise (transformers' own
                `generate` takes 50 then).
            posterior_threshold: epsilon of typical acceptance.
            posterior_alpha: delta of typical acceptance.
            streamer: a transformers streamer (batch of 1), given the prompt, then each new token in order.
            stopping_criteria: transformers criteria, called with each prefix of each row, (int64 [1, length], scores).
            logits_processor: transformers processors, called once for each emitted token of each row in order, with
                (int64 [1, length], fp32 [1, V]): the node's own path, without padding.
            prefix_allowed_tokens_fn: (row, int64 [length]) to the tokens allowed next.
            stop_strings: a row ends behind the token with which one of these appears; needs `tokenizer`.
            tokenizer: the model's.
            seed: of sampling; None draws one from torch's CPU generator, which `torch.manual_seed` sets. A row's
                numbers depend on the seed and its index only, so all trees write the same text.
            return_dict_in_generate: False returns only the sequences.
            metrics: keep counts and times, see `MedusaOutput.metrics`.
            session: keeps this call's cache for the next one, which then prefills only what is new; see `Session`.
            generation_config: transformers' settings.
            **generation: fields of a GenerationConfig, as in transformers' generate (`repetition_penalty`,
                `eos_token_id`, `max_time`, `num_return_sequences`, `output_scores`, ..).

        Raises:
            ValueError: bad arguments; a prompt that leaves no room in the context; something that cannot work here
                (beam search, say); a base model whose text depends on what decoding passes by (overridden forwards,
                hooks, attention functions, dropout in training mode, autocast); heads and base model of different
                dtypes. Raised before any work.
            FloatingPointError: the model's output is not finite; names the step.
            MemoryError: keys and values do not fit.
        """
        with _ended_on_error(streamer):
            self._check_swapped()
            bypassed.check_methods_before(self.backbone.causal)
            check_streamer(streamer)
            check_truth("metrics", metrics)
            check_truth("return_dict_in_generate", return_dict_in_generate)
            if not isinstance(session, (Session, type(None))):
                raise ValueError(f"session: expected a Session or None, got {shown(session)}")
            changes = generation | {
                "max_new_tokens": max_new_tokens, "do_sample": do_sample, "temperature": temperature, "top_p": top_p,
                "top_k": top_k, "stop_strings": stop_strings, "return_dict_in_generate": bool(return_dict_in_generate),
            }  # fmt: skip
            changes = {name: plain(name, value) for name, value in changes.items()}
            own = self.backbone.causal.generation_config
            if do_sample is None and getattr(generation_config, "do_sample", None) is None:
                changes["do_sample"] = False
            if acceptance == "typical" and temperature is None and generation_config is None:
                changes["temperature"] = 1.0
            config = settings.merged(own, generation_config, changes)
            for name, neutral in _OF_SAMPLING.items():
                value, lossy = changes.get(name), acceptance == "typical" and name == "temperature"
                if value is not None and value != neutral and not config.do_sample and not lossy:
                    raise ValueError(f"{name}: expected {neutral} without do_sample=True, got {value}")
            request = self._request(
                input_ids,
                attention_mask,
                config,
                settings.Rule(
                    acceptance,
                    plain("posterior_threshold", posterior_threshold),
                    plain("posterior_alpha", posterior_alpha),
                    settings.callables("logits_processor", logits_processor),
                    prefix_allowed_tokens_fn,
                ),
                criteria=settings.criteria(
                    config, settings.callables("stopping_criteria", stopping_criteria), tokenizer
                ),
                streamer=streamer,
                seed=whole_seed(seed),
                metrics=metrics,
                session=session,
            )
            output = self.run(request, tree)
        return output if return_dict_in_generate else output.sequences

    def _request(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        config: GenerationConfig,
        rule: settings.Rule,
        **wanted: Any,
    ) -> Request:
        """Check the prompts and find out how long their continuations may get."""
        prompts = split_prompts(input_ids, attention_mask, self.backbone.vocab_size)
        pad = config.pad_token_id
        ends = input_ids[:, [0, -1]]
        if attention_mask is None and pad is not None and len(ends) > 1 and bool((ends == pad).any()):
            logger.warning("attention_mask: none given, so the pad token %d at an end of a row is read as text", pad)
        count = settings.sampled_rows(config, len(input_ids))
        prompts = [prompt for prompt in prompts for _ in range(count)]
        if wanted.get("streamer") is not None and len(prompts) > 1:
            raise ValueError(f"streamer: expected a batch of 1, got {len(prompts)}")
        lengths = [len(prompt) for prompt in prompts]
        limits = settings.Limits.of(config, lengths, input_ids.shape[1], self.backbone.context_limit)
        return Request(input_ids.repeat_interleave(count, 0), prompts, config, rule, limits, **wanted)

    def run(self, request: Request, tree: Tree | Literal["auto"] | None = None) -> MedusaOutput:
        """Decode a checked request, after the generations of this base model that other threads have begun."""
        self._check_swapped()
        with self.backbone.turns.generation(self.backbone.device):
            self._check_decodable()
            if request.session is not None and self.backbone.peers.size > 1:
                # Each process would have to find the same rows in its own memory.
                raise ValueError(f"session: expected a model in one process, got one over {self.backbone.peers.size}")
            policy = self._policy(self._tuned_for(request.prompts) if tree is None else tree)
            # A generation within another's callback has steps of its own: graphs of one step share memory.
            steps = Steps(self.backbone, self.heads) if self._under_way else self._steps
            self._under_way += 1
            try:
                # States outlive this call, so they are not inference tensors, which nothing outside of that mode may
                # change.
                with torch.inference_mode(False), torch.no_grad(), self._current_device():
                    return self._run(request, policy, steps)
            finally:
                self._under_way -= 1
                if isinstance(policy, Adaptive):
                    self._adaptive = policy

    def _run(self, request: Request, policy: Policy, steps: Steps) -> MedusaOutput:
        backend = resolve_backend(self.backend, self.backbone.device, self.backbone.peers.size)
        turns, rule, streamer = self.backbone.turns, request.rule, request.streamer
        prompts = [prompt.to(self.backbone.device) for prompt in request.prompts]
        choice = settings.choice(self.backbone.causal, request.config, request.limits, prompts, rule)
        if isinstance(choice, Processed):
            for row in choice.rows:
                row.processors = [turns.without(row.processors)]
        model = steps.fingerprint() if request.session else None
        draws = functools.partial(_draws, request, self.backbone.peers)
        hooks = Hooks(draws, self._follower(request, prompts, choice), request.metrics)
        step_of = steps.of_generation(backend)
        rules = self._rules(request.limits, choice)
        calls_back = any((streamer is not None, request.criteria, rule.processors, rule.prefix_fn))
        with bypassed.unchanged(self.backbone.causal, self.heads) if calls_back else contextlib.nullcontext():
            if streamer is not None:
                with turns.given_up():
                    streamer.put(request.prompts[0][None])
            if request.session is not None:
                hooks.earlier = request.session.take(self.backbone, model, request.prompts)
            done = run(self.backbone, prompts, rules, policy, step_of, steps.pool, hooks)
        if streamer is not None:
            with turns.given_up():
                streamer.end()
        output = _collect(done, request, choice)
        if request.session is not None:
            request.session.keep(self.backbone, model, done.state, _cached(output, request), done.reused)
        else:
            steps.pool.release(done.state)
        return output

    def _policy(self, tree: Tree | Literal["auto"] | None) -> Policy:
        chosen = self.tree if tree is None else tree
        self._check_tree(chosen)
        if isinstance(chosen, Tree):
            return Fixed(chosen)
        # What it learns of step times and heads serves the generations that follow; meanwhile it belongs to this one.
        adaptive, self._adaptive = self._adaptive, None
        if adaptive is None:
            tree_set = TreeSet((self._accuracies or _published(self.heads)).by_rank if self.heads is not None else [])
            tuning = self._tuning_here()
            times = StepTimes() if tuning is None else tuning.times()
            adaptive = Adaptive(tree_set, times, AcceptanceModel(tree_set))
        return adaptive

    def _tuning_here(self) -> tuning_file.Tuning | None:
        """Return what `medusa tune` has found, as long as the model runs where that was."""
        return self._tuning if self._tuning is not None and self._tuning.place.still_holds(self) else None

    def _tuned_for(self, prompts: Sequence[torch.Tensor]) -> Tree | None:
        """Return the tree that was tuned for such prompts; None where the default is another one."""
        tuning = self._tuning_here() if self.tree is self._tuned_tree else None
        return None if tuning is None else tuning.nearest(len(prompts), max(map(len, prompts))).tree

    def _follower(self, request: Request, prompts: list[torch.Tensor], choice: TokenSelector) -> Follow | None:
        if not request.criteria and request.streamer is None:
            return None

        def scores(row: int, count: int) -> tuple[torch.Tensor, ...] | None:
            if not request.config.output_scores or not isinstance(choice, Processed):
                return None
            return tuple(score[None] for score in choice.rows[row].scores[:count])

        observer = StreamObserver(prompts, request.criteria, request.streamer, scores, self.backbone.peers.agree)
        return self.backbone.turns.without([observer])

    def _rules(self, limits: settings.Limits, choice: TokenSelector) -> Rules:
        device = self.backbone.device
        suppressed = any(limits.min_new) and bool(limits.eos)
        return Rules(
            torch.tensor(limits.eos, dtype=torch.int64, device=device),
            torch.tensor(limits.budgets, dtype=torch.int32, device=device),
            torch.tensor(limits.min_new, dtype=torch.int32, device=device) if suppressed else None,
            max(limits.budgets),
            choice,
        )

    def _current_device(self) -> contextlib.AbstractContextManager[object]:
        """Make the model's device the current one, on which streams and captures are made."""
        device = self.backbone.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    @property
    def heads(self) -> MedusaHeads | None:
        """The heads; another set needs another MedusaModel."""
        return self._heads

    def free(self) -> None:
        """Free what is kept between generations (caches, compiled and captured steps, step times learnt meanwhile).

        All of it is made again on use.
        """
        with self.backbone.turns.generation():
            self._steps.clear()
            self._adaptive = None

    def suspend(self) -> None:
        """Give the base model its own attention modules back until `resume`; nothing else that is kept is freed.

        Meanwhile this object refers to the base model weakly, to its layers strongly.

        Raises:
            ValueError: called during a generation of this object, by what that calls; nothing has changed then.
        """
        with self._between_generations("suspend"):
            if self.backbone.swap.active:
                self.backbone.swap.suspend()
                self._suspended = weakref.ref(self.base), weakref.ref(self.backbone.causal)
                self.base = self.backbone.causal = None

    def resume(self) -> None:
        """Swap the attention modules again after `suspend`.

        Raises:
            ValueError: the base model is gone, or a layer has got an attention that is not supported.
        """
        with self.backbone.turns.generation():
            if self._suspended is None:
                return
            base, causal = (reference() for reference in self._suspended)
            if base is None or causal is None:
                raise ValueError("MedusaModel: expected the base model still in use, got one that was deleted")
            self.backbone.swap.resume()
            self.base, self.backbone.causal = base, causal
            self._suspended = None

    def undo(self) -> None:
        """Give the base model its own attention modules back; this object cannot generate any more.

        Waits for a generation in another thread.

        Raises:
            ValueError: called during a generation of this object, by what that calls; nothing has changed then.
        """
        with self._between_generations("undo"):
            self._steps.clear()
            self.backbone.swap.undo()

    @contextlib.contextmanager
    def _between_generations(self, what: str) -> Iterator[None]:
        with self.backbone.turns.generation():
            if self._under_way:
                raise ValueError(
                    f"MedusaModel: expected {what}() between generations, got it during one (from its streamer, a "
                    "stopping criterion or a logits processor, say); call it when generate has returned"
                )
            yield

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as what it was made from: a copy swaps the modules of its own copy of the base model."""
        return type(self), (self.base, self.heads, self.tree, self.backend), {"_accuracies": self._accuracies}

    def __enter__(self) -> MedusaModel:
        """Return the model itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Undo the swap; what ends the block with an error is raised even if the swap cannot be undone now."""
        try:
            self.undo()
        except ValueError as refusal:
            if exc[0] is None:
                raise
            logger.warning("%s", refusal)

    def _check_swapped(self) -> None:
        if not self.backbone.swap.active:
            what = "undo" if self._suspended is None else "suspend"
            raise ValueError(f"MedusaModel: expected attention modules still swapped, got a model after {what}()")
        self.backbone.swap.check(self.backbone.decoder.layers)

    def _check_decodable(self) -> None:
        """Raise `ValueError` unless base model and heads still are what can be decoded."""
        self._check_swapped()
        self.backbone.check(self.base)
        if self.heads is not None:
            self._check_heads(self.heads)

    def _check_heads(self, heads: MedusaHeads) -> None:
        if not isinstance(heads, MedusaHeads):
            raise ValueError(f"heads: expected MedusaHeads or None, got {shown(heads)}")
        for name, wanted, got in (
            ("hidden_size", self.backbone.config.hidden_size, heads.hidden_size),
            ("vocab_size", self.backbone.vocab_size, heads.vocab_size),
        ):
            if wanted != got:
                raise ValueError(f"heads: expected {name} {wanted} like the base model, got {got}")
        if (heads.w1.device, heads.w1.dtype) != (self.backbone.device, self.backbone.dtype):
            raise ValueError(
                f"heads: expected {self.backbone.dtype} on {self.backbone.device} like the base model, "
                f"got {heads.w1.dtype} on {heads.w1.device}; convert both with to(device, dtype)"
            )

    def _check_tree(self, tree: Tree | Literal["auto"]) -> None:
        if isinstance(tree, str) and tree == "auto":
            return
        if not isinstance(tree, Tree):
            raise ValueError(f"tree: expected a Tree or 'auto', got {tree!r}")
        if self.heads is None:
            tree.check_fits(0, 0)
            return
        tree.check_fits(self.heads.num_heads, min(MAX_TOP_K, self.heads.num_candidates))


def default_tree(heads: MedusaHeads | None, base_model: str | None = None) -> Tree:
    """The tree used when neither caller nor checkpoint names one.

    64 nodes (or all there are), searched for published accuracies: those of the base model's own heads where the
    paper's authors have published some (Vicuna 7B, 13B, 33B), else those of Vicuna-7B's, a shape that suits heads whose
    accuracy falls off with depth. A calibrated tree is better; this one never needs calibration.

    Args:
        heads: None for plain decoding.
        base_model: its name, a hub id or a folder.
    """
    if heads is None:
        return Tree([])
    own = published_tree(base_model)
    if own is not None and own.depth <= heads.num_heads and own.top_k <= heads.num_candidates:
        return own
    accuracies = _published(heads).by_rank
    possible = sum(len(accuracies[0]) ** depth for depth in range(len(accuracies) + 1))
    return Tree.optimal(accuracies, min(64, possible))


def _published(heads: MedusaHeads) -> Accuracies:
    """What is assumed of heads that nobody has calibrated."""
    return published(heads.num_heads, heads.num_candidates)


@contextlib.contextmanager
def _ended_on_error(streamer: Any) -> Iterator[None]:
    """End a streamer where a generation is refused or fails: a thread may be waiting for its end."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with contextlib.suppress(Exception):
                streamer.end()
        raise


def whole_seed(seed: Any) -> int | None:
    """Return an optional seed as an int of 64 bits.

    Raises:
        ValueError: not a whole number, or one of more bits.
    """
    if seed is None:
        return None
    number = index("seed", seed)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seed: expected a whole number of up to 64 bits, got {number}")
    return number % 2**64


def _draws(request: Request, peers: Peers) -> torch.Tensor | None:
    """Return the uniform numbers of each row, fp64 [B, the largest budget], or None where nothing is drawn."""
    if not request.config.do_sample:
        return None
    # torch's own generator on the CPU would keep 32 bits of a seed.
    seed = request.seed if request.seed is not None else peers.agree(int(torch.randint(2**63 - 1, ())))
    budgets = request.limits.budgets
    # A stream a row: neither the batch nor the budget changes a row's numbers.
    keys = [(seed, row) for row in range(len(budgets))] if isinstance(seed, int) else [(own, 0) for own in seed]
    streams = [np.random.Generator(np.random.Philox(np.random.SeedSequence(key))) for key in keys]
    draws = np.empty((len(streams), max(budgets)))
    for row, stream in zip(draws, streams, strict=True):
        stream.random(out=row)
    return torch.from_numpy(draws)


def _collect(done: Run, request: Request, choice: TokenSelector) -> MedusaOutput:
    """Bring a generation's result to where its prompts came from."""
    state, ids = done.state, request.input_ids
    counts = state.count.tolist()
    new = state.output[:, : max(counts)].to(ids.device)
    kept = torch.arange(new.shape[1], device=new.device) < torch.tensor(counts, device=new.device)[:, None]
    sequences = torch.cat([ids, new.masked_fill(~kept, request.limits.pad)], dim=1)
    committed = state.log[:, 1 : int(state.step)].tolist()  # column 0 is the prefill's token
    accepted = [_accepted(row, count - 1) for row, count in zip(committed, counts, strict=True)]
    scores = logits = metrics = None
    if isinstance(choice, Processed):
        scores = _stacked([row.scores for row in choice.rows], counts) if choice.keep_scores else None
        logits = _stacked([row.logits for row in choice.rows], counts) if choice.keep_logits else None
    if request.metrics:
        prompts = [len(prompt) for prompt in request.prompts]
        metrics = GenerationMetrics.of(prompts, counts, accepted, done.trees, done.seconds)
    return MedusaOutput(
        sequences=sequences, scores=scores, logits=logits, accept_lengths=accepted, new_tokens=counts, metrics=metrics
    )


def _cached(output: MedusaOutput, request: Request) -> list[list[int]]:
    """Return the tokens of each row whose keys and values are cached: all but the last new one."""
    width = request.input_ids.shape[1]
    new = (
        row[width : width + count - 1].tolist() for row, count in zip(output.sequences, output.new_tokens, strict=True)
    )
    return [prompt.tolist() + tokens for prompt, tokens in zip(request.prompts, new, strict=True)]


def _accepted(committed: list[int], total: int) -> list[int]:
    """Accepted tokens below the root in each step of a row that kept `total` tokens of its steps."""
    accepted = []
    for tokens in committed:
        tokens = min(tokens, total)
        total -= tokens
        if tokens > 0:
            accepted.append(tokens - 1)
    return accepted


def _stacked(rows: list[list[torch.Tensor]], counts: list[int]) -> tuple[torch.Tensor, ...]:
    nothing = torch.zeros_like(rows[0][0])
    return tuple(
        torch.stack([row[place] if place < count else nothing for row, count in zip(rows, counts, strict=True)])
        for place in range(max(counts))
    )


__all__ = ["MedusaModel", "MedusaOutput", "default_tree"]
