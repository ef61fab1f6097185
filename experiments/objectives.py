r"""What does a small model learn from the same text with each of five objectives?

    for arm in causal_lm prefix_lm masked_lm span_corruption ul2; do
        python -m transformer train    --config=experiments/objectives.py:$arm \
            --workdir=runs/objectives/$arm
        python -m transformer evaluate --workdir=runs/objectives/$arm
    done

Each objective trains the kind of model that its paper trains. A decoder continues a text from left
to right, or continues a prefix that it attends to in both directions (Raffel et al. 2020, sec.
3.2). An encoder predicts masked tokens (Devlin et al. 2019). An encoder-decoder writes the spans
that were removed (T5; UL2, Tay et al. 2023). The losses are over different tokens and cannot be
compared, so train the arms with `train`, not with `sweep`.

Another experiment can start from the trained parameters:

    config.data = dict(tokenizer=dict(path="runs/objectives/masked_lm/tokenizer.model"), ...)
    config.train = dict(init_from="runs/objectives/masked_lm", init_new=("classifier/*",), ...)

Hardware  two CPU cores, about 4 minutes per arm
Measured  after 1,000 steps, test split (two cores of an AMD EPYC 9005): causal_lm 2.116 bits per
          byte; masked_lm loss 4.317, with 31.7 % of the target tokens predicted correctly;
          span_corruption loss 4.603 and 29.3 %. prefix_lm and ul2 were run for 30 steps only.
"""

import ml_collections

from transformer import Sweep, arms


def get_config():
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="encoder",
        num_encoder_layers=4,
        vocab_size=4096,
        d_model=128,
        d_ff=512,
        num_heads=4,
        max_length=256,
        position="rotary",
        norm_placement="pre",
        activation="gelu",
    )
    config.data = dict(corpus="wikitext2", objective="masked_lm", length=256, batch_size=8)
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
    decoder = {
        "model.family": "decoder",
        "model.num_encoder_layers": 0,
        "model.num_decoder_layers": 4,
    }
    encoder_decoder = {
        "model.family": "encoder_decoder",
        "model.num_encoder_layers": 2,
        "model.num_decoder_layers": 2,
    }
    return Sweep(
        arms(
            masked_lm={},
            causal_lm=decoder | {"data.objective": "causal_lm"},
            prefix_lm=decoder | {"data.objective": "prefix_lm", "model.prefix_lm": True},
            span_corruption=encoder_decoder | {"data.objective": "span_corruption"},
            ul2=encoder_decoder | {"data.objective": "ul2"},
        )
    )
