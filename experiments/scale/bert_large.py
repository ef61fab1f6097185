"""How long would BERT large take on a v5e-16, trained as by Devlin et al. (2019) but for dropout on attention weights?

    python -m transformer plan --config=experiments/scale/bert_large.py --topology=v5e-16

Text      your own, one document a line of JSON, in a bucket of yours: its name for BUCKET
Hardware  a TPU slice; nothing of this was run, it was planned: compiled by libtpu 0.0.42.1 (jax 0.10.2) on two cores of an AMD EPYC 9005
Beside it Nothing to compare with was found. No fused kernel has dropout on attention weights, so there is none.

    machine     v5e:4x4: 16 x TPU v5e, 16.0 GiB each
    mesh        fsdp 16
    model       336,226,108 parameters, 2.2GFLOP a token in training
    batch       131,072 tokens; 1,000,000 steps are 131.1G tokens
    attention   splash: train, evaluate

    a device's memory           train      evaluate
      parameters             81.3 MiB      81.3 MiB
      optimizer             162.5 MiB
      cache and inputs      192.1 KiB     192.1 KiB
      padding                72.9 MiB      24.3 MiB
      activations             3.8 GiB
      temporaries             4.2 GiB     956.7 MiB
      results, code          43.3 MiB       9.0 MiB
      peak of 16.0 GiB  8.3 GiB (52%)  1.0 GiB (7%)
      compiled in                39 s          10 s

    at least                          train      evaluate
      compute at 197.0TFLOP/s       94.9 ms       29.9 ms
      HBM at 819.0GB/s              77.8 ms       10.1 ms
      network                       23.8 ms        7.0 ms
      a step                        94.9 ms       29.9 ms
      bound by                      compute       compute
      MFU at most 94.5%; 86.3k tokens/s a chip, 119.3G a day
      the run at least: 26:21 h, 422 chip-hours, without evaluation and checkpoints

    sent in a training step, by a device         count        within        beyond
      all-gather                                   342       1.1 GiB
      collective-permute                         2,482     740.8 MiB
      all-reduce                                    52     121.0 MiB
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture("bert_large", attention_dropout=0.0, dtype="bfloat16", remat="dots")
    config.data = dict(
        train="gs://BUCKET/wiki_books/*.jsonl",
        format="jsonl",
        fields=("text",),
        objective=dict(name="masked_lm", next_sentence=True),
        length=512,
        batch_size=256,
        packing=False,
        tokenizer=dict(path="gs://BUCKET/bert/tokenizer.json"),
    )
    config.optimizer = dict(
        learning_rate=1e-4,
        schedule="linear",
        warmup_steps=10_000,
        b2=0.999,
        epsilon=1e-6,
        weight_decay=0.01,
    )
    config.train = dict(steps=1_000_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1)
    config.platform = "tpu"
    return config
