"""How large a learning rate, and how short a warm-up, does each norm placement tolerate?

    python -m transformer sweep --config=experiments/stability.py:rate --workdir=runs/stability_rate
    python -m transformer compare runs/stability_rate

The argument `rate` scans the learning rate. The argument `warmup` scans the warm-up steps; use
--config=experiments/stability.py:warmup.

The design follows Wortsman et al. (2023), "Small-scale proxies for large-scale Transformer training
instabilities": instabilities of large models at small learning rates also occur in small models, at
large learning rates. The report includes the paper's sensitivity: the mean loss over all rates
minus the loss at the best rate.

Hardware  two CPU cores, on a busy machine: 72 runs in 26 minutes (rate), 45 runs in 14 minutes
          (warmup)

Measured (two cores of an AMD EPYC 9005; mean test/loss over three seeds; 95 % intervals of +- 0.05
to 0.15, +- 0.5 at a rate of 1):

    learning rate     0.0003   0.001   0.003    0.01    0.03     0.1     0.3       1    sensitivity
    pre                 5.88    5.56    5.18    4.90    5.01    5.41    5.75    6.65           0.65
    post                5.83    5.43    5.11    5.85    5.85    5.86    5.86    6.52           0.68
    peri                5.88    5.55    5.17    4.84    4.90    4.91    4.94    6.31           0.47

    warm-up, steps         1      10      30     100     200    sensitivity
    pre                 4.96    4.96    4.92    4.84    4.81           0.09
    post                5.85    5.85    5.85    5.57    4.80           0.79
    peri                4.87    4.88    4.85    4.81    4.79           0.05

No run diverges. Where post-norm is unstable, its loss stays at 5.85, that of a model that has
learned only the token frequencies. With 50 steps of warm-up, this happens at rates of 0.01 and
more; 0.01 is the best rate for the other placements. With a warm-up of 200 of the 300 steps,
post-norm is as good as the others; with 100 steps, only one of three seeds trains. The rates within
5 % of the best loss span a factor of 3 for pre-norm, and of 30 for peri-norm.
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
            "rate": "How large a learning rate does each norm placement tolerate?",
            "warmup": "How short a warm-up does each norm placement tolerate?",
        }[what],
        seeds=3,
    )
