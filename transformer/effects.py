"""Which fields of an experiment have an effect, and under which condition.

One table for each config of config.py, which refuses a field that differs from its default where
the condition does not hold; the model's table is in model/effects.py.
"""

from transformer.checks import Effect
from transformer.data import corpora

TOKENIZER = (
    Effect(
        ("kind", "byte_fallback", "character_coverage", "max_sentences"),
        "a tokenizer to train: data.tokenizer.path=''",
        lambda c: not c.path,
    ),
    Effect(
        ("byte_fallback",),
        "pieces of several characters: data.tokenizer.kind='unigram' or 'bpe'",
        lambda c: c.kind != "char",
    ),
)

_HAS_FIELDS = ("tsv", "jsonl", "arrayrecord", "huggingface")


def _has_own_sides(c) -> bool:
    """Whether valid and test are both given, as files or by the corpus."""
    known = corpora.CORPORA.get(c.corpus)
    return {"valid", "test"} <= known.files.keys() if known else bool(c.valid and c.test)


DATA = (
    Effect(("format",), "files to read: data.train", lambda c: not c.corpus),
    Effect(
        ("fields",),
        f"a data.format that has fields ({', '.join(_HAS_FIELDS)})",
        lambda c: c.format in _HAS_FIELDS,
    ),
    Effect(
        ("reverse",),
        "a source and a target to swap: data.objective='seq2seq'",
        lambda c: c.chosen.columns == ("source", "target"),
    ),
    Effect(
        ("packing",),
        "data.buckets, or an objective that packs rows (causal_lm, seq2seq, masked_lm)",
        lambda c: c.chosen.packs or c.buckets,
    ),
    Effect(
        ("buckets",),
        "two widths, and an objective whose rows differ in length",
        lambda c: c.chosen.lengths_differ and len(c.buckets) > 1,
    ),
    Effect(
        ("too_long",),
        "an objective that keeps texts whole (seq2seq, classification, tagging)",
        lambda c: c.chosen.keeps_whole,
    ),
    Effect(("eval_overlap",), "data.objective='causal_lm'", lambda c: c.chosen.every_token),
    Effect(
        ("held_out",),
        "a side to hold out: data.valid='' or data.test='', and a corpus that does not bring them",
        lambda c: not _has_own_sides(c),
    ),
)

OPTIMIZER = (
    Effect(("b1", "b2"), "optimizer.name='adamw' or 'lion'", lambda c: c.name in ("adamw", "lion")),
    Effect(("epsilon",), "optimizer.name='adamw'", lambda c: c.name == "adamw"),
    Effect(("momentum",), "optimizer.name='sgd'", lambda c: c.name == "sgd"),
    Effect(("decay_fraction",), "optimizer.schedule='wsd'", lambda c: c.schedule == "wsd"),
    Effect(
        ("final_fraction",),
        "a schedule that decays to a last rate: optimizer.schedule='cosine', 'linear' or 'wsd'",
        lambda c: c.schedule in ("cosine", "linear", "wsd"),
    ),
)

MESH = (
    Effect(
        ("slices",),
        "more than one device along that axis of the mesh",
        lambda c: c.sizes[c.slices] != 1,
    ),
)

TRAIN = (
    Effect(
        ("average_checkpoints",),
        "as many checkpoints in train.steps: a smaller train.checkpoint_every (0 saves at the end only)",
        lambda c: c.checkpoint_every and -(-c.steps // c.checkpoint_every) >= c.average_checkpoints,
    ),
    Effect(
        ("init_new", "init_drop", "init_positions"),
        "parameters to start from: train.init_from",
        lambda c: c.init_from,
    ),
    Effect(
        ("profile",),
        "a step to trace: train.steps > 10, for tracing begins there",
        lambda c: c.steps > 10,
    ),
)

DECODING = (
    Effect(("length_penalty",), "beams: decoding.beam_size > 1", lambda c: c.beam_size > 1),
    Effect(("top_k", "top_p"), "sampling: decoding.temperature > 0", lambda c: c.temperature > 0),
)


EXPERIMENT = (
    Effect(
        ("model.pipeline_microbatches",),
        "stages: mesh.stage > 1",
        lambda c: c.mesh.stage != 1,
    ),
    Effect(
        ("train.z_loss",),
        "an objective that asks for tokens",
        lambda c: c.objective.asks_for_tokens,
    ),
    Effect(
        ("train.init_positions",),
        "a table of positions: model.position='learned'",
        lambda c: c.model.has_position_table,
    ),
    Effect(
        tuple(
            f"decoding.{field}"
            for field in [
                "beam_size",
                "length_penalty",
                "temperature",
                "top_k",
                "top_p",
                "max_extra",
                "batch_size",
            ]
        ),
        "a model that writes text (data.objective: causal_lm, prefix_lm or seq2seq)",
        lambda c: c.objective.writes,
    ),
)
