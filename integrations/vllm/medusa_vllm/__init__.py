"""Medusa heads in vLLM: a proposer for its method `custom_class`."""

from medusa_vllm.proposer import MedusaProposer
from medusa_vllm.runner import register

__all__ = ["MedusaProposer", "register"]
