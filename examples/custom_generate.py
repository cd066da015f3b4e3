"""An existing transformers script, with the two changes that let it decode with heads.

Heads that `medusa export --format hub` has written need one: custom_generate=FOLDER, trust_remote_code=True.

python examples/custom_generate.py
python examples/custom_generate.py --base-model BASE --heads HEADS --prompt "Write a haiku about trees."
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_decoding import medusa_generate  # the first change
from medusa_decoding.demo import CHECKPOINT

PROMPT = "Write a function total(prices) that returns the sum of the squares of the odd values in prices."

parser = argparse.ArgumentParser(description="Generate with transformers, with and without heads.")
parser.add_argument("--base-model", default=str(CHECKPOINT / "base"), help="a folder or a hub id")
parser.add_argument("--heads", default=str(CHECKPOINT / "heads"), help="a folder or a hub id")
parser.add_argument("--prompt", default=PROMPT)
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.base_model)
model = AutoModelForCausalLM.from_pretrained(args.base_model, dtype="float32")
inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)

before = model.generate(**inputs, max_new_tokens=128, do_sample=False)
after = model.generate(
    **inputs,
    max_new_tokens=128,
    do_sample=False,
    custom_generate=medusa_generate,  # the second change
    heads=args.heads,
)

print(tokenizer.decode(after[0], skip_special_tokens=True))
print("\nThe same tokens as before:", before.tolist() == after.tolist())
