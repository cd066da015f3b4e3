"""Small tokenizers trained in the test, chat templates of several kinds, and data files."""

import gzip
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
CORPUS = [
    "USER: How are you? ASSISTANT: I am fine, thank you.",
    "user\nassistant\nsystem\nWhat is the capital of France? The capital of France is Paris.",
    "Question: Count to three. Answer: one two three. Häuser, naïve, 東京.",
    "<think></think> A chat between a user and an assistant. [INST] Hello there [/INST] Hello! Hello.\n\n",
] * 4

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
GENERATION{{- message.content + '<|im_end|>' -}}ENDGENERATION
{%- else -%}{{- message.content + '<|im_end|>' -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

INST = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- raise_exception('no system messages here') -}}{%- endif -%}
{%- if message.role == 'user' -%}{{- '[INST] ' + message.content + ' [/INST]' -}}
{%- else -%}GENERATION{{- ' ' + message.content.strip() + eos_token -}}ENDGENERATION{%- endif -%}
{%- endfor -%}"""

# The prompt ends in a space, which tokenizers join to the word that follows.
SPACED = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- 'Question: ' + message.content + ' Answer: ' -}}
{%- else -%}GENERATION{{- message.content + eos_token -}}ENDGENERATION{%- endif -%}
{%- endfor -%}"""

# The last answer is rendered with a block of thought that earlier ones lack.
THINKING = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def marked(template):
    """The template with `{% generation %}` blocks."""
    return template.replace("ENDGENERATION", "{%- endgeneration -%}").replace("GENERATION", "{%- generation -%}")


def unmarked(template):
    """The template without them."""
    return template.replace("ENDGENERATION", "").replace("GENERATION", "")


def tokenizer(kind="bytes", template=None, **special):
    """A byte-level BPE ("bytes"), or one with spaces as marks that adds a start token ("marks")."""
    model = Tokenizer(models.BPE(unk_token=None))
    if kind == "bytes":
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        alphabet = sorted({character for text in CORPUS for character in text})
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    if kind == "marks":
        # Trained on single words, as such vocabularies have no token of several words; applied to the whole text.
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    model.train_from_iterator(CORPUS, trainer)
    if kind == "marks":
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        from tokenizers.processors import TemplateProcessing

        model.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | special
    additional = ["<|im_start|>", "<|im_end|>"]
    found = PreTrainedTokenizerFast(tokenizer_object=model, additional_special_tokens=additional, **tokens)
    found.chat_template = template
    return found


def spelt(tokenizer, ids):
    """The text of token ids, without the changes that decoding makes to white space."""
    if tokenizer.convert_tokens_to_ids("\u2581the") is None:
        return tokenizer.decode(ids)
    return "".join(tokenizer.convert_ids_to_tokens(list(ids))).replace("\u2581", " ")


def chat(*contents, system=None):
    """Messages of alternating roles, the user first."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def sharegpt(*contents):
    """A ShareGPT record."""
    names = ("human", "gpt")
    return {"conversations": [{"from": names[i % 2], "value": content} for i, content in enumerate(contents)]}


def write_lines(path, *records):
    """Write JSON lines; strings are written unchanged."""
    text = "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
