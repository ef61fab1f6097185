"""The three model families, built from the same modules. `features` returns the input of the
language-model head, computed from the last hidden state, and the head; `__call__` the logits.
Shape suffixes: B batch, S source, T target length, D d_model, E d_embedding, V vocabulary."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import meta

from transformer.checks import one_of
from transformer.errors import UserError, nearest
from transformer.model.cache import Cache, check_cache, empty_cache
from transformer.model.config import ModelConfig
from transformer.model.embedding import Classifier, Embedding, Head, Unembedding
from transformer.model.inputs import check_same_documents, check_sources, check_token_types, locate
from transformer.model.masks import Tokens
from transformer.model.modules import WATCHED
from transformer.model.roles import initialized, parameter_rules
from transformer.model.stack import Stack

_COLLECTIONS = (*WATCHED, "losses", "intermediates")  # the collections that `apply` may return


class _Family(nn.Module):
    """The base of the three families. `params` is the same everywhere: a nested dict of arrays,
    such as `params["decoder"]["layers"]["feed_forward"]["in"]["kernel"]`. `init`, `load_hf` and
    `load_run` return it; `apply`, `sample`, `beam_search` and `save_hf` take it."""

    config: ModelConfig

    @nn.nowrap
    def init(self, key, *inputs, **options) -> Any:  # type: ignore[override]
        """Initializes the parameters.

            params = model.init(jax.random.key(0), tokens)          # encoder, decoder
            params = model.init(jax.random.key(0), source, target)  # encoder_decoder

        Any tokens of shape [1, 1] are enough. Use `jax.jit(model.init)` for large models.

        Returns:
          A nested dict of arrays of type `config.param_dtype`."""
        return meta.unbox(self.init_with_axes(key, *inputs, **options))

    @nn.nowrap
    def init_with_axes(self, key, *inputs, **options) -> Any:
        """Initializes parameters, boxed with the logical names of their axes, for sharding."""
        params = super().init_with_output(key, *inputs, **options)[1]["params"]
        rules = parameter_rules(type(self), self.config)  # type: ignore[arg-type]
        return initialized(params, rules) if rules else params

    @nn.nowrap
    def init_with_output(self, *inputs, **options):
        """Always raises: its output would lack the multipliers of a parametrization."""
        raise UserError("init_with_output: not supported; call init, and apply with its result")

    @nn.nowrap
    def apply(self, params, *inputs, **options):
        """Runs the model on tokens.

            logits = model.apply(params, tokens)          # encoder, decoder: int[B, T]
            logits = model.apply(params, source, target)  # encoder_decoder: int[B, S], int[B, T]

        Every token is real by default. No token id implies padding, not even `config.pad_id`: for a
        padded batch, pass `padding_mask` or `segment_ids`. No token attends to padding, and the
        outputs at padding have no meaning. Options of shape [1, T] are broadcast along the batch.

        Args:
          params: from `model.init` or `load_hf`; arrays of JAX or NumPy.
          *inputs: token ids in [0, vocab_size), at most `max_length` per sequence. The target of an
            encoder_decoder is its decoder's input: `config.decoder_start_id`, then the text.
          padding_mask: bool[B, T], True at real tokens (like the attention_mask of Transformers;
            PyTorch's key_padding_mask is the opposite). Default: all True.
          segment_ids: int[B, T], the document of each token, counted from 1; 0 is padding. Tokens
            attend only to tokens of their document. It replaces `padding_mask`. Default: all 1.
          positions: int[B, T], of each token in its document. Pass them for packed sequences and
            for padding on the left. Default: 0, 1, 2, ... along the sequence.
          source_padding_mask, source_segment_ids, source_positions: the same for the source of an
            encoder_decoder, [B, S]. Document n of the target attends to document n of the source.
          prefix_mask: bool[B, T], for `prefix_lm`: True at tokens that attend to each other.
          token_types: int[B, T], for encoders with `token_types`. Default: all 0.
          order: how the tokens are arranged (see `Tokens`). Default: unknown, given positions.
          deterministic: False enables dropout and `random_positions`. Default: True.
          dropout_rate: replaces `config.dropout`; may be traced. Default: the config's rate.
          rngs: {"dropout": key}, required with `deterministic=False`.
          method: another method: "classify" (labels), "hidden" or "features" (the last hidden
            state), "encode", "decode" (with a cache). Default: `__call__`.
          mutable: collections to record: "sizes", "streams", "heads", "maps" (model/modules.py).
          capture_intermediates: as in `flax.linen.Module.apply`.

        Returns:
          float32[B, T, V], the logits of the next token (in an encoder, of the token itself).
          Without `lm_head`, the result of "classify". With `mutable`, (this, collections).

        Raises:
          UserError (a ValueError): an option or a collection does not exist, an input has the wrong
            rank, shape or type, or a sequence is longer than `max_length`. Outside `jax.jit`, also
            for tokens, masks, segments, positions and types whose values are out of range."""
        self._check_arguments(params, options)
        # NumPy arrays cannot be indexed by traced arrays.
        as_array = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
        return super().apply({"params": jax.tree.map(as_array, params)}, *inputs, **options)

    @nn.nowrap
    def _check_arguments(self, params, options) -> None:
        if "params" in params:
            problem = "the parameters are in another dict, under 'params'"
            raise UserError(f"params: {problem}; pass params['params']")
        if "embedding" not in params:
            raise UserError("params: there is no 'embedding'; pass what `init` returned")
        mutable = options.get("mutable")
        names = [mutable] if isinstance(mutable, str) else mutable
        for name in names if isinstance(names, (list, tuple, set)) else ():
            one_of("mutable", name, _COLLECTIONS)
        if options.get("method") in (None, "features", "hidden", "classify"):
            known = _options(self.config.family)
            for name in sorted(options.keys() - known - _FLAX_OPTIONS):
                raise UserError(f"apply: no option {name!r}; {nearest(name, known)}")

    @nn.nowrap
    def empty_cache(self, batch: int, slots: int) -> Cache:
        """Returns the initial cache of `decode`, with `slots` tokens per sequence."""
        return empty_cache(self.config, batch, slots)

    def __call__(self, *tokens: jax.Array, **options) -> jax.Array:
        """Returns the logits, float32[B, T, V]. Tokens and options as for `features`."""
        h_BxTxD, head = self.features(*tokens, **options)
        return head(h_BxTxD)

    def read(self, h_BxTxD: jax.Array) -> tuple[jax.Array, Head]:
        """Returns the same as `features`, given the last hidden state."""
        return self.unembedding(h_BxTxD, self.target_embedding.table_VxE)


class _OneStack(_Family):
    """A model with one stack, which predicts tokens (`lm_head`), labels (`num_labels`), or both."""

    def setup(self):
        cfg = self.config
        self.embedding = self.target_embedding = Embedding(cfg)
        setattr(self, self.side, Stack(cfg, self.side))
        if cfg.lm_head:
            self.unembedding = Unembedding(cfg)
        if cfg.pooler or cfg.num_labels or not cfg.lm_head:
            self.classifier = Classifier(cfg)

    def hidden(
        self, tokens_BxT, *, token_types=None, deterministic=True, dropout_rate=None, **options
    ) -> tuple[jax.Array, Tokens]:
        """Returns the last hidden state, [B, T, D], and its tokens. Options as for `apply`."""
        tokens = locate(self.config, tokens_BxT, **options)
        check_token_types(self.config, tokens_BxT, token_types)
        stack, x_BxTxD = getattr(self, self.side), self.embedding(tokens_BxT, token_types)
        h_BxTxD, _ = stack(x_BxTxD, tokens, deterministic=deterministic, dropout_rate=dropout_rate)
        return h_BxTxD, tokens

    def features(self, tokens_BxT, **options) -> tuple[jax.Array, Head]:
        """Returns the head's input, [B, T, E], and the head. Options as for `hidden`."""
        return self.read(self.hidden(tokens_BxT, **options)[0])

    def classify(self, tokens_BxT, **options) -> jax.Array:
        """Returns label logits, float32[B, num_labels], or else h_pooled; [B, T, ...] unpooled."""
        return self.classifier(*self.hidden(tokens_BxT, **options))

    def both(self, tokens_BxT, **options) -> tuple[tuple[jax.Array, Head], jax.Array]:
        """Returns the results of `features` and `classify`, computed in one pass."""
        h_BxTxD, tokens = self.hidden(tokens_BxT, **options)
        return self.read(h_BxTxD), self.classifier(h_BxTxD, tokens)

    def __call__(self, tokens_BxT, **options) -> jax.Array:  # type: ignore[override]
        """Returns the logits, float32[B, T, V], or those of `classify`. Options as for `hidden`."""
        if not self.config.lm_head:
            return self.classify(tokens_BxT, **options)
        if self.is_initializing() and hasattr(self, "classifier"):
            self.classify(tokens_BxT, **options)
        return super().__call__(tokens_BxT, **options)


class Encoder(_OneStack):
    """An encoder-only model: every token attends to all tokens."""

    side = "encoder"


class Decoder(_OneStack):
    """A decoder-only model: a token attends to itself and to earlier tokens."""

    side = "decoder"

    def decode(
        self, tokens_BxT, cache: Cache, *, last_only=False, **options
    ) -> tuple[jax.Array, Cache]:
        """Returns the logits of tokens that follow those in the cache, and the updated cache. With
        `last_only`, only the logits of the last token are computed."""
        tokens = locate(self.config, tokens_BxT, before=cache.tokens, **options)
        check_cache(self.config, cache, tokens)
        h_BxTxD, cache = self.decoder(self.embedding(tokens_BxT), tokens, cache=cache)
        h_BxTxE, head = self.read(h_BxTxD[:, -1:] if last_only else h_BxTxD)
        return head(h_BxTxE), cache


class EncoderDecoder(_Family):
    """An encoder-decoder model: the decoder attends to its tokens and to the encoder's output."""

    def setup(self):
        cfg, own = self.config, self.config.stack("encoder")
        self.embedding = Embedding(own)
        self.target_embedding = self.embedding if cfg.share_embeddings else Embedding(cfg)
        self.encoder, self.decoder = Stack(own, "encoder"), Stack(cfg, "decoder")
        self.unembedding = Unembedding(cfg)

    def features(
        self, source_BxS, target_BxT, *, source_positions=None, source_segment_ids=None,
        source_padding_mask=None, deterministic=True, dropout_rate=None, source_order="", **options,
    ) -> tuple[jax.Array, Head]:  # fmt: skip
        """Returns the head's input, [B, T, E], and the head. `options` are those of the target."""
        check_same_documents(options.get("segment_ids"), source_segment_ids)
        dropout = {"deterministic": deterministic, "dropout_rate": dropout_rate}
        of_source = {"positions": source_positions, "segment_ids": source_segment_ids}
        of_source |= {"padding_mask": source_padding_mask, "order": source_order}
        encoded = self.encode(source_BxS, **of_source, **dropout)
        return self.read(self._decoder(target_BxT, encoded, None, **dropout, **options)[0])

    def encode(
        self, source_BxS, *, deterministic=True, dropout_rate=None, **options
    ) -> tuple[jax.Array, Tokens]:
        """Returns the encoder's output, [B, S, D], and its tokens."""
        tokens = locate(self.config, source_BxS, "source", **options)
        dropout = {"deterministic": deterministic, "dropout_rate": dropout_rate}
        return self.encoder(self.embedding(source_BxS), tokens, **dropout)[0], tokens

    def decode(
        self, target_BxT, cache: Cache, encoded_BxSxD: jax.Array | None, encoded_tokens: Tokens, *,
        last_only=False, **options,
    ) -> tuple[jax.Array, Cache]:  # fmt: skip
        """Returns the logits of tokens that follow those in the cache, and the updated cache. With
        `last_only`, only the logits of the last token are computed. The first call takes the
        encoder's output and stores its keys and values in the cache; later calls pass None."""
        encoded = encoded_BxSxD, encoded_tokens
        h_BxTxD, cache = self._decoder(target_BxT, encoded, cache, deterministic=True, **options)
        h_BxTxE, head = self.read(h_BxTxD[:, -1:] if last_only else h_BxTxD)
        return head(h_BxTxE), cache

    def _decoder(self, target_BxT, encoded, cache, deterministic, dropout_rate=None, **options):
        (encoded_BxSxD, encoded_tokens), before = encoded, None if cache is None else cache.tokens
        tokens = locate(self.config, target_BxT, "target", before=before, **options)
        check_sources(len(encoded_tokens.segments_BxT), len(target_BxT), shared=cache is not None)
        if cache is not None:
            check_cache(self.config, cache, tokens, encoded_BxSxD)
        x_BxTxD = self.target_embedding(target_BxT)
        return self.decoder(x_BxTxD, tokens, *encoded, cache, deterministic, dropout_rate)


FAMILIES = {"encoder": Encoder, "decoder": Decoder, "encoder_decoder": EncoderDecoder}
_FLAX_OPTIONS = {"rngs", "method", "mutable", "capture_intermediates"}


@functools.cache
def _options(family: str) -> frozenset[str]:
    """Returns the names of the options of `apply`."""
    model: Any = FAMILIES[family]
    functions = (getattr(model, "hidden", model.features), locate)
    parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) - {"before"}


def build_model(config: ModelConfig) -> nn.Module:
    """Returns the model of a config, a Linen module.

        model = build_model(ModelConfig(family="decoder", vocab_size=8192))
        params = model.init(jax.random.key(0), tokens)
        logits = model.apply(params, tokens)

    An encoder_decoder takes source and target in place of tokens. `help(model.apply)` describes
    padding, packing, dropout and other options. Attention maps and other internals are recorded in
    collections: `logits, seen = model.apply(params, tokens, mutable=["maps"])`."""
    return FAMILIES[config.family](config)


@functools.lru_cache(maxsize=256)
def abstract_params(config: ModelConfig) -> Any:
    """Returns the shapes and types of the parameters, without allocating them."""
    tokens = (jax.ShapeDtypeStruct((1, 1), jnp.int32),) * len(config.sides)
    return jax.eval_shape(build_model(config).init, jax.random.key(0), *tokens)
