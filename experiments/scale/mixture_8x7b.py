"""How fast can Mixtral 8x7B, a mixture of eight experts (Jiang et al. 2024), train on a v5p-256?

    python -m transformer plan --config=experiments/scale/mixture_8x7b.py --topology=v5p-256

Data      allenai/c4's files in your bucket; replace BUCKET with its name. Prepare them once with
          `data prepare --config=experiments/scale/mixture_8x7b.py --output=gs://BUCKET/prepared/c4`,
          and train with the options that it prints
Hardware  a TPU slice. This was planned, not run: compiled by libtpu 0.0.42.1 (jax 0.10.2) on two
          cores of an AMD EPYC 9004
Compare   MaxText measured 52.6 % MFU (2,909 tokens/s per chip) for Mixtral 8x7B at this length
          (v5p, 256)

The mixture is dropless: buffers have room for the case that all tokens of eight devices are routed
to the experts of one device. With mesh.expert=1, the minimum time of a step is the same (3.83 s,
compute), the peak is 24.3 GiB, and HBM takes 1.24 s, but a decoding step takes 177 ms. With
capacity_factor=1.25, the minimum time is 4.63 s and the MFU at most 61.5 %.

    machine     v5p:4x4x8: 128 x TPU v5p, 95.0 GiB each
    mesh        fsdp 16 x expert 8
    model       46,702,792,704 parameters, 79.7 GFLOPs per token in training
    batch       2,097,152 tokens; 100,000 steps are 209.7B tokens
    decoding    128 sequences, prompts of 2,048 tokens, a cache of 4,096
    attention   flash: train, evaluate, prefill
    attention   reference: decode

    memory per device            train        evaluate       prefill        decode
      parameters               1.7 GiB         1.7 GiB       1.7 GiB       1.7 GiB
      optimizer                3.4 GiB
      cache and inputs       320.0 KiB       320.0 KiB       1.2 MiB     512.0 MiB
      padding                  1.5 KiB             0 B           0 B         508 B
      activations              5.9 GiB
      temporaries             39.0 GiB        19.7 GiB       4.0 GiB       1.2 GiB
      results, code           74.7 MiB        24.4 MiB     526.3 MiB      59.1 MiB
      peak of 95.0 GiB  50.0 GiB (53%)  21.4 GiB (23%)  6.2 GiB (7%)  3.4 GiB (4%)

    minimum time                       train      evaluate       prefill        decode
      compute at 459.0 TFLOP/s        3.83 s      954.7 ms      120.6 ms         54 us
      HBM at 2.8 TB/s                 2.77 s      641.0 ms       87.9 ms       12.8 ms
      network                       840.5 ms      334.3 ms       41.8 ms       37.0 ms
      step                            3.83 s      954.7 ms      120.6 ms       37.0 ms
      bound by                       compute       compute       compute       network
      MFU at most 74.3%; 4.3k tokens/s per chip, 47.3B tokens per day in total
      run: at least 4.4 days, 13,617 chip-hours, without evaluation and checkpoints
      decoding: 3.5k tokens/s for 128 sequences

    sent per device in one training step         count  within the slice
      all-gather                                   674         108.9 GiB
      reduce-scatter                               224          61.6 GiB
      all-reduce                                   262          14.9 GiB
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture(
        "mistral_7b",
        window=0,
        max_length=4096,
        position=dict(name="rotary", theta=1e6),
        feed_forward=dict(name="experts", num_experts=8, top_k=2),
        dtype="bfloat16",
        remat="full",
    )
    config.data = dict(
        train="gs://BUCKET/c4/en/c4-train.*.json.gz",
        valid="gs://BUCKET/c4/en/c4-validation.0000[0-3]*.json.gz",
        test="gs://BUCKET/c4/en/c4-validation.0000[4-7]*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="causal_lm",
        length=4096,
        batch_size=512,
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
    config.mesh = dict(data=1, fsdp=-1, expert=8)
    config.decoding = dict(batch_size=128, max_extra=2048)  # one sequence per device
    config.platform = "tpu"
    return config
