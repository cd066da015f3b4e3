"""The configuration: the papers' values as defaults, strict reading, and YAML round trips."""

import dataclasses

import pytest

from medusa_decoding.training import config_schema
from medusa_decoding.training.config import PRESETS, Config, DataConfig, ModelConfig, OutputConfig, SourceConfig, table

NEEDED = {
    "model": {"name": "lmsys/vicuna-7b-v1.5"},
    "data": {"train": [{"path": "train.jsonl"}]},
    "output": {"folder": "out"},
}


def of(method="medusa-1", **sections):
    values = {name: dict(section) for name, section in NEEDED.items()} | {"method": method}
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
    return Config.of(values)


def values_at(config, keys):
    found = {}
    for key in keys:
        value = config
        for name in key.split("."):
            value = getattr(value, name)
        found[key] = value
    return found


# Appendix B of the paper (and 3.1, 3.2 for epochs, lengths and batches), copied by hand.
SHARED = {
    "heads.num_heads": 5, "heads.num_layers": 1, "loss.head_decay": 0.8,
    "loss.targets": "hard", "optimisation.optimizer": "adamw_8bit",
    "optimisation.schedule": "cosine", "optimisation.heads_factor": 4.0, "lora.rank": 32, "lora.alpha": 16.0,
    "lora.dropout": 0.05, "lora.lm_head": True, "lora.target": "all-linear", "heads.shared_projection": False,
}  # fmt: skip
VICUNA = {
    "optimisation.batch_size": 64, "optimisation.learning_rate": 5e-4,
    "optimisation.epochs": 2.0, "data.length": 4096,
}  # fmt: skip
PAPER = {
    "medusa-1": SHARED | VICUNA | {
        "lora.enabled": False, "loss.lambda_0": None, "optimisation.heads_first_epochs": 0.0,
    },
    "medusa-2": SHARED | VICUNA | {
        "lora.enabled": True, "loss.lambda_0": 0.2, "loss.lambda_0_schedule": "constant",
        "optimisation.heads_first_epochs": 2.0,
    },
    "self-distillation": SHARED | {
        "lora.enabled": True, "loss.lambda_0": 0.01, "loss.lambda_0_schedule": "sine", "optimisation.batch_size": 128,
        "optimisation.learning_rate": 1e-4, "data.length": 2048,
        "optimisation.heads_first_epochs": 0.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("method", PAPER)
def test_defaults_are_those_of_the_paper(method):
    assert values_at(of(method), PAPER[method]) == PAPER[method]


@pytest.mark.parametrize("method", PAPER)
def test_by_default_the_model_is_as_it_is_deployed(method):
    """Not in the paper, which has 4 bits for Vicuna (B.3) and temperature 0.3 for self-distillation (3.2)."""
    ours = {"model.quantization": "none", "generation.temperature": None, "generation.top_p": None}
    assert values_at(of(method), ours) == ours


@pytest.mark.parametrize(("method", "paper"), [("medusa-1", 40), ("medusa-2", 40), ("self-distillation", 20)])
def test_the_warm_up_is_that_of_the_paper_and_fits_few_steps(method, paper):
    assert [of(method).warmup_steps(steps) for steps in (1000, 4 * paper)] == [paper, paper]
    assert [of(method).warmup_steps(steps) for steps in (40, 3, 1)] == [10, 0, 0]
    assert of(method, optimisation={"warmup_steps": 7}).warmup_steps(8) == 7


def test_the_warm_up_can_be_a_share_of_the_steps():
    config = of(optimisation={"warmup_share": 0.3})
    assert [config.warmup_steps(steps) for steps in (671, 10, 1)] == [201, 3, 0]


def test_given_values_override_the_defaults_of_the_method():
    config = of("self-distillation", optimisation={"warmup_steps": 7}, loss={"lambda_0_schedule": "constant"})
    assert config.optimisation.warmup_steps == 7
    assert config.optimisation.learning_rate == 1e-4
    assert config.loss == dataclasses.replace(config.loss, lambda_0=0.01, lambda_0_schedule="constant")


def test_heads_that_are_trained_already_need_no_first_stage():
    assert of("medusa-2", heads={"initial": "heads"}).optimisation.heads_first_epochs == 0
    asked = of("medusa-2", heads={"initial": "heads"}, optimisation={"heads_first_epochs": 1})
    assert asked.optimisation.heads_first_epochs == 1.0


@pytest.mark.parametrize("method", PAPER)
def test_yaml_round_trip(method, tmp_path):
    config = of(
        method,
        data={
            "train": [{"path": "a"}, {"path": "b/c", "split": "test", "subset": "en"}],
            "template_arguments": {"enable_thinking": False, "names": ["ä", 1]},
            "system": "Zwei\nZeilen: ja",
            "held_out_share": 0.125,
        },
        optimisation={"learning_rate": 3e-5, "epsilon": 1e-12, "max_steps": 500},
        heads={"token_map_size": 8000},
    )
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    again = Config.read(file)
    assert again == config
    assert again.data.train[1] == SourceConfig("b/c", split="test", subset="en")
    assert again.to_yaml() == config.to_yaml()


def test_every_setting_is_written_and_described():
    written = []

    def walk(value, path):
        for field in dataclasses.fields(value):
            inner, name = getattr(value, field.name), f"{path}{field.name}"
            if dataclasses.is_dataclass(inner):
                walk(inner, f"{name}.")
            else:
                written.append(name)

    config = of()
    walk(config, "")
    described = {row[0]: row for row in config_schema.describe(Config)}
    assert {name for name in described if "[]" not in name} == set(written)
    assert all(meaning for _, _, _, meaning, _ in described.values())
    # Each setting with a default names its source.
    assert [key for key, _, default, _, source in described.values() if default != "required" and not source] == []
    meaning = "peak rate of the backbone; self-distillation: 1e-4"
    key = "optimisation.learning_rate"
    assert described[key] == (key, "a number", "0.0005", meaning, "B.3; B.4")
    assert "| heads.num_heads | a whole number | 5 | K | B.2; 2.2.3 |\n" in table()
    assert len(table().splitlines()) == len(described) + 2


@pytest.mark.parametrize("text", ["5e-4", "0.0005", "5.0E-04", "+5e-4"])
def test_numbers_in_yaml_are_parsed(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_text(
        f"model: {{name: m}}\ndata: {{train: [{{path: d}}]}}\noutput: {{folder: o}}\noptimisation:\n"
        f"  learning_rate: {text}\n  epochs: 3\n"
    )
    config = Config.read(file)
    assert config.optimisation.learning_rate == 5e-4
    assert config.optimisation.epochs == 3.0
    assert isinstance(config.optimisation.epochs, float)


BAD_FILES = {
    "a: [": "config: expected YAML in .*, got while parsing",
    "": "config: expected a mapping in .*, got nothing",
    "- a": "config: expected a mapping in .*, got seq",
    "heads: {num_heads: 3,\n num_heads: 4}": "config: expected YAML in .*, got the key 'num_heads' again in line 2",
    "heads: {num_heads: !!int x}": "config: expected YAML in .*, got invalid literal",
    "a: !!python/object:os.system {}": "config: expected YAML in .*, got could not determine a constructor",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_files_are_named(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=BAD_FILES[text]):
        Config.read(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config: expected a readable file, got .*none.yaml"):
        Config.read(tmp_path / "none.yaml")


BAD = [
    ({"optimization": {}}, r"^optimization: expected one of model, .* \('optimisation' is near\), got an unknown key$"),
    ({"heads": {"num_head": 3}}, r"^heads.num_head: expected one of .* \('num_heads' is near\), got an unknown key$"),
    ({"heads": {"num_heads": "five"}}, r"^heads.num_heads: expected a whole number, got 'five'$"),
    ({"heads": {"num_heads": True}}, r"^heads.num_heads: expected a whole number, got True$"),
    ({"heads": {"num_heads": 2.0}}, r"^heads.num_heads: expected a whole number, got 2.0$"),
    ({"heads": {"num_heads": 0}}, r"^heads.num_heads: expected at least 1, got 0$"),
    ({"heads": {"bias": 1}}, r"^heads.bias: expected true or false, got 1$"),
    ({"heads": {"token_map_size": "all"}}, r"^heads.token_map_size: expected a whole number or null, got 'all'$"),
    ({"heads": {"storage": "int4"}}, r"^heads.storage: expected 'float' or 'int8' or 'fp8', got 'int4'$"),
    ({"heads": None}, r"^heads: expected a mapping, got None$"),
    ({"method": "medusa-3"}, r"^method: expected 'medusa-1' or 'medusa-2' or 'self-distillation', got 'medusa-3'$"),
    ({"method": ["medusa-2"]}, r"^method: expected 'medusa-1' .* got \['medusa-2'\]$"),
    ({"optimisation": {"learning_rate": "5e-4"}}, r"^optimisation.learning_rate: expected a number, got '5e-4'$"),
    (
        {"optimisation": {"learning_rate": float("nan")}},
        r"^optimisation.learning_rate: expected a finite number above 0",
    ),
    (
        {"optimisation": {"learning_rate": 0}},
        r"^optimisation.learning_rate: expected a finite number above 0, got 0.0$",
    ),
    ({"lora": {"dropout": 1.0}}, r"^lora.dropout: expected a number from 0 to below 1, got 1.0$"),
    ({"loss": {"targets": "soft"}}, r"^loss.targets: expected 'hard' or 'kl', got 'soft'$"),
    ({"loss": {"head_decay": 1.5}}, r"^loss.head_decay: expected a number above 0 and at most 1, got 1.5$"),
    ({"model": {"name": " "}}, r"^model.name: expected at least one character, got ' '$"),
    ({"data": {"train": []}}, r"^data.train: expected at least one entry, got \(\)$"),
    ({"data": {"train": "a.jsonl"}}, r"^data.train: expected a list, got 'a.jsonl'$"),
    ({"data": {"train": ["a.jsonl"]}}, r"^data.train\[0\]: expected a mapping, got 'a.jsonl'$"),
    ({"data": {"train": [{"path": "a"}, {"split": "b"}]}}, r"^data.train\[1\].path: expected text, got nothing$"),
    ({"data": {"train": [{"path": 3}]}}, r"^data.train\[0\].path: expected text, got 3$"),
    ({"data": {"template_arguments": {1: 2}}}, r"^data.template_arguments: expected a mapping, got \{1: 2\}$"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[1:40] for _, message in BAD])
def test_bad_values_are_named_by_their_path(change, message):
    with pytest.raises(ValueError, match=message):
        of(**change)


@pytest.mark.parametrize("missing", ["model", "data", "output"])
def test_missing_sections_are_named(missing):
    values = {name: section for name, section in NEEDED.items() if name != missing}
    with pytest.raises(ValueError, match=f"^{missing}: expected a mapping, got nothing$"):
        Config.of(values)
    with pytest.raises(
        ValueError, match=f"^{missing}.{'train' if missing == 'data' else '(name|folder)'}: expected .*, got nothing$"
    ):
        Config.of(NEEDED | {missing: {}})
    with pytest.raises(ValueError, match=r"^config: expected a mapping, got 'text'$"):
        Config.of("text")


EXCLUDED = [
    ("medusa-1", {"lora": {"enabled": True}}, "lora.enabled: expected false with method medusa-1"),
    ("medusa-1", {"loss": {"lambda_0": 0.2}}, "loss.lambda_0: expected null with method medusa-1"),
    ("medusa-1", {"optimisation": {"heads_first_epochs": 1}}, "optimisation.heads_first_epochs: expected 0 with"),
    ("medusa-2", {"loss": {"lambda_0": None}}, "loss.lambda_0: expected a number with method medusa-2, got null"),
    (
        "medusa-2",
        {"lora": {"enabled": False}, "model": {"quantization": "4bit"}},
        "lora.enabled: expected true with model.quantization 4bit",
    ),
    (
        "medusa-1",
        {"optimisation": {"warmup_steps": 4, "warmup_share": 0.1}},
        "optimisation.warmup_share: expected null with optimisation.warmup_steps .*, got 0.1",
    ),
    (
        "self-distillation",
        {"lora": {"enabled": False}},
        "lora.enabled: expected true with method self-distillation",
    ),
    ("medusa-2", {"optimisation": {"patience": 2}}, "optimisation.patience: expected null with method medusa-2"),
    ("medusa-2", {"data": {"cache_hidden": "c"}}, "data.cache_hidden: expected null with method medusa-2"),
    ("medusa-1", {"heads": {"shared_projection": True, "storage": "int8"}}, "heads.storage: expected float with"),
    (
        "medusa-1",
        {"model": {"attention": "flash_attention_2", "dtype": "float32"}},
        "model.dtype: expected bfloat16 or float16 with model.attention flash_attention_2, got float32",
    ),
    (
        "medusa-1",
        {"data": {"held_out": [{"path": "h"}], "held_out_share": 0.1}},
        "data.held_out_share: expected null or 0",
    ),
    ("medusa-1", {"optimisation": {"micro_batch_size": 3}}, "optimisation.batch_size: expected a multiple of"),
    (
        "medusa-1",
        {"optimisation": {"max_steps": 40, "warmup_steps": 40}},
        "optimisation.warmup_steps: expected fewer than",
    ),
]


@pytest.mark.parametrize(("method", "change", "message"), EXCLUDED, ids=[message[:40] for _, _, message in EXCLUDED])
def test_settings_that_exclude_each_other_are_refused(method, change, message):
    with pytest.raises(ValueError, match=message):
        of(method, **change)


def test_settings_close_to_those_are_allowed():
    assert of("medusa-2", lora={"enabled": False}).trains_backbone
    assert of(data={"cache_hidden": "c"}).data.cache_hidden == "c"
    assert not of().trains_backbone
    assert of().held_out_share == 0.02
    assert of(data={"held_out_share": 0}).held_out_share == 0
    assert of(data={"held_out": [{"path": "h"}]}).held_out_share == 0
    assert of(optimisation={"max_steps": 41}).optimisation.max_steps == 41


def test_a_quantised_teacher_gives_a_warning():
    assert of("self-distillation").warnings() == []
    (warning,) = of("self-distillation", model={"quantization": "4bit"}).warnings()
    assert warning.startswith("model.quantization: 4bit makes the quantised model the teacher")


@pytest.mark.parametrize("method", ["medusa-1", "medusa-2", "self-distillation"])
def test_a_quantised_model_gives_a_warning_unless_it_is_deployed_so(method):
    assert of(method).warnings() == []
    (warning,) = of(method, model={"quantization": "8bit"}).warnings()
    assert ("states" in warning) == (method != "self-distillation")
    assert of(method, model={"quantization": "8bit"}, generation={"quantized": True}).warnings() == []


def test_a_configuration_made_in_python_is_checked():
    parts = {"model": ModelConfig("m"), "data": DataConfig((SourceConfig("d"),)), "output": OutputConfig("o")}
    assert Config(**parts) == Config.of(
        {**NEEDED, "model": {"name": "m"}, "data": {"train": [{"path": "d"}]}, "output": {"folder": "o"}}
    )
    with pytest.raises(ValueError, match=r"^data.length: expected a whole number, got '2k'$"):
        Config(**parts | {"data": DataConfig((SourceConfig("d"),), length="2k")})
    with pytest.raises(ValueError, match=r"^model: expected ModelConfig, got 'm'$"):
        Config(**parts | {"model": "m"})


def test_presets_name_settings_that_exist():
    keys = {row[0] for row in config_schema.describe(Config)}
    assert {f"{name}.{key}" for preset in PRESETS.values() for name, part in preset.items() for key in part} <= keys


def test_defaults_for_a_gpu_are_not_taken_silently_on_a_cpu():
    (first, *others) = of().warnings(gpu=False)
    assert "model.dtype bfloat16, data.length 4096, optimisation.optimizer adamw_8bit" in first
    assert others == of().warnings()
    fitting = {
        "model": {"dtype": "float32"},
        "data": {"train": [{"path": "a"}], "length": 512},
        "optimisation": {"optimizer": "adamw"},
    }
    assert of(**fitting).warnings(gpu=False) == []
    (only,) = of(**fitting | {"optimisation": {}}).warnings(gpu=False)
    assert "for one: optimisation.optimizer adamw_8bit;" in only
