"""The configs of the data: what text is read, and how it becomes batches of tokens."""

import dataclasses
from typing import Protocol

from transformer.checks import Choice, Effect, at_least, one_of, strict
from transformer.data import corpora, probes
from transformer.data.objectives import OBJECTIVES
from transformer.errors import UserError
from transformer.model.config import ModelConfig

_TOKENIZER_EFFECTS = (
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


@strict("data.tokenizer", _TOKENIZER_EFFECTS)
@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """SentencePiece, trained from the run's own training text (both languages together) to `model.vocab_size` pieces, less what the
    objective keeps for its signs."""

    kind: str = (
        "unigram"  # unigram | bpe | char: every character a piece, at most model.vocab_size of them
    )
    path: str = ""  # a SentencePiece .model, a tokenizer.json (extra [hf]) or a run's tokenizer.pair, to use instead of training one
    pad_id: int = -1  # of a given one: padding,
    bos_id: int = -1  # what a text, or a decoder, begins with,
    eos_id: int = -1  # and what a text ends with; -1: as it says itself
    source_bos_id: int = -1  # what a source begins with (BART); -1: nothing
    byte_fallback: bool = True  # unknown characters become bytes, so nothing is lost
    character_coverage: float = 0.9995
    max_sentences: int = 1_000_000  # read at most so many lines for training

    def __post_init__(self):
        one_of("data.tokenizer.kind", self.kind, ("unigram", "bpe", "char"))
        at_least("data.tokenizer", self, 1, "max_sentences")
        at_least("data.tokenizer", self, -1, "pad_id", "bos_id", "eos_id", "source_bos_id")
        if not 0.98 <= self.character_coverage <= 1:  # SentencePiece's own bounds
            raise UserError(
                f"data.tokenizer.character_coverage: {self.character_coverage} must lie between 0.98 and 1"
            )

    def at(self, path) -> "TokenizerConfig":
        """The same special tokens, with the tokenizer that lies at `path`: none is trained."""
        ids = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if "_id" in f.name}
        return TokenizerConfig(path=str(path), **ids)


_HAS_FIELDS = ("tsv", "jsonl", "arrayrecord", "huggingface")


def _has_own_sides(c) -> bool:
    """Whether valid and test are both given, as files or by the corpus."""
    known = corpora.CORPORA.get(c.corpus)
    return {"valid", "test"} <= known.files.keys() if known else bool(c.valid and c.test)


_DATA_EFFECTS = (
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


@strict("data", _DATA_EFFECTS)
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text to batches of static shape."""

    corpus: str = ""  # a known corpus (python -m transformer data), or "" to read the files below
    format: str = "tsv"  # tsv | paired | text | jsonl | arrayrecord | huggingface | probe
    train: str = ""  # a path or glob, local or gs://; paired: "source,target"; huggingface: "name[/subset]:split"; probe: "reverse:1-20"
    valid: str = ""  # "": held out from train
    test: str = ""
    fields: tuple[
        str, ...
    ] = ()  # jsonl, arrayrecord, huggingface: ("text",) or ("source", "target"); tsv: column numbers
    reverse: bool = False  # swap source and target
    objective: Choice = "causal_lm"  # seq2seq | prefix_lm | masked_lm | span_corruption | ul2 | classification | tagging, or dict(name=...)
    length: int = 128  # tokens in a row; in an encoder-decoder, in a row of the encoder
    target_length: int = 0  # and in one of its decoder; 0: as many
    batch_size: int = 32  # rows of `length`; a shorter bucket has more rows, so that batch_size * length tokens stay
    packing: bool = True  # several documents a row, told apart by segment ids
    buckets: tuple[int, ...] = ()  # without packing: row lengths, the last of which is `length`
    too_long: str = "drop"  # drop | cut, counted and reported
    eval_overlap: int = 0  # causal_lm: held-out rows read so many tokens of the row before once more, unscored, as context
    held_out: int = 1000  # sources in each of valid and test, where no file is given
    max_examples: int = 0  # train on so many only; 0: all
    tokenizer: TokenizerConfig = TokenizerConfig()

    def __post_init__(self):
        if self.corpus and self.train:
            raise UserError(
                "data.corpus and data.train: two texts to train on; leave one of them out"
            )
        if self.corpus and (self.valid or self.test or self.fields):
            raise UserError(
                "data.corpus: a known corpus has its own files; data.valid, data.test and data.fields go with data.train"
            )
        one_of(
            "data.format",
            self.format,
            ("tsv", "paired", "text", "jsonl", "arrayrecord", "huggingface", "probe"),
        )
        for part in ("train", "valid", "test") if self.format == "probe" else ():
            if path := getattr(self, part):
                probes.parse(path, f"data.{part}")
        one_of("data.too_long", self.too_long, ("drop", "cut"))
        at_least("data", self, 2, "length")
        at_least("data", self, 1, "batch_size", "held_out")
        at_least("data", self, 0, "max_examples", "eval_overlap", "target_length")
        if self.eval_overlap >= self.length:
            raise UserError(
                f"data.eval_overlap: {self.eval_overlap} must be less than data.length = {self.length}"
            )
        if (
            self.fields
            and self.format == "tsv"
            and not all(f.isascii() and f.isdigit() for f in self.fields)
        ):
            raise UserError(
                f"data.fields: {self.fields}; of tsv they are the numbers of columns, from 0: ('0', '1')"
            )
        if self.buckets:
            if min(self.buckets) < 1:
                raise UserError(f"data.buckets: {self.buckets}; a row has at least 1 token")
            if self.packing:
                raise UserError(
                    "data.buckets: rows are either packed or bucketed; set data.packing=False or leave out data.buckets"
                )
            if any(width * self.decoder_length % self.length for width in self.buckets):
                raise UserError(
                    f"data.buckets: {self.buckets} times data.target_length / data.length must be whole numbers"
                )
            if sorted(set(self.buckets)) != list(self.buckets) or self.buckets[-1] != self.length:
                raise UserError(
                    f"data.buckets: {self.buckets} must grow and end in data.length = {self.length}"
                )

    @property
    def chosen(self):
        """The objective that `objective` chooses, with its options (data/objectives/base.py)."""
        return OBJECTIVES.build(self.objective)

    @property
    def decoder_length(self) -> int:
        """Tokens in a row of the decoder."""
        return self.target_length or self.length


class Task(Protocol):
    """What of an experiment decides which batches there are."""

    model: ModelConfig
    data: DataConfig
    seed: int
