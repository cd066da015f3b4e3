"""Train variants of the embedded demo model alike, measure them, and print one table.

    python -m benchmarks.variants table-2 --out runs/table2 [--controls]
    python -m benchmarks.variants heads --out runs/heads --seeds 0 1 2 [--temperature 0.8]

`table-2` is the paper's Table 2 in miniature: what direct fine-tuning, Medusa-1 and Medusa-2 do to a small model and
its speed. Every variant learns the same requests with their reference answers, such as the model itself was trained
on, as Vicuna's heads learn from ShareGPT. (Text written by the model would reward whatever makes it more certain, and
its perplexity on other text would rise with any recipe.) Perplexity of the reference answers to held-out requests takes
the place of MT-Bench.

`heads` compares kinds of heads and losses. A model, the demo's or one of your own, answers prompts, greedily or at a
temperature (`medusa distill`). Each kind learns these answers from the same start (`medusa train`), with every seed.
Trees are chosen on other prompts and judged on held-out ones. A killed run continues where it was.

`table-2` decodes greedily, with the tree of 16 nodes that each variant's own accuracies ask for, and every text must be
the one that the same model writes plainly. All in float32 on the CPU; trained folders are kept.
"""
