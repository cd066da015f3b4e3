"""Pass hidden states to the proposer: vLLM's `custom_class` receives token ids only.

One method of vLLM's V1 model runner is wrapped. The wrapper notes the hidden states of the step, then calls vLLM's own
method, which calls the proposer. Other methods of speculative decoding see no difference.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from typing import Any

RUNNER = "vllm.v1.worker.gpu_model_runner"
NEEDED = ("scheduler_output", "sample_hidden_states", "spec_decode_metadata")
"""Parameters of `GPUModelRunner.propose_draft_token_ids` that the wrapper reads, by name. Others are passed on."""


def register() -> None:
    """Wrap vLLM's model runner: the entry point of `vllm.general_plugins`, called in each of vLLM's processes.

    If this vLLM cannot be wrapped, only log why: it may serve other models. `MedusaProposer` then refuses to start.
    """
    try:
        wrap_runner()
    except (ImportError, RuntimeError) as error:
        logging.getLogger("vllm.medusa").warning("Medusa heads cannot be served here: %s", error)


def wrap_runner() -> None:
    """Wrap `GPUModelRunner.propose_draft_token_ids`, once per process.

    Raises:
        ImportError: vLLM is not installed, or has no V1 model runner.
        RuntimeError: the method or its parameters have changed; the message has vLLM's version and the difference.
    """
    runner = importlib.import_module(RUNNER).GPUModelRunner
    original = getattr(runner, "propose_draft_token_ids", None)
    if getattr(original, "notes_states_for_medusa", False):
        return
    found = [] if original is None else list(inspect.signature(original).parameters)
    missing = [name for name in NEEDED if name not in found]
    if original is None or missing:
        lack = f"without {', '.join(missing)}: ({', '.join(found)})" if original else "no such method"
        raise RuntimeError(
            f"vLLM {importlib.import_module('vllm').__version__}: expected GPUModelRunner.propose_draft_token_ids "
            f"with the parameters {', '.join(NEEDED)}, got {lack}. Install a vLLM that medusa-vllm's README lists."
        )
    signature = inspect.signature(original)

    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        note = getattr(self.drafter, "note_states", None)
        if note is not None:
            given = signature.bind(self, *args, **kwargs).arguments
            verified = given["spec_decode_metadata"]
            note(
                given["sample_hidden_states"],
                None if verified is None else verified.num_draft_tokens,
                given["scheduler_output"].num_spec_tokens_to_schedule,
            )
        return original(self, *args, **kwargs)

    propose_draft_token_ids.notes_states_for_medusa = True  # type: ignore[attr-defined]
    runner.propose_draft_token_ids = propose_draft_token_ids
