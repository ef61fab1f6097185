"""The base Transformer of Vaswani et al. (2017), with all hyperparameters: WMT 2014 English-German.

What BLEU does the paper's model reach with the paper's recipe?

    python -m transformer train    --config=experiments/vaswani_base.py --workdir=runs/vaswani_base
    python -m transformer evaluate --workdir=runs/vaswani_base

Data      WMT 2014 English-German (4.5 M pairs; newstest2013 for validation, newstest2014 for
          testing) at the paths of `data.train`, `data.valid` and `data.test`: tab-separated files,
          local or gs://; for pairs of files, set data.format=paired
Hardware  an accelerator: 63 M parameters (the paper: 65 M), 25,000 source and 25,000 target tokens
          per step; the paper took 0.4 s per step on 8 P100
Expected  the paper reports 27.3 BLEU (tokenized, compound-split) after 100,000 steps. On
          detokenized text, sacreBLEU is about 0.7 lower for the same output (for fairseq's big
          model, 28.6 instead of 29.29)
Measured  not run yet, for lack of an accelerator. The tests build and shard the model.

Choices that the paper leaves open: label smoothing is spread over the whole vocabulary (Szegedy et
al. 2016); dropout is also applied to attention weights, as in the authors' tensor2tensor; sentences
are packed into sequences of 256 tokens instead of grouped by length.
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
        # Section 3.4: one matrix serves both embeddings and the pre-softmax projection.
        share_embeddings=True,
        tie_embeddings=True,
        embedding_scale=True,  # multiplies embeddings by sqrt(d_model)
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
        # 24,576 source and 24,576 target tokens; section 5.1: "approximately 25,000"
        batch_size=96,
        tokenizer=dict(kind="bpe"),
    )
    config.optimizer = dict(
        name="adamw",
        b1=0.9,
        b2=0.98,
        epsilon=1e-9,
        schedule="inverse_sqrt",  # equation 3
        warmup_steps=4000,
        learning_rate=(512 * 4000) ** -0.5,  # the peak of equation 3
    )
    config.train = dict(
        steps=100_000,
        label_smoothing=0.1,
        # Section 6.1: the last 5 checkpoints, one every 10 minutes, that is every 1,500 steps.
        average_checkpoints=5,
        checkpoint_every=1500,
        keep_checkpoints=5,
        eval_every=5000,
        log_every=100,
    )
    config.decoding = dict(beam_size=4, length_penalty=0.6, max_extra=50)  # section 6.1
    config.mesh = dict(data=-1)
    config.platform = "accelerator"
    return config
