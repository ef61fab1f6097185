"""Embedding and heads: from tokens to vectors and from vectors to logits of tokens or labels. Shape
suffixes: B batch, T length, D d_model, E embedding_size, V vocabulary, Y types, C num_labels."""

import jax
import jax.numpy as jnp
from flax import linen as nn, struct

from transformer.model.config import ModelConfig
from transformer.model.masks import Tokens
from transformer.model.modules import ACTIVATIONS, Linear, declare, matrix_init, soft_cap
from transformer.model.sharding import constrain, gathered


class Embedding(nn.Module):
    """Token embeddings E[token]. With `d_embedding`, they have that width and are projected to
    d_model (Lan et al. 2020). With `embedding_scale`, they are multiplied by sqrt(d_model) (Vaswani
    et al. 2017, sec. 3.4). With `token_types`, E_type[type] is added (Devlin et al. 2019)."""

    config: ModelConfig

    def setup(self):
        cfg = self.config
        std = cfg.embedding_init_std or cfg.base.d_model**-0.5
        normal, shape = nn.initializers.normal(std), (cfg.vocab_size, cfg.embedding_size)
        self.table_VxE = declare(self, "embedding", normal, ("vocab", "embed"), shape)
        if cfg.embedding_size != cfg.d_model:
            self.project = Linear(cfg, (cfg.d_model,), (None, "embed"), False)
        if cfg.token_types:
            shape = (cfg.token_types, cfg.d_model)
            self.types_YxD = declare(self, "token_types", normal, (None, "embed"), shape)

    def __call__(self, tokens_BxT, token_types_BxT: jax.Array | None = None) -> jax.Array:
        """Returns float[B, T, D]. Without `token_types_BxT`, all tokens are of type 0."""
        cfg = self.config
        table_VxE = self.table_VxE.astype(cfg.dtype)
        if tokens_BxT.shape[1] > 1:
            # Gather the table along E. From a table sharded along E the lookup would return
            # embeddings sharded along E, and these would have to be moved instead of the table,
            # which only a decoding step has few enough of.
            table_VxE = gathered(table_VxE, ("vocab", "embed"))
            # Keep its gradient unsharded along E until it is summed. Otherwise the gradient of the
            # embeddings would be moved to the devices that hold each part of the table.
            table_VxE = constrain(table_VxE, ("vocab", "activation_embed"))
        # Each device looks up the tokens in its part of the vocabulary; the results are summed.
        x_BxTxD = constrain(table_VxE[tokens_BxT], ("batch", "length", "activation_embed"))
        if cfg.embedding_size != cfg.d_model:
            x_BxTxD = self.project(x_BxTxD)
        if cfg.embedding_scale:
            x_BxTxD *= cfg.base.d_model**0.5
        if cfg.token_types:
            types = jnp.zeros_like(tokens_BxT) if token_types_BxT is None else token_types_BxT
            x_BxTxD += self.types_YxD[types].astype(cfg.dtype)
        return constrain(x_BxTxD, ("batch", "stream", "activation_embed"))


@struct.dataclass
class Head:
    """The map from the last hidden state to logits: h W^T + b, in float32, or with `soft_cap` c,
    c tanh(logits / c). It is a pytree of arrays, so that a loss can apply it in chunks."""

    matrix_VxE: jax.Array
    bias_V: jax.Array | None = None
    soft_cap: float = struct.field(pytree_node=False, default=0.0)

    def __call__(self, h_BxTxE: jax.Array) -> jax.Array:
        h_BxTxE = constrain(h_BxTxE, ("batch", "length", "activation_embed"))
        products = "BTE,VE->BTV", h_BxTxE, self._matrix(h_BxTxE.dtype)
        logits_BxTxV = jnp.einsum(*products, preferred_element_type=jnp.float32)
        if self.bias_V is not None:
            logits_BxTxV += self.bias_V
        if self.soft_cap:
            logits_BxTxV = soft_cap(logits_BxTxV, self.soft_cap)
        return constrain(logits_BxTxV, ("batch", "length", "activation_vocab"))

    def ready(self, dtype) -> "Head":
        """Returns the head with its matrix cast to `dtype` and gathered along d_model."""
        return self.replace(matrix_VxE=self._matrix(dtype))

    def _matrix(self, dtype) -> jax.Array:
        return gathered(self.matrix_VxE.astype(dtype), ("vocab", "embed"))

    def accumulate_gradients(self, h_BxTxE, logits_BxTxV, d_BxTxV) -> tuple[jax.Array, "Head"]:
        """Returns the gradients of h and, in float32, of this head, given `d_BxTxV`, that of the
        logits. They equal those of autodiff. The sum over tokens transposes the narrow h instead of
        the wide logits, which saves a tenth of a small model's step on a CPU."""
        if self.soft_cap:
            d_BxTxV = d_BxTxV * (1.0 - jnp.square(logits_BxTxV / self.soft_cap))
        d_BxTxV = jax.lax.optimization_barrier(d_BxTxV)  # compute it once for its two uses
        d_BxTxV = constrain(d_BxTxV, ("batch", "length", "activation_vocab")).astype(h_BxTxE.dtype)
        d_h_BxTxE = jnp.einsum("BTV,VE->BTE", d_BxTxV, self._matrix(h_BxTxE.dtype))
        float32 = {"preferred_element_type": jnp.float32}
        d_matrix_ExV = jnp.einsum("BTE,BTV->EV", h_BxTxE, d_BxTxV, **float32)
        # Without it, XLA folds the transpose below into the product, which CPUs lack in bfloat16.
        d_matrix_ExV = jax.lax.optimization_barrier(d_matrix_ExV)
        d_bias_V = None if self.bias_V is None else jnp.sum(d_BxTxV, axis=(0, 1), dtype=jnp.float32)
        return d_h_BxTxE, self.replace(matrix_VxE=d_matrix_ExV.T, bias_V=d_bias_V)


class Unembedding(nn.Module):
    """The head of a language model and its input. The matrix is the tied embedding (J&M eq. 9.45)
    or a separate parameter; the bias is optional. The input is the last hidden state, optionally
    transformed (`head_transform`; Devlin et al. 2019), projected (`d_embedding`) and scaled
    (`logit_scale`; Raffel et al. 2020), and divided by its width relative to the base."""

    config: ModelConfig

    @nn.compact
    def __call__(self, h_BxTxD: jax.Array, embedding_VxE: jax.Array) -> tuple[jax.Array, Head]:
        """Returns the input of the head, [B, T, E], and the head."""
        cfg, h_BxTxE = self.config, h_BxTxD
        if cfg.head_transform:
            names = ("embed", "transform")
            transform = Linear(cfg, (cfg.d_model,), names, cfg.use_bias, name="transform")
            h_BxTxE = cfg.norm_module(name="norm")(ACTIVATIONS[cfg.activation](transform(h_BxTxE)))
        if cfg.embedding_size != cfg.d_model:
            project = Linear(cfg, (cfg.embedding_size,), ("embed", None), False, name="project")
            h_BxTxE = project(h_BxTxE)
        scale = cfg.logit_scale * cfg.base.embedding_size / cfg.embedding_size
        h_BxTxE = h_BxTxE * scale if scale != 1.0 else h_BxTxE
        matrix_VxE, bias_V = embedding_VxE, None
        if not cfg.tie_embeddings:
            init, shape = matrix_init(cfg.initializer, cfg.init_std), embedding_VxE.shape[::-1]
            matrix_VxE = declare(self, "kernel", init, ("embed", "vocab"), shape).T
        if cfg.logit_bias:
            bias_V = declare(self, "bias", nn.initializers.zeros, ("vocab",), (cfg.vocab_size,))
        return h_BxTxE, Head(matrix_VxE, bias_V, cfg.logit_soft_cap)


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
    """The head of labels: h_pooled W + b, where h_pooled = pool(h) or, with `pooler`, act(pool(h)
    W_p + b_p) (Devlin et al. 2019; act is `pooler_activation`). Without `num_labels`, the output is
    h_pooled. BERT's next-sentence head: `pooling="cls", pooler=True, num_labels=2`."""

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
        act = ACTIVATIONS.get(self.config.pooler_activation, jnp.tanh)
        pooled = act(self.pooler(h)) if self.config.pooler else h
        return self.labels(pooled).astype(jnp.float32) if self.config.num_labels else pooled
