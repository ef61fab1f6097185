"""Data configs: which text is read, and how it becomes batches of tokens."""

import dataclasses
import functools
from typing import Annotated, Any, Literal

from flax.core import FrozenDict

from transformer.checks import Choice, Effect, one_of, strict
from transformer.data import corpora, mixture, probes
from transformer.data.objectives import OBJECTIVES
from transformer.errors import UserError
from transformer.limits import POSITIVE, Count, NonNegative, Size, at_least, at_most

_HAS_FIELDS = ("tsv", "jsonl", "parquet", "arrayrecord", "huggingface")
FORMATS = (*_HAS_FIELDS, "paired", "text", "documents", "probe", "prepared")
_Id = Annotated[int, at_least(-1)]
_TOKENIZER_EFFECTS = (
    Effect(("kind", "byte_fallback", "character_coverage", "max_sentences"),
           "data.tokenizer.path='', which trains a tokenizer", lambda c: not c.path),
    Effect(("byte_fallback",), "multi-character pieces: data.tokenizer.kind other than 'char'",
           lambda c: c.kind != "char"),
)  # fmt: skip


@strict("data.tokenizer", _TOKENIZER_EFFECTS)
class TokenizerConfig:
    """An existing tokenizer, or a SentencePiece model trained on the training text (both sides),
    with `model.vocab_size` pieces, less the special tokens of the objective."""

    # unigram | bpe | char (one piece per character) | word (one per word between spaces; unknown
    # words, and words beside a line end, become bytes). char, word: up to model.vocab_size pieces.
    kind: Literal["unigram", "bpe", "char", "word"] = "unigram"
    # an existing SentencePiece .model, tokenizer.json (extra [hf]) or tokenizer.pair; "" trains one
    path: str = ""
    # id that fills a sequence after its end; -1, here and below: as the tokenizer's file defines
    pad_id: _Id = -1
    bos_id: _Id = -1  # begins a text, or the input of a decoder
    eos_id: _Id = -1  # ends a text
    source_bos_id: _Id = -1  # begins a source (BART); -1: none
    byte_fallback: bool = True  # encode unknown characters as bytes, so that no text is lost
    # Share of the text's characters that get pieces. The others are encoded as bytes.
    character_coverage: Annotated[float, at_least(0.98), at_most(1)] = 0.9995
    max_sentences: Size = 1_000_000  # maximum number of lines to train the tokenizer on


def _has_own_splits(c) -> bool:
    """Whether files or the corpus provide both valid and test."""
    corpus = corpora.CORPORA.get(c.corpus)
    return {"valid", "test"} <= corpus.files.keys() if corpus else bool(c.valid and c.test)


_DATA_EFFECTS = (
    Effect(("format",), "files to read: data.train", lambda c: not c.corpus),
    Effect(("fields",), f"a data.format that has fields ({', '.join(_HAS_FIELDS)})",
           lambda c: c.format in _HAS_FIELDS),
    Effect(("reverse",), "a source and a target to swap: data.objective='seq2seq'",
           lambda c: c.chosen.has_pairs),
    Effect(("valid", "test", "reverse", "max_examples", "held_out"),
           "text that is not prepared: set this when it is prepared (data prepare)",
           lambda c: c.format != "prepared"),
    Effect(("packing",),
           "data.buckets, or an objective that packs sequences (causal_lm, seq2seq, masked_lm)",
           lambda c: c.chosen.can_pack or c.buckets),
    Effect(("buckets",), "two widths, and an objective whose sequences differ in length",
           lambda c: c.chosen.has_variable_length and len(c.buckets) > 1),
    Effect(("too_long",), "an objective that keeps texts whole (seq2seq, classification, tagging)",
           lambda c: c.chosen.never_splits),
    Effect(("eval_overlap",), "data.objective='causal_lm'", lambda c: c.chosen.scores_every_token),
    Effect(("mixture_temperature",), "sources: data.mixture", lambda c: bool(c.mixture)),
    Effect(("held_out",), "because valid and test have their own files",
           lambda c: not _has_own_splits(c)),
)  # fmt: skip


@strict("data", _DATA_EFFECTS)
class DataConfig:
    """The text, the objective and the shape of the batches."""

    corpus: str = ""  # a known corpus (python -m transformer data); "" reads the files below
    # tsv|paired|text|documents|jsonl|parquet|arrayrecord|huggingface|probe|prepared
    format: str = "tsv"
    # A path or glob, local or gs://. paired: "source,target"; huggingface: "name[/subset]:split";
    # probe: "reverse:1-20"; prepared: a folder of `data prepare`.
    train: str = ""
    valid: str = ""  # validation text, like train; "": held out from train
    test: str = ""  # test text, like valid
    # tsv: column numbers; other formats: names, such as ("text",) or ("source", "target")
    fields: tuple[str, ...] = ()
    reverse: bool = False  # swap source and target
    # Several texts instead: dict(name=..., weight=..., max_epochs=...) for each, with the fields
    # above and below in which it differs (data/mixture.py).
    mixture: tuple[FrozenDict, ...] = ()
    # Weights of the sources are (training tokens)^(1 / temperature); 0: each has its own `weight`
    mixture_temperature: NonNegative = 0.0
    # causal_lm | seq2seq | prefix_lm | masked_lm | span_corruption | ul2 | classification |
    # tagging | extractive_qa, or dict(name=...).
    objective: Choice = "causal_lm"
    # tokens in a sequence; encoder-decoder: in a sequence of the encoder
    length: Annotated[int, at_least(2)] = 128
    target_length: Count = 0  # encoder-decoder: tokens in a sequence of the decoder; 0: `length`
    # sequences of `length` tokens in a batch; shorter buckets have more, of as many tokens in all
    batch_size: Size = 32
    packing: bool = True  # put several documents into a sequence, separated by segment ids
    # with packing=False: bucket lengths, increasing; the last is `length`
    buckets: tuple[Size, ...] = ()
    # what becomes of examples that are too long; their number is reported
    too_long: Literal["drop", "cut"] = "drop"
    # causal_lm: each held-out sequence repeats this many tokens of the one before, without loss
    eval_overlap: Count = 0
    # Sources to hold out for each of valid and test, unless it has its own file: a number, or a
    # fraction below 0.5, which a hash selects alike in all texts of a mixture.
    held_out: Annotated[int | float, POSITIVE] = 1000
    max_examples: Count = 0  # maximum number of training examples; 0: all
    tokenizer: TokenizerConfig = TokenizerConfig()  # trained on the text, or an existing file

    def __post_init__(self):
        if self.corpus and self.train:
            raise UserError("data.corpus and data.train: both name a training text; leave one out")
        if self.corpus and (self.valid or self.test or self.fields):
            raise UserError("data.corpus: a known corpus has its own files; set data.train instead")
        one_of("data.format", self.format, FORMATS)
        for part in ("train", "valid", "test") if self.format == "probe" else ():
            if path := getattr(self, part):
                probes.parse(path, f"data.{part}")
        if self.mixture:
            self._check_mixture()
        if isinstance(self.held_out, float) and self.held_out >= 0.5:
            raise UserError(f"data.held_out: {self.held_out} is not a fraction between 0 and 0.5")
        if self.eval_overlap >= self.length:
            limit = f"must be less than data.length = {self.length}"
            raise UserError(f"data.eval_overlap: {self.eval_overlap} {limit}")
        is_tsv = self.format == "tsv"
        if is_tsv and not all(x.isascii() and x.isdigit() for x in self.fields):
            raise UserError(f"data.fields: {self.fields} must be column numbers of a tsv, from 0")
        if is_tsv and self.train and (self.fields, self.chosen.columns) == ((), ("text",)):
            way_out = "set data.format='text' for lines, or data.fields=('0',) for the first column"
            raise UserError(f"data.format: 'tsv' has columns, the objective one text; {way_out}")
        if self.buckets and self.format == "prepared":
            raise UserError("data.buckets: prepared sequences have one length; leave it out")
        if self.buckets:
            if self.packing:
                raise UserError("data.buckets: text is packed or bucketed; set data.packing=False")
            widths = f"data.buckets: {self.buckets}"
            if any(width * self.decoder_length % self.length for width in self.buckets):
                raise UserError(f"{widths} times data.target_length / data.length must be integers")
            if sorted(set(self.buckets)) != list(self.buckets) or self.buckets[-1] != self.length:
                raise UserError(f"{widths} must increase and end in data.length = {self.length}")

    def _check_mixture(self) -> None:
        if set_here := [f for f in ("corpus", "train", "valid", "test") if getattr(self, f)]:
            problem = "each source of data.mixture names its own text"
            raise UserError(f"data.{set_here[0]}: {problem}; leave it out")
        if self.buckets:
            raise UserError("data.buckets: a mixture has sequences of one length; leave it out")
        mixture.read_sources(self.mixture, self.mixture_temperature)
        if self.chosen.predicts != ("tokens",):
            way_out = "choose one of the sources' objectives"
            raise UserError(f"data.objective: {self.chosen.name!r} predicts labels; {way_out}")
        for name, source in self.sources.items():
            ours, theirs = self.chosen, source.chosen
            if theirs.predicts != ("tokens",) or type(ours).losses is not type(theirs).losses:
                problem = f"{theirs.name!r} of source {name!r} has another loss than data.objective"
                raise UserError(f"data.mixture.objective: {problem}; train on it alone")

    @functools.cached_property
    def sources(self) -> dict[str, "DataConfig"]:
        """The config of each source of `mixture`; this config, by the name "", without one."""
        if not self.mixture:
            return {"": self}
        sources, alone = {}, {"mixture": (), "mixture_temperature": 0.0}
        for entry in self.mixture:
            fields = {k: v for k, v in entry.items() if k not in mixture.OWN_FIELDS}
            try:
                sources[entry["name"]] = dataclasses.replace(self, **alone, **fields)
            except UserError as e:
                raise UserError(f"{e} (source {entry['name']!r} of data.mixture)") from None
        return sources

    def with_tokenizer(self, path) -> "DataConfig":
        """The same config, and special tokens, with the existing tokenizer at `path`."""
        ids = {name: x for name, x in vars(self.tokenizer).items() if name.endswith("_id")}
        return dataclasses.replace(self, tokenizer=TokenizerConfig(path=str(path), **ids))

    @property
    def chosen(self):
        """The objective chosen by `objective`, with its options (data/objectives/base.py)."""
        return OBJECTIVES.build(self.objective)

    @property
    def decoder_length(self) -> int:
        """Tokens in a sequence of the decoder."""
        return self.target_length or self.length


Task = Any
"""An Experiment, or an object with those of its fields that a function reads. Packages below
`transformer.config` cannot import it, so experiments are not typed there."""
