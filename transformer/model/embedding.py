"""Tokens to vectors, vectors to logits.

Shape suffixes: B batch, T length, D d_model, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.config import ModelConfig
from transformer.model.initializers import matrix_init


class Embedding(nn.Module):
    """E[token], times sqrt(d_model) with `embedding_scale` (Vaswani et al. 2017, sec. 3.4)."""

    config: ModelConfig

    def setup(self):
        cfg = self.config
        init = nn.initializers.normal(cfg.embedding_init_std or cfg.d_model**-0.5)
        init = nn.with_logical_partitioning(init, ("vocab", "embed"))
        self.table_VxD = self.param("embedding", init, (cfg.vocab_size, cfg.d_model), cfg.param_dtype)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        x_BxTxD = self.table_VxD[tokens_BxT].astype(self.config.dtype)
        if self.config.embedding_scale:
            x_BxTxD *= self.config.d_model**0.5
        return nn.with_logical_constraint(x_BxTxD, ("batch", "length", "activation_embed"))


@struct.dataclass
class Head:
    """From the last hidden state to logits: h W^T + b, float32. An array-holding value, so that a loss can apply it in chunks."""

    matrix_VxD: jax.Array
    bias_V: jax.Array | None = None

    def __call__(self, h_BxTxD: jax.Array) -> jax.Array:
        logits_BxTxV = jnp.einsum(
            "BTD,VD->BTV", h_BxTxD, self.matrix_VxD.astype(h_BxTxD.dtype), preferred_element_type=jnp.float32
        )
        if self.bias_V is not None:
            logits_BxTxV += self.bias_V
        return nn.with_logical_constraint(logits_BxTxV, ("batch", "length", "activation_vocab"))

    def pull_back(self, h_BxTxD: jax.Array, d_BxTxV: jax.Array) -> tuple[jax.Array, "Head"]:
        """The gradients by h and by this head, given that by the logits: what autodiff gives, with the sum over tokens laid
        out so that the narrow h is transposed and not the wide logits (on a CPU a tenth of a small model's step)."""
        d_BxTxV = nn.with_logical_constraint(d_BxTxV, ("batch", "length", "activation_vocab")).astype(h_BxTxD.dtype)
        d_h_BxTxD = jnp.einsum("BTV,VD->BTD", d_BxTxV, self.matrix_VxD.astype(h_BxTxD.dtype))
        d_matrix_DxV = jnp.einsum("BTD,BTV->DV", h_BxTxD, d_BxTxV, preferred_element_type=jnp.float32)
        d_matrix_DxV = jax.lax.optimization_barrier(
            d_matrix_DxV
        )  # folded with the transpose, XLA's CPU has no bfloat16 for it
        d_bias_V = (
            None if self.bias_V is None else jnp.sum(d_BxTxV, axis=(0, 1), dtype=jnp.float32).astype(self.bias_V.dtype)
        )
        return d_h_BxTxD, Head(d_matrix_DxV.T.astype(self.matrix_VxD.dtype), d_bias_V)


class Unembedding(nn.Module):
    """The head of a language model: the embedding itself (tied; J&M eq. 9.45) or a matrix of its own; an optional bias."""

    config: ModelConfig

    @nn.compact
    def __call__(self, embedding_VxD: jax.Array) -> Head:
        cfg = self.config
        matrix_VxD, bias_V = embedding_VxD, None
        if not cfg.tie_embeddings:
            init = nn.with_logical_partitioning(matrix_init(cfg.initializer, cfg.init_std), ("embed", "vocab"))
            kernel = self.param("kernel", init, (cfg.d_model, cfg.vocab_size), cfg.param_dtype)
            matrix_VxD = kernel.T
        if cfg.logit_bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("vocab",))
            bias_V = self.param("bias", zeros, (cfg.vocab_size,), cfg.param_dtype)
        return Head(matrix_VxD, bias_V)
