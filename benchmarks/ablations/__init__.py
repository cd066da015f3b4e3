"""The paper's ablations again, one command each, on any model: `python -m benchmarks.ablations figure-4`.

    draft             makes the draft model that figure-7 needs, for the embedded demo model
    figure-3b         speedup by category of questions
    figure-4          random dense trees against optimised sparse ones, by size
    figure-5          thresholds of typical acceptance against greedy decoding and sampling
    figure-7          speculative decoding with a draft model (with table 1's row)
    table-3           what each technique adds
    dynamic           trees chosen anew each step against the optimised one, of the same size

`setup` reads arguments, model and prompts, `measuring` runs ways of decoding in turn, `writing` keeps records and
pictures; one module per ablation measures and draws. docs/ablations.md has the findings.
"""
