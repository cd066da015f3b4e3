"""Write what a newcomer brings along: a small chat model of their own and a few hundred conversations.

    PYTHONPATH=. python .ci/own_model.py FOLDER

FOLDER then has `model` (a Llama with tokenizer and chat template, trained for seconds) and `data.jsonl`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.demo.base import make_base

WORDS = ["tree", "branch", "leaf", "root", "path", "node", "token", "model", "head", "draft", "step", "text"]
STEPS, ROWS = 300, 8


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Return questions whose answers follow from them."""
    chance = random.Random(0)
    chats = []
    for _ in range(count):
        start, length = chance.randrange(40), chance.randrange(5, 12)
        word = chance.choice(WORDS)
        numbers = range(start, start + length)
        question, answer = chance.choice(
            [
                (f"Count from {start} to {numbers[-1]}.", ", ".join(map(str, numbers)) + "."),
                (f"Count down from {numbers[-1]} to {start}.", ", ".join(map(str, reversed(numbers))) + "."),
                (f"Write {word} {length} times.", " ".join([word] * length) + "."),
                (f"Spell {word} {length % 4 + 2} times.", "; ".join(["-".join(word)] * (length % 4 + 2)) + "."),
            ]
        )
        chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    return chats


def main(folder: Path) -> None:
    """Write the data, and a model that has learnt it."""
    torch.set_num_threads(1)  # the model is too small for more
    chats = conversations(400)
    folder.mkdir(parents=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    make_base(str(data), folder / "model", vocab_size=384, hidden_size=128, num_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    rows = tokenizer(texts, padding=True, return_tensors="pt")
    labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        some = torch.randint(len(chats), (ROWS,), generator=order)
        loss = model(rows.input_ids[some], attention_mask=rows.attention_mask[some], labels=labels[some]).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(folder / "model")
    print(f"{len(chats)} conversations, a model of {model.num_parameters():,} parameters, loss {loss.item():.2f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python .ci/own_model.py FOLDER")
    main(Path(sys.argv[1]))
