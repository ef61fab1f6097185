"""What an experiment is: frozen dataclasses, validated when they are built.

A combination that makes no sense is a UserError that names the field, the value and the way out. The model's part stands in
model/config.py; how an experiment is read from a file and the command line in config_io.py.
"""

import dataclasses

from transformer import effects
from transformer.checks import (
    LARGEST,
    at_least,
    at_most,
    in_unit_interval,
    one_of,
    positive,
    strict,
)
from transformer.data import objectives, probes
from transformer.errors import UserError
from transformer.evaluation import kinds
from transformer.model.config import Choice, ModelConfig

__all__ = [
    "Choice",
    "DataConfig",
    "DecodingConfig",
    "Experiment",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "TokenizerConfig",
    "TrainConfig",
]


@strict("data.tokenizer", effects.TOKENIZER)
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


@strict("data", effects.DATA)
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
    def chosen(self) -> objectives.Objective:
        """What `objective` chooses, with its options."""
        return objectives.build(self.objective)

    @property
    def decoder_length(self) -> int:
        """Tokens in a row of the decoder."""
        return self.target_length or self.length


@strict("optimizer", effects.OPTIMIZER)
@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule and its learning rate, a function of the step alone."""

    name: str = "adamw"  # adamw | adafactor | lion | sgd
    learning_rate: float = 1e-3  # the peak
    schedule: str = "cosine"  # inverse_sqrt | cosine | linear | wsd | constant
    warmup_steps: int = 1000  # linear, from 0
    decay_fraction: float = 0.2  # wsd: the share of the steps in which it decays, at the end
    final_fraction: float = 0.0  # cosine, linear, wsd: the last rate, as a share of the peak
    b1: float = 0.9
    b2: float = 0.98
    epsilon: float = 1e-9
    momentum: float = 0.9  # sgd
    weight_decay: float = 0.0  # decoupled; not on norms, biases, positions' tables and gates
    clip_norm: float = 0.0  # of the global gradient; 0: off

    def __post_init__(self):
        one_of("optimizer.name", self.name, ("adamw", "adafactor", "lion", "sgd"))
        one_of(
            "optimizer.schedule",
            self.schedule,
            ("inverse_sqrt", "cosine", "linear", "wsd", "constant"),
        )
        at_least(
            "optimizer",
            self,
            0,
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "clip_norm",
        )
        if not 0 <= self.final_fraction <= 1:
            raise UserError(f"optimizer.final_fraction: {self.final_fraction} must lie in [0, 1]")
        positive("optimizer", self, "epsilon")
        in_unit_interval("optimizer", self, "b1", "b2", "momentum")
        if not 0 < self.decay_fraction <= 1:
            raise UserError(f"optimizer.decay_fraction: {self.decay_fraction} must lie in (0, 1]")
        if self.schedule == "inverse_sqrt" and not self.warmup_steps:
            raise UserError(
                "optimizer.warmup_steps: 0, but schedule 'inverse_sqrt' is measured in warm-ups; set it to 1 or more"
            )


@strict("mesh", effects.MESH)
@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 takes the rest (one axis at most)."""

    data: int = -1  # rows of the batch; parameters are on every device
    stage: int = 1  # layers (a pipeline); outside of them, rows
    fsdp: int = 1  # rows of the batch; parameters, gradients and optimizer state are spread too
    expert: int = 1  # experts; outside of them, rows
    context: int = 1  # the tokens of a row (ring attention)
    tensor: int = 1  # heads, d_ff and vocabulary (Megatron); between sublayers, the tokens of a row
    slices: str = "data"  # of several slices of TPUs, the axis that goes from one to the next: data | stage | fsdp

    def __post_init__(self):
        one_of("mesh.slices", self.slices, ("data", "stage", "fsdp"))
        sizes = self.sizes
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise UserError(f"mesh.{axis}: {size}; a positive number, or -1 for the rest")
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"mesh: {sizes} has more than one -1; only one axis can take the rest")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices along it, in the order of the mesh: neighbours on the last talk most."""
        return {
            axis: getattr(self, axis)
            for axis in ("data", "stage", "fsdp", "expert", "context", "tensor")
        }


@strict("train", effects.TRAIN)
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, which loss, how often what."""

    steps: int = 1000
    label_smoothing: float = 0.0
    z_loss: float = 0.0  # weight of log(Z)^2, which keeps logits from drifting
    accumulate: int = (
        1  # micro-batches a step: less memory, the same loss (dropout draws other masks)
    )
    ema_decay: float = (
        0.0  # exponential moving average of the parameters, used for evaluation; 0: off
    )
    average_checkpoints: int = 0  # evaluate the mean of the last n checkpoints; 0: the last alone
    init_from: str = (
        ""  # start from the parameters of a run, or of a Hugging Face directory (extra [hf])
    )
    init_new: tuple[
        str, ...
    ] = ()  # of this model, what starts anew nevertheless: ("classifier/*",)
    init_drop: tuple[str, ...] = ()  # of that model, what is left out: ("unembedding/*",)
    init_positions: str = (
        "same"  # same | extend | interpolate: a learned table of positions of another length
    )
    log_every: int = 50
    eval_every: int = 0  # 0: at the end only
    eval_batches: int = 0  # of the validation side, during training; 0: all
    evaluators: tuple[
        Choice, ...
    ] = ()  # what else is measured (evaluation/kinds.py): loss_by_position | depth_profile | attention | ..., or dict(name=...)
    checkpoint_every: int = 0  # 0: at the end only
    keep_checkpoints: int = 2
    strict_checkpoints: bool = (
        False  # refuse to resume from an older checkpoint where the newest is damaged
    )
    tensorboard: bool = True
    wandb: str = ""  # a Weights & Biases project; "": off
    profile: int = 0  # trace so many steps, from the 10th, into the run directory; 0: off

    def __post_init__(self):
        at_least("train", self, 1, "steps", "accumulate", "log_every", "keep_checkpoints")
        at_least(
            "train",
            self,
            0,
            "eval_every",
            "eval_batches",
            "checkpoint_every",
            "average_checkpoints",
            "z_loss",
        )
        at_least("train", self, 0, "profile")
        in_unit_interval("train", self, "label_smoothing", "ema_decay")
        for spec in self.evaluators:
            kinds.build(spec)
        one_of("train.init_positions", self.init_positions, ("same", "extend", "interpolate"))
        if self.average_checkpoints == 1:
            raise UserError(
                "train.average_checkpoints: the mean of 1 checkpoint is the last alone, as with 0; "
                "set it to 0, or to 2 or more"
            )
        if self.average_checkpoints > self.keep_checkpoints:
            raise UserError(
                f"train.average_checkpoints: {self.average_checkpoints}, but train.keep_checkpoints = {self.keep_checkpoints} are kept; raise it"
            )
        if self.average_checkpoints > 1 and self.ema_decay:
            raise UserError(
                "train.average_checkpoints and train.ema_decay: two ways to average; set one of them to 0"
            )


@strict("decoding", effects.DECODING)
@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    """How text is generated from the trained model."""

    beam_size: int = 1  # 1: greedy, or sampling where temperature > 0
    length_penalty: float = 0.6  # alpha of ((5 + |y|) / 6)^alpha
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    max_extra: int = (
        50  # tokens written at most: so many more than the source has; of a language model, so many
    )
    batch_size: int = 64

    def __post_init__(self):
        at_least("decoding", self, 1, "beam_size", "max_extra", "batch_size")
        at_least("decoding", self, 0, "temperature", "top_k", "length_penalty")
        at_most(
            "decoding", self, 100, temperature="there every token is about as likely as any other"
        )
        if self.beam_size > 1 and self.temperature:
            raise UserError(
                "decoding.beam_size and decoding.temperature: beam search does not sample; set decoding.temperature to 0, or decoding.beam_size to 1"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"decoding.top_p: {self.top_p} must lie in (0, 1]")


@strict("", effects.EXPERIMENT)
@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything a run depends on."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    decoding: DecodingConfig = DecodingConfig()
    mesh: MeshConfig = MeshConfig()
    seed: int = 0  # of parameters, dropout and the order of the data
    platform: str = (
        "auto"  # auto | cpu | gpu | tpu | accelerator: training anywhere else is refused
    )

    def __post_init__(self):
        one_of("platform", self.platform, ("auto", "cpu", "gpu", "tpu", "accelerator"))
        if not 0 <= self.seed <= LARGEST:
            raise UserError(f"seed: {self.seed} must lie between 0 and {LARGEST:,}")
        for field in ("length", "target_length"):
            if getattr(self.data, field) > self.model.max_length:
                raise UserError(
                    f"data.{field}: {getattr(self.data, field)} is longer than model.max_length = {self.model.max_length}"
                )
        if self.data.batch_size % self.train.accumulate:
            raise UserError(
                f"train.accumulate: {self.train.accumulate} does not divide data.batch_size = {self.data.batch_size}"
            )
        objective = self.objective
        spec = self.data.objective
        name = spec if isinstance(spec, str) else spec["name"]
        if self.model.family.removeprefix("recurrent_") not in objective.families:
            raise UserError(
                f"data.objective: {name!r} trains a model of family {' or '.join(map(repr, objective.families))}, "
                f"but model.family = {self.model.family!r}"
            )
        if objective.asks_for_tokens and not self.model.lm_head:
            raise UserError(f"data.objective: {name!r} asks for tokens; set model.lm_head=True")
        if self.model.prefix_lm and not objective.gives_prefix:
            raise UserError(
                f"model.prefix_lm: True, but data.objective {name!r} gives no prefix; set it to False"
            )
        if self.data.target_length and not self.model.two_sides:
            raise UserError(
                f"data.target_length: {self.data.target_length}, but model.family = {self.model.family!r} has one side; leave it at 0"
            )
        for field, limit in (("beam_size", vocab := self.model.vocab_size), ("top_k", vocab - 1)):
            if getattr(self.decoding, field) > limit:
                raise UserError(
                    f"decoding.{field}: {getattr(self.decoding, field):,} is too large for model.vocab_size = {vocab:,}; "
                    f"at most {limit:,}"
                )
        for kind in map(kinds.build, self.train.evaluators):
            if problem := kind.why_not(self):
                raise UserError(f"train.evaluators: {kind.name} {problem}")
        if problem := objective.check(self):
            raise UserError(f"data.objective: {name!r} {problem}")

    @property
    def objective(self) -> objectives.Objective:
        """What `data.objective` chooses, with its options."""
        return self.data.chosen

    def on(self, mesh: MeshConfig) -> "Experiment":
        """The same experiment on another mesh; without stages, a batch is not cut for them."""
        model = self.model if mesh.stage != 1 else self.model.part(pipeline_microbatches=0)
        return dataclasses.replace(self, mesh=mesh, model=model)
