"""The name that `medusa_decoding.tuning.expected` had in 0.3."""

from medusa_decoding import moved

__getattr__ = moved(__name__, "medusa_decoding.tuning.expected")
