"""Training Medusa heads: data, losses, schedules and the configuration (Medusa paper, sections 2.2, 2.3.2 and B).

    records -> examples -> rows -> hidden states -> loss
    data.py    chat.py     packing.py               losses.py (targets.py: of what; chunked.py: without all logits)

`schedules` says how rates and weights move, `config` holds every setting with its source (`strict` reads it). None of
them knows a training loop.
"""
