"""Heads of encoders and decoders that do not write text: a label a sequence, or a label a token.

Shape suffixes: B batch, T length, D d_model, C num_labels.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.config import ModelConfig
from transformer.model.linear import Linear
from transformer.model.masks import Tokens
from transformer.model.pooling import POOLINGS


class Classifier(nn.Module):
    """h_pooled W + b, with h_pooled = tanh(pool(h) W_p + b_p) where there is a `pooler` (Devlin et al. 2019).

    BERT's next-sentence prediction is `pooling="cls", pooler=True, num_labels=2`.
    """

    config: ModelConfig

    def setup(self):
        cfg = self.config
        if cfg.pooler:
            self.pooler = Linear(cfg, (cfg.d_model,), ("embed", "transform"), True)
        if cfg.num_labels:
            self.labels = Linear(cfg, (cfg.num_labels,), ("embed", None), True)

    def pool(self, h_BxTxD: jax.Array, tokens: Tokens) -> jax.Array:
        """[B, D], or [B, T, D] without pooling."""
        h = POOLINGS[self.config.pooling](h_BxTxD, (tokens.segments_BxT > 0)[..., None])
        return jnp.tanh(self.pooler(h)) if self.config.pooler else h

    def __call__(self, h_BxTxD: jax.Array, tokens: Tokens) -> jax.Array:
        """float32[B, C], or [B, T, C] without pooling."""
        pooled = self.pool(h_BxTxD, tokens)
        return self.labels(pooled).astype(jnp.float32) if self.config.num_labels else pooled
