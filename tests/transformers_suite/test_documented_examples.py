"""transformers' own examples of generation, as its docstrings have them, with and without heads.

transformers' tests of generation are not on PyPI: a source distribution has only the modules at the top of `tests/`,
and none of them that calls `generate` can be imported without folders that it has not (`checkout.py` is for the tests
of a checkout). But each processor, criterion, streamer and watermark is documented with examples, which are installed
with transformers. They are run here unchanged, with tiny models and tokenizers in the place of those from the hub:
each call of `generate` is made without heads and with several, and greedy texts, scores and what streamers get must be
the same.
"""

import ast
import copy
import doctest
import functools
import importlib
import re
from typing import NamedTuple

import pytest
import torch
import transformers
from calls import Recorder
from models import FAMILIES, MORE_FAMILIES, heads_for, tiny
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GenerationMixin, PreTrainedTokenizerFast

from medusa_decoding import Tree, medusa_generate

# Phi-4 has Phi-3's classes.
CLASSES = {family: kind for family, (_, kind) in FAMILIES.items()}
CLASSES |= {of: getattr(transformers, f"{name}ForCausalLM") for of, (name, _) in MORE_FAMILIES.items() if of != "phi4"}
MODULES = [
    *(f"generation.{name}" for name in ("logits_process", "stopping_criteria", "streamers", "utils", "watermarking")),
    "generation.configuration_utils",
    *(f"models.{family}.modeling_{family}" for family in CLASSES),
]
# Examples with models that cannot have heads, or a device that is not everywhere.
OTHERS = {
    "CompileConfig": "cuda",
    "ClassifierFreeGuidanceLogitsProcessor": "MusicgenForConditionalGeneration",
    "ForcedBOSTokenLogitsProcessor": "AutoModelForSeq2SeqLM",
    "SuppressTokensAtBeginLogitsProcessor": "WhisperForConditionalGeneration",
    "SuppressTokensLogitsProcessor": "WhisperForConditionalGeneration",
    "TextDiffusionStreamer": "DiffusionGemmaForBlockDiffusion",
    "WhisperTimeStampLogitsProcessor": "WhisperForConditionalGeneration",
}
# Examples of what is refused, and the message.
REFUSED = {
    "SequenceBiasLogitsProcessor": "num_beams: expected 1, got 4; .* no beam search",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": r"guidance_scale: expected 1\.0, got (1\.5|2|0); .*twice",
    "compute_transition_scores": "num_beams: expected 1, got 4; .* no beam search",
}
# Tokens of an example that indexes scores by ids of its own model's.
VOCABULARY = {"TypicalLogitsWarper": 1000}
HEADS = [({"num_heads": 1}, Tree.chain(1)), ({"num_heads": 3}, Tree.cartesian([3, 2])), ({"shared": True}, "auto")]


def documented():
    """The examples that generate, by the name of what they document; of models, those with text alone."""
    found = {}
    texts = {kind.__name__ for kind in CLASSES.values()}
    for name in MODULES:
        for test in doctest.DocTestFinder().find(importlib.import_module(f"transformers.{name}")):
            of = test.name.removesuffix(".forward").rpartition(".")[2]
            ours = of in texts or not name.startswith("models.")
            if ours and any(".generate(" in example.source for example in test.examples):
                found[of] = test.examples
    return found


EXAMPLES = documented()
RUN = [name for name in EXAMPLES if name not in OTHERS]


def loaded(examples):
    """The names whose `from_pretrained` examples call."""
    calls = [node for example in examples for node in ast.walk(ast.parse(example.source)) if isinstance(node, ast.Call)]
    return {
        call.func.value.id
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"
    }


def word_tokenizer(examples, size):
    """A tokenizer of the words in examples, in pieces of four letters, the first with the space before it.

    Args:
        examples: of one docstring.
        size: tokens to have at least.
    """
    pieces = r" ?\w{1,4}|\W"
    # `StopStringCriteria` looks at tokens after these letters.
    found = re.findall(pieces, "abcdef") + [piece for one in examples for piece in re.findall(pieces, one.source)]
    listed = ["<s>", "</s>", "<pad>", "<unk>", *sorted(set(found))]
    listed += [f" filler-{place}" for place in range(len(listed), size)]
    tokens = WordLevel({token: place for place, token in enumerate(listed)}, unk_token="<unk>")
    made = Tokenizer(tokens)
    made.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )


class Call(NamedTuple):
    """One call of generate: whether it drew, how many tokens it wrote and how many drafts were accepted; a refusal."""

    sampled: bool
    tokens: int = 0
    accepted: int = 0
    refusal: str = ""


def sequences(output):
    return output if isinstance(output, torch.Tensor) else output.sequences


def compared(plain, calls):
    """transformers' generate, which makes each call without heads and with each of HEADS, and compares."""

    def made(model, args, kwargs, **more):
        given = {name: copy.deepcopy(value) if "process" in name else value for name, value in kwargs.items()}
        if "streamer" in given:
            given["streamer"] = Recorder()
        return plain(model, *args, **(given | more)), given.get("streamer")

    @functools.wraps(plain)
    def generate(model, *args, **kwargs):
        config = kwargs.get("generation_config") or model.generation_config
        sampled = bool(kwargs.get("do_sample", config.do_sample))
        scored = {"return_dict_in_generate": True, "output_scores": True}
        expected, told = made(model, args, kwargs)
        first = made(model, args, kwargs, **scored, max_new_tokens=1)[0].scores[0] if sampled else None
        for shape, tree in HEADS:
            medusa = {"custom_generate": medusa_generate, "heads": heads_for(model, **shape), "tree": tree}
            try:
                got, heard = made(model, args, kwargs, **medusa)
            except ValueError as error:
                calls.append(Call(sampled, refusal=str(error)))
                continue
            output, _ = made(model, args, kwargs, **medusa, **scored, **({"max_new_tokens": 1} if sampled else {}))
            if sampled:
                # The first token's distribution depends on nothing that was drawn.
                torch.testing.assert_close(output.scores[0], first, rtol=1e-4, atol=1e-4)
            else:
                assert sequences(got).tolist() == sequences(expected).tolist() == output.sequences.tolist()
                assert (heard is None) == (told is None)
                assert heard is None or (heard.values, heard.ended) == (told.values, told.ended)
            calls.append(Call(sampled, sum(output.new_tokens), sum(map(sum, output.accept_lengths))))
        return expected if calls[-1].refusal else got

    return generate


@pytest.fixture
def calls(monkeypatch, request):
    """The calls that an example makes, which finds tiny models and a tokenizer of its words on the hub."""
    made = []
    name = request.node.callspec.params["name"]
    families = [*FAMILIES, *MORE_FAMILIES]
    family = families[RUN.index(name) % len(families)]
    tokenizer = word_tokenizer(EXAMPLES[name], VOCABULARY.get(name, 0))

    def model(of, *args, **kwargs):
        tokens = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        found = tiny(of, **tokens, max_position_embeddings=1024)
        found.generation_config.pad_token_id = 2
        found.generation_config.length_penalty = 1.0  # which an example reads
        return found

    for of, kind in CLASSES.items():
        monkeypatch.setattr(kind, "from_pretrained", functools.partial(model, of))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", functools.partial(model, family))
    for kind in (transformers.AutoTokenizer, transformers.GPT2Tokenizer):
        monkeypatch.setattr(kind, "from_pretrained", lambda *args, **kwargs: copy.deepcopy(tokenizer))
    monkeypatch.setattr(GenerationMixin, "generate", compared(GenerationMixin.generate, made))
    return made


def test_examples_of_other_models_are_those_listed():
    ours = {"AutoModelForCausalLM", "AutoTokenizer", "GPT2Tokenizer", *(kind.__name__ for kind in CLASSES.values())}
    foreign = {name for name, examples in EXAMPLES.items() if loaded(examples) - ours - {"BayesianDetectorModel"}}
    assert foreign == {name for name, reason in OTHERS.items() if reason != "cuda"} & set(EXAMPLES)
    for name, reason in OTHERS.items():
        assert name not in EXAMPLES or any(reason in example.source for example in EXAMPLES[name])
    assert len(RUN) > 25
    assert set(REFUSED) <= set(RUN)


@pytest.mark.parametrize("name", RUN)
def test_an_example_of_transformers(name, calls, capsys):
    variables = {}
    for example in EXAMPLES[name]:
        exec(compile(example.source, f"<{name}>", "exec"), variables)
    stated = sum(".generate(" in example.source for example in EXAMPLES[name])
    assert len(calls) >= stated * len(HEADS)
    refusals = [call.refusal for call in calls if call.refusal]
    assert bool(refusals) == (name in REFUSED), refusals
    assert all(re.search(REFUSED[name], refusal) for refusal in refusals), refusals
    greedy = [call for call in calls if not call.sampled and not call.refusal]
    if sum(call.tokens for call in greedy) > 120:
        assert sum(call.accepted for call in greedy) > 0, "no draft token was ever right"
