"""How large a learning rate does each norm placement stand, and how much does the rate matter? (:rate) How short a warm-up? (:warmup)

    python -m transformer sweep --config=experiments/stability.py:rate --workdir=runs/stability_rate
    python -m transformer compare runs/stability_rate

and the same with --config=experiments/stability.py:warmup.

Wortsman et al. (2023), "Small-scale proxies for large-scale Transformer training instabilities": what becomes unstable in large models at a small rate
does so in small ones at a large one. Their sensitivity, the mean loss over all rates less the loss at the best, is in the report.

Hardware  two CPU cores, 72 runs in 26 minutes and 45 in 14 while other work ran beside them

Seen (two cores of an AMD EPYC 9005; three seeds, mean test/loss; 95 % intervals of +- 0.05 to 0.15, +- 0.5 at a rate of 1):

    learning rate     0.0003   0.001   0.003    0.01    0.03     0.1     0.3       1    sensitivity
    pre                 5.88    5.56    5.18    4.90    5.01    5.41    5.75    6.65           0.65
    post                5.83    5.43    5.11    5.85    5.85    5.86    5.86    6.52           0.68
    peri                5.88    5.55    5.17    4.84    4.90    4.91    4.94    6.31           0.47

    warm-up, steps         1      10      30     100     200    sensitivity
    pre                 4.96    4.96    4.92    4.84    4.81           0.09
    post                5.85    5.85    5.85    5.57    4.80           0.79
    peri                4.87    4.88    4.85    4.81    4.79           0.05

No run diverges: post-norm, where it becomes unstable, ends at 5.85, where only the frequencies of tokens are known, and stays. It does so from a rate on that is
best for the others (0.01, with 50 steps of warm-up), unless the warm-up is 200 steps of 300 (of 100 steps one seed of three comes through); then
it is as good as they are. Within 5 % of the best loss are, for pre-norm, rates over a factor of 3, for peri-norm over one of 30.
"""

import ml_collections

from transformer import Sweep, product, scan, vary

ARGUMENTS = ("rate", "warmup")


def get_config(what="rate"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=4,
        d_model=64,
        d_ff=256,
        num_heads=4,
        max_length=64,
        position="rotary",
        norm_placement="pre",
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=16)
    config.optimizer = dict(name="adamw", learning_rate=1e-2, schedule="cosine", warmup_steps=50)
    config.train = dict(steps=300, log_every=20, eval_every=100, eval_batches=10, tensorboard=False)
    return config


def sweep(what="rate"):
    numbers = {
        "rate": scan("optimizer.learning_rate", 3e-4, 1.0, 8),
        "warmup": vary("optimizer.warmup_steps", 1, 10, 30, 100, 200),
    }
    return Sweep(
        product(vary("model.norm_placement", "pre", "post", "peri"), numbers[what]),
        question={
            "rate": "How large a learning rate does each norm placement stand?",
            "warmup": "How short a warm-up does each norm placement stand?",
        }[what],
        declared={"parameters": "placements have other numbers of norms"},
        seeds=3,
    )
