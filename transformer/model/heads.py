"""The classification head of encoders and decoders: one label per sequence or per token.
Shape suffixes: B batch, T length, D d_model, C num_labels."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.config import ModelConfig
from transformer.model.linear import Linear
from transformer.model.masks import Tokens


def _last(h_BxTxD, real_BxTx1):
    index_BxTx1 = jnp.where(real_BxTx1, jnp.arange(h_BxTxD.shape[1])[:, None], 0)
    return jnp.take_along_axis(h_BxTxD, jnp.max(index_BxTx1, axis=1, keepdims=True), axis=1)[:, 0]


POOLINGS = {
    "none": lambda h_BxTxD, real_BxTx1: h_BxTxD,  # one label per token: tagging
    "span": lambda h_BxTxD, real_BxTx1: h_BxTxD,  # a logit of the start and the end per token
    "cls": lambda h_BxTxD, real_BxTx1: h_BxTxD[:, 0],
    "mean": lambda h_BxTxD, real_BxTx1: (
        jnp.sum(h_BxTxD * real_BxTx1, 1) / jnp.maximum(jnp.sum(real_BxTx1, 1), 1)
    ),
    "last": _last,
}
"""Name -> function (h_BxTxD, real_BxTx1) -> h. "cls" takes the first token, "mean" averages over
real tokens, "last" takes the last real token."""


class Classifier(nn.Module):
    """Computes h_pooled W + b, where h_pooled = pool(h). With `pooler`, h_pooled = tanh(pool(h) W_p
    + b_p) (Devlin et al. 2019). Without `num_labels`, the output is h_pooled. BERT's next-sentence
    head: `pooling="cls", pooler=True, num_labels=2`."""

    config: ModelConfig

    def setup(self):
        cfg = self.config
        if cfg.pooler:
            self.pooler = Linear(cfg, (cfg.d_model,), ("embed", "transform"), True)
        if cfg.num_labels:
            self.labels = Linear(cfg, (cfg.num_labels,), ("embed", None), cfg.label_bias)

    def __call__(self, h_BxTxD: jax.Array, tokens: Tokens) -> jax.Array:
        """Returns float32[B, C], or [B, T, C] without pooling. Without `num_labels`: h_pooled."""
        h = POOLINGS[self.config.pooling](h_BxTxD, (tokens.segments_BxT > 0)[..., None])
        pooled = jnp.tanh(self.pooler(h)) if self.config.pooler else h
        return self.labels(pooled).astype(jnp.float32) if self.config.num_labels else pooled
