"""Medusa decoding for Llama-family models of Hugging Face Transformers.

Extra heads guess several next tokens, one forward pass verifies a tree of guesses, the longest path the model agrees
with is kept: the text the model alone would write, in fewer steps.
"""

from medusa_decoding.cache import TreeCache
from medusa_decoding.generate import medusa_generate
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.session import Session
from medusa_decoding.tree import Tree

__all__ = ["MedusaHeads", "MedusaModel", "MedusaOutput", "Session", "Tree", "TreeCache", "medusa_generate"]
