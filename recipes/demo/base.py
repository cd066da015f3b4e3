"""Write a small untrained model: a tokenizer learnt from the data, and a Llama with random weights.

    python -m recipes.demo.base --data train.jsonl.gz --out runs/chat/base
    medusa train --config recipes/chat-cpu.yaml

Two CPU cores can train a model of this size from nothing. Its text has the right form and no content, which is enough
to show training and decoding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa_decoding.files import whole_folder
from medusa_decoding.training.config import SourceConfig
from medusa_decoding.training.data.records import Report, read_records

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|>' -}}{%- generation -%}{{- message.content + '<|end|>' -}}{%- endgeneration -%}
{%- else -%}{{- '<|user|>' + message.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def train_tokenizer(texts: Iterable[str], vocab_size: int, code: bool = False) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE whose token 0 ends texts and turns, with a chat template.

    Args:
        texts: to learn from.
        vocab_size: tokens.
        code: keep words apart from the spaces before them. A name is then the same tokens wherever it stands, so that a
            small model can copy it.
    """
    roles = [USER, ASSISTANT]
    model = Tokenizer(models.BPE())
    if code:
        pieces = Regex(r"[A-Za-z]+|[0-9]|\n[ \n]*|[^A-Za-z0-9\n]+")
        splits = [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    else:
        splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    model.pre_tokenizer = pre_tokenizers.Sequence(splits)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, *roles],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    model.train_from_iterator(texts, trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=END, pad_token=END, additional_special_tokens=roles
    )
    found.chat_template = TEMPLATE
    return found


def make_base(
    data: str,
    out: Path,
    *,
    code: bool = False,
    vocab_size: int = 4096,
    hidden_size: int = 256,
    num_layers: int = 4,
    seed: int = 0,
) -> None:
    """Write the tokenizer and the model.

    Args:
        data: conversations or texts (see `training.data`), of which the first 20,000 train the tokenizer.
        out: folder to write.
        code: see `train_tokenizer`.
        vocab_size: tokens.
        hidden_size: H, a multiple of 64.
        num_layers: decoder layers.
        seed: of the weights.

    Raises:
        ValueError: unreadable data, an existing folder, or a hidden size that is not a multiple of 64.
    """
    if out.exists():
        raise ValueError(f"out: expected a new folder, got {out}")
    if hidden_size < 64 or hidden_size % 64:
        raise ValueError(f"hidden_size: expected a multiple of 64, got {hidden_size}")

    def texts() -> Iterator[str]:
        for record in read_records([SourceConfig(data)], Report(), limit=20_000):
            yield from [record.text] if record.text is not None else (turn["content"] for turn in record.messages)

    tokenizer = train_tokenizer(texts(), vocab_size, code)
    torch.manual_seed(seed)
    end = int(tokenizer.vocab[END])
    heads = hidden_size // 64
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=11 * hidden_size // 4,
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=end,
        )
    )
    with whole_folder(out) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)


def main() -> int:
    """Write the folder that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="conversations or texts: a file, a folder or a hub name")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--code", action="store_true", help="keep words apart from the spaces before them")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64 (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default: 4)")
    args = parser.parse_args()
    make_base(
        args.data,
        args.out,
        code=args.code,
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_layers=args.layers,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
