"""Draws the figures of the guides in docs/: `python -m benchmarks.plot_guides [--out docs/figures]`.

All of them come from records in `benchmarks/results/`, except for `one-step`, which shows a real step of the demo
model. Nothing is timed here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import harness, plot
from benchmarks.plot import COLOURS, Record
from benchmarks.trace import records_of
from medusa_decoding import MedusaModel, Tree
from medusa_decoding.chat.template import prompt_encoder
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.decode.arrange import arrange
from medusa_decoding.decode.propose import propose
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.demo.requests import EXAMPLES

H200 = harness.RESULTS / "nvidia-h200.jsonl"

REQUEST = EXAMPLES[1]


def one_step(plt: Any, path: Path) -> None:
    """Draw the tree of the first step that keeps a whole path: draft tokens, and the path that verification keeps."""
    tokenizer = pretrained.load_tokenizer(CHECKPOINT / "base")
    tree = Tree.load(CHECKPOINT / "heads" / "medusa_tree.json")
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype="float32") as model, torch.no_grad():
        prompt = torch.tensor([prompt_encoder(tokenizer, None, []).encode([{"role": "user", "content": REQUEST}])])
        output = model.generate(prompt, tree=tree)
        text, lengths = output.sequences[0], output.accept_lengths[0]
        step = lengths.index(tree.depth)
        place = prompt.shape[1] + step + sum(lengths[:step])
        base, nodes = model.base, TreeTensors.from_tree(tree, text.device)
        hidden = base.model(text[None, :place]).last_hidden_state[:, -1]
        state: Any = SimpleNamespace(hidden=hidden, root=text[None, place])
        drafts = propose(state, model.heads, base.lm_head, nodes, embed_tokens=base.model.embed_tokens)
        tokens = arrange(state, drafts, nodes)[0][0].tolist()
    right = text[place + 1 : place + 2 + tree.depth].tolist()
    names = [_shown(tokenizer, token) for token in tokens]
    kept = [0]
    for token in right[:-1]:
        kept.append(next(i for i, n in enumerate(tree.parents.tolist()) if n == kept[-1] and tokens[i] == token))

    figure, panel = plt.subplots(figsize=(9, 2.6), layout="constrained")
    at = _places(tree)
    for node, parent in enumerate(tree.parents.tolist()):
        (x, y), on = at[node], node in kept
        colour = COLOURS[2] if on else "0.6"
        if parent >= 0:
            panel.plot([at[parent][0], x], [at[parent][1], y], color=colour, linewidth=2.5 if on else 1, zorder=1)
        box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": colour, "linewidth": 2 if on else 1}
        panel.text(x, y, names[node], ha="center", va="center", family="monospace", fontsize=9, bbox=box, zorder=2)
    x, y = at[kept[-1]]
    free = {"boxstyle": "round,pad=0.4", "facecolor": COLOURS[2], "edgecolor": COLOURS[2]}
    panel.plot([x, x + 1], [y, y], "--", color=COLOURS[2], linewidth=2, zorder=1)
    following = _shown(tokenizer, right[-1])
    panel.text(x + 1, y, following, ha="center", va="center", family="monospace", fontsize=9, color="white", bbox=free)
    titles = ["root", *(f"head {depth}" for depth in range(1, tree.depth + 1)), "the model's\nown next token"]
    for depth, title in enumerate(titles):
        panel.text(depth, 1.75, title, ha="center", va="center", fontsize=9)
    panel.set_xlim(-0.5, tree.depth + 1.5)
    panel.set_ylim(min(y for _, y in at) - 0.6, 2.2)
    panel.axis("off")
    foot = f"One step of the demo model, asked {REQUEST!r}\ngreen is kept: {tree.depth + 1} tokens from one pass"
    plot._save(plt, figure, foot, path)


def _shown(tokenizer: Any, token: int) -> str:
    return repr(tokenizer.decode([token]))[1:-1].strip()


def _places(tree: Tree) -> list[tuple[float, float]]:
    """Return a place for each node: depth to the right, one line for each path that branches off."""
    places: list[tuple[float, float]] = [(0.0, 1.0)]
    lowest = 1.0
    lines: dict[tuple[int, ...], float] = {(): 1.0}
    for choice in sorted(map(tuple, tree.choices)):
        if choice[-1]:
            lowest -= 1.0
        lines[choice] = lowest if choice[-1] else lines[choice[:-1]]
    places += [(float(len(choice)), lines[tuple(choice)]) for choice in tree.choices]
    return places


def step_cost(plt: Any, records: Sequence[Record], path: Path) -> None:
    """Draw what a step with a tree costs, as a multiple of the plain step of the same model."""
    kinds = {
        (16, "shared"): "16 nodes",
        (64, "shared"): "64 nodes",
        (64, "shared, trimmed 8192"): "64 nodes, trimmed heads",
        (64, "full bf16"): "64 nodes, heads with own projections",
    }
    steps = [record for record in plot.latest(records) if record["benchmark"] == "step"]
    shown = [record for record in steps if record["way"] == "medusa graph" and _kind(record) in kinds]
    groups = list(dict.fromkeys(plot.step_label(record) for record in shown))
    figure, panel = plt.subplots(figsize=(9, 3.6), layout="constrained")
    for group, label in enumerate(groups):
        mine = [record for record in shown if plot.step_label(record) == label]
        for i, record in enumerate(sorted(mine, key=lambda record: list(kinds).index(_kind(record)))):
            x, value = group + 0.2 * (i - (len(mine) - 1) / 2), record["ratio_to_plain"]
            panel.bar(x, value, 0.18, color=COLOURS[list(kinds).index(_kind(record))])
            panel.text(x, value + 0.01, f"{value:.2f}", ha="center", fontsize=7)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(groups)), groups, fontsize=7)
    panel.set_ylabel("step time / plain step")
    panel.set_ylim(0, 1.6)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[i]) for i in range(len(kinds))]
    figure.legend(handles, kinds.values(), loc="outside upper center", ncols=4, fontsize=8)
    plot._save(plt, figure, f"Captured steps, bf16, random weights. {plot.conditions(shown)}", path)


def _kind(record: Record) -> tuple[int, str]:
    return record["nodes"], record["heads"]


def heads_cost(plt: Any, records: Sequence[Record], path: Path) -> None:
    """Draw the time of four heads by kind and vocabulary, batch 1."""
    words = {"own": "own projections", "shared": "shared lm_head", "gather": "shared lm_head"}
    of_ops = [record for record in plot.latest(records) if record["benchmark"] == "heads_topk"]
    shown = [r for r in of_ops if r["implementation"] == plot.OURS and r["shapes"]["batch"] == 1]
    shown.sort(key=lambda record: (record["shapes"]["vocabulary"], -record["median_us"]))
    figure, panel = plt.subplots(figsize=(9, 3.6), layout="constrained")
    labels = []
    for i, record in enumerate(shown):
        shapes = record["shapes"]
        large = shapes["vocabulary"] > 64_000
        panel.barh(i, record["median_us"], color=COLOURS[large])
        panel.text(record["median_us"], i, f" {record['median_us']:.0f}", va="center", fontsize=8)
        trimmed = f", trimmed to {shapes['rows']:,}" if shapes["rows"] < shapes["vocabulary"] else ""
        storage = "" if shapes["weights"] == "full" else f", {shapes['weights']}"
        labels.append(f"{words[shapes['form']]}{trimmed}{storage}")
    panel.set_yticks(range(len(shown)), labels, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("microseconds for 4 heads, one row, hidden size 4,096")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[i]) for i in range(2)]
    panel.legend(handles, ["vocabulary 32,000", "vocabulary 128,256"], loc="lower right")
    plot._save(plt, figure, f"Heads and top 10, bf16 unless named. {plot.conditions(shown)}", path)


def generations(plt: Any, record: Record, path: Path) -> None:
    """Draw tokens per second of transformers, the plain loop and Medusa, as `bench_generate` measured them."""
    ways = ("transformers", "plain", "medusa")
    figure, panel = plt.subplots(figsize=(7, 2.4), layout="constrained")
    for i, name in enumerate(("best", "float32")):
        rates = record[name]["tokens_per_second"]
        for j, way in enumerate(ways):
            panel.barh(i + 0.27 * (j - 1), rates[way], 0.25, color=COLOURS[j])
            panel.text(rates[way], i + 0.27 * (j - 1), f" {rates[way]:.0f}", va="center", fontsize=8)
    panel.set_yticks([0, 1], ["best setting of each", "float32 throughout"])
    panel.set_ylim(1.5, -0.5)
    panel.set_xlabel("tokens per second")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[j]) for j in range(3)]
    names = ["transformers' generate", "our plain loop", "Medusa"]
    figure.legend(handles, names, loc="outside upper center", ncols=3, fontsize=8)
    foot = f"Demo model, {record['prompts']} prompts, batch 1. {_conditions(record)}"
    plot._save(plt, figure, foot, path)


def predicted_steps(plt: Any, record: Record, path: Path) -> None:
    """Draw what bytes and arithmetic predict for a step on a CPU (lines), and what steps took (points)."""
    steps = [step for step in record["steps"] if step["prefix"] == 256]
    models = list(dict.fromkeys(step["model"] for step in steps))
    figure, panels = plt.subplots(1, len(models), figsize=(9, 3.4), layout="constrained", squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        for i, dtype in enumerate(("fp32", "bf16", "int8")):
            mine = [step for step in steps if (step["model"], step["dtype"]) == (model, dtype)]
            nodes = [step["nodes"] for step in mine]
            panel.plot(nodes, [step["predicted_us"] / 1e3 for step in mine], "--", color=COLOURS[i], linewidth=1)
            panel.plot(nodes, [step["measured_us"] / 1e3 for step in mine], "o", color=COLOURS[i], label=dtype)
        panel.set(title=model, xlabel="nodes (1: plain)", ylabel="ms per step", ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend(loc="upper left")
    device = record["device"]
    peaks = f"{device['flops'] / 1e9:.0f} GFLOP/s in float32 and {device['bandwidth'] / 1e9:.1f} GB/s"
    words = f"points: measured; lines: predicted from bytes and arithmetic at the {peaks} that PyTorch reaches"
    foot = f"{words}\n{_conditions(record)}"
    plot._save(plt, figure, foot, path)


def large_models(plt: Any, records: Sequence[Record], path: Path) -> None:
    """Draw tokens per second of every way of decoding a model whose weights exceed the cache, at batch 1."""
    single = [r for r in records if r["batch"] == 1]
    largest = max(single, key=lambda r: r["parameters"])["model"]
    latest = {r["dtype"]: r for r in single if r["model"] == largest and "decoding_tokens_per_second" in r}
    shown = [latest[dtype] for dtype in ("float32", "bfloat16", "int8") if dtype in latest]
    figure, panels = plt.subplots(
        1, len(shown), figsize=(3 * len(shown) + 2, 3.6), layout="constrained", squeeze=False, sharey=True
    )
    ways = list(max((r["tokens_per_second"] for r in shown), key=len))
    for panel, record in zip(panels[0], shown, strict=True):
        decoding = record["decoding_tokens_per_second"]
        for place, way in enumerate(ways):
            if way not in decoding:
                continue
            colour = COLOURS[0 if way.startswith("transformers") else 1 if way == "plain" else 2]
            panel.barh(place, decoding[way], color=colour, alpha=0.35)
            panel.barh(place, record["tokens_per_second"][way], color=colour)
            panel.text(decoding[way], place, f" {decoding[way]:.0f}", va="center", fontsize=8)
        panel.set(title=f"{record['model']}, {record['dtype']}", xlabel="tokens per second")
        panel.set_xlim(0, 1.2 * max(max(r["decoding_tokens_per_second"].values()) for r in shown))
    names = {"plain": "our plain loop"}
    panels[0][0].set_yticks(range(len(ways)), [names.get(way, way) for way in ways], fontsize=8)
    panels[0][0].invert_yaxis()
    words = "light: decoding alone; full: with prefill"
    words += f"; batch 1, {shown[0]['prompts']} requests, texts and drafts are the demo model's"
    plot._save(plt, figure, f"{words}\n{_conditions(shown[-1])}", path)


PUBLISHED = {
    "transformers": "transformers", "llama.cpp": "llama.cpp", "llama.cpp, n-grams": "llama.cpp, n-gram drafts",
    "plain": "our plain loop", "lookup": "a copy in every step, no heads", "auto, no heads": "our default, no heads",
    "heads": "Medusa, best fixed tree", "heads, auto": "Medusa, our default",
}  # fmt: skip
"""Ways of `bench_published`, in the order of the figure."""


def published(plt: Any, record: Record, path: Path) -> None:
    """Draw tokens per second of ways of answering with a published model, as `bench_published` measured them."""
    every, dtypes = record["groups"]["all"]["ways"], record["settings"]["dtypes"]
    figure, panels = plt.subplots(1, len(dtypes), figsize=(11, 3.4), layout="constrained", squeeze=False, sharey=True)
    for panel, dtype in zip(panels[0], dtypes, strict=True):
        for place, name in enumerate(PUBLISHED):
            rate = every[f"{dtype}/{name}"]["tokens_per_second"]
            theirs = name.startswith(("transformers", "llama.cpp"))
            panel.barh(place, rate, color=COLOURS[0 if theirs else 2 if name.startswith("heads") else 1])
            panel.text(rate, place, f" {rate:.0f}", va="center", fontsize=8)
        panel.set(title=dtype, xlabel="tokens per second")
        panel.margins(x=0.15)
    panels[0][0].set_yticks(range(len(PUBLISHED)), list(PUBLISHED.values()), fontsize=8)
    panels[0][0].invert_yaxis()
    texts = f"SmolLM2-135M-Instruct, {record['groups']['all']['texts']} answers, batch 1, one thread, with prefill"
    plot._save(plt, figure, f"{texts}. {_conditions(record)}", path)


SETS = {"human_eval": "HumanEval", "gsm8k": "GSM8K", "dev": "chat"}


def categories(plt: Any, record: Record, path: Path) -> None:
    """Draw speedups over plain decoding by category of MT-Bench and by other set, as the paper's figure 3 does."""
    [dtype] = record["settings"]["dtypes"]
    names = [name for name in record["groups"] if name not in ("all", "mt_bench", *SETS)]
    groups = {name: record["groups"][name]["ways"] for name in (*names, *SETS)}
    figure, panel = plt.subplots(figsize=(10, 3.4), layout="constrained")
    for place, name in enumerate(("heads", "auto, no heads", "heads, auto")):
        over = [ways[f"{dtype}/{name}"]["over"][f"{dtype}/plain"] for ways in groups.values()]
        values = [one["value"] for one in over]
        ends = [[abs(one[end] - one["value"]) for one in over] for end in ("low", "high")]
        places = [x + 0.27 * (place - 1) for x in range(len(groups))]
        style = {"color": COLOURS[place], "error_kw": {"linewidth": 0.8}, "label": PUBLISHED[name]}
        panel.bar(places, values, 0.25, yerr=ends, **style)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xticks(range(len(groups)), [SETS.get(name, name) for name in groups], fontsize=8)
    panel.set(ylabel="times plain decoding")
    panel.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    texts = f"SmolLM2-135M-Instruct, {dtype}, {record['groups']['all']['texts']} answers; 95 % intervals over prompts"
    plot._save(plt, figure, f"{texts}. {_conditions(record)}", path)


SERVED = ("medusa", "plain", "transformers, continuous batching", "transformers")


def serve_load(plt: Any, records: Sequence[Record], path: Path) -> None:
    """Draw tokens per second of servers by the number of clients, as `bench_serve` measured them."""
    figure, panels = plt.subplots(1, len(records), figsize=(9, 3.2), layout="constrained", squeeze=False)
    names = {"medusa": "medusa serve", "plain": "medusa serve --tree root"}
    for panel, record in zip(panels[0], records, strict=True):
        clients = list(record["clients"])
        for place, name in enumerate(SERVED):
            if name not in record["servers"]:
                continue
            rates = [record["clients"][count][name]["tokens_per_second"] for count in clients]
            label = names.get(name, name.replace("transformers", "transformers serve"))
            panel.plot(range(len(clients)), rates, "o-", color=COLOURS[place], label=label)
            panel.annotate(f"{rates[0]:.0f}", (0, rates[0]), (-4, 5), textcoords="offset points", fontsize=8)
        title = record["benchmark"].removeprefix("serve-").replace("demo", "demo model, 4.3M")
        panel.set(title=title, xlabel="clients", ylabel="tokens per second", ylim=(0, None))
        panel.set_xticks(range(len(clients)), clients)
        panel.grid(alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    plot._save(plt, figure, f"float32, greedy, closed loops of clients. {_conditions(records[-1])}", path)


def _conditions(record: Record) -> str:
    machine = record["machine"]
    words = f"{machine['name']}, {machine['isa']}, {machine['cores']} cores; torch {record['versions']['torch']}"
    return f"{words}; commit {record['commit']}; {record['date']}"


def head_kinds(plt: Any, record: Record, path: Path) -> None:
    """Draw tokens per step with 16 nodes, and the bytes read per step, of each kind of heads, trained alike."""
    kinds = sorted(record["variants"].items(), key=lambda kind: -_tokens_per_step(kind[1])["value"])
    places, colours = list(range(len(kinds))), [COLOURS[name.startswith("shared")] for name, _ in kinds]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for place, (_, found), colour in zip(places, kinds, colours, strict=True):
        rate, megabytes = _tokens_per_step(found), found["bytes_bf16"] / 1e6
        panels[0].plot([rate["low"], rate["high"]], [place, place], color=colour, linewidth=1)
        panels[0].plot(rate["value"], place, "o", color=colour)
        panels[0].text(rate["value"], place - 0.2, f"{rate['value']:.2f}", ha="center", fontsize=8)
        panels[1].barh(place, megabytes, color=colour)
        panels[1].text(megabytes, place, f" {megabytes:.2f}", va="center", fontsize=8)
    panels[0].set_yticks(places, [name for name, _ in kinds])
    panels[0].invert_yaxis()
    panels[0].set_xlabel("tokens per step, 16 nodes, with 95 % intervals")
    panels[0].grid(alpha=0.3)
    panels[1].set_xlabel("MB that the heads read per step (bf16 unless named)")
    panels[1].margins(x=0.15)
    foot = f"Heads of the small chat model, {record['prompts']} prompts. {_conditions(record)}"
    plot._save(plt, figure, foot, path)


def _tokens_per_step(kind: Record) -> Record:
    found: Record = kind["ways"]["measured"]["16"]["tokens_per_step"]
    return found


def draw(out: Path) -> list[Path]:
    """Draw every figure into a folder; return the files.

    Raises:
        ValueError: matplotlib is not installed.
    """
    plt = plot.pyplot()
    out.mkdir(parents=True, exist_ok=True)
    gpu = plot.read(H200)
    names = ("one-step", "step-cost", "heads-cost", "generations", "head-kinds", "predicted-steps", "large-models")
    names += ("serve-load", "published-model", "by-category")
    files = [out / f"{name}.svg" for name in names]
    one_step(plt, files[0])
    step_cost(plt, gpu, files[1])
    heads_cost(plt, gpu, files[2])
    generations(plt, records_of("generate")[-1], files[3])
    head_kinds(plt, records_of("chat-kinds")[-1], files[4])
    predicted_steps(plt, records_of("cpu-roofline")[-1], files[5])
    large_models(plt, records_of("models"), files[6])
    serve_load(plt, [records_of("serve")[-1], records_of("serve-large")[-1]], files[7])
    published(plt, records_of("published")[-1], files[8])
    categories(plt, records_of("published-sets")[-1], files[9])
    return files


def main() -> None:
    """Draw from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder (default: %(default)s)")
    args = parser.parse_args()
    try:
        print("\n".join(map(str, draw(args.out))))
    except ValueError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
