"""A first config fits the model, the data and the device, says why, and trains as it stands."""

from __future__ import annotations

import json

import pytest
import torch
import toy
import workshop

from medusa_decoding.training import Config, config_schema, first_config
from medusa_decoding.training.loop.schedules import stages

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
LLAMA_2 = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_3 = {**LLAMA_2, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}


def make(model, data, device=CPU, recipe="own-answers"):
    """The choices by key, after checking that the file says the same."""
    found = first_config.first_config(str(model), str(data), device, recipe)
    text = found.to_yaml(["medusa train --config x.yaml"])
    assert Config.of(config_schema.parse_yaml(text)) == found.config
    assert "#   medusa train --config x.yaml\n" in text
    return found, {choice.key: choice.value for choice in found.choices}


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a GPU of some GiB; with bitsandbytes or without."""

    def pretend(gib, bitsandbytes=True, bf16=True):
        monkeypatch.setattr(first_config, "available", lambda device: gib * GIB)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a test's GPU")
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: bf16)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "bitsandbytes" or bitsandbytes or None)

    return pretend


def large(folder, sizes, **changes):
    """A folder with the config and a tokenizer of a large model, without weights."""
    toy.tokenizer("bytes", toy.marked(toy.CHATML)).save_pretrained(folder)
    stated = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 8192, **sizes, **changes}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def test_given_answers_are_trained_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = workshop.make_base(tmp_path / "Tiny Model")
    data = workshop.make_data(tmp_path / "data.jsonl", 400)
    found, chosen = make(base, data, recipe="given-answers")
    assert not found.distills
    assert chosen["data.answers"] == "given"
    assert not any(key.startswith("generation.") for key in chosen)
    assert chosen["model.name"] == str(base)
    assert chosen["data.train"] == [{"path": str(data)}]
    assert (chosen["model.dtype"], chosen["model.quantization"]) == ("float32", "none")
    assert chosen["heads.shared_projection"]
    ranks = chosen["heads.root_rank"], chosen["heads.parent_rank"]
    assert (chosen["heads.num_layers"], ranks) == (2, (workshop.BASE["hidden_size"] // 2, 64))
    assert chosen["output.folder"] == "runs/tiny-model"
    config = found.config
    # Rows are as long as the longest conversations, within the model's context.
    assert chosen["data.length"] == 64
    assert config.optimisation.batch_size % config.optimisation.micro_batch_size == 0
    assert config.warnings() == []
    # The model's answers have about 19 of 28 tokens, so that 64 tokens of a row have about 40 to learn: 16 rows.
    assert config.optimisation.batch_size == 16
    assert config.optimisation.epochs == 10
    (stage,) = stages(config, 330)
    assert stage.warmup_steps == int(0.3 * stage.steps)
    assert [line.split(":")[0] for line in found.facts] == ["model", "data", "device"]
    assert "400 sharegpt" in found.facts[1]
    assert found.facts[2].startswith("device: this machine, ")
    assert found.to_yaml([]).startswith("# Medusa heads, fitted to this machine.")
    (tmp_path / "runs" / "tiny-model").mkdir(parents=True)
    assert make(base, data)[1]["output.folder"] == "runs/tiny-model-2"


def test_prompts_alone_are_answered_by_the_model(tmp_path):
    base = workshop.make_base(tmp_path / "base", max_position_embeddings=512)
    data = toy.write_lines(tmp_path / "a.jsonl", *({"prompt": f"Question {n}?"} for n in range(30)))
    found, chosen = make(base, data)
    assert found.distills
    assert "30 without an answer" in found.facts[1]
    # The prompt and the answer fit a row.
    assert chosen["generation.max_new_tokens"] == 256
    assert chosen["data.length"] == 512
    # About 128 of 140 tokens are learnt: one row, as 512 tokens are wanted.
    assert chosen["optimisation.batch_size"] == 1


def test_the_model_answers_conversations_that_have_answers(tmp_path):
    base = workshop.make_base(tmp_path / "base", max_position_embeddings=512)
    lines = [toy.sharegpt("Hi", "Hello", "And?", "Paris")] * 20 + [toy.sharegpt("Hi", "Hello")] * 10
    found, chosen = make(base, toy.write_lines(tmp_path / "a.jsonl", *lines))
    assert found.distills
    assert chosen["data.answers"] == "own"
    assert chosen["generation.turns"] == 4
    reasons = {choice.key: choice.why for choice in found.choices}
    assert "the 30 given ones are dropped, --recipe given-answers learns them" in reasons["data.answers"]
    # Two questions with two answers of 256 tokens do not fit a longer row: the model has 512.
    assert chosen["data.length"] == 512
    assert "data.turns" not in chosen


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (None, "greedy (no do_sample)"),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None}, "temperature 0.6, top_k 20"),
    ],
)
def test_the_way_of_sampling_is_the_models_own_and_it_is_said(tmp_path, stated, words):
    base = workshop.make_base(tmp_path / "base")
    file = base / "generation_config.json"
    file.unlink()
    if stated is not None:
        file.write_text(json.dumps(stated))
    found, chosen = make(base, toy.write_lines(tmp_path / "a.jsonl", {"prompt": "Hi"}))
    assert found.config.generation.temperature is None
    (why,) = [choice.why for choice in found.choices if choice.key == "generation.temperature"]
    samples = stated is not None and stated["do_sample"]
    assert chosen.get("loss.targets") == ("kl" if samples else None)
    assert why == f"the model's own generation_config: {words}; name it if you serve otherwise"


def test_the_papers_settings_can_be_had(tmp_path, gpu):
    gpu(139)
    data = workshop.make_data(tmp_path / "data.jsonl", 200)
    _, chosen = make(large(tmp_path, LLAMA_2), data, GPU, "paper")
    # Appendix B, and 3.1 for epochs; what is not in the file has the defaults, which are the paper's.
    paper = {
        "data.answers": "given", "model.quantization": "4bit", "heads.num_heads": 5, "heads.shared_projection": False,
        "optimisation.optimizer": "adamw_8bit", "optimisation.batch_size": 64, "optimisation.epochs": 2,
    }  # fmt: skip
    assert {key: chosen[key] for key in paper} == paper
    ours = {"optimisation.warmup_share", "optimisation.learning_rate", "heads.num_layers", "heads.root_rank"}
    assert not ours & chosen.keys()


def test_given_answers_are_dropped(tmp_path):
    base = workshop.make_base(tmp_path / "base", max_position_embeddings=512)
    lines = [{"prompt": f"Question {n}?", "response": "Yes."} for n in range(28)]
    found, chosen = make(base, toy.write_lines(tmp_path / "a.jsonl", *lines, *[{"prompt": "Question?"}] * 2))
    # An answer of up to 256 tokens follows every prompt, whatever answer was given.
    assert "half of them have up to 1" in found.facts[1]
    assert chosen["data.length"] == 512


def test_texts_need_no_template(tmp_path):
    base = workshop.make_base(tmp_path / "base")
    toy.tokenizer().save_pretrained(base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    data = toy.write_lines(tmp_path / "a.jsonl", *({"text": "Paris is the capital of France. " * 20} for _ in range(9)))
    found, chosen = make(base, data)
    assert "data.template" not in chosen
    assert chosen["data.length"] == 64
    assert not any("dropped" in choice.why for choice in found.choices)  # texts have no answers
    chats = toy.write_lines(tmp_path / "b.jsonl", toy.sharegpt("Hi", "Hello", "And?", "Paris"))
    _, chosen = make(base, chats)
    assert chosen["data.template"] == "plain"


def test_a_template_that_changes_earlier_turns_is_rendered_turn_by_turn(tmp_path):
    base = workshop.make_base(tmp_path / "base")
    toy.tokenizer("bytes", "{#- enable_thinking -#}" + toy.THINKING).save_pretrained(base)
    chats = toy.write_lines(tmp_path / "b.jsonl", *[toy.sharegpt("Hi", "Hello", "And?", "Paris")] * 3)
    _, chosen = make(base, chats, recipe="given-answers")
    assert chosen["data.turns"] == "each"
    assert chosen["data.template_arguments"] == {"enable_thinking": False}
    # The model writes its answers without the empty thought, so all of them are in one row.
    assert "data.turns" not in make(base, chats)[1]


@pytest.mark.parametrize(("gib", "quantization"), [(24, "none"), (12, "4bit")])
def test_a_smaller_gpu_gets_smaller_settings(tmp_path, gpu, gib, quantization):
    gpu(gib)
    model, data = large(tmp_path, LLAMA_2), workshop.make_data(tmp_path / "data.jsonl", 200)
    found, chosen = make(model, data, GPU, "given-answers")
    assert (chosen["model.quantization"], chosen["optimisation.optimizer"]) == (quantization, "adamw")
    assert chosen["heads.shared_projection"]
    assert chosen["model.dtype"] == "bfloat16"
    assert "data.cache_hidden" not in chosen
    assert "# this GPU computes in it" in found.to_yaml([])


def test_a_model_is_not_quantised_to_write_its_answers(tmp_path, gpu):
    gpu(12)
    model, data = large(tmp_path, LLAMA_2), workshop.make_data(tmp_path / "data.jsonl", 200)
    with pytest.raises(ValueError, match=r"MODEL: expected one that can be .*; --recipe paper with bitsandbytes"):
        make(model, data, GPU)


def test_own_projections_that_do_not_fit_are_shared(tmp_path, gpu):
    model, data = large(tmp_path, LLAMA_3), workshop.make_data(tmp_path / "data.jsonl")
    gpu(139)
    assert not make(model, data, GPU, "paper")[1]["heads.shared_projection"]
    gpu(16)
    assert make(model, data, GPU, "paper")[1]["heads.shared_projection"]


def test_a_large_vocabulary_is_trimmed_if_its_logits_are_most_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(first_config, "available", lambda device: 139 * GIB)
    data = workshop.make_data(tmp_path / "data.jsonl")
    small = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    small |= {"num_key_value_heads": 3, "tie_word_embeddings": True}  # SmolLM2-135M

    def size(vocabulary, sizes=small, *others):
        return make(large(tmp_path, sizes | {"vocab_size": vocabulary}), data, *others)[1].get("heads.token_map_size")

    assert size(49152) == 8192
    found, _ = make(large(tmp_path, small, vocab_size=49152), data)
    assert (
        "# of 49,152, the answers' most frequent tokens, then the tokenizer's first: 48% of the operations"
        in found.to_yaml([])
    )
    # A small vocabulary; a large model, whose layers take longer than logits.
    assert size(16000) is size(128256, LLAMA_3) is None


def test_heads_for_a_gpu(tmp_path, gpu):
    gpu(139)
    _, chosen = make(large(tmp_path, LLAMA_3), workshop.make_data(tmp_path / "data.jsonl"), GPU)
    assert chosen["heads.shared_projection"]
    assert (chosen["heads.num_layers"], chosen["heads.root_rank"], chosen["heads.parent_rank"]) == (2, 256, 64)
    gpu(139, bf16=False)
    assert make(large(tmp_path, LLAMA_2), tmp_path / "data.jsonl", GPU)[1]["model.dtype"] == "float32"


@pytest.mark.parametrize(
    ("lines", "words"), [([{"query": "Hi"}], "got 1 x none of the keys"), ([], "got an empty file")]
)
def test_unusable_data_is_named(tmp_path, lines, words):
    base = workshop.make_base(tmp_path / "base")
    with pytest.raises(ValueError, match=f"DATA: expected records .*, {words}"):
        make(base, toy.write_lines(tmp_path / "a.jsonl", *lines))
