"""BERT large on a v5e-16, as Devlin et al. (2019) trained it but for dropout on attention weights, which no fused kernel has.

python -m transformer plan --config=experiments/scale/bert_large.py --topology=v5e-16
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
        learning_rate=1e-4, schedule="linear", warmup_steps=10_000, b2=0.999, epsilon=1e-6, weight_decay=0.01
    )
    config.train = dict(steps=1_000_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1)
    config.platform = "tpu"
    return config
