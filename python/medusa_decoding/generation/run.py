"""Run a checked request: token selector, runner, decode loop, output."""

from __future__ import annotations

import dataclasses

import torch

from medusa_decoding.decode.loop import decode_loop
from medusa_decoding.decode.policy import Policy
from medusa_decoding.decode.runtime.runner import Runner
from medusa_decoding.decode.runtime.steps import Backend, Steps
from medusa_decoding.decode.runtime.streaming import Observer, StreamObserver
from medusa_decoding.decode.selection.processors import LogitsProcessors
from medusa_decoding.decode.verify import TokenSelector
from medusa_decoding.generation.output import MedusaOutput, collect_output
from medusa_decoding.generation.request import Request
from medusa_decoding.generation.selectors import token_selector


def run_request(request: Request, policy: Policy, steps: Steps, backend: Backend) -> MedusaOutput:
    """Generate for a request; the caller holds the model's turn."""
    backbone, session, streamer = steps.backbone, request.session, request.streamer
    causal = backbone.causal_lm
    prompts = [prompt.to(backbone.device) for prompt in request.prompts]
    limits = dataclasses.replace(request.limits, device=backbone.device)
    selector = token_selector(causal, request, prompts)
    weights = steps.fingerprint() if session is not None else None
    runner = Runner(
        steps, backend, prompts, selector, limits, policy,
        take_earlier=lambda: session.take(backbone, weights, request.prompts) if session is not None else (None, 0),
        seeds=request.row_seeds(backbone.peers),
        observer=_observer(request, prompts, selector, steps),
        timed=request.metrics,
    )  # fmt: skip
    if streamer is not None:
        streamer.put(request.prompts[0][None])
    try:
        state = decode_loop(backbone, prompts, selector, limits, policy, runner)
    except BaseException:
        runner.release()
        raise
    if streamer is not None:
        streamer.end()
    output = collect_output(state, request, selector, runner)
    if session is not None:
        session.keep(backbone, weights, state, _cached_texts(output, request), runner.reused)
    else:
        steps.pool.release(state)
    return output


def _observer(request: Request, prompts: list[torch.Tensor], selector: TokenSelector, steps: Steps) -> Observer | None:
    """Return what shows tokens to the caller's criteria and streamer; None if there are none."""
    if not request.criteria and request.streamer is None:
        return None

    def scores(row: int, count: int) -> tuple[torch.Tensor, ...] | None:
        if not request.config.output_scores or not isinstance(selector, LogitsProcessors):
            return None
        return tuple(score[None] for score in selector.rows[row].scores[:count])

    return StreamObserver(prompts, request.criteria, request.streamer, scores, steps.backbone.peers.agree)


def _cached_texts(output: MedusaOutput, request: Request) -> list[list[int]]:
    """Return the tokens of each row whose keys and values are cached: all but its last new one."""
    width = request.input_ids.shape[1]
    new = (
        row[width : width + count - 1].tolist() for row, count in zip(output.sequences, output.new_tokens, strict=True)
    )
    return [prompt.tolist() + tokens for prompt, tokens in zip(request.prompts, new, strict=True)]
