"""The configuration: the papers' values as defaults, strict reading, and YAML round trips."""

import dataclasses

import pytest

from medusa_decoding.training import config_schema
from medusa_decoding.training.config import (
    PRESETS,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OutputConfig,
    SourceConfig,
    table,
)

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
    "lora.dropout": 0.05, "lora.lm_head": True, "heads.shared_projection": False,
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


def test_folders_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = of("medusa-1", output={"folder": "~/run"}, data={"train": [{"path": "d"}], "cache_hidden": "~/states"})
    assert (config.output.folder, config.data.cache_hidden) == ("/home/me/run", "/home/me/states")


def test_yaml_round_trip(tmp_path):
    config = of(
        "medusa-2",
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
    described = {row[0]: row for row in config_schema.describe(Config)}
    assert all(meaning for _, _, _, meaning, _ in described.values())
    # Each setting with a default names its source.
    assert [key for key, _, default, _, source in described.values() if default != "required" and not source] == []
    assert config_schema.flat(of())["optimisation.learning_rate"] == 5e-4
    assert described.keys() >= config_schema.flat(of()).keys()
    assert "| heads.num_heads | int | 5 | K | B.2; 2.2.3 |\n" in table()
    assert len(table().splitlines()) == len(described) + 2


@pytest.mark.parametrize("text", ["5e-4", "0.0005", "+5E-04"])
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
    "- a": r"config: expected a mapping in .*, got \['a'\]",
    "heads: {num_heads: 3,\n num_heads: 4}": "config: expected YAML in .*, got the key 'num_heads' again in line 2",
    "a: !!python/object:os.system {}": "config: expected YAML in .*, got could not determine a constructor",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_files_are_named(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=BAD_FILES[text]):
        Config.read(file)
    with pytest.raises(ValueError, match=r"config: expected a readable file, got .*none.yaml"):
        Config.read(tmp_path / "none.yaml")


BAD = [
    ({"optimization": {}}, r"^optimization: expected one of model, .* \('optimisation' is near\), got an unknown key$"),
    ({"heads": {"num_head": 3}}, r"^heads.num_head: expected one of .* \('num_heads' is near\), got an unknown key$"),
    ({"heads": {"num_heads": True}}, r"^heads.num_heads: expected a valid integer, got True$"),
    ({"heads": {"num_heads": 0}}, r"^heads.num_heads: expected greater than or equal to 1, got 0$"),
    ({"heads": {"storage": "int8"}}, r"^heads.storage: leave it out, and run `medusa export --storage`"),
    ({"heads": None}, r"^heads: expected an object, got None$"),
    ({"optimisation": {"learning_rate": "5e-4"}}, r"^optimisation.learning_rate: expected a valid number, got '5e-4'$"),
    (
        {"optimisation": {"learning_rate": float("nan")}},
        r"^optimisation.learning_rate: expected a finite number, got nan",
    ),
    ({"lora": {"dropout": 1.0}}, r"^lora.dropout: expected less than 1, got 1.0$"),
    ({"model": {"name": " "}}, r"^model.name: expected at least one character that is no space, got ' '$"),
    ({"data": {"train": []}}, r"^data.train: expected at least 1 item"),
    ({"data": {"train": "a.jsonl"}}, r"^data.train: expected a valid array, got 'a.jsonl'$"),
    ({"data": {"train": [{"path": "a"}, {"split": "b"}]}}, r"^data.train\[1\].path: expected a value, got nothing$"),
    (
        {"data": {"train": [{"paht": "a", "path": "a"}]}},
        r"^data.train\[0\].paht: expected one of path, .*'path' is near",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[1:40] for _, message in BAD])
def test_bad_values_are_named_by_their_path(change, message):
    with pytest.raises(ValueError, match=message):
        of(**change)


def test_missing_sections_are_named():
    values = {name: section for name, section in NEEDED.items() if name != "data"}
    with pytest.raises(ValueError, match=r"^data: expected a value, got nothing$"):
        Config.of(values)
    with pytest.raises(ValueError, match=r"^config: expected an object, got 'text'$"):
        Config.of("text")


EXCLUDED = [
    ("medusa-1", {"lora": {"enabled": True}}, "lora.enabled: expected false with method medusa-1"),
    ("medusa-1", {"loss": {"lambda_0": 0.2}}, "loss.lambda_0: expected null with method medusa-1"),
    ("medusa-1", {"optimisation": {"heads_first_epochs": 1}}, "optimisation.heads_first_epochs: expected 0 with"),
    ("medusa-2", {"loss": {"lambda_0": None}}, "loss.lambda_0: expected a number with method medusa-2, got null"),
    ("medusa-2", {"lora": {"enabled": False}, "model": {"quantization": "4bit"}}, "lora.enabled: expected true with"),
    ("medusa-1", {"optimisation": {"warmup_steps": 4, "warmup_share": 0.1}}, "optimisation.warmup_share: .*, got 0.1"),
    ("self-distillation", {"lora": {"enabled": False}}, "lora.enabled: expected true with method self-distillation"),
    ("medusa-2", {"optimisation": {"patience": 2}}, "optimisation.patience: expected null with method medusa-2"),
    ("medusa-2", {"data": {"cache_hidden": "c"}}, "data.cache_hidden: expected null with method medusa-2"),
    ("medusa-1", {"model": {"attention": "flash_attention_2", "dtype": "float32"}}, "model.dtype: .*, got float32"),
    ("medusa-1", {"data": {"held_out": [{"path": "h"}], "held_out_share": 0.1}}, "data.held_out_share: expected null"),
    ("medusa-1", {"optimisation": {"micro_batch_size": 3}}, "optimisation.batch_size: expected a multiple of"),
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


@pytest.mark.parametrize("method", ["medusa-1", "self-distillation"])
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
    with pytest.raises(ValueError, match=r"length\n  Input should be a valid integer"):
        Config(**parts | {"data": DataConfig((SourceConfig("d"),), length="2k")})
    with pytest.raises(ValueError, match=r"lora.enabled: expected false with method medusa-1"):
        Config(**parts, lora=LoraConfig(enabled=True))


def test_presets_name_settings_that_exist():
    keys = {row[0] for row in config_schema.describe(Config)}
    assert {f"{name}.{key}" for preset in PRESETS.values() for name, part in preset.items() for key in part} <= keys
