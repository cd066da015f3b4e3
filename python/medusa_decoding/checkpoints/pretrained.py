"""Load configs, tokenizers, models and adapters with transformers and peft. No other module calls their loaders.

A checkpoint may come from a stranger. Its own code never runs, nothing is asked on standard input, and its sizes are
compared with its weight files before a model is allocated. Whatever the libraries raise becomes one `ValueError`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import logging
import os
import threading
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from medusa_decoding.checkpoints.config_checks import check_config, check_revision, read_settings
from medusa_decoding.checkpoints.four_bit_files import for_reading
from medusa_decoding.checkpoints.tensor_files import StoredTensor, listed, model_weights, open_tensors, read_index
from medusa_decoding.gguf_files import check_gguf, find_gguf
from medusa_decoding.heads import not_finite

# Arguments for the weights; AutoConfig would take them for fields of the config.
_WEIGHT_ARGUMENTS = ("dtype", "torch_dtype", "quantization_config")
# Arguments for the location; AutoConfig consumes them, but the weights must come from the same place.
_HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "gguf_file",
)

_parsing = threading.Lock()
_MAY_BE_MISSING = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
# A regular expression, as transformers wants it.
_HEADS = r"^medusa_head\."
# Numbers that one element of a quantised file can hold: 32 bits of 2 bits each.
_PACKED = 16


def stated_sizes(base_model: str, revision: str | None = None, **hub: Any) -> dict[str, int]:
    """Return hidden_size and vocab_size from a model's config; whatever cannot be read is left out."""
    try:
        config = read_file(base_model, **at(revision), **hub)
    except ValueError:
        return {}
    return {name: size for name in ("hidden_size", "vocab_size") if isinstance(size := config.get(name), int)}


def read_file(name: str | Path, *, argument: str = "base_model", **hub: Any) -> dict[str, Any]:
    """Return the content of a model's config.json, checked for impossible sizes.

    `argument` is the one that messages name, `hub` are arguments of the hub, such as `revision`.
    """
    name, hub = _located(name, hub)
    gguf = hub.pop("gguf_file", None)
    with _explained(argument, name, "a model's folder or hub id within reach"):
        file = _file_of(name, gguf or "config.json", **hub)
        if gguf is not None:
            check_gguf(file)
        raw = read_settings(file) if gguf is None else _gguf_config(file, file.stat().st_mtime_ns)
    check_config(raw, file)
    return raw


@functools.lru_cache(maxsize=4)
def _gguf_config(file: Path, changed: int) -> dict[str, Any]:
    """Read a config from a GGUF file, which `GGUFReader` takes seconds to parse: once for transformers and for us."""
    gguf: Any = importlib.import_module("gguf")
    parsed: list[Any] = []

    def kept(*given: Any) -> Any:
        parsed.append(parse(*given))
        return parsed[0]

    with _parsing:
        parse, gguf.GGUFReader = gguf.GGUFReader, kept
        try:
            raw: dict[str, Any] = PretrainedConfig.get_config_dict(file.parent, gguf_file=file.name)[0]
        finally:
            gguf.GGUFReader = parse
    return raw | _gguf_biases(parsed[0], raw["model_type"]) | _gguf_rope(parsed[0], raw.get("rope_theta", 10_000.0))


def _gguf_biases(reader: Any, family: str) -> dict[str, bool]:
    """Return the config's settings for the biases of a GGUF file, which transformers would leave out without them."""
    held = {one.name.partition(".bias")[0].rpartition(".")[2] for one in reader.tensors if one.name.endswith(".bias")}
    inputs, mlp = {"attn_q", "attn_k", "attn_v"}, {"ffn_gate", "ffn_up", "ffn_down"}
    attention = {"attention_bias": inputs | {"attn_output"}}
    settings = {"llama": attention | {"mlp_bias": mlp}, "qwen3": attention}.get(family, {})
    found = {name: bool(biases & held) for name, biases in settings.items()}
    known = set().union(*settings.values(), inputs if family.startswith("qwen2") else ())
    if held - known:
        raise ValueError(
            f"expected only biases that {family} models have, got also those of {listed(sorted(held - known))}"
        )
    return found


def _gguf_rope(reader: Any, theta: float) -> dict[str, Any]:
    """Return the `rope_parameters` of a GGUF file with scaled rotary embeddings, which transformers leaves out.

    llama.cpp stores Llama 3's as what each frequency is divided by.
    """
    held = {
        name.partition(".rope.")[2]: field.parts[field.data[0]]
        for name, field in reader.fields.items()
        if ".rope." in name
    }
    factor = float(held.get("scaling.factor", held.get("scale_linear", [1.0]))[0])  # the latter in files of 2023
    kind = bytes(held["scaling.type"]).decode() if "scaling.type" in held else "none" if factor in (0, 1) else "linear"
    divisors = next((torch.tensor(one.data) for one in reader.tensors if one.name == "rope_freqs.weight"), None)
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if divisors is not None:
        largest, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
        wavelengths = 2 * torch.pi * theta ** (torch.arange(len(divisors)) / len(divisors))
        smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        if not torch.allclose(divisors, 1 / ((1 - smooth) / largest + smooth), rtol=1e-3):
            raise ValueError("rope_freqs.weight: expected the scaling of Llama 3.1 to 3.3, got another")
        found = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
        return {"rope_parameters": scaling | found | {"rope_type": "llama3", "factor": largest}}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type: expected linear or yarn, got {kind!r}")
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = int(held["scaling.original_context_length"][0])
    return {"rope_parameters": scaling | {"factor": factor}}


def read_config(
    name: str | Path, *, argument: str = "base_model", **kwargs: Any
) -> tuple[PretrainedConfig, dict[str, Any]]:
    """Read a model's config, and split the keyword arguments as `AutoModelForCausalLM.from_pretrained` does.

    Arguments that are fields of the config override the file's. `argument` is the one that messages name. Returns the
    config and the other arguments for `load_model`.
    """
    name, kwargs = _located(name, kwargs)
    hub = {key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs}
    raw = read_file(name, argument=argument, **hub)
    model_type = raw.get("model_type", "")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not known or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        remedy = "; its own code (auto_map) is never run" if "auto_map" in raw else ""
        raise ValueError(
            f"{name}: expected a model_type that transformers has as a causal language model, such as llama, mistral, "
            f"qwen2 or qwen3, got {model_type!r}{remedy}"
        )
    held = {key: kwargs.pop(key) for key in _WEIGHT_ARGUMENTS if key in kwargs}
    attention, experts = (kwargs.get(f"{part}_implementation") for part in ("attn", "experts"))
    with _explained(argument, name, "a model with a config that transformers accepts"):
        if "gguf_file" in kwargs:  # AutoConfig would read the file once more
            given = {key: value for key, value in kwargs.items() if key not in _HUB_ARGUMENTS}
            config, rest = CONFIG_MAPPING[model_type].from_dict(dict(raw), return_unused_kwargs=True, **given)
        else:
            config, rest = AutoConfig.from_pretrained(
                name, return_unused_kwargs=True, trust_remote_code=False, **kwargs
            )
        # The file may name kernels on the hub, which transformers would fetch and run.
        config._attn_implementation, config._experts_implementation = attention, experts
    return config, {**rest, **held, **hub}


def load_config(name: str | Path, revision: str | None = None, *, argument: str = "base_model") -> PretrainedConfig:
    """Return a model's config; see `read_config` for arguments and errors."""
    return read_config(name, argument=argument, **at(revision))[0]


def load_tokenizer(name: str | Path, revision: str | None = None, *, argument: str = "base_model") -> Any:
    """Return a model's tokenizer; no such model, no tokenizer there, or a damaged one is a `ValueError`."""
    config = load_config(name, revision, argument=argument)
    name, hub = _located(name, at(revision))
    with _explained(argument, name, "a folder or hub id with a tokenizer"):
        gguf = "gguf_file" in hub  # which has a tokenizer itself
        file = None if gguf else cached_file(name, "tokenizer_config.json", **_MAY_BE_MISSING, **hub)
        stated = read_settings(file).get("tokenizer_class") if file else None
        for kind in (stated, getattr(config, "tokenizer_class", None)):
            # transformers calls any of its classes that is named here, even those that ask about running code.
            found = None if kind is None else getattr(transformers, kind, None)
            # A class whose library is missing has `_backends`; transformers then says which one.
            known = isinstance(found, type) and (
                issubclass(found, PreTrainedTokenizerBase) or hasattr(found, "_backends")
            )
            if found is not None and not known:
                raise ValueError(f"tokenizer_class: expected a tokenizer, got {kind}")
        return AutoTokenizer.from_pretrained(name, config=config, trust_remote_code=False, **hub)


def read_generation_config(name: str | Path, revision: str | None = None, *, argument: str = "base_model") -> Any:
    """Return what a model's generation_config.json says; an empty mapping if there is none."""
    name, hub = _located(name, at(revision))
    if "gguf_file" in hub:
        return {}
    with _explained(argument, name, "a model's folder or hub id within reach"):
        file = cached_file(name, "generation_config.json", **_MAY_BE_MISSING, **hub)
        return read_settings(file) if file else {}


def load_model(
    name: str | Path,
    config: PretrainedConfig | None = None,
    *,
    argument: str = "base_model",
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a causal language model with every weight that its config describes, and no other.

    Medusa heads among its weights are ignored. `config` and `kwargs` are what `read_config` returned; without a config
    it is read, with arguments as for `read_config`. The model is in eval mode, an instance of transformers' own class.

    Weights that it does not describe so, that are missing, or that are infinite in float16 are a `ValueError`.
    """
    name, kwargs = _located(name, kwargs)
    if config is None:
        config, kwargs = read_config(name, argument=argument, **kwargs)
    config = for_reading(config)
    gguf = kwargs.get("gguf_file")
    hub = {key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs and key != "gguf_file"}
    with _explained(argument, name, "a model's folder or hub id within reach"):
        found = _file_of(name, gguf or "config.json", **hub)
        folder, adapter = found.parent, None
        if gguf is None:  # transformers ignores what is next to a GGUF file
            generation = cached_file(name, "generation_config.json", **_MAY_BE_MISSING, **hub)
            if generation:  # transformers passes over a damaged one
                read_settings(generation)
            adapter = cached_file(name, "adapter_config.json", **_MAY_BE_MISSING, **hub)
    usual = gguf is None and not kwargs.get("variant") and kwargs.get("use_safetensors") is not False
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    quantised = getattr(config, "quantization_config", None) is not None

    def built(model: Any, *args: Any, **options: Any) -> None:
        model_class.__init__(model, *args, **options)
        # At this point shapes are known, weights on the hub have been fetched, and no memory has been taken.
        if usual and (shapes := stored or _stored_shapes(folder)):
            _check_shapes(model, shapes, folder, quantised)
        if gguf is not None:
            _check_shapes(model, {"all": torch.Size([found.stat().st_size])}, folder, quantised=True)

    # In the hub's cache files may still be missing, even after a download that was stopped.
    stored = _stored_shapes(folder) if usual and os.path.isdir(name) else {}
    # transformers reads the list of ignored weights from the class: a subclass for loading leaves the class unchanged.
    ignored = [*(model_class._keys_to_ignore_on_load_unexpected or []), _HEADS]
    changes = {"_keys_to_ignore_on_load_unexpected": ignored, "__init__": built, "__module__": model_class.__module__}
    reader: Any = type(model_class.__name__, (model_class,), changes)
    with _explained(argument, name, f"weights that fit {model_class.__name__}"), _without_report():
        # An adapter next to the model is loaded below: transformers would report its weights, not the model's.
        elsewhere = {} if adapter is None and gguf is None else {"adapter_kwargs": {"subfolder": "none"}}
        model, report = reader.from_pretrained(
            name, config=config, output_loading_info=True, trust_remote_code=False, **elsewhere, **kwargs
        )
    model.__class__ = model_class
    if gguf is not None and hasattr(model, "hf_quantizer"):  # the weights are ordinary ones now
        model.hf_quantizer.remove_quantization_config(model)
    _check_report(model, report, name, quantised)
    if adapter is not None:
        load_adapter(model, name, **hub)
    halves = {  # float16 has the smallest range of the three dtypes
        key: weight
        for key, weight in model.named_parameters()
        if type(weight) is torch.nn.Parameter and weight.dtype == torch.float16 and not weight.is_meta
    }
    names = not_finite(halves)
    if names:
        raise ValueError(f"{name}: expected weights that are finite in float16, got larger ones in {listed(names)}")
    return model


def build_model(
    config: PretrainedConfig, device: torch.device, *, argument: str = "base_model", **options: Any
) -> PreTrainedModel:
    """Return a causal language model with random weights, or on the meta device with shapes alone."""
    with _explained(argument, str(config.name_or_path), "a config that describes a model"), device:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)


def load_adapter(model: PreTrainedModel, name: str | Path, **hub: Any) -> None:
    """Put an adapter of peft into a model; one that is damaged, names code or does not fit is a `ValueError`."""
    name = _local(name)
    with _explained("base_model", name, "an adapter that fits its model"), _without_report():
        folder = _file_of(name, "adapter_config.json", **hub).parent
        names = ("adapter_model.safetensors", "adapter_model.bin")
        found = next((file for one in names if (file := cached_file(name, one, **_MAY_BE_MISSING, **hub))), None)
        if found is None:
            raise ValueError("no adapter_model.safetensors or adapter_model.bin there")
        stored = open_tensors(Path(found))
        _check_adapter(folder / "adapter_config.json", stored)
        own = dict(model.named_parameters())
        for key, tensor in stored.items():  # whole weights, such as embeddings of a larger vocabulary
            there = own.get(key.removeprefix("base_model.model."))
            if there is not None and there.is_floating_point() and there.shape != tensor.shape:
                raise tensor.refused(f"shape {list(there.shape)} as in the base model", list(tensor.shape))
        # transformers itself finds neither a .bin file in a folder nor the magnitudes of DoRA.
        weights = {
            f"{key}.weight" if key.endswith("lora_magnitude_vector") else key: tensor.load()
            for key, tensor in stored.items()
        }
        report: Any = model.load_adapter(str(folder), adapter_state_dict=weights)
    # Older versions of transformers report nothing.
    missing, stray = (sorted(getattr(report, f"{kind}_keys", ())) for kind in ("missing", "unexpected"))
    if missing:
        raise ValueError(f"{name}: expected every weight of the adapter, got none for {listed(missing)}")
    if stray:
        raise ValueError(f"{name}: expected an adapter of its base model, got also {listed(stray)}")


def _check_adapter(file: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse an adapter's config that names code, or matrices of more rows than the adapter's weights have."""
    settings = read_settings(file)
    if settings.get("megatron_config") is not None:
        raise ValueError("expected no megatron_config, because it names a module to import, got one")
    rows = max((tensor.shape[0] for name, tensor in stored.items() if "_A" in name and tensor.shape), default=2**12)
    pattern = settings.get("rank_pattern") or {}
    for rank in (settings.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])):
        if rank is not None and (not isinstance(rank, int) or not 1 <= rank <= rows):
            raise ValueError(f"expected a rank from 1 to {rows} as in the adapter's weights, got {rank!r}")


@contextlib.contextmanager
def _explained(argument: str, name: str, expected: str) -> Iterator[None]:
    """Turn any error of the libraries into a `ValueError`, unless memory, disk space or a library is missing."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, ModuleNotFoundError):
        raise
    except ImportError as error:  # what transformers raises if a quantisation's library is missing
        raise ModuleNotFoundError(f"{argument}: {name}: {str(error).strip()}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        words = str(error).strip().partition("\n")[0]
        why = words if isinstance(error, ValueError) and words else f"{type(error).__name__}: {words}"
        raise ValueError(f"{argument}: expected {expected}, got {name} ({why})") from error


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Suppress transformers' table of weights that do not fit: each of them is an error here."""

    def other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    with contextlib.ExitStack() as stack:
        for name in ("modeling_utils", "integrations.peft"):
            log = logging.getLogger(f"transformers.{name}")
            log.addFilter(other)
            stack.callback(log.removeFilter, other)
        yield


def _local(name: str | Path) -> str:
    path = os.path.expanduser(name)
    return path if os.path.isdir(path) else str(name)  # False also for an invalid path


def _located(name: str | Path, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a model's folder or hub id, and arguments of loading with the `gguf_file` there if it is one."""
    named = arguments.get("gguf_file") is not None and os.path.isdir(os.path.expanduser(name))
    file = None if named else find_gguf(name)
    if file is not None:
        check_gguf(file)
        return str(file.parent), {**arguments, "gguf_file": file.name}
    return _local(name), {key: value for key, value in arguments.items() if (key, value) != ("gguf_file", None)}


def at(revision: str | None) -> dict[str, str]:
    """Return the keyword argument for a revision, if there is one."""
    return {} if revision is None else {"revision": revision}


def _file_of(name: str, file: str, **hub: Any) -> Path:
    """Return where a file of a model is, fetched if need be; `OSError` if there is none."""
    check_revision(hub.get("revision"))
    return Path(cached_file(name, file, **hub) or file)


def _stored_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of all tensors in the files that transformers reads a folder's weights from."""
    if any(folder.glob("shard-*-model-*.safetensors")):
        # transformers would read these first, and ignore tensors that the model has no place for.
        raise ValueError(f"{folder}: expected whole weights, got the shards of a distributed run (save them whole)")
    file = model_weights(folder)
    if file is None:
        return {}
    parts = sorted(set(read_index(file).values())) if file.suffix == ".json" else [file.name]
    opened = [open_tensors(folder / part) for part in parts]
    return {key: torch.Size(tensor.shape) for tensors in opened for key, tensor in tensors.items()}


def _check_shapes(model: PreTrainedModel, stored: Mapping[str, torch.Size], folder: Path, quantised: bool) -> None:
    """Compare the weights that a config describes with those in the files, before memory is taken for them."""
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    stored = {_name_in(model, name, expected): shape for name, shape in stored.items()}
    for tied in model.all_tied_weights_keys.items():  # one of the two names is enough
        stored |= {name: stored[other] for name, other in (tied, tied[::-1]) if name not in stored and other in stored}
        if quantised:
            expected.pop(tied[0], None)
    if not quantised:
        for name, shape in expected.items():
            if stored.get(name, shape) != shape:
                raise ValueError(
                    f"{name} in {folder}: expected shape {list(shape)} as config.json says, got {list(stored[name])}"
                )
    # transformers may know other names of some weights. What it cannot find it makes up, so that needs a limit.
    made_up = sorted(name for name in expected if quantised or name not in stored)
    held = sum(shape.numel() for shape in stored.values()) * (_PACKED if quantised else 1)
    wanted = sum(expected[name].numel() for name in made_up)
    if wanted > held:
        raise ValueError(
            f"{folder}: expected every weight of {type(model).__name__} as config.json describes it, "
            + (f"got {held} numbers at most for {wanted}" if quantised else f"got none for {listed(made_up)}")
        )


def _name_in(model: PreTrainedModel, name: str, expected: Container[str]) -> str:
    """Return the model's name of a stored weight: transformers adds or removes the prefix of the decoder."""
    prefix = f"{model.base_model_prefix}."
    shorter = name.removeprefix(prefix)
    return shorter if shorter in expected else prefix + name if prefix + name in expected else name


def _check_report(model: PreTrainedModel, report: Mapping[str, Any], name: str, quantised: bool) -> None:
    """Raise `ValueError` if weights and config are not the same model's."""
    kind = type(model).__name__
    missing = sorted(report["missing_keys"]) + sorted(str(entry[0]) for entry in report["mismatched_keys"])
    if missing:
        raise ValueError(f"{name}: expected every weight of {kind}, got none for {listed(missing)}")
    # What quantisation stores next to a weight may have been used already.
    modules = {module for module, _ in model.named_modules()} if quantised else set()
    stray = sorted(key for key in report["unexpected_keys"] if key.rpartition(".")[0] not in modules)
    if stray:
        raise ValueError(
            f"{name}: expected weights of {kind} as config.json describes it "
            f"({model.config.num_hidden_layers} layers), got also {listed(stray)}; config.json or the weights are wrong"
        )
