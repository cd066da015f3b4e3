"""Run `medusa data`: see `cli.parsers.data` for its arguments."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from medusa_decoding.training.config import Config
from medusa_decoding.training.data.records import EXAMPLES, NO_ANSWER, Report, prompt_key, read_records


def run(args: argparse.Namespace) -> int:
    """Print what is in the data; return 1 if a run would refuse it."""
    if args.seeds and args.model is not None:
        raise ValueError("--seeds: leave out --model, as only the answers decide how many tokens there are")
    data = {"train": [{"path": file} for file in args.files], "template": args.template, "length": args.length}
    model, output = {"name": args.model or "unknown"}, {"folder": "unknown"}
    config = Config.of({"model": model, "data": data | {"held_out_share": 0.0}, "output": output})
    report, refused = Report(), None
    records = list(read_records(config.data.train, report, seeds=args.seeds))
    turns = [turn for record in records for turn in record.messages]
    unanswered = [
        one for one in records if one.text is None and all(turn["role"] != "assistant" for turn in one.messages)
    ]
    found: dict[str, Any] = {
        "good_records": len(records),
        "kinds": Counter(record.kind for record in records),
        "prompts_alone": report.bad[NO_ANSWER] + len(unanswered),
        "user_turns": sum(turn["role"] == "user" for turn in turns),
        "answers": sum(turn["role"] == "assistant" and turn.get("weight") != 0 for turn in turns),
        "repeated_prompts": len(records) - len({prompt_key(record.prompt) for record in records}),
    }
    if args.model is not None:
        from medusa_decoding.checkpoints.pretrained import read_generation_config, stated_sizes
        from medusa_decoding.checks import token_list
        from medusa_decoding.training.data.encoding import ChatEncoder
        from medusa_decoding.training.loop.backbone import load_tokenizer
        from medusa_decoding.training.loop.rows import load_rows

        tokenizer = load_tokenizer(config.model)
        encoder, exact = ChatEncoder(tokenizer, args.template), [one for one in records if one.tokens is not None]
        own = read_generation_config(args.model, None, argument="--model") or {}
        ends = token_list(own.get("eos_token_id"))
        compared = [(record.where, *encoder.compare(record, ends)) for record in exact]
        found["tokenizer"] = encoder.fingerprint
        found["token_ids_of"] = Counter(one.tokens.tokenizer for one in exact if one.tokens is not None)
        found["answers_without_end"] = sum(cut for _, cut, _ in compared)
        found["ids_of_other_text"] = [where for where, _, differs in compared if differs]
    try:
        if args.model is None:
            report.check(config.data.max_bad_share)
        else:
            rows = load_rows(config, tokenizer, stated_sizes(args.model).get("vocab_size"))
            report, found = rows.report, found | rows.sizes(args.length)
    except ValueError as error:
        refused = str(error)
    if args.json:
        print(json.dumps(found | vars(report) | {"refused": refused}))
        return int(refused is not None)
    for name, value in found.items():
        if isinstance(value, Counter):
            value = ", ".join(f"{count} x {one}" for one, count in value.most_common())
        elif isinstance(value, list):
            value = ", ".join([str(len(value)), *value[:EXAMPLES]])
        print(f"{name.replace('_', ' ')}: {value or 0}")
    if refused is None or str(report) not in refused:
        print(report)
    verdict = "takes these data" if refused is None else f"refuses these data: {refused}"
    print(f"`medusa {'distill' if args.seeds else 'train'}` {verdict}")
    return int(refused is not None)
