"""Values that users choose among, in Python and on the command line.

This module imports nothing, so that the command line can name them in its help before torch is imported.
"""

BACKENDS = ("auto", "eager", "compiled", "graph")
"""How steps run, see `MedusaModel`."""
ACCEPTANCES = ("lossless", "typical")
"""How draft tokens are accepted, see `MedusaModel.generate`."""
DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes of weights."""
CACHE_DTYPES = ACTIVATION_DTYPES = ("int8",)
"""Names of dtypes that a KV cache and inputs of quantised layers may have instead of the model's, see `MedusaModel`."""
VLLM_VERSIONS = "0.28 to 0.32"
"""Versions of vLLM that read Medusa heads themselves."""
VLLM_LATER = "0.33 and later need the plugin medusa-vllm, which reads heads as they are"
TARGETS = {
    "native": "what this package writes itself; holds every kind of heads; not for vLLM",
    "hub": "for a repository on the hub: native, with a model card and code for transformers' generate",
    "embedded": "the base model with the heads in it, one folder; holds every kind of heads; not for vLLM",
    "original-v1": "the original project's: one projection per head (a shared lm_head is copied); not for vLLM",
    "original-v2": "the original project's: residual blocks alone, lm_head shared; not for vLLM",
    "vllm": f"for vLLM {VLLM_VERSIONS}, whose Medusa reads it; {VLLM_LATER}",
}
"""Formats of `checkpoints.export`, with a description."""
SLOTS = 8
"""How many answers are written at the same time by default, see `serving.engine.Engine`."""
TURNS, PROMPT_TOKENS = 2, 128
"""Turns of a conversation that an evaluation uses, and tokens of a plain text that are its prompt."""
