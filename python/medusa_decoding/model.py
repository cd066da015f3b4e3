"""MedusaModel: a base model with its heads, the public face of the package.

Checkpoint formats are in `checkpoints`, checking and running a call in `generation`, and the steps in `decode`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import GenerationConfig

from medusa_decoding.backbone import unsupported
from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.checkpoints import (
    HeadsCheckpoint,
    load_base_model,
    read_heads,
    tuning_file,
    tuning_paths,
)
from medusa_decoding.checkpoints.accuracies import Accuracies, default_accuracies, find_accuracies
from medusa_decoding.checkpoints.pretrained import stated_sizes
from medusa_decoding.checkpoints.reading import (
    HUB_ARGUMENTS,
    HUB_FILES,
    fetch_folder,
    is_plain,
    stated_base_model,
    without_heads,
)
from medusa_decoding.checks import shown
from medusa_decoding.decode.adaptive.acceptance import TreeSet, sizes_for
from medusa_decoding.decode.adaptive.copying import Copying
from medusa_decoding.decode.adaptive.policy import Adaptive
from medusa_decoding.decode.adaptive.step_times import StepTimes
from medusa_decoding.decode.policy import FixedTree, Policy
from medusa_decoding.decode.runtime.progress import STEPS_LATE
from medusa_decoding.decode.runtime.steps import Backend, Steps, resolve_backend
from medusa_decoding.generation.inputs import ended_on_error
from medusa_decoding.generation.output import MedusaOutput
from medusa_decoding.generation.request import Request, check_request
from medusa_decoding.generation.run import run_request
from medusa_decoding.generation.session import Session
from medusa_decoding.generation.tree_choice import (
    CHANGED,
    FOR_SAMPLING,
    GIVEN,
    NO_HEADS,
    UNTUNED,
    TreeChoice,
    tuned_choice,
)
from medusa_decoding.heads import MAX_TOP_K, MedusaHeads
from medusa_decoding.options import ACTIVATION_DTYPES, CACHE_DTYPES
from medusa_decoding.trees.tree import Tree

logger = logging.getLogger(__name__)


class MedusaModel:
    """A Llama-family model with Medusa heads.

    Any number of threads may call `generate` of one MedusaModel, or of several with one base model: their generations
    run one after the other, and each gets the text that it would get alone. Streamers, stopping criteria and logits
    processors may generate with the model themselves. Weights, adapters and modes must not be changed while another
    thread generates.

    Args:
        base: a causal language model as loaded by transformers (quantised or LoRA-wrapped is fine). Its attention
            modules are swapped until `undo` (or the end of a `with` block), and some quantised linear ones replaced
            (see `LinearHold`); meanwhile its own forward and `generate` keep working.
        heads: its heads; None for plain decoding and copies from the text only.
        tree: what `generate` verifies by default, a Tree or "auto", which picks one for each step. None for the tree
            that was tuned for this device if there is one (see `from_pretrained`), else "auto", or plain decoding
            without heads; `tree_choice` says which, and why. On a CPU with eager steps, "auto" and None also verify
            tokens copied from the text, where that promises more (see `Copying`).
        backend: how steps run. "eager"; "compiled": through torch.compile, at the first use of each tree; "graph":
            captured as a CUDA graph at the first use of each tree and cache size; "auto": "graph" on CUDA if the steps
            can be captured (see `Backbone.capturable`), else "eager". Captured steps keep their caches between
            generations, see `free`.
        cache_dtype: "int8" keeps keys and values in 8 bits with a scale per head and token, about half the bytes of
            bfloat16. LOSSY: the text is that of the model with such a cache, whatever the tree. None: the model's
            dtype. It may be set between generations.
        activation_dtype: "int8" rounds the inputs of layers with weights in int8 or int4 to 8 bits with a scale per
            token, which is faster on a CPU (see docs/quantisation.md). LOSSY: until `undo` the base model's own forward
            rounds too. None: as the layers are.

    Raises:
        ValueError: an unsupported model, heads of another size, or a tree the heads cannot fill. The base model is
            unchanged then.
    """

    def __init__(
        self,
        base: nn.Module,
        heads: MedusaHeads | None = None,
        tree: Tree | Literal["auto"] | None = None,
        backend: Backend = "auto",
        cache_dtype: Literal["int8"] | None = None,
        activation_dtype: Literal["int8"] | None = None,
    ) -> None:
        self.base: Any = base
        self._suspended: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None
        if activation_dtype not in (None, *ACTIVATION_DTYPES):
            raise ValueError(f"activation_dtype: expected None or 'int8', got {shown(activation_dtype)}")
        features = heads.feature_layers if isinstance(heads, MedusaHeads) else ()
        self.backbone = Backbone(base, activation_dtype is not None, features)
        try:
            if heads is not None:
                self._check_heads(heads)
            self._heads = heads
            self.tree = tree
            self.backend = backend
            self.cache_dtype = cache_dtype
            self._steps = Steps(self.backbone, heads)
            self._policies: dict[tuple[Tree | str, bool, bool], Policy] = {}  # of choices, and whether tokens are drawn
            self._under_way = 0
            self._accuracies: Accuracies | None = None
            self._stored_trees: dict[str, Tree] = {}
            self._tuning: tuning_file.Tuning | None = None
            self._untuned = UNTUNED
            self._told: set[str] = set()
        except BaseException:
            self.backbone.undo()
            raise

    @classmethod
    def from_pretrained(
        cls,
        heads: str | Path,
        base_model: str | Path | nn.Module | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        tree: Tree | Literal["auto"] | None = None,
        backend: Backend = "auto",
        cache_dtype: Literal["int8"] | None = None,
        activation_dtype: Literal["int8"] | None = None,
        **hf_kwargs: Any,
    ) -> MedusaModel:
        """Load heads and their base model.

        Args:
            heads: folder or hub id in any supported format (see `checkpoints`); a model without heads is loaded for
                plain decoding and copies from the text, with a warning.
            base_model: folder or hub id; overrides the checkpoint's `base_model_name_or_path`. Or the loaded model,
                which stays in its dtype and on its device.
            dtype: of the base model; "auto" keeps the checkpoint's. The heads follow the base model. `torch_dtype`, its
                older name, is read as well.
            device_map: passed to transformers.
            tree: as in the constructor. By default what `medusa tune` has stored next to the heads: for each generation
                the tree of the nearest batch and prefix length. It is used only with the device, model, heads, dtype
                and backend that it was measured with; otherwise a warning says what has changed, and the default is
                "auto". That starts from the step times stored there, under the same conditions, and from the
                accuracies stored next to the heads; a `medusa_tree.json` there is one of the trees it may choose. A
                generation that samples takes a `medusa_tree_sampling.json` instead of it, if there is one.
            backend: as in the constructor.
            cache_dtype: as in the constructor.
            activation_dtype: as in the constructor.
            **hf_kwargs: passed to `AutoModelForCausalLM.from_pretrained`. Remote code is never run.

        Raises:
            ValueError: an unreadable checkpoint, or one that does not fit the base model; names what is wrong.
        """
        if hf_kwargs.pop("trust_remote_code", False):
            raise ValueError("trust_remote_code: expected False, got True; remote code is never run")
        older = hf_kwargs.pop("torch_dtype", None)  # transformers ignores it next to `dtype`
        dtype = older if dtype == "auto" and older is not None else dtype
        placed = {"dtype": dtype, "device_map": device_map, **hf_kwargs}
        rounds = activation_dtype is not None
        sizes = _sizes_of_loaded(base_model, placed, rounds) if isinstance(base_model, nn.Module) else {}
        gguf = hf_kwargs.get("gguf_file")
        hub = {name: hf_kwargs[name] for name in HUB_ARGUMENTS if name in hf_kwargs}
        folder = fetch_folder(heads, None, "heads", [*HUB_FILES, *([] if gguf is None else [gguf])], **hub)
        if is_plain(folder, gguf):
            if base_model is not None and str(base_model) not in (str(heads), str(folder)):
                raise ValueError(f"base_model: expected none, because {without_heads(folder)}, got {shown(base_model)}")
            if isinstance(tree, Tree):
                tree.check_fits(0, 0)
            base = load_base_model(None, heads, **placed)
            model = cls(base.eval(), None, tree, backend, cache_dtype, activation_dtype)
            logger.warning("no heads: %s; %s", model.tree_choice().verified, without_heads(folder))
            return model
        # The base model's sizes are checked before the heads take memory; heads that share lm_head do not state V.
        # A hub is not asked for the base model's config first, unless that model is given.
        found, recorded = stated_base_model(folder)
        named = found if base_model is None else base_model
        if isinstance(named, (str, Path)) and (base_model is not None or os.path.exists(named)):
            revision = hf_kwargs.get("revision") or (recorded if str(named) == found else None)
            sizes = stated_sizes(str(named), revision, **hub)
        checkpoint = read_heads(folder, hidden_size=sizes.get("hidden_size"), vocab_size=sizes.get("vocab_size"))
        if isinstance(base_model, nn.Module):
            return cls.from_checkpoint(base_model, checkpoint, tree, backend, cache_dtype, activation_dtype)
        base = load_base_model(checkpoint, base_model, **placed).eval()
        return cls.from_checkpoint(base, checkpoint, tree, backend, cache_dtype, activation_dtype)

    @classmethod
    def from_checkpoint(
        cls,
        base: Any,
        checkpoint: HeadsCheckpoint,
        tree: Tree | Literal["auto"] | None = None,
        backend: Backend = "auto",
        cache_dtype: Literal["int8"] | None = None,
        activation_dtype: Literal["int8"] | None = None,
    ) -> MedusaModel:
        """Put heads that were read on a loaded base model; arguments are as in `from_pretrained`.

        Raises:
            ValueError: heads that do not fit the base model, or a damaged file with a tree.
        """
        stored = {} if isinstance(tree, Tree) else tuning_file.stored_trees(checkpoint.path, checkpoint.heads)
        causal = base.get_base_model() if hasattr(base, "get_base_model") else base  # peft's wrapper
        norm = causal.model.norm.weight
        model = cls(base, checkpoint.heads.place(norm.device, norm.dtype), tree, backend, cache_dtype, activation_dtype)
        model._recall(checkpoint.path, stored)
        return model

    def _recall(self, folder: Path, stored: dict[str, Tree]) -> None:
        """Load earlier measurements: head accuracies, step times and the trees chosen by them."""
        assert self.heads is not None
        self._stored_trees = stored
        try:
            self._accuracies = find_accuracies(folder, self.heads)
        except (ValueError, OSError) as error:
            logger.warning("accuracies refused, published ones of other heads serve: %s", error)
        # Callers that name a tree need no warning that another one is refused.
        level = logging.INFO if isinstance(self._tree, Tree) else logging.WARNING
        self._tuning = tuning_file.recall(folder, self.backbone, self.heads, self.backend, level)
        if self._tuning is None and tuning_paths.stored_files(folder):
            self._untuned = CHANGED
        for name, one in stored.items() if self._tuning is not None and self._tree is None else ():
            if self._tuning is not None and one not in self._tuning.trees:
                logger.warning(
                    "%s is not used: the stored tuning did not time it. Run `medusa tune` again, or pass it as tree=",
                    folder / name,
                )

    @property
    def tree(self) -> Tree | Literal["auto"]:
        """What `generate` verifies by default; as `tree_choice` says for one prompt of 128 tokens."""
        return self._default_choice().tree if self._tree is None else self._tree

    @tree.setter
    def tree(self, tree: Tree | Literal["auto"] | None) -> None:
        if tree is not None:
            self.check_tree(tree)
        self._tree = tree

    @property
    def backend(self) -> Backend:
        """How steps run; "eager" for "auto" if they cannot be captured."""
        return "eager" if self._backend == "auto" and not self.backbone.capturable else self._backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self._backend: Backend = backend

    @property
    def cache_dtype(self) -> Literal["int8"] | None:
        """The dtype of the KV cache if it is not the model's."""
        return None if self.backbone.cache_dtype is None else "int8"

    @cache_dtype.setter
    def cache_dtype(self, name: Literal["int8"] | None) -> None:
        if name is not None and name not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype: expected None or {' or '.join(map(repr, CACHE_DTYPES))}, got {shown(name)}")
        self.backbone.cache_dtype = None if name is None else torch.int8

    @property
    def activation_dtype(self) -> Literal["int8"] | None:
        """The dtype that inputs of quantised layers are rounded to; None if they are as the layers take them."""
        return "int8" if self.backbone.linears.rounds else None

    @property
    def lossy_dtypes(self) -> dict[str, str]:
        """The arguments among `cache_dtype` and `activation_dtype` that are set."""
        named = {"cache_dtype": self.cache_dtype, "activation_dtype": self.activation_dtype}
        return {name: dtype for name, dtype in named.items() if dtype is not None}

    def tree_choice(
        self, batch: int = 1, prefix: int = 128, tree: Tree | Literal["auto"] | None = None, sample: bool = False
    ) -> TreeChoice:
        """Return the tree that a generation verifies, and the reason.

        Args:
            batch: number of prompts.
            prefix: tokens of the longest prompt.
            tree: the argument of that `generate`.
            sample: whether tokens are sampled.

        Raises:
            ValueError: a tree that the heads cannot fill.
        """
        given = self._tree if tree is None else tree
        if given is not None:
            self.check_tree(given)
            return TreeChoice(given, GIVEN, copies=given == "auto" and self._copies)
        return dataclasses.replace(self._default_choice(batch, prefix, sample), copies=self._copies)

    def _default_choice(self, batch: int = 1, prefix: int = 128, sample: bool = False) -> TreeChoice:
        if self.heads is None:
            return TreeChoice(Tree([]), NO_HEADS)
        tuning = self._tuning_here()
        if tuning is None:
            return TreeChoice("auto", self._untuned if self._tuning is None else CHANGED)
        case = tuning.nearest(batch, prefix)
        own = self._stored_trees.get(tuning_file.SAMPLING_TREE_FILE) if sample else None
        timed = next((size for size in case.sizes if size.tree == own and size.rate > case.sizes[0].rate), None)
        return (
            tuned_choice(case) if timed is None else TreeChoice(timed.tree, FOR_SAMPLING, False, *case.compared(timed))
        )

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
            input_ids: int64 [B, T] prompts, left- or right-padded if lengths differ.
            attention_mask: [B, T], 1 for tokens and 0 for padding; None if nothing is padded.
            max_new_tokens: new tokens per row, at least 1; obeyed as in transformers, even past the declared context.
                If neither given nor in a config: 256, or what the context leaves.
            tree: verified in each step; `Tree([])` decodes plainly; "auto" picks a tree for each step, among plain
                decoding and trees of several sizes, from measured step times and the acceptance seen so far. None for
                the model's default, see `tree_choice`. Where both copy from the text (see the constructor), they do
                not with typical acceptance.
            acceptance: "lossless": the model's own next token is computed at every node, and the child that has it is
                followed. "typical": the paper's typical acceptance (section 2.3.1), which accepts draft tokens that
                are likely enough; LOSSY, the text is not the model's own.
            do_sample: draw from the model's processed distribution instead of taking the argmax.
            temperature: of sampling, or of typical acceptance.
            top_p: nucleus of sampling.
            top_k: how many of the most likely tokens to sample from; 0, the default, for all (the default of
                transformers' own `generate` is 50).
            posterior_threshold: epsilon of typical acceptance.
            posterior_alpha: delta of typical acceptance.
            streamer: a transformers streamer (batch of 1), given the prompt, then each new token in order. If it has a
                method `end_step`, that is called after the tokens of each step.
            stopping_criteria: transformers criteria, called with each prefix of each row, (int64 [1, length], scores).
            logits_processor: transformers processors, called once for each emitted token of each row in order, with
                (int64 [1, length], fp32 [1, V]): the node's own path, without padding.
            prefix_allowed_tokens_fn: (row, int64 [length]) to the tokens allowed next.
            stop_strings: a row ends after the token that completes one of these; needs `tokenizer`.
            tokenizer: the model's.
            seed: of sampling; None draws one from torch's CPU generator, which `torch.manual_seed` sets. A row's
                random numbers depend on the seed and its index only, so in float32 (and in bfloat16 on a CPU whose
                layers are one call) all trees write the same text. In 16 bits elsewhere, logits of trees of different
                sizes differ by rounding, and texts may part where two tokens are almost equally likely; sampling with
                "auto" may then differ from call to call.
            return_dict_in_generate: False returns only the sequences.
            metrics: measure counts and times, see `MedusaOutput.metrics`.
            session: keeps this call's cache for the next one, which then prefills only what is new; see `Session`.
            generation_config: transformers' settings.
            **generation: fields of a GenerationConfig, as in transformers' generate (`repetition_penalty`,
                `eos_token_id`, `max_time`, `num_return_sequences`, `output_scores`, ..).

        Raises:
            ValueError: bad arguments; a prompt that leaves no room in the context; something that cannot work here
                (such as beam search); a base model whose text depends on code that decoding does not run (overridden
                forwards, hooks, attention functions, dropout in training mode, autocast); heads and base model of
                different dtypes. Raised before any work.
            FloatingPointError: the model's output is not finite; names the step.
            MemoryError: keys and values do not fit.
        """
        with ended_on_error(streamer):
            self._check_swapped()
            unsupported.check_methods(self.backbone.causal_lm)
            changes = generation | {
                "max_new_tokens": max_new_tokens, "do_sample": do_sample, "temperature": temperature, "top_p": top_p,
                "top_k": top_k, "stop_strings": stop_strings, "return_dict_in_generate": return_dict_in_generate,
            }  # fmt: skip
            request = check_request(
                self.backbone, input_ids, attention_mask, generation_config, changes,
                acceptance=acceptance, posterior_threshold=posterior_threshold, posterior_alpha=posterior_alpha,
                logits_processor=logits_processor, prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                stopping_criteria=stopping_criteria, tokenizer=tokenizer, streamer=streamer, seed=seed,
                metrics=metrics, session=session,
            )  # fmt: skip
            output = self.run(request, tree)
        return output if return_dict_in_generate else output.sequences

    def run(self, request: Request, tree: Tree | Literal["auto"] | None = None) -> MedusaOutput:
        """Generate for a checked request, after earlier generations of this base model in other threads."""
        self._check_swapped()
        with self.backbone.lock.held(self.backbone.device):
            self._check_decodable()
            budgets = zip(map(len, request.prompts), request.limits.budgets, strict=True)
            self.backbone.check_length(max(length + budget for length, budget in budgets))
            if request.session is not None and self.backbone.peers.size > 1:
                # Each process would have to find the same rows in its own memory.
                raise ValueError(f"session: expected a model in one process, got one over {self.backbone.peers.size}")
            sample = bool(request.config.do_sample)
            choice = self.tree_choice(len(request.prompts), max(map(len, request.prompts)), tree, sample)
            if request.acceptance == "typical":  # it would accept copies that the model finds likely: more repetition
                choice = dataclasses.replace(choice, copies=False)
            self._tell(choice)
            kept = choice.tree, choice.copies, sample
            policy = self._policies.pop(kept, None) or self.policy(choice, sample)
            # A generation within another's callback needs separate steps: graphs of one step share memory.
            steps = Steps(self.backbone, self.heads) if self._under_way else self._steps
            self._under_way += 1
            try:
                # States outlive this call. Inference tensors could not be changed outside of inference mode.
                with torch.inference_mode(False), torch.no_grad(), self.current_device():
                    output = run_request(request, policy, steps, self.backend)
                output["tree_choice"] = choice
                return output
            finally:
                self._under_way -= 1
                if policy.timed:
                    # What it learns about steps and texts is used by later generations; meanwhile it belonged to this
                    # one. Heads are right about sampled tokens at another rate, so that is learned apart.
                    self._policies[kept] = policy

    def _tell(self, choice: TreeChoice) -> None:
        """Log which tree is used and why, once per model."""
        line = f"decoding with tree: {choice}"
        if line not in self._told:
            self._told.add(line)
            logger.info("%s", line)

    def policy(self, choice: TreeChoice, sample: bool = False, independent: bool = False) -> Policy:
        """Return a new policy for a choice.

        Args:
            choice: what `tree_choice` returned.
            sample: whether tokens are sampled.
            independent: see `Adaptive`.
        """
        own: FixedTree | Adaptive
        if isinstance(choice.tree, Tree):
            own = FixedTree(choice.tree, choice.cost, choice.rate)
        else:
            own = self._adaptive(sample, independent)
        return Copying(own) if choice.copies else own

    def _adaptive(self, sample: bool = False, independent: bool = False) -> Adaptive:
        """Return a policy that chooses among trees, from what is known of this model so far."""
        accuracies = [] if self.heads is None else (self._accuracies or default_accuracies(self.heads)).by_rank
        backend = resolve_backend(self.backend, self.backbone.device, self.backbone.peers.size)
        names = (tuning_file.SAMPLING_TREE_FILE,) * sample + (tuning_file.TREE_FILE,)
        stored = next((self._stored_trees[name] for name in names if name in self._stored_trees), None)
        tree_set = TreeSet(accuracies, stored, sizes_for(backend, self.backbone.runs_quantised_modules()))
        tuning = self._tuning_here()
        times = StepTimes() if tuning is None else tuning.times()
        return Adaptive(tree_set, times, independent)

    @property
    def _copies(self) -> bool:
        """Whether steps copy from the text by default: on a CPU, where the host has each token before the next one."""
        device = self.backbone.device
        eager = resolve_backend(self.backend, device, self.backbone.peers.size) == "eager"
        return eager and device.type not in STEPS_LATE

    def _tuning_here(self) -> tuning_file.Tuning | None:
        """Return what `medusa tune` has found, as long as the model runs where that was."""
        tuning = self._tuning
        return tuning if tuning is not None and tuning.conditions.still_hold(self.backbone, self.backend) else None

    def current_device(self) -> contextlib.AbstractContextManager[object]:
        """Make the model's device the current one, for streams and captures."""
        device = self.backbone.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    @property
    def heads(self) -> MedusaHeads | None:
        """The heads; another set needs another MedusaModel."""
        return self._heads

    def free(self) -> None:
        """Free what is kept between generations: caches, compiled and captured steps, learned step times.

        It is made again when needed.
        """
        with self.backbone.lock.held():
            self._steps.clear()
            self._policies.clear()

    def suspend(self) -> None:
        """Restore the base model's own modules until `resume`; caches and steps are kept.

        Meanwhile this object refers to the base model weakly, to its layers strongly.

        Raises:
            ValueError: called by a callback of this object's own generation; nothing has changed then.
        """
        with self._between_generations("suspend"):
            if self.backbone.swap.active:
                self.backbone.suspend()
                self._suspended = weakref.ref(self.base), weakref.ref(self.backbone.causal_lm)
                self.base = self.backbone.causal_lm = None

    def resume(self) -> None:
        """Swap the modules again after `suspend`.

        Raises:
            ValueError: the base model was deleted, or a layer has an unsupported attention now.
        """
        with self.backbone.lock.held():
            if self._suspended is None:
                return
            base, causal = (reference() for reference in self._suspended)
            if base is None or causal is None:
                raise ValueError("MedusaModel: expected the base model still in use, got one that was deleted")
            self.backbone.resume(causal)
            self.base, self.backbone.causal_lm = base, causal
            self._suspended = None

    def undo(self) -> None:
        """Restore the base model's own modules; this object cannot generate any more.

        Waits for a generation in another thread.

        Raises:
            ValueError: called by a callback of this object's own generation; nothing has changed then.
        """
        with self._between_generations("undo"):
            self._steps.clear()
            self.backbone.undo()

    @contextlib.contextmanager
    def _between_generations(self, what: str) -> Iterator[None]:
        with self.backbone.lock.held():
            if self._under_way:
                raise ValueError(
                    f"MedusaModel: expected {what}() between generations, got it during one (from its streamer, a "
                    "stopping criterion or a logits processor, say); call it when generate has returned"
                )
            yield

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by constructor arguments: a copy swaps the modules of its own copy of the base model."""
        kept = ("_accuracies", "_stored_trees", "_tuning", "_untuned")
        state = {name: getattr(self, name) for name in kept}
        dtypes = self.cache_dtype, self.activation_dtype
        return type(self), (self.base, self.heads, self._tree, self._backend, *dtypes), state

    def __enter__(self) -> MedusaModel:
        """Return the model itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Undo the swap."""
        self.undo()

    def _check_swapped(self) -> None:
        if not self.backbone.swap.active:
            what = "undo" if self._suspended is None else "suspend"
            raise ValueError(f"MedusaModel: expected attention modules still swapped, got a model after {what}()")
        self.backbone.swap.check(self.backbone.decoder.layers)

    def _check_decodable(self) -> None:
        """Raise `ValueError` unless base model and heads can still be decoded."""
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
        layers = len(self.backbone.decoder.layers)
        if max(heads.feature_layers, default=0) >= layers:
            raise ValueError(
                f"heads: expected feature_layers below {layers} (the base model's), got {list(heads.feature_layers)}"
            )
        if (heads.w1.device, heads.w1.dtype) != (self.backbone.device, self.backbone.dtype):
            raise ValueError(
                f"heads: expected {self.backbone.dtype} on {self.backbone.device} like the base model, "
                f"got {heads.w1.dtype} on {heads.w1.device}; convert both with to(device, dtype)"
            )

    def check_tree(self, tree: Tree | Literal["auto"]) -> None:
        """Raise `ValueError` for a tree that the heads cannot fill, or for neither a tree nor "auto"."""
        if isinstance(tree, str) and tree == "auto":
            return
        if not isinstance(tree, Tree):
            raise ValueError(f"tree: expected a Tree or 'auto', got {tree!r}")
        if self.heads is None:
            tree.check_fits(0, 0)
            return
        tree.check_fits(self.heads.num_heads, min(MAX_TOP_K, self.heads.num_candidates))


def _sizes_of_loaded(base: nn.Module, given: dict[str, Any], rounds: bool) -> dict[str, int]:
    """Return the sizes of a loaded model; raise `ValueError` if it is unsupported, or for arguments of loading."""
    backbone = Backbone(base, rounds)
    backbone.undo()
    if given["dtype"] in ("auto", backbone.dtype, str(backbone.dtype).removeprefix("torch.")):
        given = given | {"dtype": None}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: expected none, because base_model is loaded already, got {shown(value)}")
    return {"hidden_size": backbone.config.hidden_size, "vocab_size": backbone.vocab_size}


__all__ = ["MedusaModel", "MedusaOutput", "TreeChoice"]
