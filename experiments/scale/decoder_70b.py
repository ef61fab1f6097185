"""Does a decoder of 70 B parameters, shaped like Llama 3, fit on a v5p-512 with fsdp alone?

    python -m transformer plan --config=experiments/scale/decoder_70b.py --topology=v5p-512

Data      allenai/c4's files in your bucket; replace BUCKET with its name. Prepare them once with
          `data prepare --config=experiments/scale/decoder_70b.py --output=gs://BUCKET/prepared/c4`,
          and train with the options that it prints
Hardware  a TPU slice. This was planned, not run: compiled by libtpu 0.0.42.1 (jax 0.10.2) on two
          cores of an AMD EPYC 9004
Compare   MaxText measured 65.4 % MFU (692 tokens/s per chip) for Llama 2 70B at a length of 4,096
          (v5p, 512)

    machine     v5p:4x8x8: 256 x TPU v5p, 95.0 GiB each
    mesh        fsdp 256
    model       70,553,706,496 parameters, 449.2 GFLOPs per token in training
    batch       2,097,152 tokens; 100,000 steps are 209.7B tokens
    decoding    256 sequences, prompts of 4,096 tokens, a cache of 8,192
    attention   flash: train, evaluate, prefill
    attention   reference: decode

    memory per device            train      evaluate         prefill          decode
      parameters               1.0 GiB       1.0 GiB         1.0 GiB         1.0 GiB
      optimizer                2.1 GiB
      cache and inputs       160.0 KiB     160.0 KiB         5.0 MiB         2.5 GiB
      padding                  1.5 KiB           0 B             0 B           508 B
      activations             11.3 GiB
      temporaries             23.4 GiB       7.8 GiB        11.3 GiB         5.9 GiB
      results, code           60.1 MiB      20.5 MiB         2.5 GiB       848.3 MiB
      peak of 95.0 GiB  37.8 GiB (40%)  8.8 GiB (9%)  14.8 GiB (16%)  10.3 GiB (11%)

    minimum time                       train      evaluate       prefill        decode
      compute at 459.0 TFLOP/s       10.14 s        2.69 s        1.37 s         47 us
      HBM at 2.8 TB/s                 1.22 s      341.7 ms      280.2 ms      204.3 ms
      network                         1.05 s      264.2 ms      269.1 ms      261.4 ms
      step                           10.14 s        2.69 s        1.37 s      261.4 ms
      bound by                       compute       compute       compute       network
      MFU at most 79.1%; 808 tokens/s per chip, 17.9B tokens per day in total
      run: at least 11.7 days, 72,118 chip-hours, without evaluation and checkpoints
      decoding: 979 tokens/s for 256 sequences

    sent per device in one training step         count  within the slice
      all-reduce                                   564         265.7 GiB
      all-gather                                   962         259.9 GiB
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture("llama3_70b", dtype="bfloat16", remat="full")
    config.data = dict(
        train="gs://BUCKET/c4/en/c4-train.*.json.gz",
        valid="gs://BUCKET/c4/en/c4-validation.0000[0-3]*.json.gz",
        test="gs://BUCKET/c4/en/c4-validation.0000[4-7]*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="causal_lm",
        length=8192,
        batch_size=256,
    )
    config.optimizer = dict(
        learning_rate=1.5e-4,
        warmup_steps=2000,
        b2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(steps=100_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1)
    config.decoding = dict(batch_size=256, max_extra=2048)  # at least one sequence per device
    config.platform = "tpu"
    return config
