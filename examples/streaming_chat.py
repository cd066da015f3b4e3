"""A chat that prints each answer while it is written, and keeps the conversation in the KV cache.

python examples/streaming_chat.py --model HEADS_OF_A_CHAT_MODEL
echo "Write a class Point with x: float and y: float." | python examples/streaming_chat.py

A model without a chat template continues the text: a message is then its next piece.
"""

import argparse
import sys

import torch
from transformers import AutoTokenizer, TextStreamer

from medusa_decoding import MedusaModel, Session
from medusa_decoding.demo import CHECKPOINT

parser = argparse.ArgumentParser(description="Chat with a model and its heads; Ctrl-D leaves.")
parser.add_argument("--model", default=str(CHECKPOINT / "heads"), help="heads: a folder or a hub id")
parser.add_argument("--max-new-tokens", type=int, default=256)
args = parser.parse_args()

model = MedusaModel.from_pretrained(args.model, device_map="cuda" if torch.cuda.is_available() else "cpu")
tokenizer = AutoTokenizer.from_pretrained(model.base.name_or_path)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
session = Session()  # the next turn prefills only what is new
messages, text = [], ""

print("> ", end="", flush=True)
for line in sys.stdin:
    if tokenizer.chat_template is None:
        text += line
        ids = tokenizer(text, return_tensors="pt").input_ids
    else:
        messages.append({"role": "user", "content": line.strip()})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    output = model.generate(ids, max_new_tokens=args.max_new_tokens, streamer=streamer, session=session)
    answer = tokenizer.decode(output.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    text += answer
    messages.append({"role": "assistant", "content": answer})
    print(f"[{output.tokens_per_step:.2f} tokens per step, {session.reused} tokens from the cache]")
    print("> ", end="", flush=True)
print()
