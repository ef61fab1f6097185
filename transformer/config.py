"""What an experiment is: frozen dataclasses, validated when they are built.

A combination that makes no sense is a UserError that names the field, the value and the way out. How an experiment is read
from a file and the command line stands in config_io.py.
"""

import dataclasses
import functools

from flax.core import FrozenDict

from transformer.errors import UserError, nearest
from transformer.model import positions
from transformer.model.activations import ACTIVATIONS
from transformer.model.attention_backends import BACKENDS
from transformer.model.initializers import INITIALIZERS
from transformer.model.norms import NORMS, Norm
from transformer.model.placements import Placement, build_placement
from transformer.model.remat import REMAT_POLICIES

Choice = str | FrozenDict
"""A name, or a mapping with a `name` and the options of what it names."""


def _one_of(field: str, value, names) -> None:
    if value not in names:
        raise UserError(f"{field}: no {value!r}; {nearest(str(value), names)}")


def _at_least(section: str, config, minimum, *fields: str) -> None:
    for field in fields:
        if getattr(config, field) < minimum:
            raise UserError(f"{section}.{field}: {getattr(config, field)} is too small; at least {minimum}")


def _rate(section: str, config, *fields: str) -> None:
    for field in fields:
        if not 0 <= getattr(config, field) < 1:
            raise UserError(f"{section}.{field}: {getattr(config, field)} must lie in [0, 1)")


def _strict(cls):
    """An unknown keyword is a UserError with the nearest name."""
    init, names = cls.__init__, [f.name for f in dataclasses.fields(cls)]

    @functools.wraps(init)
    def checked(self, *args, **fields):
        for name in fields:
            if name not in names:
                raise UserError(f"{cls.__name__}.{name}: no such field; {nearest(name, names)}")
        init(self, *args, **fields)

    cls.__init__ = checked
    return cls


@_strict
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One model of any family. Field names are the papers'."""

    family: str  # encoder | decoder | encoder_decoder
    vocab_size: int
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    num_kv_heads: int = 0  # 0: as many as num_heads; 1: multi-query; between: grouped-query
    d_head: int = 0  # 0: d_model / num_heads
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    max_length: int = 512  # longest sequence, in tokens, on either side

    position: Choice = "sinusoidal"  # none | learned | sinusoidal | rotary | alibi | t5, or dict(name=..., options)
    norm_placement: Choice = "pre"  # pre | post | peri | res_post | deepnorm | none | rezero, or dict(name=..., parts)
    norm: str = "layernorm"  # layernorm | rmsnorm
    norm_gain: bool = True
    norm_offset: bool = True  # layernorm only
    norm_epsilon: float = 1e-6
    embedding_norm: bool = False  # normalise the sum of embeddings and positions

    activation: str = "relu"  # relu | gelu | gelu_tanh | silu
    glu: bool = False  # act(x W_gate) * (x W_in)
    use_bias: bool = True  # in every projection
    attention_scale: float | None = None  # None: 1 / sqrt(d_head)
    attention_backend: str = "auto"  # auto | reference | ...; "reference" forces the plain path

    tie_embeddings: bool = True  # the unembedding is the (target) embedding, transposed
    share_embeddings: bool = True  # encoder_decoder: source and target read one embedding
    logit_bias: bool = False
    embedding_scale: bool = False  # multiply embeddings by sqrt(d_model)

    dropout: float = 0.0  # on every sublayer's output and on the sum of embeddings and positions
    attention_dropout: float = 0.0  # on the attention weights
    activation_dropout: float = 0.0  # inside the feed-forward

    initializer: str = "xavier_uniform"  # xavier_uniform | lecun_normal | normal
    init_std: float = 0.02  # of "normal"
    embedding_init_std: float = 0.0  # 0: 1 / sqrt(d_model)
    residual_init_scale: bool = False  # W_O and the feed-forward's output start 1 / sqrt(sublayers) smaller (GPT-2)

    scan_layers: bool = True  # one compiled layer, looped; False: unrolled
    remat: str = "none"  # none | full | dots: what the backward pass computes again
    dtype: str = "float32"  # of activations; parameters and optimizer stay in param_dtype
    param_dtype: str = "float32"
    pad_id: int = 0

    def __post_init__(self):
        set_ = functools.partial(object.__setattr__, self)
        _one_of("model.family", self.family, ("encoder", "decoder", "encoder_decoder"))
        _at_least("model", self, 1, "vocab_size", "d_model", "d_ff", "num_heads", "max_length")
        _rate("model", self, "dropout", "attention_dropout", "activation_dropout")
        for field, names in {
            "norm": NORMS, "activation": ACTIVATIONS, "initializer": INITIALIZERS, "remat": REMAT_POLICIES,
            "attention_backend": ("auto", *BACKENDS), "dtype": ("float32", "bfloat16"), "param_dtype": ("float32", "bfloat16"),
        }.items():  # fmt: skip
            _one_of(f"model.{field}", getattr(self, field), names)
        if not self.d_head:
            if self.d_model % self.num_heads:
                raise UserError(
                    f"model.d_model: {self.d_model} is not divisible by model.num_heads = {self.num_heads}; "
                    f"change one, or set model.d_head"
                )
            set_("d_head", self.d_model // self.num_heads)
        set_("num_kv_heads", self.num_kv_heads or self.num_heads)
        if self.num_kv_heads < 0 or self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_kv_heads: {self.num_kv_heads} does not divide model.num_heads = {self.num_heads}"
            )
        for side in ("encoder", "decoder"):
            layers = f"num_{side}_layers"
            if side not in self.family:
                set_(layers, 0)
            elif getattr(self, layers) < 1:
                raise UserError(
                    f"model.{layers}: {getattr(self, layers)}; a family with a{'n' * (side == 'encoder')} {side} needs at least 1"
                )
        if not 0 <= self.pad_id < self.vocab_size:
            raise UserError(f"model.pad_id: {self.pad_id} is no token of a vocabulary of {self.vocab_size}")
        for field in ("position", "norm_placement"):
            if not isinstance(getattr(self, field), str):
                set_(field, FrozenDict(getattr(self, field)))
        for side in self.sides:
            self.placement(side)
            if problem := positions.build(self.position).check(self.stack_facts(side)):
                raise UserError(problem)

    @property
    def sides(self) -> tuple[str, ...]:
        """The stacks of this family."""
        return tuple(side for side in ("encoder", "decoder") if side in self.family)

    def num_layers(self, side: str) -> int:
        return self.num_encoder_layers if side == "encoder" else self.num_decoder_layers

    def placement(self, side: str) -> Placement:
        """The parts of the residual formula in one stack."""
        return build_placement(
            self.norm_placement, is_decoder=side == "decoder",
            encoder_layers=self.num_encoder_layers, decoder_layers=self.num_decoder_layers,
        )  # fmt: skip

    def stack_facts(self, side: str) -> positions.StackFacts:
        """What a position scheme may know."""
        return positions.StackFacts(
            d_model=self.d_model, num_heads=self.num_heads, d_head=self.d_head, max_length=self.max_length,
            causal=side == "decoder", param_dtype=self.param_dtype,
        )  # fmt: skip

    @property
    def norm_module(self):
        """The configured norm, to be named by whoever uses it."""
        return functools.partial(
            Norm, kind=self.norm, epsilon=self.norm_epsilon, gain=self.norm_gain, offset=self.norm_offset,
            param_dtype=self.param_dtype,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """SentencePiece, trained from the run's own training text (both languages together) to `model.vocab_size` pieces."""

    kind: str = "unigram"  # unigram | bpe
    path: str = ""  # a SentencePiece .model to use instead of training one
    byte_fallback: bool = True  # unknown characters become bytes, so nothing is lost
    character_coverage: float = 0.9995
    max_sentences: int = 1_000_000  # read at most so many lines for training

    def __post_init__(self):
        _one_of("data.tokenizer.kind", self.kind, ("unigram", "bpe"))


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text to batches of static shape."""

    corpus: str = ""  # a known corpus (python -m transformer data), or "" to read the files below
    format: str = "tsv"  # tsv | paired | text | jsonl | arrayrecord | huggingface
    train: str = ""  # a path or glob, local or gs://; paired: "source,target"; huggingface: "name[/subset]:split"
    valid: str = ""  # "": held out from train
    test: str = ""
    fields: tuple[
        str, ...
    ] = ()  # jsonl, arrayrecord, huggingface: ("text",) or ("source", "target"); tsv: column numbers
    reverse: bool = False  # swap source and target
    objective: str = "causal_lm"  # seq2seq | causal_lm
    length: int = 128  # tokens in a row, on each side
    batch_size: int = 32  # rows of `length`; a shorter bucket has more rows, so that batch_size * length tokens stay
    packing: bool = True  # several documents a row, told apart by segment ids
    buckets: tuple[int, ...] = ()  # without packing: row lengths, the last of which is `length`
    too_long: str = "drop"  # drop | cut, counted and reported
    held_out: int = 1000  # sources in each of valid and test, where no file is given
    max_examples: int = 0  # train on so many only; 0: all
    tokenizer: TokenizerConfig = TokenizerConfig()

    def __post_init__(self):
        if bool(self.corpus) == bool(self.train):
            raise UserError(
                "data.corpus or data.train: name one of them (python -m transformer data lists the corpora)"
            )
        if self.corpus and (self.valid or self.test or self.fields):
            raise UserError(
                "data.corpus: a known corpus has its own files; data.valid, data.test and data.fields go with data.train"
            )
        _one_of("data.format", self.format, ("tsv", "paired", "text", "jsonl", "arrayrecord", "huggingface"))
        _one_of("data.too_long", self.too_long, ("drop", "cut"))
        _at_least("data", self, 2, "length")
        _at_least("data", self, 1, "batch_size", "held_out")
        _at_least("data", self, 0, "max_examples")
        if self.buckets:
            if self.packing:
                raise UserError(
                    "data.buckets: rows are either packed or bucketed; set data.packing=False or leave out data.buckets"
                )
            if sorted(set(self.buckets)) != list(self.buckets) or self.buckets[-1] != self.length:
                raise UserError(f"data.buckets: {self.buckets} must grow and end in data.length = {self.length}")


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
        _one_of("optimizer.name", self.name, ("adamw", "adafactor", "lion", "sgd"))
        _one_of("optimizer.schedule", self.schedule, ("inverse_sqrt", "cosine", "linear", "wsd", "constant"))
        _at_least("optimizer", self, 0, "learning_rate", "warmup_steps", "weight_decay", "clip_norm", "final_fraction")
        _rate("optimizer", self, "b1", "b2", "momentum")
        if not 0 < self.decay_fraction <= 1:
            raise UserError(f"optimizer.decay_fraction: {self.decay_fraction} must lie in (0, 1]")
        if self.schedule == "inverse_sqrt" and not self.warmup_steps:
            raise UserError(
                "optimizer.warmup_steps: 0, but schedule 'inverse_sqrt' is measured in warm-ups; set it to 1 or more"
            )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 takes the rest (one axis at most)."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise UserError(f"mesh.{axis}: {size}; a positive number, or -1 for the rest")
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"mesh: {sizes} has more than one -1; only one axis can take the rest")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, which loss, how often what."""

    steps: int = 1000
    label_smoothing: float = 0.0
    z_loss: float = 0.0  # weight of log(Z)^2, which keeps logits from drifting
    accumulate: int = 1  # micro-batches a step: less memory, the same loss (dropout draws other masks)
    ema_decay: float = 0.0  # exponential moving average of the parameters, used for evaluation; 0: off
    average_checkpoints: int = 0  # evaluate the mean of the last n checkpoints; 0 or 1: the last alone
    log_every: int = 50
    eval_every: int = 0  # 0: at the end only
    eval_batches: int = 0  # of the validation side, during training; 0: all
    checkpoint_every: int = 0  # 0: at the end only
    keep_checkpoints: int = 2
    tensorboard: bool = True
    wandb: str = ""  # a Weights & Biases project; "": off
    profile: int = 0  # trace so many steps, from the 10th, into the run directory; 0: off

    def __post_init__(self):
        _at_least("train", self, 1, "steps", "accumulate", "log_every", "keep_checkpoints")
        _at_least("train", self, 0, "eval_every", "eval_batches", "checkpoint_every", "average_checkpoints", "z_loss")
        _rate("train", self, "label_smoothing", "ema_decay")
        if self.average_checkpoints > self.keep_checkpoints:
            raise UserError(
                f"train.average_checkpoints: {self.average_checkpoints}, but train.keep_checkpoints = {self.keep_checkpoints} are kept; raise it"
            )
        if self.average_checkpoints > 1 and self.ema_decay:
            raise UserError("train.average_checkpoints and train.ema_decay: two ways to average; set one of them to 0")


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    """How text is generated from the trained model."""

    beam_size: int = 1  # 1: greedy, or sampling where temperature > 0
    length_penalty: float = 0.6  # alpha of ((5 + |y|) / 6)^alpha
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    max_extra: int = 50  # a translation ends at source length + so many tokens
    batch_size: int = 64

    def __post_init__(self):
        _at_least("decoding", self, 1, "beam_size", "max_extra", "batch_size")
        _at_least("decoding", self, 0, "temperature", "top_k", "length_penalty")
        if self.beam_size > 1 and self.temperature:
            raise UserError(
                "decoding.beam_size and decoding.temperature: beam search does not sample; set one of them back"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"decoding.top_p: {self.top_p} must lie in (0, 1]")


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
    platform: str = "auto"  # auto | cpu | gpu | tpu | accelerator: training anywhere else is refused

    def __post_init__(self):
        _one_of("platform", self.platform, ("auto", "cpu", "gpu", "tpu", "accelerator"))
        if self.data.length > self.model.max_length:
            raise UserError(
                f"data.length: {self.data.length} is longer than model.max_length = {self.model.max_length}"
            )
        if self.data.batch_size % self.train.accumulate:
            raise UserError(
                f"train.accumulate: {self.train.accumulate} does not divide data.batch_size = {self.data.batch_size}"
            )
        if self.model.pad_id != 0:
            raise UserError(f"model.pad_id: {self.model.pad_id}, but the tokenizer's padding is 0; leave it at 0")
        objective, families = self.data.objective, {"seq2seq": "encoder_decoder", "causal_lm": "decoder"}
        _one_of("data.objective", objective, families)
        if self.model.family != families[objective]:
            raise UserError(
                f"data.objective: {objective!r} trains a model of family {families[objective]!r}, but model.family = {self.model.family!r}"
            )
