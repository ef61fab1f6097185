"""Which position scheme? One small language model, its positions told in every way.

    for arm in none learned sinusoidal rotary alibi t5; do
        python -m transformer train    --config=experiments/positions.py:$arm --workdir=runs/positions/$arm
        python -m transformer evaluate --workdir=runs/positions/$arm
    done

One arm: --config=experiments/positions.py:rotary

Arms differ in `model.position` alone (learned and t5 add parameters: 32,768 and 128). Attention runs on the plain path for all of
them, so that no arm profits from a kernel that another cannot use. At the training length Press et al. (2022) found, on
WikiText-103, ALiBi and the T5 bias ahead of rotary and sinusoidal by 1 to 4 % of perplexity, and Haviv et al. (2022) no
positions behind learned ones by 2 to 3 %.

Hardware  two CPU cores, about 4 minutes an arm

Seen after 1,000 steps, about 2 M tokens (two cores of an AMD EPYC 9005; test side, rows that do not overlap; one seed):

    arm         loss   perplexity  bits per byte
    alibi       4.402        81.6          2.093
    rotary      4.453        85.9          2.117
    t5          4.659       105.5          2.215
    learned     4.731       113.4          2.250
    none        4.733       113.6          2.250
    sinusoidal  5.040       154.5          2.397

So early in training schemes that favour what is near are ahead by far more than at the end of the papers' runs, and learned positions are not
ahead of none yet. Sinusoids are larger than the embeddings they are added to (std 0.7 against 1 / sqrt(d_model) = 0.09, without
`embedding_scale`), which may be why they are behind.
"""

import ml_collections

from transformer import Sweep, vary


def get_config():
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=4096,
        num_decoder_layers=4,
        d_model=128,
        d_ff=512,
        num_heads=4,
        max_length=256,
        position="rotary",
        norm_placement="pre",
        activation="relu",
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=256, batch_size=8)
    config.optimizer = dict(
        name="adamw",
        learning_rate=2e-3,
        schedule="cosine",
        warmup_steps=200,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(steps=1000, eval_every=250, checkpoint_every=250)
    return config


def sweep():
    return Sweep(
        vary("model.position", "rotary", "alibi", "t5", "learned", "sinusoidal", "none"),
        question="Which position scheme learns the fastest from two million tokens?",
        declared={"parameters": "a learned table has 32,768 numbers, T5's bias 128"},
    )
