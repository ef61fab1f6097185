"""How long does BERT large train on a v5e-16, with the recipe of Devlin et al. (2019)?

    python -m transformer plan --config=experiments/scale/bert_large.py --topology=v5e-16

Data      your own text in your bucket, one JSON document per line; replace BUCKET with its name
Hardware  a TPU slice. This was planned, not run: compiled by libtpu 0.0.42.1 (jax 0.10.2) on two
          cores of an AMD EPYC 9004
Compare   no published measurement was found

    machine     v5e:4x4: 16 x TPU v5e, 16.0 GiB each
    mesh        fsdp 16
    model       336,226,108 parameters, 2.2 GFLOPs per token in training
    batch       131,072 tokens; 1,000,000 steps are 131.1B tokens
    attention   flash: train, evaluate

    memory per device           train      evaluate
      parameters             81.3 MiB      81.3 MiB
      optimizer             162.5 MiB
      cache and inputs      192.1 KiB     192.1 KiB
      padding                72.9 MiB      24.3 MiB
      activations             3.8 GiB
      temporaries             4.2 GiB     956.8 MiB
      results, code          42.3 MiB       8.4 MiB
      peak of 16.0 GiB  8.3 GiB (52%)  1.0 GiB (7%)

    minimum time                       train      evaluate
      compute at 197.0 TFLOP/s       92.8 ms       29.9 ms
      HBM at 819.0 GB/s              71.3 ms        9.8 ms
      network                        23.8 ms        7.0 ms
      step                           92.8 ms       29.9 ms
      bound by                       compute       compute
      MFU at most 96.6%; 88.3k tokens/s per chip, 122.0B tokens per day in total
      run: at least 25:47 h, 413 chip-hours, without evaluation and checkpoints

    sent per device in one training step         count  within the slice
      all-gather                                   342           1.1 GiB
      collective-permute                         2,482         740.8 MiB
      all-reduce                                    52         121.0 MiB
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture("bert_large", dtype="bfloat16", remat="dots")
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
