"""What does T5's bias cost in an encoder-decoder of 3 B parameters on a v4-64?

    python -m transformer plan --config=experiments/scale/t5_3b.py --topology=v4-64

Data      allenai/c4's files in your bucket; replace BUCKET with its name. Each host
          tokenizes them before its first step
Hardware  a TPU slice. This was planned, not run: compiled by libtpu 0.0.42.1 (jax 0.10.2) on two
          cores of an AMD EPYC 9005
Compare   T5X published no utilization for this size on TPUs

No fused kernel supports T5's bias. Attention logits therefore pass through HBM, which determines
the minimum time of a step.

    machine     v4:2x4x4: 32 x TPU v4, 32.0 GiB each
    mesh        fsdp 32
    model       2,851,598,336 parameters, 9.1 GFLOPs per token in training
    batch       1,310,720 tokens; 500,000 steps are 655.4B tokens
    attention   reference (splash: the position scheme changes logits): train, evaluate
    attention   splash: train, evaluate
    compiling   57 s for train, 17 s for evaluate

    memory per device            train       evaluate
      parameters             340.4 MiB      340.4 MiB
      optimizer               47.5 MiB
      cache and inputs       544.0 KiB      544.0 KiB
      padding                      0 B            0 B
      activations              2.7 GiB
      temporaries              9.1 GiB        2.7 GiB
      results, code           75.3 MiB       14.0 MiB
      peak of 32.0 GiB  12.3 GiB (38%)  3.0 GiB (10%)

    minimum time                       train      evaluate
      compute at 275.0 TFLOP/s        1.70 s      453.3 ms
      HBM at 1.2 TB/s                 3.15 s      266.9 ms
      network                       185.5 ms       40.9 ms
      step                            3.15 s      453.3 ms
      bound by                           HBM       compute
      MFU at most 43.1%; 13.0k tokens/s per chip, 36.0B tokens per day in total
      run: at least 18.2 days, 13,988 chip-hours, without evaluation and checkpoints

    sent per device in one training step         count  within the slice
      all-gather                                   785          10.3 GiB
      collective-permute                        12,705           5.5 GiB
      all-reduce                                    53           1.8 GiB
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture(
        "t5_3b",
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        dtype="bfloat16",
        remat="full",
    )
    config.data = dict(
        train="gs://BUCKET/c4/en/c4-train.*.json.gz",
        valid="gs://BUCKET/c4/en/c4-validation.0000[0-3]*.json.gz",
        test="gs://BUCKET/c4/en/c4-validation.0000[4-7]*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="span_corruption",
        length=512,
        target_length=128,
        batch_size=2048,
    )
    config.optimizer = dict(
        name="adafactor", learning_rate=1e-2, schedule="inverse_sqrt", warmup_steps=10_000
    )
    config.train = dict(steps=500_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1)
    config.platform = "tpu"
    return config
