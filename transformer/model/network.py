"""The three families: the same parts, wired differently.

Shape suffixes: B batch, S source length, T target length, D d_model, E d_embedding, V vocabulary.

Every family has `features`, the last hidden state (as the head wants it) and the head that turns it into logits, and
`__call__`, the logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.model.cache import Cache, check_room, empty_cache
from transformer.model.config import ModelConfig
from transformer.model.embedding import Embedding, Head, Unembedding
from transformer.model.heads import Classifier
from transformer.model.inputs import check_same_documents, check_token_types, locate
from transformer.model.masks import Tokens
from transformer.model.stack import Stack


class _Family(nn.Module):
    config: ModelConfig

    @nn.nowrap
    def apply(
        self, variables, *inputs, rngs=None, method=None, mutable=False, capture_intermediates=False, **options
    ):  # fmt: skip
        """Runs the model on tokens.

            logits = model.apply(params, tokens)          # encoder, decoder: int[B, T]
            logits = model.apply(params, source, target)  # encoder_decoder: int[B, S], int[B, T]

        Every token is real unless you say otherwise. No token id implies padding, not even `model.config.pad_id`: where a
        batch is padded, pass `padding_mask` or `segment_ids`. Padding is never attended to, by any token; its own outputs
        mean nothing.

        Args:
          variables: {"params": ...}, as `model.init` and `load_hf` return it; arrays of JAX or NumPy.
          *inputs: token ids in [0, vocab_size), at most `max_length` on a side. The target of an encoder_decoder is what its
            decoder reads: the start token (`config.decoder_start_id`), then the text.
          padding_mask: bool[B, T], True where a token is real (as Transformers' attention_mask; PyTorch's
            key_padding_mask is the opposite). Default: all True.
          segment_ids: int[B, T], for several documents in a row: tokens see those of their own document alone, numbered
            from 1; 0 is padding. Instead of `padding_mask`. Default: all 1.
          positions: int[B, T], the position of each token in its document. Default: 0, 1, 2, ... along the row, whatever is
            padding and wherever a document begins. Pass them for rows that are packed or padded on the left.
          source_padding_mask, source_segment_ids, source_positions: the same of an encoder_decoder's source, [B, S].
            Document n of the target reads document n of the source.
          prefix_mask: bool[B, T], for decoders with `prefix_lm`: tokens that see each other both ways. Default: none.
          token_types: int[B, T], for encoders with `token_types`. Default: all 0.
          order: what is known of the positions (see `transformer.model.masks.Tokens`). Default: nothing, if you pass any.
          deterministic: False turns dropout on (and `random_positions`). Default: True.
          dropout_rate: float or float32[], in place of `config.dropout`; it may be traced. Default: None, the config's.
          rngs: {"dropout": key}, needed with `deterministic=False`.
          method: another method: "classify" (labels), "hidden" or "features" (the last hidden state), "encode", "decode" (with
            a cache). Default: `__call__`.
          mutable, capture_intermediates: as in `flax.linen.Module.apply`.

        All but (B, T) arrays of shape (1, T) are repeated along the batch.

        Returns:
          float32[B, T, V], the logits of what follows each token (in an encoder: of the token itself). Without `lm_head`,
          what "classify" gives. With `mutable`, a pair of that and the collections.

        Raises:
          UserError (a ValueError): an input has the wrong rank, shape or type, or a sequence is longer than `max_length`.
            Outside `jax.jit`, where values are known, also for token ids outside the vocabulary and for masks, segments,
            positions and types out of range. Under `jax.jit` these are not checked.
        """
        as_array = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
        variables = jax.tree.map(
            as_array, variables
        )  # a traced index cannot look up NumPy's tables
        return super().apply(
            variables, *inputs, rngs=rngs, method=method, mutable=mutable, capture_intermediates=capture_intermediates, **options
        )  # fmt: skip

    @nn.nowrap
    def empty_cache(self, batch: int, slots: int) -> Cache:
        """What `decode` starts from, with room for so many tokens a row."""
        return empty_cache(self.config, batch, slots)

    def __call__(self, *tokens: jax.Array, **given) -> jax.Array:
        """int32[B, T] (or int32[B, S], int32[B, T]) -> float32[B, T, V]. Options as for `features`."""
        h_BxTxD, head = self.features(*tokens, **given)
        return head(h_BxTxD)


class _OneStack(_Family):
    """Tokens in, and out of the last hidden state: logits over the vocabulary (`lm_head`), labels (`num_labels`), or both."""

    def setup(self):
        cfg = self.config
        self.embedding = Embedding(cfg)
        setattr(self, self.side, Stack(cfg, self.side))
        if cfg.lm_head:
            self.unembedding = Unembedding(cfg)
        if cfg.pooler or cfg.num_labels:
            self.classifier = Classifier(cfg)

    def hidden(
        self, tokens_BxT, *, token_types=None, deterministic=True, dropout_rate=None, **given
    ) -> tuple[jax.Array, Tokens]:
        """The last hidden state, [B, T, D], and where its tokens stand. Options as for `apply`."""
        where = locate(self.config, tokens_BxT, **given)
        check_token_types(self.config, tokens_BxT, token_types)
        stack, x_BxTxD = getattr(self, self.side), self.embedding(tokens_BxT, token_types)
        h_BxTxD, _ = stack(x_BxTxD, where, deterministic=deterministic, dropout_rate=dropout_rate)
        return h_BxTxD, where

    def features(self, tokens_BxT, **given) -> tuple[jax.Array, Head]:
        """What the language model's head is applied to, [B, T, E], and the head. Options as for `hidden`."""
        h_BxTxD, _ = self.hidden(tokens_BxT, **given)
        return self.read(h_BxTxD)

    def read(self, h_BxTxD: jax.Array) -> tuple[jax.Array, Head]:
        """The same of a last hidden state."""
        return self.unembedding(h_BxTxD, self.embedding.table_VxE)

    def classify(self, tokens_BxT, **given) -> jax.Array:
        """float32[B, num_labels], or [B, T, num_labels] with `pooling="none"`; what is pooled itself without labels."""
        return self.classifier(*self.hidden(tokens_BxT, **given))

    def both(self, tokens_BxT, **given) -> tuple[tuple[jax.Array, Head], jax.Array]:
        """What `features` and what `classify` give, from one pass."""
        h_BxTxD, where = self.hidden(tokens_BxT, **given)
        return self.read(h_BxTxD), self.classifier(h_BxTxD, where)

    def __call__(self, tokens_BxT, **given) -> jax.Array:
        """int32[B, T] -> float32[B, T, V]; without `lm_head` what `classify` gives. Options as for `hidden`."""
        labels = None
        if not self.config.lm_head or (self.is_initializing() and hasattr(self, "classifier")):
            labels = self.classify(tokens_BxT, **given)
        return super().__call__(tokens_BxT, **given) if self.config.lm_head else labels


class Encoder(_OneStack):
    """Encoder only: every token sees every other one."""

    side = "encoder"


class Decoder(_OneStack):
    """Decoder only: a token sees itself and what comes before."""

    side = "decoder"

    def decode(
        self, tokens_BxT, cache: Cache, *, last_only=False, **given
    ) -> tuple[jax.Array, Cache]:
        """The logits of these tokens (or `last_only`), which follow those in the cache, and the cache with them in it."""
        check_room(cache, tokens_BxT)
        where = locate(self.config, tokens_BxT, before=cache.tokens, **given)
        h_BxTxD, cache = self.decoder(self.embedding(tokens_BxT), where, cache=cache)
        h_BxTxE, head = self.read(h_BxTxD[:, -1:] if last_only else h_BxTxD)
        return head(h_BxTxE), cache


class EncoderDecoder(_Family):
    """The decoder attends to itself and, in every layer, to the encoder's output."""

    def setup(self):
        self.embedding = Embedding(self.config)
        self.target_embedding = (
            self.embedding if self.config.share_embeddings else Embedding(self.config)
        )
        self.encoder = Stack(self.config, "encoder")
        self.decoder = Stack(self.config, "decoder")
        self.unembedding = Unembedding(self.config)

    def features(
        self,
        source_BxS,
        target_BxT,
        *,
        source_positions=None,
        source_segment_ids=None,
        source_padding_mask=None,
        deterministic=True,
        dropout_rate=None,
        source_order="",
        **given,
    ) -> tuple[jax.Array, Head]:
        """What the head is applied to, [B, T, E], and the head. `given`: the target's positions, segment_ids, padding_mask, order."""
        check_same_documents(given.get("segment_ids"), source_segment_ids)
        encoded = self.encode(
            source_BxS, positions=source_positions, segment_ids=source_segment_ids,
            padding_mask=source_padding_mask, deterministic=deterministic, dropout_rate=dropout_rate, order=source_order,
        )  # fmt: skip
        h_BxTxD, _ = self._decoder(
            target_BxT, *encoded, None, deterministic, dropout_rate=dropout_rate, **given
        )
        return self.read(h_BxTxD)

    def read(self, h_BxTxD: jax.Array) -> tuple[jax.Array, Head]:
        """The same of a last hidden state."""
        return self.unembedding(h_BxTxD, self.target_embedding.table_VxE)

    def encode(
        self, source_BxS, *, deterministic=True, dropout_rate=None, **given
    ) -> tuple[jax.Array, Tokens]:
        """The encoder's output, [B, S, D], and where its tokens stand."""
        where = locate(self.config, source_BxS, "source", **given)
        encoded_BxSxD, _ = self.encoder(
            self.embedding(source_BxS),
            where,
            deterministic=deterministic,
            dropout_rate=dropout_rate,
        )
        return encoded_BxSxD, where

    def decode(
        self,
        target_BxT,
        cache: Cache,
        encoded_BxSxD: jax.Array | None,
        encoded_tokens: Tokens,
        *,
        last_only=False,
        **given,
    ) -> tuple[jax.Array, Cache]:
        """The logits of these target tokens (or `last_only`), which follow those in the cache, and the cache with them in it.

        The first call is given the encoder's output and keeps its keys and values in the cache; later ones pass None for it.
        """
        h_BxTxD, cache = self._decoder(
            target_BxT, encoded_BxSxD, encoded_tokens, cache, True, **given
        )
        h_BxTxE, head = self.read(h_BxTxD[:, -1:] if last_only else h_BxTxD)
        return head(h_BxTxE), cache

    def _decoder(
        self, target_BxT, encoded_BxSxD, encoded_tokens, cache, deterministic, dropout_rate=None, **given
    ):  # fmt: skip
        if cache is not None:
            check_room(cache, target_BxT)
        before = None if cache is None else cache.tokens
        where = locate(self.config, target_BxT, "target", before=before, **given)
        x_BxTxD = self.target_embedding(target_BxT)
        return self.decoder(
            x_BxTxD, where, encoded_BxSxD, encoded_tokens, cache, deterministic, dropout_rate
        )


FAMILIES = {
    "encoder": Encoder,
    "decoder": Decoder,
    "encoder_decoder": EncoderDecoder,
}


def build_model(config: ModelConfig) -> nn.Module:
    """The Linen module of a config: `init(key, tokens)` and `apply(params, tokens)`, or with (source, target)."""
    return FAMILIES[config.family](config)
