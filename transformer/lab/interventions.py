"""Interventions: the loss of a text when a part of the model's computation is replaced.

Head ablation sets the output of one attention head to zero (Michel et al. 2019). Activation
patching replaces the residual stream after one layer, at one token, by that of a run on another
text (Meng et al. 2022, arXiv:2202.05262). Suffixes: B batch, T length, L layers, N heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.errors import UserError
from transformer.evaluation.subject import Subject, token_losses
from transformer.model.layout import flatten, unflatten, where
from transformer.model.stack import Layer


def _losses(subject: Subject, params, batch: dict) -> jax.Array:
    """Returns the mean loss of each sequence's targets, in nats, [B]."""
    (h_BxTxE, head), _, read = subject.watch(params, batch)
    losses_BxT = token_losses(head(h_BxTxE), read["targets"]) * read["weights"]
    return jnp.sum(losses_BxT, axis=1) / jnp.sum(read["weights"], axis=1)


def ablated(subject: Subject, params, batch: dict, name: str, layers: list[int]) -> np.ndarray:
    """Returns the loss of the first sequence without each head of a sublayer, such as "decoder
    self_attention", [L, N]. A head's part of W_O is 0. In differential attention, a head is a
    pair. Raises UserError if the attention has no W_O."""
    flat, name = flatten(params), name.replace(" ", "/layers_{}/") + "/out/kernel"
    places = where(subject.config.model, flat)
    if name.format(layers[0]) not in places:
        raise UserError("--ablate: model.attention_out=False leaves no output to ablate")
    run = subject.program("losses of sequences", functools.partial(_losses, subject))
    losses_LxN = []
    for path, index in (places[name.format(layer)] for layer in layers):
        heads = range(flat[path].shape[len(index)])
        changed = (flat | {path: flat[path].at[(*index, head)].set(0.0)} for head in heads)
        losses_LxN.append([float(run(unflatten(x), batch)[0]) for x in changed])
    return np.array(losses_LxN)


def patched(subject: Subject, params, batch: dict, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the losses of two sequences, [2], and that of the first with the residual stream of
    the second after each layer of the stack `side`, at each token, [L, T]."""

    def losses(params, batch, layer, token):
        def intercept(call, args, kwargs, context):
            result, module = call(*args, **kwargs), context.module
            is_layer = isinstance(module, Layer) and context.method_name == "__call__"
            if not is_layer or module.side != side or jnp.ndim(args[1][1]):  # [L]: a whole scan
                return result
            (streams, passed), state = result
            here_T = (jnp.arange(length) == token) & (args[1][1] == layer)
            mask = lambda x: here_T.reshape(-1, *[1] * (x.ndim - 2))
            swap = lambda x: x.at[0].set(jnp.where(mask(x), x[1], x[0]))
            return (jax.tree.map(swap, streams), passed), state

        with nn.intercept_methods(intercept):
            return _losses(subject, params, batch)

    length = batch["source" if side == "encoder" else "inputs"].shape[1]
    run = functools.partial(subject.program("patched", losses), params, batch)
    layers = range(subject.config.model.num_layers(side))
    losses_LxT = [[float(run(n, t)[0]) for t in range(length)] for n in layers]
    return np.asarray(run(-1, 0)), np.array(losses_LxT)
