"""Run `medusa demo`: see `cli.parsers.demo` for its arguments."""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils.logging import disable_progress_bar

from medusa_decoding.chat.streaming import CONTROLS
from medusa_decoding.chat.template import prompt_encoder
from medusa_decoding.checkpoints import load_base_model, pretrained, read_heads, tuning_file
from medusa_decoding.cli import _arguments, _display
from medusa_decoding.cli._arguments import torch_dtype
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.demo.checking import problem
from medusa_decoding.demo.requests import EXAMPLES, parse
from medusa_decoding.generation.tree_choice import GIVEN
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.progress import Progress
from medusa_decoding.trees.tree import Tree

BUDGET = 10.0
"""Seconds after which no further round is begun, so that the demo ends within half a minute on a busy machine."""
BUSY = 0.9
"""Share of the time that this thread has a core, below which the machine counts as busy."""
QUESTIONS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that counts the words of a text, and show how it is called.",
)
"""What models other than the embedded one are asked by default."""
TRIAL = 12
"""Tokens that are written to tell whether one thread is faster than all, and to warm up."""


def run(args: argparse.Namespace) -> int:
    """Show an answer, check it, then measure and print; return 1 if the texts differ in float32."""
    threads = torch.get_num_threads()
    try:
        return _run(args)
    finally:
        torch.set_num_threads(threads)


def _run(args: argparse.Namespace) -> int:
    disable_progress_bar()
    embedded = args.model is None
    asked = list(EXAMPLES if embedded else QUESTIONS) if args.prompt is None else [args.prompt]
    if not asked[0].strip():
        raise ValueError("--prompt: give some text")
    if args.max_new_tokens is None:
        args.max_new_tokens = 400 if embedded else 100
    heads = CHECKPOINT / "heads" if embedded else _arguments.heads_folder(args)
    if embedded and args.base_model is not None:
        raise ValueError("--base-model needs --model, the heads")
    tokenizer = pretrained.load_tokenizer(str(CHECKPOINT / "base")) if embedded else _arguments.load_tokenizer(args)
    encoder = prompt_encoder(tokenizer, None, [])
    prompts = [torch.tensor([encoder.encode([{"role": "user", "content": text}])]) for text in asked]
    console = None if args.json else _display.terminal()
    dtype = torch_dtype(args.dtype)
    checkpoint = read_heads(heads)
    base = load_base_model(checkpoint, args.base_model, dtype=dtype)
    swapped = copy.deepcopy(base)
    with MedusaModel.from_checkpoint(swapped, checkpoint, args.tree, args.backend) as model:
        stored = stored_tree(model, heads)
        if not args.json:
            parts = [part for part in (model.backbone.causal_lm, model.heads) if part is not None]
            size = sum(weights.numel() for part in parts for weights in part.parameters())
            knows = " (medusa demo --help says what it knows)" if embedded else ""
            print(f"A model of {size / 1e6:.1f}M parameters{knows} is asked:\n")
            print(f"{asked[0].translate(CONTROLS)}\n")
        choose_threads(base, prompts[0], tokenizer)
        if console is not None:
            runs = race(model, base, tokenizer, prompts[0], args.max_new_tokens, stored)
            if console.width < _display.PANEL * len(runs):
                del runs[0]  # two next to each other show more than three below each other
            _display.Race(console, runs).play()
            console.print()
        elif not args.json:
            model.generate(
                prompts[0],
                max_new_tokens=args.max_new_tokens,
                streamer=encoder.streamer(),
                tokenizer=tokenizer,
            )
            print()
        with Progress(args.rounds, "round", shown=console is not None, leave=False) as progress:
            result = compare(model, base, tokenizer, prompts, args.max_new_tokens, args.rounds, stored, progress.update)
        backend = resolve_backend(args.backend, model.backbone.device)
    answers = zip(asked, [encoder.answer(ids) for ids in result.pop("texts")], strict=True)
    result["checks"] = [
        check(text, answer) if embedded else {"request": text, "answer": answer} for text, answer in answers
    ]
    result |= {"dtype": args.dtype, "backend": backend, "threads": torch.get_num_threads()}
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
    if not result["identical"] and args.dtype == "float32":
        print("medusa: the texts differ, which must not happen in float32: please report it", file=sys.stderr)
        return 1
    return 0


def check(text: str, answer: str) -> dict[str, Any]:
    """Run an answer; return it with the kind of the request (None: unknown, and not checked) and what is wrong."""
    request = parse(text)
    found = None if request is None else problem(request, answer)
    return {"request": text, "answer": answer, "kind": None if request is None else request.kind, "problem": found}


def choose_threads(base: Any, ids: torch.Tensor, tokenizer: Any) -> None:
    """Use one thread if that is faster: on a busy machine, threads that wait for each other wait for other programs."""
    seconds = {}
    for threads in dict.fromkeys((torch.get_num_threads(), 1)):
        torch.set_num_threads(threads)
        start = time.perf_counter()
        greedy(base, ids, TRIAL, tokenizer)
        seconds[threads] = time.perf_counter() - start
    torch.set_num_threads(min(seconds, key=seconds.__getitem__))


def greedy(base: Any, ids: torch.Tensor, new_tokens: int, tokenizer: Any, **given: Any) -> Any:
    """Generate by transformers; the tokenizer is for stop strings that the model's own generation config may have."""
    return base.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        tokenizer=tokenizer,
        **given,
    )


def stored_tree(model: MedusaModel, heads: Path) -> Tree | None:
    """Return the tree in the heads' folder if "auto" runs without being asked for: it measures while it decodes."""
    choice = model.tree_choice()
    if choice.tree != "auto" or choice.reason == GIVEN or model.heads is None:
        return None
    return tuning_file.stored_trees(heads, model.heads).get(tuning_file.TREE_FILE)


def race(
    model: MedusaModel, base: Any, tokenizer: Any, ids: torch.Tensor, new_tokens: int, stored: Tree | None
) -> list[_display.Run]:
    """Record a generation by transformers, a plain and a Medusa one, each after one that compiles and warms up.

    "auto" measures in its first generations, so unless it was asked for, the tree stored with the heads runs instead.
    """
    choice = model.tree_choice(tree=stored)

    def record(label: str, tree: Tree | Literal["auto"]) -> _display.Run:
        generate = functools.partial(model.generate, ids, None, new_tokens, tree, tokenizer=tokenizer)
        model.generate(ids, None, new_tokens if tree == "auto" else min(TRIAL, new_tokens), tree, tokenizer=tokenizer)
        return _display.record(label, generate, tokenizer)

    theirs = functools.partial(greedy, base, ids, new_tokens, tokenizer)
    return [
        _display.record("transformers", theirs, tokenizer, tells_steps=False),
        record("plain decoding", Tree([])),
        record(f"Medusa, {choice.name}", choice.tree),
    ]


def compare(
    model: MedusaModel,
    base: Any,
    tokenizer: Any,
    prompts: list[torch.Tensor],
    new_tokens: int,
    rounds: int,
    stored: Tree | None,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Run the methods in turn; return their speed, Medusa's texts, and whether all texts are identical.

    `base` is the same base model as transformers loads it, without swapped attention; prompts are int64 [1, T] each.
    The first round warms up and counts only if the time is up after it.
    """
    accept_lengths: dict[str, list[int]] = {"tree": [], "medusa": []}
    tree_nodes: Counter[int] = Counter()

    def transformers(ids: torch.Tensor) -> list[int]:
        return greedy(base, ids, new_tokens, tokenizer)[0, ids.shape[1] :].tolist()

    def ours(ids: torch.Tensor, name: str, tree: Tree | None = None) -> list[int]:
        output = model.generate(ids, max_new_tokens=new_tokens, tree=tree, metrics=True, tokenizer=tokenizer)
        assert isinstance(output, MedusaOutput)
        if name in accept_lengths:
            accept_lengths[name].extend(output.accept_lengths[0])
        if name == "medusa":
            assert output.metrics is not None
            tree_nodes.update(output.metrics.tree_nodes)
        return output.sequences[0, ids.shape[1] :].tolist()

    methods: dict[str, Callable[[torch.Tensor], list[int]]] = {
        "transformers": transformers, "plain": functools.partial(ours, name="plain", tree=Tree([]))
    }  # fmt: skip
    if stored is not None:
        methods["tree"] = functools.partial(ours, name="tree", tree=stored)
    methods["medusa"] = functools.partial(ours, name="medusa")
    began, done = time.perf_counter(), -1
    texts: dict[str, list[list[int]]] = {name: [] for name in methods}
    timed: dict[str, list[tuple[int, float, float]]] = {name: [] for name in methods}  # tokens, seconds, CPU seconds
    while done < rounds and (done < 0 or time.perf_counter() - began < BUDGET):
        if done == 0:
            tree_nodes.clear()
            timed = {name: [] for name in methods}
            for lengths in accept_lengths.values():
                lengths.clear()
        for ids in prompts:
            for name, method in methods.items():
                start, cpu_start = time.perf_counter(), time.thread_time()
                new = method(ids)
                timed[name].append((len(new), time.perf_counter() - start, time.thread_time() - cpu_start))
                if done < 0:
                    texts[name].append(new)
        done += 1
        if done:
            after_round()
    everything = [one for found in timed.values() for one in found]
    share = sum(cpu for _, _, cpu in everything) / sum(seconds for _, seconds, _ in everything)
    busy = share < BUSY
    speeds = {name: [n / (cpu if busy else seconds) for n, seconds, cpu in found] for name, found in timed.items()}
    # Other programs only add time, so each prompt's fastest round counts.
    rates = {
        name: statistics.median(max(found[n :: len(prompts)]) for n in range(len(prompts)))
        for name, found in speeds.items()
    }
    histogram = Counter(accept_lengths["medusa"])
    per_step = {name: (sum(found) + len(found)) / len(found) for name, found in accept_lengths.items() if found}
    choice = model.tree_choice()
    return {
        "tokens_per_second": rates,
        "busy": busy,
        "core_share": share,
        "tokens_per_step": per_step.get("medusa"),
        "tokens_per_step_of_tree": per_step.get("tree"),
        "fixed_tree": None if stored is None else model.tree_choice(tree=stored).name,
        "accepted_length_histogram": {str(n): histogram[n] for n in sorted(histogram)},
        "tree_nodes": choice.tree.num_nodes if isinstance(choice.tree, Tree) else None,
        "tree": choice.name,
        "verified": choice.verified,
        "tree_reason": choice.reason,
        "steps_by_tree_nodes": {str(n): tree_nodes[n] for n in sorted(tree_nodes)},
        "prompts": len(prompts),
        "new_tokens": sum(map(len, texts["medusa"])),
        "rounds": max(done, 1),
        "texts": texts["medusa"],
        "identical": all(found == texts["transformers"] for found in texts.values()),
    }


def print_table(result: dict[str, Any]) -> None:
    """Print the comparison as a table."""
    rates = result["tokens_per_second"]
    names = labels(result)
    width = max(24, *(len(label) for label in names.values()))
    print(f"{'':{width}}{'tokens/s':>10}{'x generate':>12}{'x plain loop':>14}")
    for name, label in names.items():
        rate = rates[name]
        print(f"{label:{width}}{rate:10.0f}{rate / rates['transformers']:12.2f}{rate / rates['plain']:14.2f}")
    if result["tokens_per_step"] is not None:
        print(f"\ntokens per step: {result['tokens_per_step']:.2f}; accepted draft tokens per step:")
        for length, share in shares(result["accepted_length_histogram"]).items():
            print(f"  {length}  {'#' * round(40 * share):40} {share:6.1%}")
    for line in notes(result):
        print(line)


def labels(result: dict[str, Any]) -> dict[str, str]:
    """Return what to call the methods."""
    names = {"transformers": "transformers generate", "plain": "our plain loop"}
    if result["fixed_tree"]:
        names["tree"] = f"Medusa, {result['fixed_tree']}"
    return names | {"medusa": f"Medusa, {result['tree']}"}


def shares(counts: dict[str, int]) -> dict[str, float]:
    """Return the share of each count in their sum."""
    total = sum(counts.values())
    return {value: count / total for value, count in counts.items()}


def notes(result: dict[str, Any]) -> list[str]:
    """Return what else there is to say: which trees ran and why, whether the texts are equal, how it was measured."""
    tree = f"tree: {result['verified']} ({result['tree_reason']})"
    if result["tree_nodes"] is None and result["steps_by_tree_nodes"]:
        used = [
            f"{'plain' if nodes == '1' else f'{nodes} nodes'} {share:.0%}"
            for nodes, share in shares(result["steps_by_tree_nodes"]).items()
            if share >= 0.005
        ]
        tree += f"; share of the steps: {', '.join(used)}"
    if result["tokens_per_step_of_tree"] is not None:
        figure = f"{result['tokens_per_step_of_tree']:.2f} tokens per step"
        tree += f"\n{result['fixed_tree']}, stored with the heads: {figure}"
    same = "identical" if result["identical"] else "DIFFERENT"
    threads, ways = result["threads"], len(result["tokens_per_second"])
    waited = f"the machine is busy: other programs had the core {1 - result['core_share']:.0%} of the time"
    return [
        *map(verdict, (one for one in result["checks"] if "kind" in one)),
        "",
        tree,
        *([f"{waited}, so tokens/s are per second of processor time"] if result["busy"] else []),
        f"texts of all {ways} ways: {same} ({result['new_tokens']} tokens of {result['prompts']} prompts); "
        f"{result['dtype']}, {result['backend']}, {threads} thread{'s' * (threads > 1)}, "
        f"fastest of {result['rounds']} rounds",
    ]


def verdict(checked: dict[str, Any]) -> str:
    """Return whether an answer does what was asked, in words."""
    if checked["kind"] is None:
        return "not checked: the request is of none of the kinds that the model knows (medusa demo --help)"
    request = checked["request"].strip()
    shown = (request if len(request) <= 60 else request[:57] + "..").translate(CONTROLS)
    if checked["problem"] is None:
        return f"the answer was run and does what was asked: {shown}"
    return f"the answer was run and is wrong ({checked['problem'].translate(CONTROLS)}): {shown}"
