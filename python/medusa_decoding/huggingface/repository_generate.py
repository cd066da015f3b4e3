"""Decode with the Medusa heads of this repository, inside transformers' own `generate`.

    model.generate(**inputs, custom_generate="OWNER/NAME or a folder", trust_remote_code=True)

`model` is the base model of the heads. With greedy decoding in float32 the text is that of `generate` alone. All
arguments of `generate` and of medusa-kernels' `medusa_generate` (such as `tree=`) are passed on.
"""

import inspect
import os
from typing import Any

from huggingface_hub import snapshot_download

try:  # transformers looks for imports outside of `try`, and would advise to install a package of the module's name
    from medusa_decoding import medusa_generate
except ImportError as error:
    raise ImportError("this repository's generate needs medusa-kernels: pip install medusa-kernels") from error

# Arguments of `generate` that transformers has fetched this file with: the heads come from the same place.
_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_FILES = ["config.json", "measured.json", "medusa_*"]


def generate(model: Any, heads: Any = None, **arguments: Any) -> Any:
    """Return what `model.generate` returns; `heads` may name others than this repository's."""
    hub = {name: arguments.pop(name) for name in _HUB if name in arguments}
    heads = _repository() if heads is None else heads
    if isinstance(heads, str) and not os.path.isdir(heads):
        heads = snapshot_download(heads, allow_patterns=_FILES, ignore_patterns="*/*", **hub)
    # The class's function, because a model may have this one as an attribute of the same name.
    return type(model).generate(model, custom_generate=medusa_generate, heads=heads, **arguments)


def _repository() -> str:
    """Return the folder or hub id that transformers' `generate` was called with.

    transformers runs a copy of this file in a cache of modules and does not pass the name on.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if frame.f_globals.get("__name__") == "transformers.generation.utils" and isinstance(name, str):
            return name
        frame = frame.f_back
    raise ValueError(
        "heads: expected a folder or hub id of heads, because this function was not called by "
        'model.generate(custom_generate="OWNER/NAME"), got None'
    )
