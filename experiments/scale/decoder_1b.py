"""How long does a decoder of 1.4 B parameters train on a v5e-16?

    python -m transformer plan --config=experiments/scale/decoder_1b.py --topology=v5e-16

Data      allenai/c4's files in your bucket; replace BUCKET with its name. Prepare them once with
          `data prepare --config=experiments/scale/decoder_1b.py --output=gs://BUCKET/prepared/c4`,
          and train with the options that it prints
Hardware  a TPU slice. This was planned, not run: compiled by libtpu 0.0.42.1 (jax 0.10.2) on two
          cores of an AMD EPYC 9004
Compare   no published measurement was found for this chip and size; MaxText's 16 B model reached
          61.1 % MFU on a v5e-256

With optimizer.name=muon, the minimum time of a step is 1.84 s. Six all-to-alls of 705 MiB in all
spread the matrices of the layers over the devices.

    machine     v5e:4x4: 16 x TPU v5e, 16.0 GiB each
    mesh        fsdp 16
    model       1,364,297,728 parameters, 8.4 GFLOPs per token in training
    batch       524,288 tokens; 50,000 steps are 26.2B tokens
    decoding    64 sequences, prompts of 1,024 tokens, a cache of 2,048
    attention   flash: train, evaluate, prefill
    attention   reference: decode

    memory per device            train       evaluate        prefill         decode
      parameters             325.6 MiB      325.6 MiB      325.6 MiB      325.6 MiB
      optimizer              651.3 MiB
      cache and inputs       640.0 KiB      640.0 KiB      320.0 KiB        1.5 GiB
      padding                  1.5 KiB            0 B            0 B          764 B
      activations              3.6 GiB
      temporaries              6.7 GiB        1.3 GiB        2.5 GiB        1.8 GiB
      results, code           34.4 MiB        9.5 MiB        1.5 GiB       36.0 MiB
      peak of 16.0 GiB  11.3 GiB (70%)  1.6 GiB (10%)  4.4 GiB (27%)  3.7 GiB (23%)

    minimum time                       train      evaluate       prefill        decode
      compute at 197.0 TFLOP/s        1.82 s      478.1 ms       59.1 ms         53 us
      HBM at 819.0 GB/s               1.21 s      146.8 ms       23.3 ms        9.5 ms
      network                        93.1 ms       28.4 ms       28.4 ms       27.1 ms
      step                            1.82 s      478.1 ms       59.1 ms       27.1 ms
      bound by                       compute       compute       compute       network
      MFU at most 76.9%; 18.1k tokens/s per chip, 25.0B tokens per day in total
      run: at least 25:12 h, 403 chip-hours, without evaluation and checkpoints
      decoding: 2.4k tokens/s for 64 sequences

    sent per device in one training step         count  within the slice
      all-gather                                   338           4.5 GiB
      collective-permute                         2,856           2.4 GiB
      all-reduce                                    28         703.8 MiB
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture(
        "llama2_7b",
        num_decoder_layers=24,
        d_model=2048,
        d_ff=5632,
        num_heads=16,
        num_kv_heads=16,
        max_length=2048,
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
        length=2048,
        batch_size=256,
    )
    config.optimizer = dict(
        learning_rate=2e-4,
        warmup_steps=2000,
        b2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(steps=50_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1)
    config.platform = "tpu"
    return config
