"""What a model is: one frozen dataclass, validated when it is built."""

import copy
import dataclasses
import functools

from flax.core import FrozenDict

from transformer.checks import Choice, strict
from transformer.model import positions, special_tokens
from transformer.model.config_checks import check
from transformer.model.effects import EFFECTS, mixer_reads
from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward
from transformer.model.mixers.base import MIXERS, Mixer
from transformer.model.norms import Norm
from transformer.model.placements import PLACEMENTS, Placement


@strict("model", EFFECTS)
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One model of any family. Field names are the papers'."""

    family: str  # encoder | decoder | encoder_decoder
    vocab_size: int
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    num_kv_heads: int = 0  # 0: as many as num_heads; 1: multi-query; between: grouped-query
    d_head: int = 0  # of queries and keys; 0: d_model / num_heads
    d_value: int = 0  # of values; 0: d_head
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    max_length: int = 512  # longest sequence, in tokens, on either side
    d_embedding: int = (
        0  # width of the embedding table; 0: d_model; else projected (ALBERT, OPT-350m)
    )
    token_types: int = (
        0  # kinds of tokens (BERT's two sentences), each with an embedding of its own; 0: none
    )

    mixer: Choice = "attention"  # a token mixer of model/mixers/, or dict(name=..., options)
    position: Choice = "sinusoidal"  # a scheme of model/positions/ (README has a table), or dict(name=..., options)
    random_positions: int = (
        0  # train at positions drawn, in order, from so many (Ruoss et al. 2023); 0: 0, 1, 2, ...
    )
    layer_pattern: tuple[
        FrozenDict, ...
    ] = ()  # mixer, position, window, feed_forward and norm_placement of layer 0, 1, ..., and so on from the first again
    norm_placement: Choice = (
        "pre"  # pre | post | peri | res_post | deepnorm | none | rezero, or dict(name=..., parts)
    )
    norm: str = "layernorm"  # layernorm | rmsnorm
    norm_gain: bool = True
    norm_offset: bool = True  # layernorm only
    norm_zero_centered: bool = False  # the gain is 1 + w, w starting (and decaying) at 0 (Gemma)
    norm_epsilon: float = 1e-6
    embedding_norm: bool = False  # normalise the sum of embeddings and positions
    first_norm: bool = True  # False: the first sublayer of a stack reads its input as it is, without in_norm (ModernBERT)
    parallel: bool = (
        False  # x + attention(norm(x)) + ff(norm(x)): sublayers side by side (GPT-J, GPT-NeoX)
    )

    feed_forward: Choice = (
        "dense"  # dense, or dict(name="experts", num_experts=..., top_k=..., capacity_factor=...)
    )
    activation: str = "relu"  # relu | gelu | gelu_tanh | silu
    glu: bool = False  # act(x W_gate) * (x W_in)
    use_bias: bool = True  # in every projection, but for what the next two say
    attention_bias: bool | None = None  # in the four projections of attention; None: as use_bias
    qkv_bias: bool | None = (
        None  # in those of queries, keys and values (Qwen 2); None: as attention_bias
    )
    qk_norm: bool = False  # normalise each head's query and key (Henry et al. 2020; Qwen 3)
    attention_scale: float | None = None  # None: 1 / sqrt(d_head)
    attention_soft_cap: float = 0.0  # c tanh(logits / c) (Gemma 2); 0: off
    attention_sink: bool = (
        False  # a learned logit per head that attention may go to instead of a token (GPT-OSS)
    )
    causal: bool = True  # decoder: a token sees itself and what comes before; False: what comes after, too, which is what it is asked for
    prefix_lm: bool = (
        False  # decoder: the tokens of a prefix see each other both ways (Raffel et al. 2020)
    )
    window: int = 0  # keys fewer than so many positions away; 0: all
    attention_backend: str = "auto"  # auto | reference | blockwise | ring | splash (TPU) | cudnn (GPU); one that cannot serve falls back, and says so

    tie_embeddings: bool = True  # the unembedding is the (target) embedding, transposed
    share_embeddings: bool = True  # encoder_decoder: source and target read one embedding
    logit_bias: bool = False
    logit_scale: float = 1.0  # multiplies the last hidden state (T5: d_model^-0.5)
    logit_soft_cap: float = 0.0  # c tanh(logits / c) (Gemma 2); 0: off
    head_transform: bool = (
        False  # act(h W + b), normed, before the unembedding (BERT's masked-language-model head)
    )
    lm_head: bool = True  # logits over the vocabulary; an encoder or decoder may do without
    pooling: str = "none"  # none | cls | mean | last: from a row's hidden states to one, for labels; none: a label a token
    pooler: bool = False  # tanh(h W + b) of what is pooled (BERT)
    num_labels: int = 0  # a classifier; 0: none
    embedding_scale: bool = False  # multiply embeddings by sqrt(d_model)

    dropout: float = 0.0  # on every sublayer's output and on the sum of embeddings and positions
    attention_dropout: float = 0.0  # on the attention weights
    activation_dropout: float = 0.0  # inside the feed-forward

    initializer: str = "xavier_uniform"  # xavier_uniform | lecun_normal | normal
    init_std: float = 0.02  # of "normal"
    embedding_init_std: float = 0.0  # 0: 1 / sqrt(d_model)
    residual_init_scale: bool = (
        False  # W_O and the feed-forward's output start 1 / sqrt(sublayers) smaller (GPT-2)
    )

    scan_layers: bool = True  # one compiled layer, looped; False: unrolled
    pipeline_microbatches: int = (
        0  # parts of a batch that follow each other through mesh.stage; 0: as many as stages
    )
    pipeline_rounds: int = (
        1  # how often each goes through all stages: layers are stacked [rounds, layers / rounds]
    )
    remat: str = "none"  # none | full | dots: what the backward pass computes again
    dtype: str = "float32"  # of activations; parameters and optimizer stay in param_dtype
    param_dtype: str = "float32"
    # The vocabulary's special tokens; None: it has none. What a model computes never depends on them (special_tokens.py).
    pad_id: int | None = None  # fills a sequence after its end
    bos_id: int | None = None  # begins a text, or a source (BART)
    eos_id: int | tuple[int, ...] | None = None  # ends a text; several: any of them (Llama 3.1)
    decoder_start_id: int | None = None  # encoder_decoder: what the decoder reads first

    def __post_init__(self):
        check(self)
        self._set("eos_id", special_tokens.checked(self)["eos_id"])

    def _set(self, field: str, value) -> None:
        """In a frozen dataclass, while it is built."""
        object.__setattr__(self, field, value)

    @property
    def resolved(self) -> dict:
        """What fields without effect may say: there are no layers on one side, or no key/value
        heads apart from the others."""
        absent = {f"num_{s}_layers": 0 for s in ("encoder", "decoder") if s not in self.sides}
        if not mixer_reads("num_kv_heads")(self):
            absent["num_kv_heads"] = self.num_heads
        return absent

    @property
    def position_schemes(self) -> tuple[positions.Position, ...]:
        """Every position scheme that a layer uses."""
        specs = dict.fromkeys(entry.get("position", self.position) for entry in self.used_pattern)
        return tuple(map(positions.build, specs))

    @property
    def has_position_table(self) -> bool:
        """Whether a position scheme has a parameter for each position."""
        return any(scheme.bounded for scheme in self.position_schemes)

    @property
    def last_position(self) -> int | None:
        """The last position that has a meaning; None without such a limit."""
        ends = any(scheme.ends for scheme in self.position_schemes)
        return max(self.max_length, self.random_positions) - 1 if ends else None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a text: none, one or several."""
        return special_tokens.as_tuple(self.eos_id)

    @property
    def sides(self) -> tuple[str, ...]:
        """The stacks of this family."""
        return tuple(side for side in ("encoder", "decoder") if side in self.family)

    @property
    def two_sides(self) -> bool:
        """An encoder and a decoder."""
        return len(self.sides) == 2

    # What follows another field unless it is given is resolved when it is read, so that a replaced field is followed too.

    @property
    def head_size(self) -> int:
        """The head size of queries and keys."""
        return self.d_head or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """How many heads keys and values have."""
        given = self.num_kv_heads if mixer_reads("num_kv_heads")(self) else 0
        return given or self.num_heads

    @property
    def value_size(self) -> int:
        """The head size of values."""
        return self.d_value or self.head_size

    def key_size(self, side: str) -> int:
        """The head size of queries and keys when they meet, which a position scheme may widen."""
        return positions.build(self.position).key_size(self.stack_facts(side))

    @property
    def embedding_size(self) -> int:
        """The width of the embedding table."""
        return self.d_embedding or self.d_model

    @property
    def attention_has_bias(self) -> bool:
        """In its output projection."""
        return self.use_bias if self.attention_bias is None else self.attention_bias

    @property
    def qkv_has_bias(self) -> bool:
        """In the projections of queries, keys and values."""
        return self.attention_has_bias if self.qkv_bias is None else self.qkv_bias

    @property
    def token_mixer(self) -> Mixer:
        """What `mixer` chooses, with its options."""
        return MIXERS.build(self.mixer)

    @property
    def feed_forward_kind(self) -> FeedForward:
        """What `feed_forward` chooses, with its options."""
        return FEED_FORWARDS.build(self.feed_forward)

    def num_layers(self, side: str) -> int:
        """Layers of a stack; 0 where the family does not have it."""
        return getattr(self, f"num_{side}_layers") if side in self.sides else 0

    def layers(self, side: str) -> tuple["ModelConfig", ...]:
        """Each layer's own config: what `layer_pattern` and `first_norm` say of it."""
        pattern = self.layer_pattern or ({},)
        own = lambda i: {"layer_pattern": (), "first_norm": self.first_norm or i > 0}
        return tuple(
            self.part(**own(i) | dict(pattern[i % len(pattern)]))
            for i in range(self.num_layers(side))
        )

    def part(self, **fields) -> "ModelConfig":
        """The config of a part of this model: with fields changed, unchecked, for this one has been."""
        one = copy.copy(self)
        for field, value in fields.items():
            one._set(field, value)
        return one

    @property
    def used_pattern(self) -> tuple[FrozenDict, ...]:
        """The entries of `layer_pattern` that a layer has."""
        return self.layer_pattern[: max(map(self.num_layers, self.sides))] or (FrozenDict(),)

    def period(self, side: str) -> int:
        """After how many layers they repeat: the smallest divisor of their number that does."""
        layers = self.layers(side)
        return next(
            p
            for p in range(1, len(layers) + 1)
            if not len(layers) % p and layers[:-p] == layers[p:]
        )

    @property
    def uses_position(self) -> bool:
        """Of a layer's own config: whether its position scheme acts on it. A mixer that reads tokens in order can do without."""
        scheme = positions.build(self.position)
        return not scheme.hooks or bool(scheme.hooks & self.token_mixer.hooks)

    @property
    def layer_position(self) -> Choice:
        """Of a layer's own config: the position scheme that acts on it."""
        return self.position if self.uses_position else "none"

    def placement(self, side: str) -> Placement:
        """The parts of the residual formula in one layer of a stack; in the model's own config, unless `layer_pattern` differs."""
        depths = {f"{s}_layers": self.num_layers(s) for s in ("encoder", "decoder")}
        return PLACEMENTS.build(self.norm_placement).in_stack(side, **depths)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The parts of the residual formula in every layer, each once."""
        specs = [entry.get("norm_placement", self.norm_placement) for entry in self.used_pattern]
        each = (self.part(norm_placement=spec).placement(s) for spec in specs for s in self.sides)
        return tuple(dict.fromkeys(each))

    @property
    def token_mixers(self) -> tuple[Mixer, ...]:
        """Every mixer that a layer has, each once."""
        return tuple(dict.fromkeys(mixer for side in self.sides for mixer in self.mixers_of(side)))

    def mixers_of(self, side: str) -> tuple[Mixer, ...]:
        """The mixers of a stack, as often as `layer_pattern` has them."""
        specs = [e.get("mixer", self.mixer) for e in self.used_pattern[: self.num_layers(side)]]
        return tuple(map(MIXERS.build, specs))

    @property
    def has_cross_attention(self) -> bool:
        """Whether some layer of a decoder has a cross-attention sublayer."""
        mixers = self.mixers_of("decoder") if self.two_sides else ()
        return any(mixer.source == "cross_attention" for mixer in mixers)

    def observes(self, what: str) -> bool:
        """Whether some layer tells this to those who watch (watch.py)."""
        return self.has_cross_attention or any(
            what in mixer.observes for mixer in self.token_mixers
        )

    def has_final_norm(self, side: str) -> bool:
        """Whether the stack ends in a norm: as the placement of its last layer says."""
        return self.layers(side)[-1].placement(side).final_norm

    def stack_facts(self, side: str) -> positions.StackFacts:
        """What a position scheme may know of a layer that it serves."""
        facts = positions.StackFacts(
            d_model=self.d_model, num_heads=self.num_heads, num_kv_heads=self.kv_heads, d_head=self.head_size,
            d_value=self.value_size, max_length=max(self.max_length, self.random_positions), causal=side == "decoder" and self.causal and not self.prefix_lm, param_dtype=self.param_dtype,
        )  # fmt: skip
        return self.token_mixer.facts(self, facts)

    @property
    def norm_module(self):
        """The configured norm, to be named by whoever uses it."""
        return functools.partial(
            Norm, kind=self.norm, epsilon=self.norm_epsilon, gain=self.norm_gain, zero_centered=self.norm_zero_centered,
            offset=self.norm_offset, param_dtype=self.param_dtype,
        )  # fmt: skip
