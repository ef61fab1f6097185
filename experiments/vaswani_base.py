"""The base Transformer of Vaswani et al. (2017) on WMT 2014 English-German, with all of its hyperparameters.

What does the paper's model reach with the paper's recipe?

    python -m transformer train    --config=experiments/vaswani_base.py --workdir=runs/vaswani_base
    python -m transformer evaluate --workdir=runs/vaswani_base

Text      put WMT 2014 English-German where `data.train` and the others point (4.5 M pairs; newstest2013 to validate, newstest2014
          to test): tab-separated files, local or gs://, or set data.format=paired
Hardware  an accelerator: 65 M parameters, 25,000 source and 25,000 target tokens a step; the paper took 0.4 s a step on 8 P100
Expected  the paper reports 27.3 BLEU (tokenised, compound-split) after 100,000 steps. On detokenised text sacreBLEU is about
          0.7 lower for the same output (fairseq's big model: 29.29 and 28.6)
Seen      not run yet: no accelerator was at hand. It builds and shards in the tests.

Where the paper leaves a choice: label smoothing spreads over the whole vocabulary (Szegedy et al. 2016); dropout also on
attention weights, as in the authors' tensor2tensor; sentences are packed into rows of 256 tokens instead of grouped by length.
"""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="encoder_decoder",
        vocab_size=37000,  # joint BPE, section 5.1
        num_encoder_layers=6,  # N
        num_decoder_layers=6,
        d_model=512,
        d_ff=2048,
        num_heads=8,  # h; d_k = d_v = 64
        max_length=1024,
        position="sinusoidal",
        norm_placement="post",
        norm="layernorm",
        activation="relu",
        use_bias=True,
        share_embeddings=True,  # one matrix: both embeddings and the pre-softmax projection, section 3.4
        tie_embeddings=True,
        embedding_scale=True,  # times sqrt(d_model)
        dropout=0.1,  # P_drop
        attention_dropout=0.1,
        dtype="bfloat16",
    )
    config.data = dict(
        format="tsv",
        train="data/wmt14_en_de/train.tsv",
        valid="data/wmt14_en_de/newstest2013.tsv",
        test="data/wmt14_en_de/newstest2014.tsv",
        objective="seq2seq",
        length=256,
        batch_size=96,  # 24,576 tokens on each side: "approximately 25,000", section 5.1
        tokenizer=dict(kind="bpe"),
    )
    config.optimizer = dict(
        name="adamw",
        b1=0.9,
        b2=0.98,
        epsilon=1e-9,
        schedule="inverse_sqrt",  # equation 3
        warmup_steps=4000,
        learning_rate=(512 * 4000) ** -0.5,  # where equation 3 peaks
    )
    config.train = dict(
        steps=100_000,
        label_smoothing=0.1,
        average_checkpoints=5,  # section 6.1: the last 5, written every 10 minutes, which were 1,500 steps
        checkpoint_every=1500,
        keep_checkpoints=5,
        eval_every=5000,
        log_every=100,
    )
    config.decoding = dict(beam_size=4, length_penalty=0.6, max_extra=50)  # section 6.1
    config.mesh = dict(data=-1)
    config.platform = "accelerator"
    return config
