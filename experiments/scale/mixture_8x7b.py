"""How fast can a mixture of eight experts, Mixtral 8x7B's shape (Jiang et al. 2024), be on a v5p-256?

    python -m transformer plan --config=experiments/scale/mixture_8x7b.py --topology=v5p-256

Hardware  a TPU slice; nothing of this was run, it was planned: compiled by libtpu 0.0.42.1 (jax 0.10.2) on two cores of an AMD EPYC 9005
Beside it MaxText measured 52.6 % (2,909 tokens/s a chip) for Mixtral 8x7B at this length (v5p, 256). Without a capacity (dropless) the
bound is 40.1 %, below that: gradients of experts' matrices then go over all gathered pairs (transformer/model/experts.py).

    machine     v5p:4x4x8: 128 x TPU v5p, 95.0 GB each
    mesh        fsdp 16 x expert 8
    model       46,702,792,704 parameters, 79.7GFLOP a token in training
    batch       2,097,152 tokens; 100,000 steps are 209.7G tokens
    attention   splash: train, evaluate
    attention   blockwise (splash: where tokens stand in their rows is not known): prefill
    attention   reference: decode

    a device's memory           train      evaluate       prefill        decode
      parameters               1.7 GB        1.7 GB        1.7 GB        1.7 GB
      optimizer                3.4 GB
      cache and inputs       320.0 KB      320.0 KB      512.0 KB        2.0 GB
      padding                  1.5 KB           0 B           0 B         764 B
      activations              5.5 GB
      temporaries             14.6 GB        4.3 GB        1.6 GB        3.4 GB
      results, code           50.8 MB       11.1 MB        2.0 GB        4.7 MB
      peak of 95.0 GB   25.2 GB (27%)   6.0 GB (6%)   5.3 GB (6%)   7.1 GB (7%)
      compiled in                50 s          13 s          13 s           4 s

    at least                          train      evaluate       prefill        decode
      compute at 459.0TFLOP/s        4.67 s        1.15 s      149.2 ms        143 us
      HBM at 2.8TB/s                 1.42 s      189.4 ms      663.6 ms       18.9 ms
      network                      317.7 ms      104.4 ms       37.7 ms       37.7 ms
      a step                         4.67 s        1.15 s      663.6 ms       37.7 ms
      bound by                      compute       compute           HBM       network
      MFU at most 60.9%; 3.5k tokens/s a chip, 38.8G a day
      the run: 5.4 days, 16,616 chip-hours
      decoding: 1.7k tokens/s for 64 rows

    messages of a training step, a device         count        within        beyond
      all-to-all                                    192       52.5 GB
      all-gather                                    450       24.8 GB
      collective-permute                          1,632       11.2 GB
      all-reduce                                    198        1.7 GB
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
        feed_forward=dict(name="experts", num_experts=8, top_k=2, capacity_factor=1.25),
        dtype="bfloat16",
        remat="full",
    )
    config.data = dict(
        train="gs://BUCKET/c4/en/*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="causal_lm",
        length=4096,
        batch_size=512,
    )
    config.optimizer = dict(
        learning_rate=3e-4, warmup_steps=2000, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0
    )
    config.train = dict(steps=100_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1, expert=8)
    config.platform = "tpu"
    return config
