"""Names that parts of `medusa_decoding.tuning` had in 0.3."""
