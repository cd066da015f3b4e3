"""Load the model that arguments name, for the command line and for servers.

Functions take any object with the arguments as attributes. Only those that load something import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_decoding.demo import CHECKPOINT, HEADS
from medusa_decoding.gguf_files import SMOLLM2, check_gguf, find_gguf

if TYPE_CHECKING:
    from medusa_decoding.model import MedusaModel


def find_model(name: str) -> str:
    """Return the path or hub id of a model's name; raise `ValueError` for a GGUF file that cannot be read.

    `smollm2` becomes the folder of the package's heads for that model, whose file must be installed.
    """
    known = HEADS.get(name) if not Path(name).exists() else None
    file = find_gguf(name if known is None else SMOLLM2)
    if file is not None:
        check_gguf(file)  # at once, because models take long to load
    return name if known is None else str(known)


def resolve_device(args: Any) -> None:
    """Replace the device "auto" by cuda or cpu; raise `ValueError` if CUDA is requested but not available."""
    import torch

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device: expected cpu, because torch sees no CUDA device, got {args.device}")
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        raise ValueError(f"--device: expected cpu, cuda or a number as in cuda:1, got {args.device}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: expected one of {torch.cuda.device_count()} CUDA devices, got {args.device}")


def load_tokenizer(args: Any) -> Any:
    """Load the tokenizer, at the same revision as the base model; raise `ValueError` if there is none."""
    from medusa_decoding.checkpoints import pretrained
    from medusa_decoding.checkpoints.reading import fetch_folder, stated_base_model

    base = base_model(args)
    stated, revision = stated_base_model(fetch_folder(heads_of(args), None))
    revision = revision if base == stated else None
    return pretrained.load_tokenizer(base, revision, argument="base model (--base-model names another)")


def load_model(args: Any, **placed: Any) -> MedusaModel:
    """Load the heads and their base model, with the tree and the backend that the arguments name.

    `placed` are placement arguments of transformers' `from_pretrained`; default: the requested device.
    """
    from medusa_decoding.model import MedusaModel

    placed = placed or {"device_map": None if args.device == "cpu" else args.device}
    return MedusaModel.from_pretrained(
        heads_of(args), base_model(args), dtype=args.dtype or "auto", tree=args.tree, backend=args.backend,
        **{name: getattr(args, name, None) for name in ("cache_dtype", "activation_dtype")}, **placed,
    )  # fmt: skip


def heads_of(args: Any) -> str:
    """Return the heads that the arguments name, by default the embedded demo's."""
    return args.model or str(CHECKPOINT / "heads")


def base_model(args: Any) -> str:
    """Return the base model of the heads that the arguments name; raise `ValueError` if none is known."""
    from medusa_decoding.checkpoints.reading import fetch_folder, stated_base_model

    base = args.base_model or stated_base_model(fetch_folder(heads_of(args), None))[0]
    if base is None:
        raise ValueError(f"--base-model is needed (a folder or hub id), because {heads_of(args)} names none")
    return str(base)
