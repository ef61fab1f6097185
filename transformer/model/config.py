"""ModelConfig: one frozen dataclass that defines a model. It is validated when it is built."""

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from flax.core import FrozenDict

from transformer.checks import Choice, strict
from transformer.limits import POSITIVE, Count, NonNegative, Positive, Rate, Size, at_least, at_most
from transformer.model import positions, special_tokens
from transformer.model.config_checks import EFFECTS, check, mixer_reads
from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward
from transformer.model.mixers.base import MIXERS, SHARED_FIELDS, SOURCE_MIXERS, Mixer
from transformer.model.modules import Norm
from transformer.model.parametrizations.base import NONE, PARAMETRIZATIONS
from transformer.model.placements.base import PLACEMENTS, Placement

_Cap = Annotated[float, at_least(0), at_most(10**9, "above it, nothing is capped")]
_Dropout = Annotated[Rate, at_most(0.9999, "almost nothing would be kept")]


@strict("model", EFFECTS)
class ModelConfig:
    """The config of a model of any family. Field names follow the papers."""

    family: Literal["encoder", "decoder", "encoder_decoder"]
    vocab_size: Size  # number of token ids
    d_model: Size = 512  # width of the residual stream
    d_ff: Count = 0  # width of the feed-forward; 0: 4 d_model
    num_heads: Size = 8  # number of query heads
    num_kv_heads: Count = 0  # key/value heads; 0: num_heads; 1: multi-query; others: grouped-query
    d_head: Count = 0  # size of each head's queries and keys; 0: d_model / num_heads
    d_value: Count = 0  # size of each head's values; 0: d_head
    num_encoder_layers: int = 6  # layers of the encoder
    num_decoder_layers: int = 6  # layers of the decoder
    max_length: Size = 512  # longest source or target sequence, in tokens
    # encoder_decoder: the encoder's own sizes, as dict(d_ff=512), or its layer_pattern of windows
    encoder: FrozenDict = NONE
    d_embedding: Count = 0  # embedding width, projected to d_model (ALBERT, OPT-350m); 0: d_model
    token_types: Count = 0  # number of token types (BERT has two), each with an embedding; 0: none

    mixer: Choice = "attention"  # a token mixer of model/mixers/, or dict(name=..., options)
    # A scheme of model/positions/ (docs/position_schemes.md), or dict(name=..., options).
    position: Choice = "sinusoidal"
    # A scheme of distances between target and source, in each cross-attention; none: no positions.
    cross_position: Choice = "none"
    # Train at sorted random positions below this bound (Ruoss et al. 2023). 0: at 0, 1, 2, ...
    random_positions: Count = 0
    # overrides of mixer, position, window, feed_forward and norm_placement for layers in turn
    layer_pattern: tuple[FrozenDict, ...] = ()
    # pre | post | peri | res_post | deepnorm | none | rezero, a topology such as mhc or resi_dual
    # (docs/placements.md), or dict(name=..., parts)
    norm_placement: Choice = "pre"
    norm: str = "layernorm"  # layernorm | detach_norm | rmsnorm | dynamic_tanh
    norm_gain: bool = True  # norms have a learned gain
    norm_offset: bool = True  # norms have a learned offset (not rmsnorm)
    # The gain is 1 + w; w starts at 0, and weight decay pulls it to 0 (Gemma).
    norm_zero_centered: bool = False
    norm_epsilon: Positive = 1e-6  # added to the variance (layernorm) or mean square (rmsnorm)
    embedding_norm: bool = False  # normalize the sum of embeddings and positions
    first_norm: bool = True  # False: the first sublayer of a stack has no in_norm (ModernBERT)
    parallel: bool = False  # x + attention(norm(x)) + ff(norm(x)) in each layer (GPT-J, GPT-NeoX)

    # dense | none, or dict(name="experts", num_experts=..., top_k=..., capacity_factor=...)
    feed_forward: Choice = "dense"
    activation: str = "relu"  # relu | gelu | gelu_tanh | quick_gelu | silu | relu_squared | linear
    glu: bool = False  # a gated feed-forward: act(x W_gate) * (x W_in) before the output matrix
    # c in act(min(g, c)) * (clip(h, -c, c) + 1); g = x W_gate and h = x W_in (GPT-OSS). 0: off
    glu_limit: _Cap = 0.0
    use_bias: bool = True  # biases in all projections, unless the next two fields override it
    attention_bias: bool | None = None  # biases in attention's four projections; None: use_bias
    qkv_bias: bool | None = None  # biases of queries, keys, values (Qwen 2); None: attention_bias
    qk_norm: bool = False  # normalize each head's query and key (Henry et al. 2020; Qwen 3)
    qk_norm_joint: bool = False  # qk_norm: one norm for all heads of a token (OLMo 2)
    v_norm: bool = False  # normalize each head's value (HybridNorm; Zhuo et al. 2025)
    # dot: q . k | bilinear: q M k with a matrix for each head, initially the identity (Luong et al.
    # 2015) | additive: v . tanh(q + k) with a vector for each head (Bahdanau et al. 2015).
    attention_score: Literal["dot", "bilinear", "additive"] = "dot"
    # multiplies query-key products; None: 1 / sqrt(d_head)
    attention_scale: Annotated[float | None, POSITIVE] = None
    # Divide the queries of self-attention by the layer's number, from 1 on (an option of GPT-2).
    attention_layer_scale: bool = False
    attention_soft_cap: _Cap = 0.0  # c in c tanh(logits / c), for attention (Gemma 2); 0: off
    # Added to logits of masked keys, such as -1e9, in backend "reference". 0: weights of exactly 0.
    attention_mask_value: float = 0.0
    # A learned logit per head that takes attention weight without contributing a value (GPT-OSS).
    attention_sink: bool = False
    # elementwise | headwise: multiply each head's output by sigmoid(x W) (Qiu et al. 2025).
    attention_gate: Literal["", "elementwise", "headwise"] = ""
    # fixed | learned: average each value with the first layer's, with weights of 1/2, or weights
    # learned from 1/2 (ResFormer; Zhou et al. 2024).
    value_residual: Literal["", "fixed", "learned"] = ""
    # Canon layers at some of the places "ABCD" (Allen-Zhu 2025; places: model/convolution.py)
    canon: str = ""
    # Project the concatenated outputs of the heads with W_O. Without it, their size is d_model.
    attention_out: bool = True
    # A decoder's tokens attend to no later token. False: to all, including the one they predict.
    causal: bool = True
    # In a decoder, tokens of a prefix attend to each other in both directions (Raffel et al. 2020).
    prefix_lm: bool = False
    window: Count = 0  # attend to keys fewer than this many positions away; 0: to all keys
    # auto | reference | blockwise | ring | flash (TPU, GPU). A backend that does not support the
    # inputs is replaced by another, and the reason is recorded.
    attention_backend: str = "auto"

    tie_embeddings: bool = True  # the unembedding is the (target) embedding table, transposed
    share_embeddings: bool = True  # encoder_decoder: source and target share one embedding table
    logit_bias: bool = False  # the unembedding has a bias
    logit_scale: Positive = 1.0  # multiplies the last hidden state (T5: d_model^-0.5)
    logit_soft_cap: _Cap = 0.0  # c in c tanh(logits / c), for the vocabulary (Gemma 2); 0: off
    # Apply norm(act(h W + b)) before the unembedding (BERT's masked-language-model head).
    head_transform: bool = False
    # Compute vocabulary logits. Optional in encoders, and in decoders with labels or a pooler.
    lm_head: bool = True
    # none | span | cls | mean | last: pooling for labels. none: one label per token; span: for each
    # token, a logit of being the first and one of being the last of a span (extractive_qa).
    pooling: Literal["none", "span", "cls", "mean", "last"] = "none"
    pooler: bool = False  # apply act(h W + b) to the pooled hidden state (BERT)
    pooler_activation: Literal["tanh", "gelu"] = "tanh"  # act of the pooler (DeBERTa: gelu)
    num_labels: Count = 0  # outputs of the classifier; 0: no classifier
    label_bias: bool = True  # the classifier has a bias
    embedding_scale: bool = False  # multiply embeddings by sqrt(d_model)

    dropout: _Dropout = 0.0  # rate on sublayers' outputs and on the sum of embeddings and positions
    attention_dropout: _Dropout = 0.0  # dropout rate of the attention weights
    activation_dropout: _Dropout = 0.0  # dropout rate inside the feed-forward

    initializer: str = "xavier_uniform"  # xavier_uniform | lecun_normal | normal
    init_std: Positive = 0.02  # standard deviation of the initializer "normal"
    embedding_init_std: NonNegative = 0.0  # standard deviation of embeddings; 0: 1 / sqrt(d_model)
    # Divide the initial W_O and feed-forward output matrix by sqrt(number of sublayers) (GPT-2).
    residual_init_scale: bool = False
    # How initial values, learning rates and multipliers depend on the model's size: standard | mup
    # | completep, or dict(name=..., base=dict(d_model=...)) (docs/parametrizations.md).
    parametrization: Choice = "standard"

    scan_layers: bool = True  # compile one layer and scan over layers; False: unroll them
    pipeline_microbatches: Count = 0  # micro-batches per batch over mesh.stage; 0: one per stage
    # Passes of a micro-batch through all stages. Layers are stacked [rounds, layers / rounds].
    pipeline_rounds: Size = 1
    # none: keep all activations; dots: keep products with weight matrices; full: keep only each
    # layer's input. The backward pass recomputes the rest.
    remat: Literal["none", "dots", "full"] = "none"
    dtype: Literal["float32", "bfloat16"] = "float32"  # type of activations
    # type of parameters and optimizer state
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # Special token that fills a sequence after its end. None, here and below: the vocabulary has no
    # such token. Special tokens never affect what the model computes (special_tokens.py).
    pad_id: int | None = None
    bos_id: int | None = None  # begins a text, or a source (BART)
    eos_id: int | tuple[int, ...] | None = None  # ends a text; several: any of them (Llama 3.1)
    decoder_start_id: int | None = None  # encoder_decoder: the first input token of the decoder

    def __post_init__(self):
        check(self)
        self._set("eos_id", special_tokens.checked_ends(self))

    def _set(self, field: str, value) -> None:
        object.__setattr__(self, field, value)

    @property
    def resolved(self) -> dict:
        """Values that fields without effect may have besides their defaults."""
        layers = {f"num_{s}_layers": 0 for s in ("encoder", "decoder") if s not in self.sides}
        heads = {} if mixer_reads("num_kv_heads")(self) else {"num_kv_heads": self.num_heads}
        return layers | heads

    @property
    def position_schemes(self) -> tuple[positions.Position, ...]:
        """The distinct position schemes of all layers."""
        specs = dict.fromkeys(entry.get("position", self.position) for entry in self.used_pattern)
        return tuple(map(positions.build, specs))

    @property
    def position_table(self) -> str:
        """The name of a position scheme that has a parameter per position; "" if there is none."""
        return next((scheme.name for scheme in self.position_schemes if scheme.bounded), "")

    @property
    def last_position(self) -> int | None:
        """The last position that every position scheme supports; None if there is no limit."""
        ends = any(scheme.ends for scheme in self.position_schemes)
        return max(self.max_length, self.random_positions) - 1 if ends else None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a text: none, one or several."""
        return special_tokens.as_tuple(self.eos_id)

    @property
    def sides(self) -> tuple[str, ...]:
        """The stacks of this family: "encoder", "decoder" or both."""
        return tuple(side for side in ("encoder", "decoder") if side in self.family)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has both an encoder and a decoder."""
        return len(self.sides) == 2

    # Defaults that depend on other fields are resolved on access, so they follow replaced fields.

    @property
    def head_size(self) -> int:
        """The head size of queries and keys."""
        return self.d_head or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads."""
        return (mixer_reads("num_kv_heads")(self) and self.num_kv_heads) or self.num_heads

    @property
    def ff_size(self) -> int:
        """The width of the feed-forward."""
        return self.d_ff or 4 * self.d_model

    @property
    def value_size(self) -> int:
        """The head size of values."""
        return self.d_value or self.head_size

    def key_size(self, side: str) -> int:
        """Returns the size of queries and keys in attention; a position scheme may increase it."""
        return positions.build(self.layer_position).key_size(self.stack_facts(side))

    @property
    def embedding_size(self) -> int:
        """The width of the embedding table."""
        return self.d_embedding or self.d_model

    @property
    def attention_has_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.use_bias if self.attention_bias is None else self.attention_bias

    @property
    def qkv_has_bias(self) -> bool:
        """Whether the projections of queries, keys and values have biases."""
        return self.attention_has_bias if self.qkv_bias is None else self.qkv_bias

    @property
    def token_mixer(self) -> Mixer:
        """The token mixer that `mixer` selects, with its options."""
        return MIXERS.build(self.mixer)

    @property
    def feed_forward_kind(self) -> FeedForward:
        """The feed-forward that `feed_forward` selects, with its options."""
        return FEED_FORWARDS.build(self.feed_forward)

    @property
    def base(self) -> "ModelConfig":
        """The config of the model at whose sizes hyperparameters are stated. It is not checked."""
        return PARAMETRIZATIONS.build(self.parametrization).base_of(self)

    def m_L(self, side: str) -> float:
        """Returns the number of layers of a stack, relative to the base."""
        return self.num_layers(side) / self.base.num_layers(side)

    def num_layers(self, side: str) -> int:
        """Returns the number of layers of a stack; 0 if the family does not have it."""
        return getattr(self, f"num_{side}_layers") if side in self.sides else 0

    def stack(self, side: str) -> "ModelConfig":
        """Returns the config of a stack: the encoder's has the fields that `encoder` sets."""
        has_own = side == "encoder" and self.encoder
        return self.part(encoder=NONE, **self.encoder) if has_own else self

    def layers(self, side: str) -> tuple["ModelConfig", ...]:
        """Returns the config of each layer, with `layer_pattern` and `first_norm` applied."""
        stack = self.stack(side)
        pattern: Sequence[Mapping] = stack.layer_pattern or ({},)
        resolve = lambda i: {"layer_pattern": (), "first_norm": self.first_norm or i > 0}
        entry = lambda i: dict(pattern[i % len(pattern)])
        return tuple(stack.part(**resolve(i) | entry(i)) for i in range(self.num_layers(side)))

    def part(self, **fields) -> "ModelConfig":
        """Returns a copy for a part of this model, with `fields` replaced. It is not checked."""
        config = copy.copy(self)
        for field, value in fields.items():
            config._set(field, value)
        return config

    @property
    def used_pattern(self) -> tuple[FrozenDict, ...]:
        """The entries of `layer_pattern` that some layer uses; one empty entry if it is empty."""
        return self.layer_pattern[: max(map(self.num_layers, self.sides))] or (FrozenDict(),)

    def period(self, side: str) -> int:
        """Returns the smallest divisor of a stack's depth after which its layers repeat."""
        layers = self.layers(side)
        repeats = lambda p: len(layers) % p == 0 and layers[:-p] == layers[p:]
        return next(filter(repeats, range(1, len(layers) + 1)))

    @property
    def position_acts(self) -> bool:
        """For a layer's config: whether its position scheme acts on its mixer, or has no hooks. A
        mixer that processes tokens in order does not need a position scheme."""
        scheme = positions.build(self.position)
        return not scheme.hooks or bool(scheme.hooks & self.token_mixer.hooks)

    @property
    def layer_position(self) -> Choice:
        """For a layer's config: the position scheme that acts on its mixer."""
        return self.position if self.position_acts else "none"

    def placement(self, side: str) -> Placement:
        """Returns the placement of norms in one layer of a stack. The config is a layer's, or the
        model's for layers whose `layer_pattern` entry does not set `norm_placement`."""
        depths = {f"{s}_layers": self.base.num_layers(s) for s in ("encoder", "decoder")}
        placement = PLACEMENTS.build(self.norm_placement).in_stack(side, **depths)
        scale = PARAMETRIZATIONS.build(self.parametrization).branch_scale(self.m_L(side))
        return dataclasses.replace(placement, branch_scale=scale * placement.branch_scale)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The distinct placements of all layers."""
        specs = [entry.get("norm_placement", self.norm_placement) for entry in self.used_pattern]
        each = (self.part(norm_placement=spec).placement(s) for spec in specs for s in self.sides)
        return tuple(dict.fromkeys(each))

    def mixers(self, side: str) -> dict[str, Mixer]:
        """For a layer's config: the mixers of its sublayers, by their part of a LayerState. "mixer"
        reads the tokens of the stack. "source" reads the encoder's output; it is missing if there
        is no encoder or if "mixer" already reads the encoder."""
        mixers, source = {"mixer": self.token_mixer}, self.token_mixer.source
        if side == "decoder" and self.is_encoder_decoder and source in SOURCE_MIXERS:
            mixers["source"] = SOURCE_MIXERS.build(source)
        return mixers

    def mixers_of(self, *sides: str, unset: str = "") -> tuple[Mixer, ...]:
        """Returns the distinct mixers and cross-attentions of layers whose entry omits `unset`."""
        layers = (
            self.part(mixer=entry.get("mixer", self.mixer)).mixers(side)
            for side in sides or self.sides
            for entry in self.used_pattern[: self.num_layers(side)]
            if unset not in entry
        )
        return tuple(dict.fromkeys(mixer for layer in layers for mixer in layer.values()))

    def read_by(self, mixer: Mixer) -> "ModelConfig":
        """For a layer's config: the config without the SHARED_FIELDS that a mixer does not read."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return self.part(**{name: defaults[name] for name in {*SHARED_FIELDS} - mixer.fields})

    def num_sublayers(self, side: str) -> int:
        """For a layer's config: the number of its sublayers, in sequence or parallel."""
        return len(self.mixers(side)) + self.feed_forward_kind.exists

    def observes(self, what: str) -> bool:
        """Returns whether some mixer or cross-attention can record `what` (modules.py)."""
        return any(what in mixer.observes for mixer in self.mixers_of())

    def last_placement(self, side: str) -> Placement:
        """Returns the placement of the last layer, which decides how the stack ends."""
        return self.layers(side)[-1].placement(side)

    def residuals(self, side: str) -> int:
        """Returns the number of residual connections of a stack. Parallel sublayers share one."""
        return sum(layer.residuals_of_layer(side) for layer in self.layers(side))

    def residuals_of_layer(self, side: str) -> int:
        """For a layer's config: the number of its residual connections."""
        return 1 if self.parallel else self.num_sublayers(side)

    def stack_facts(self, side: str) -> positions.StackFacts:
        """Returns the facts about a layer that a position scheme may depend on."""
        facts = positions.StackFacts(
            d_model=self.d_model, num_heads=self.num_heads, d_head=self.head_size,
            d_value=self.value_size, max_length=max(self.max_length, self.random_positions),
            causal=side == "decoder" and self.causal and not self.prefix_lm,
            param_dtype=self.param_dtype, norm_epsilon=self.norm_epsilon,
            m_D=self.d_model / self.base.d_model,
        )  # fmt: skip
        return self.token_mixer.facts(self, facts)

    @property
    def norm_module(self):
        """The configured norm: a partial of `Norm`, to be called with a `name`."""
        return functools.partial(Norm, self)
