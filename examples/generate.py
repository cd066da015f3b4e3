"""Generate with heads: load a model, continue a prompt, see how many tokens each step made.

python examples/generate.py
python examples/generate.py --model HEADS --prompt "Write a haiku about trees."
"""

import argparse

import torch
from transformers import AutoTokenizer

from medusa_decoding import MedusaModel
from medusa_decoding.demo import CHECKPOINT

PROMPT = "Write a function total(prices) that returns the sum of the squares of the odd values in prices."

parser = argparse.ArgumentParser(description="Continue a prompt, or answer it if the model has a chat template.")
parser.add_argument("--model", default=str(CHECKPOINT / "heads"), help="heads: a folder or a hub id")
parser.add_argument("--prompt", default=PROMPT)
parser.add_argument("--max-new-tokens", type=int, default=128)
args = parser.parse_args()

# The base model is the one that the heads name.
model = MedusaModel.from_pretrained(args.model, device_map="cuda" if torch.cuda.is_available() else "cpu")
tokenizer = AutoTokenizer.from_pretrained(model.base.name_or_path)
if tokenizer.chat_template is None:
    inputs = tokenizer(args.prompt, return_tensors="pt")
else:
    messages = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=args.max_new_tokens)

new = output.sequences[0, inputs.input_ids.shape[1] :]
print(tokenizer.decode(new, skip_special_tokens=True))
print(f"\n{output.new_tokens[0]} tokens in {output.steps} steps: {output.tokens_per_step:.2f} per step")
print(f"tree: {output.tree_choice}")
