"""The three families: the same parts, wired differently.

Shape suffixes: B batch, S source length, T target length, D d_model, E d_embedding, V vocabulary.

Every family has `features`, the last hidden state (as the head wants it) and the head that turns it into logits, and
`__call__`, the logits.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.cache import Cache, empty_cache
from transformer.model.config import ModelConfig
from transformer.model.embedding import Embedding, Head, Unembedding
from transformer.model.heads import Classifier
from transformer.model.masks import Tokens
from transformer.model.recurrent import RecurrentDecoder, RecurrentEncoder, empty_recurrent_cache
from transformer.model.stack import Stack


def locate(
    tokens_BxT: jax.Array,
    pad_id: int,
    positions=None,
    segment_ids=None,
    padding_mask=None,
    prefix_mask=None,
    order="",
) -> Tokens:
    """Where tokens stand: by default at 0, 1, 2, ... in one document a row, `pad_id` being padding; and which are a prefix.

    `order` promises of given positions what is known of the default ones, which stand in rows (see `Tokens`)."""
    order = order or ("rows" if positions is None else "")
    if positions is None:
        positions = jnp.arange(tokens_BxT.shape[1], dtype=jnp.int32)[None]
    if segment_ids is None:
        segment_ids = (tokens_BxT != pad_id if padding_mask is None else padding_mask).astype(
            jnp.int32
        )
    if prefix_mask is None:
        return Tokens(positions, segment_ids, order=order)
    prefix_BxT, positions = prefix_mask.astype(bool), jnp.broadcast_to(positions, tokens_BxT.shape)
    together_BxTxT = (segment_ids[:, :, None] == segment_ids[:, None, :]) & prefix_BxT[:, None, :]
    end_BxT = jnp.max(jnp.where(together_BxTxT, positions[:, None, :], 0), axis=-1)
    return Tokens(positions, segment_ids, jnp.where(prefix_BxT, end_BxT, positions), order)


class _Family(nn.Module):
    config: ModelConfig

    def _locate(self, tokens_BxT: jax.Array, **given) -> Tokens:
        if tokens_BxT.shape[1] > self.config.max_length:
            raise ValueError(
                f"sequence of {tokens_BxT.shape[1]} tokens, but model.max_length = {self.config.max_length}"
            )
        if given.get("prefix_mask") is not None and not self.config.prefix_lm:
            raise ValueError(
                "prefix_mask is for decoders that read a prefix whole: set model.prefix_lm=True"
            )
        return locate(tokens_BxT, self.config.pad_id, **given)

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
        self, tokens_BxT, *, token_types=None, deterministic=True, **given
    ) -> tuple[jax.Array, Tokens]:
        """The last hidden state, [B, T, D], and where its tokens stand. `given`: see `locate`."""
        where = self._locate(tokens_BxT, **given)
        stack = getattr(self, self.side)
        h_BxTxD, _ = stack(
            self.embedding(tokens_BxT, token_types), where, deterministic=deterministic
        )
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
        where = self._locate(tokens_BxT, **given)
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
        self.encoder, self.decoder = self._stacks()
        self.unembedding = Unembedding(self.config)

    def _stacks(self) -> tuple[nn.Module, nn.Module]:
        return Stack(self.config, "encoder"), Stack(self.config, "decoder")

    def features(
        self,
        source_BxS,
        target_BxT,
        *,
        source_positions=None,
        source_segment_ids=None,
        source_padding_mask=None,
        deterministic=True,
        source_order="",
        **given,
    ) -> tuple[jax.Array, Head]:
        """What the head is applied to, [B, T, E], and the head. `given`: the target's positions, segment_ids, padding_mask, order."""
        encoded = self.encode(
            source_BxS, positions=source_positions, segment_ids=source_segment_ids,
            padding_mask=source_padding_mask, deterministic=deterministic, order=source_order,
        )  # fmt: skip
        h_BxTxD, _ = self._decoder(target_BxT, *encoded, None, deterministic, **given)
        return self.read(h_BxTxD)

    def read(self, h_BxTxD: jax.Array) -> tuple[jax.Array, Head]:
        """The same of a last hidden state."""
        return self.unembedding(h_BxTxD, self.target_embedding.table_VxE)

    def encode(self, source_BxS, *, deterministic=True, **given) -> tuple[jax.Array, Tokens]:
        """The encoder's output, [B, S, D], and where its tokens stand."""
        where = self._locate(source_BxS, **given)
        encoded_BxSxD, _ = self.encoder(
            self.embedding(source_BxS), where, deterministic=deterministic
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

    def _decoder(self, target_BxT, encoded_BxSxD, encoded_tokens, cache, deterministic, **given):
        where = self._locate(target_BxT, **given)
        x_BxTxD = self.target_embedding(target_BxT)
        return self.decoder(
            x_BxTxD, where, encoded_BxSxD, encoded_tokens, cache=cache, deterministic=deterministic
        )


class RecurrentEncoderDecoder(EncoderDecoder):
    """The same with LSTMs in place of self-attention (recurrent.py)."""

    def _stacks(self):
        return RecurrentEncoder(self.config), RecurrentDecoder(self.config)

    @nn.nowrap
    def empty_cache(self, batch: int, slots: int) -> Cache:
        return empty_recurrent_cache(self.config, batch, slots)


FAMILIES = {
    "encoder": Encoder,
    "decoder": Decoder,
    "encoder_decoder": EncoderDecoder,
    "recurrent_encoder_decoder": RecurrentEncoderDecoder,
}


def build_model(config: ModelConfig) -> nn.Module:
    """The Linen module of a config: `init(key, tokens)` and `apply(params, tokens)`, or with (source, target)."""
    return FAMILIES[config.family](config)
