r"""How fast can a decoder of 8 B parameters, shaped like Llama 3, train on a v5p-128 or v6e-64?

    python -m transformer plan --config=experiments/scale/decoder_8b.py --topology=v5p-128
    python -m transformer plan --config=experiments/scale/decoder_8b.py --topology=v6e-64 \
        --only=train

Data      allenai/c4's files in your bucket; replace BUCKET with its name. Prepare them once with
          `data prepare --config=experiments/scale/decoder_8b.py --output=gs://BUCKET/prepared/c4`,
          and train with the options that it prints
Hardware  a TPU slice. This was planned, not run: compiled by libtpu 0.0.42.1 (jax 0.10.2) on two
          cores of an AMD EPYC 9004
Compare   MaxText measured 45.5 % MFU (7,207 tokens/s per chip) at this size and length (v6e, 256)

    machine     v5p:4x4x4: 64 x TPU v5p, 95.0 GiB each
    mesh        fsdp 64
    model       8,030,261,248 parameters, 51.5 GFLOPs per token in training
    batch       1,048,576 tokens; 100,000 steps are 104.9B tokens
    decoding    64 sequences, prompts of 4,096 tokens, a cache of 8,192
    attention   flash: train, evaluate, prefill
    attention   reference: decode

    memory per device            train      evaluate       prefill        decode
      parameters             479.6 MiB     479.6 MiB     479.6 MiB     479.6 MiB
      optimizer              959.3 MiB
      cache and inputs       320.0 KiB     320.0 KiB       1.2 MiB       1.0 GiB
      padding                  1.5 KiB           0 B           0 B         764 B
      activations              4.6 GiB
      temporaries             11.9 GiB       3.8 GiB       4.0 GiB       4.9 GiB
      results, code           62.1 MiB      20.9 MiB       1.0 GiB     319.6 MiB
      peak of 95.0 GiB  18.0 GiB (19%)  4.3 GiB (5%)  5.5 GiB (6%)  6.7 GiB (7%)

    minimum time                       train      evaluate       prefill        decode
      compute at 459.0 TFLOP/s        2.34 s      618.7 ms      154.9 ms          9 us
      HBM at 2.8 TB/s               630.0 ms       83.8 ms       40.8 ms       23.5 ms
      network                       119.0 ms       31.2 ms       31.2 ms       31.2 ms
      step                            2.34 s      618.7 ms      154.9 ms       31.2 ms
      bound by                       compute       compute       compute       network
      MFU at most 78.4%; 7.0k tokens/s per chip, 38.7B tokens per day in total
      run: at least 2.7 days, 4,164 chip-hours, without evaluation and checkpoints
      decoding: 2.1k tokens/s for 64 sequences

    sent per device in one training step         count  within the slice
      all-reduce                                   164          31.4 GiB
      all-gather                                   258          28.5 GiB

    machine     v6e:8x8: 64 x TPU v6e, 32.0 GiB each
    mesh        fsdp 64
    model       8,030,261,248 parameters, 51.5 GFLOPs per token in training
    batch       1,048,576 tokens; 100,000 steps are 104.9B tokens
    attention   flash: train

    memory per device            train
      parameters             479.6 MiB
      optimizer              959.3 MiB
      cache and inputs       320.0 KiB
      padding                  1.5 KiB
      activations              4.7 GiB
      temporaries             11.7 GiB
      results, code           37.3 MiB
      peak of 32.0 GiB  17.8 GiB (56%)

    minimum time                       train
      compute at 918.0 TFLOP/s        1.18 s
      HBM at 1.6 TB/s                 1.01 s
      network                       351.3 ms
      step                            1.18 s
      bound by                       compute
      MFU at most 77.7%; 13.9k tokens/s per chip, 76.6B tokens per day in total
      run: at least 32:49 h, 2,101 chip-hours, without evaluation and checkpoints

    sent per device in one training step         count  within the slice
      all-reduce                                   164          31.4 GiB
      all-gather                                   386          27.5 GiB
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture("llama3_8b", dtype="bfloat16", remat="full")
    config.data = dict(
        train="gs://BUCKET/c4/en/c4-train.*.json.gz",
        valid="gs://BUCKET/c4/en/c4-validation.0000[0-3]*.json.gz",
        test="gs://BUCKET/c4/en/c4-validation.0000[4-7]*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="causal_lm",
        length=8192,
        batch_size=128,
    )
    config.optimizer = dict(
        learning_rate=3e-4,
        warmup_steps=2000,
        b2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(steps=100_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1)
    config.platform = "tpu"
    return config
