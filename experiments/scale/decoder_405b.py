"""Does a decoder of 405 B parameters, shaped like Llama 3.1, fit on a v5p-2048?

    python -m transformer plan --config=experiments/scale/decoder_405b.py --topology=v5p-2048

Data      allenai/c4's files in your bucket; replace BUCKET with its name. Prepare them once with
          `data prepare --config=experiments/scale/decoder_405b.py --output=gs://BUCKET/prepared/c4`,
          and train with the options that it prints
Hardware  a TPU slice. This was planned, not run: compiled by libtpu 0.0.42.1 (jax 0.10.2) on two
          cores of an AMD EPYC 9004
Compare   MaxText measured 38.6 % MFU for this model (v6e, 256), and 66.2 % for 1,160 B on a
          v5p-12288

    machine     v5p:8x8x16: 1024 x TPU v5p, 95.0 GiB each
    mesh        fsdp 128 x tensor 8
    model       405,853,388,800 parameters, 2.5 TFLOPs per token in training
    batch       4,194,304 tokens; 100,000 steps are 419.4B tokens
    decoding    128 sequences, prompts of 4,096 tokens, a cache of 8,192
    attention   flash: train, evaluate, prefill
    attention   reference: decode

    memory per device            train      evaluate       prefill        decode
      parameters               1.5 GiB       1.5 GiB       1.5 GiB       1.5 GiB
      optimizer                3.0 GiB
      cache and inputs       640.0 KiB     640.0 KiB       2.5 MiB     504.0 MiB
      padding                769.5 KiB     256.0 KiB     256.0 KiB     256.5 KiB
      activations             17.5 GiB
      temporaries             18.9 GiB       3.0 GiB       2.5 GiB       1.6 GiB
      results, code           33.6 MiB       9.9 MiB     514.3 MiB     173.5 MiB
      peak of 95.0 GiB  40.9 GiB (43%)  4.5 GiB (5%)  4.5 GiB (5%)  3.7 GiB (4%)

    minimum time                       train      evaluate       prefill        decode
      compute at 459.0 TFLOP/s       28.28 s        7.53 s      955.6 ms         19 us
      HBM at 2.8 TB/s                 3.98 s        1.52 s      274.1 ms       75.5 ms
      network                        10.37 s        4.71 s      591.1 ms      278.2 ms
      step                           28.28 s        7.53 s      955.6 ms      278.2 ms
      bound by                       compute       compute       compute       network
      MFU at most 79.6%; 145 tokens/s per chip, 12.8B tokens per day in total
      run: at least 32.7 days, 804,475 chip-hours, without evaluation and checkpoints
      decoding: 460 tokens/s for 128 sequences

    sent per device in one training step         count  within the slice
      all-gather                                 2,528         849.9 GiB
      collective-permute                         3,402         425.2 GiB
      reduce-scatter                               634         281.7 GiB
      all-reduce                                   387          69.6 GiB
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture("llama3.1_405b", max_length=8192, dtype="bfloat16", remat="full")
    config.data = dict(
        train="gs://BUCKET/c4/en/c4-train.*.json.gz",
        valid="gs://BUCKET/c4/en/c4-validation.0000[0-3]*.json.gz",
        test="gs://BUCKET/c4/en/c4-validation.0000[4-7]*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="causal_lm",
        length=8192,
        batch_size=512,
    )
    config.optimizer = dict(
        learning_rate=8e-5,
        warmup_steps=2000,
        b2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(steps=100_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1, tensor=8)
    config.decoding = dict(batch_size=128, max_extra=2048)  # at least one sequence per device
    config.platform = "tpu"
    return config
