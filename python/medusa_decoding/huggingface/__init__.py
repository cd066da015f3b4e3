"""Medusa decoding inside transformers' own `generate`, through `custom_generate`."""
