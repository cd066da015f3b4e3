"""MedusaModel: a base model and its heads, generating.

This is the public face: it checks what it is given, then runs the loop. It does not know checkpoint formats (see
`checkpoints`) or how a step is made (see `decode`).
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from medusa_decoding.checkpoints import load_base_model, read_heads
from medusa_decoding.checkpoints.base import stated_vocab_size
from medusa_decoding.decode.loop import run
from medusa_decoding.decode.state import DecodeState, StopRules
from medusa_decoding.decode.step_graph import Backend, Steps
from medusa_decoding.decode.watch import Progress
from medusa_decoding.heads import MAX_TOP_K, MedusaHeads
from medusa_decoding.inputs import GreedySettings, split_prompts, token_list, whole
from medusa_decoding.tree import Tree
from medusa_decoding.trunk import Trunk

DEFAULT_NEW_TOKENS = 256
DEFAULT_TREE_FILE = "medusa_tree.json"
logger = logging.getLogger(__name__)


@dataclass
class MedusaOutput:
    """What `MedusaModel.generate` returns.

    Attributes:
        sequences: int64 [B, prompt + new]: the prompt as given (padding included), then the new tokens, padded on the
            right with the pad token; a row ends at its EOS token, as in transformers.
        accept_lengths: one list a row: accepted tokens below the root, a number a step (prefill is not a step). A last
            step cut short by EOS or the budget counts what was kept.
        new_tokens: new tokens of each row.
    """

    sequences: torch.Tensor
    accept_lengths: list[list[int]]
    new_tokens: list[int]

    @property
    def steps(self) -> int:
        """Steps summed over the rows, each row's own."""
        return sum(len(row) for row in self.accept_lengths)

    @property
    def tokens_per_step(self) -> float:
        """Committed tokens / steps, the acceleration rate; the prefill's token is not counted. NaN without a step."""
        committed = sum(sum(row) + len(row) for row in self.accept_lengths)
        return committed / self.steps if self.steps else float("nan")


class MedusaModel:
    """A Llama-family model with Medusa heads.

    Args:
        base: a causal language model as loaded by transformers (quantised or LoRA-wrapped is fine). Its attention
            modules are swapped until `undo` (or the end of a `with` block); its own forward and `generate` keep
            working meanwhile.
        heads: its heads; None for plain decoding only.
        tree: what `generate` verifies by default; None for the 64-node tree of `default_tree`.
        backend: how steps run. "eager"; "compiled": through torch.compile, at the first use of each tree; "graph":
            captured as a CUDA graph at the first use of each tree and cache size; "auto": "graph" on CUDA, else
            "eager". Captured steps keep their caches between generations, see `free`.

    Raises:
        ValueError: an unsupported model, heads of another size, or a tree the heads cannot fill. The base model is left
            as it was.
    """

    def __init__(
        self, base: nn.Module, heads: MedusaHeads | None = None, tree: Tree | None = None, backend: Backend = "auto"
    ) -> None:
        self.base: Any = base
        self.trunk = Trunk(base)
        try:
            if heads is not None:
                self._check_heads(heads)
            self._heads = heads
            self.tree = tree if tree is not None else default_tree(heads)
            self._check_tree(self.tree)
            self.backend = backend
            self._steps = Steps(self.trunk, heads)
        except BaseException:
            self.trunk.swap.undo()
            raise

    @classmethod
    def from_pretrained(
        cls,
        heads: str | Path,
        base_model: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        tree: Tree | None = None,
        backend: Backend = "auto",
        **hf_kwargs: Any,
    ) -> MedusaModel:
        """Load heads and their base model.

        Args:
            heads: folder or hub id in any supported format (see `checkpoints`).
            base_model: folder or hub id; overrides the checkpoint's `base_model_name_or_path`.
            dtype: of the base model; "auto" keeps the checkpoint's. The heads follow the base model.
            device_map: passed to transformers.
            tree: as in the constructor; by default the checkpoint's `medusa_tree.json` if it has one.
            backend: as in the constructor.
            **hf_kwargs: passed to `AutoModelForCausalLM.from_pretrained`. Remote code is never run.

        Raises:
            ValueError: an unreadable checkpoint, or one that does not fit the base model; it names what is wrong.
        """
        if hf_kwargs.pop("trust_remote_code", False):
            raise ValueError("trust_remote_code: expected False, got True; remote code is never run")
        # Heads that share lm_head do not say V; the base model that was asked for does.
        vocab_size = None if base_model is None else stated_vocab_size(str(base_model))
        checkpoint = read_heads(heads, vocab_size=vocab_size)
        base = load_base_model(checkpoint, base_model, dtype=dtype, device_map=device_map, **hf_kwargs)
        tree_file = checkpoint.path / DEFAULT_TREE_FILE
        if tree is None and tree_file.is_file():
            tree = Tree.load(tree_file)
        norm = base.model.norm.weight
        return cls(base.eval(), checkpoint.heads.to(device=norm.device, dtype=norm.dtype), tree, backend)

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int | None = None,
        tree: Tree | None = None,
        acceptance: Literal["lossless", "typical"] = "lossless",
        do_sample: bool = False,
        *,
        streamer: Any = None,
        return_dict_in_generate: bool = True,
        min_new_tokens: int | None = None,
        eos_token_id: int | list[int] | torch.Tensor | None = None,
        pad_token_id: int | None = None,
        **later: Any,
    ) -> MedusaOutput | torch.Tensor:
        """Continue each prompt greedily, token for token as the base model alone would.

        Args:
            input_ids: int64 [B, T] prompts, left- or right-padded where lengths differ.
            attention_mask: [B, T], 1 for tokens and 0 for padding; None if nothing is padded.
            max_new_tokens: new tokens a row, at least 1; obeyed as transformers does, even past the declared context.
                None for the base model's generation config's, else 256 or what the context leaves.
            tree: verified each step; `Tree([])` decodes plainly. None for the model's own.
            acceptance: "lossless"; "typical" is not available yet.
            do_sample: False; sampling is not available yet.
            streamer: a transformers streamer (batch of 1), given the prompt, then each new token in order.
            return_dict_in_generate: False returns only the sequences.
            min_new_tokens: new tokens before which an EOS token is never chosen; None for the generation config's.
            eos_token_id: token or tokens that end a row; None for those of the base model's generation config.
            pad_token_id: fills rows that ended early; None for the generation config's, else the first EOS token.
            **later: other arguments of transformers' generate are refused by name, unless they ask for what greedy
                decoding does anyway (temperature 1, no processors, ..).

        Raises:
            ValueError: bad arguments; a prompt that leaves no room in the context; a generation config that asks for
                what greedy decoding here does not do (a repetition penalty, say); autocast; forward hooks on modules
                that decoding passes by. Raised before any work.
        """
        if not self.trunk.swap.active:
            raise ValueError("MedusaModel: expected attention modules still swapped, got a model after undo()")
        self.trunk.check_unhooked()
        if torch.is_autocast_enabled(self.trunk.device.type):
            raise ValueError("autocast: expected off (load the model in the dtype it shall run in), got on")
        _refuse("acceptance", acceptance, "lossless")
        _refuse("do_sample", do_sample, False)
        for name, value in later.items():
            _refuse(name, value, _NEUTRAL.get(name))
        chosen = self.tree if tree is None else tree
        self._check_tree(chosen)
        prompts = split_prompts(input_ids, attention_mask, self.trunk.vocab_size)
        if streamer is not None and len(prompts) > 1:
            raise ValueError(f"streamer: expected a batch of 1, got {len(prompts)}")
        # States outlive this call, so they are not inference tensors, which nothing outside of that mode may change.
        with torch.inference_mode(False), torch.no_grad(), self._current_device():
            rules = self._stop_rules(prompts, input_ids.shape[1], max_new_tokens, min_new_tokens, eos_token_id)
            pad = self._pad_token(pad_token_id, rules)
            watch = _Streaming(streamer, prompts[0]) if streamer is not None else None
            step = self._steps.get(chosen, self.backend)
            on_device = [prompt.to(self.trunk.device) for prompt in prompts]
            state = run(self.trunk, on_device, rules, chosen, step, self._steps.arena, watch)
            if watch:
                watch.end()
            output = _collect(state, input_ids, pad)
            self._steps.arena.give_back(state)
        return output if return_dict_in_generate else output.sequences

    def _current_device(self) -> contextlib.AbstractContextManager[object]:
        """Make the model's device the current one, on which streams and captures are made."""
        device = self.trunk.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    @property
    def heads(self) -> MedusaHeads | None:
        """The heads; another set needs another MedusaModel."""
        return self._heads

    def free(self) -> None:
        """Free what is kept between generations (caches, compiled and captured steps); they are made again on use."""
        self._steps.clear()

    def undo(self) -> None:
        """Give the base model its own attention modules back; this object cannot generate any more."""
        self._steps.clear()
        self.trunk.swap.undo()

    def __enter__(self) -> MedusaModel:
        """Return the model itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Undo the swap."""
        self.undo()

    def _check_heads(self, heads: MedusaHeads) -> None:
        for name, wanted, got in (
            ("hidden_size", self.trunk.config.hidden_size, heads.hidden_size),
            ("vocab_size", self.trunk.vocab_size, heads.vocab_size),
        ):
            if wanted != got:
                raise ValueError(f"heads: expected {name} {wanted} like the base model, got {got}")
        if (heads.w1.device, heads.w1.dtype) != (self.trunk.device, self.trunk.dtype):
            raise ValueError(
                f"heads: expected {self.trunk.dtype} on {self.trunk.device} like the base model, "
                f"got {heads.w1.dtype} on {heads.w1.device}"
            )

    def _check_tree(self, tree: Tree) -> None:
        if not isinstance(tree, Tree):
            raise ValueError(f"tree: expected a Tree, got {type(tree).__name__}")
        if self.heads is None:
            tree.check_fits(0, 0)
            return
        tree.check_fits(self.heads.num_heads, min(MAX_TOP_K, self.heads.num_candidates))

    def _stop_rules(
        self,
        prompts: list[torch.Tensor],
        width: int,
        max_new_tokens: int | None,
        min_new_tokens: int | None,
        eos_token_id: int | list[int] | torch.Tensor | None,
    ) -> StopRules:
        settings = GreedySettings.of(self.trunk.causal.generation_config)
        limit = self.trunk.context_limit
        longest = max(len(prompt) for prompt in prompts)
        if longest >= limit:
            raise ValueError(f"input_ids: expected fewer than {limit} tokens (the model's context), got {longest}")
        max_new_tokens = whole("max_new_tokens", settings.max_new_tokens if max_new_tokens is None else max_new_tokens)
        min_new_tokens = whole("min_new_tokens", settings.min_new_tokens if min_new_tokens is None else min_new_tokens)
        if max_new_tokens is None and settings.max_length is not None:
            max_new_tokens = settings.max_length - width
            if max_new_tokens < 1:
                raise ValueError(
                    f"input_ids: expected fewer than max_length = {settings.max_length} tokens, got {width}"
                )
        if max_new_tokens is None:
            budgets = [min(DEFAULT_NEW_TOKENS, limit - len(prompt)) for prompt in prompts]
        elif max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
        else:
            budgets = [max_new_tokens] * len(prompts)
            if longest + max_new_tokens > limit:
                logger.warning(
                    "max_new_tokens: %d prompt and %d new tokens go past the model's context of %d",
                    longest, max_new_tokens, limit,
                )  # fmt: skip
        if min_new_tokens is not None and not 0 <= min_new_tokens <= max(budgets):
            raise ValueError(f"min_new_tokens: expected 0 to {max(budgets)} (max_new_tokens), got {min_new_tokens}")
        eos = token_list(settings.eos_token_id if eos_token_id is None else eos_token_id)
        device = self.trunk.device
        return StopRules(
            torch.tensor(eos, dtype=torch.int64, device=device),
            torch.tensor(budgets, dtype=torch.int32, device=device),
            torch.tensor([min_new_tokens], dtype=torch.int32, device=device) if min_new_tokens and eos else None,
            max(budgets),
        )

    def _pad_token(self, pad_token_id: int | None, rules: StopRules) -> int:
        if pad_token_id is None:
            pad_token_id = self.trunk.causal.generation_config.pad_token_id
        if pad_token_id is None:
            pad_token_id = int(rules.eos[0]) if rules.eos.numel() else 0
        return pad_token_id


def default_tree(heads: MedusaHeads | None) -> Tree:
    """The tree used when neither caller nor checkpoint names one.

    64 nodes (or all there are), searched for the accuracies published for Vicuna-7B's Medusa-1 heads: a shape that
    suits heads whose accuracy falls off with depth. A calibrated tree is better; this one never needs calibration.
    """
    if heads is None:
        return Tree([])
    ranks = min(5, heads.num_candidates)
    accuracies = [row[:ranks] for row in _VICUNA_7B[: heads.num_heads]]
    possible = sum(ranks**depth for depth in range(len(accuracies) + 1))
    return Tree.optimal(accuracies, min(64, possible))


# Accuracy of each rank alone, from the cumulative figures of the original project's training logs for vicuna-7b-v1.3.
_VICUNA_7B = [
    [0.560, 0.112, 0.055, 0.033, 0.020],
    [0.316, 0.108, 0.061, 0.043, 0.035],
    [0.201, 0.087, 0.060, 0.035, 0.034],
    [0.147, 0.078, 0.049, 0.037, 0.029],
    [0.118, 0.069, 0.048, 0.037, 0.028],
]


class _Streaming:
    """Hands tokens to a transformers streamer one by one, in order."""

    def __init__(self, streamer: Any, prompt: torch.Tensor) -> None:
        self.streamer = streamer
        self.seen = 0
        streamer.put(prompt.cpu()[None])

    def __call__(self, progress: Progress) -> None:
        assert progress.output is not None
        count = progress.counts[0]
        for token in progress.output[0, self.seen : count].clone():
            self.streamer.put(token[None])
        self.seen = count

    def end(self) -> None:
        self.streamer.end()


def _collect(state: DecodeState, input_ids: torch.Tensor, pad: int) -> MedusaOutput:
    counts = state.count.tolist()
    new = state.output[:, : max(counts)].to(input_ids.device)
    kept = torch.arange(new.shape[1], device=new.device) < torch.tensor(counts, device=new.device)[:, None]
    sequences = torch.cat([input_ids, new.masked_fill(~kept, pad)], dim=1)
    steps = state.log[:, 1 : int(state.step)].tolist()  # column 0 is the prefill's token
    return MedusaOutput(sequences, [[length - 1 for length in row if length > 0] for row in steps], counts)


# What arguments of later versions are allowed to say: nothing that changes greedy decoding.
_NEUTRAL = {
    "num_beams": 1,
    "use_cache": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "posterior_threshold": 0.09,
    "posterior_alpha": 0.3,
}


def _refuse(name: str, value: Any, supported: Any) -> None:
    if value is not None and value != supported:
        raise ValueError(f"{name}: expected {supported!r} (the only choice so far), got {value!r}")


__all__ = ["MedusaModel", "MedusaOutput", "default_tree"]
