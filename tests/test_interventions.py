"""Head ablation and activation patching (transformer/lab/interventions.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, model_fields
from flax import linen as nn

from transformer import ModelConfig, UserError
from transformer.config import DataConfig, Experiment, MeshConfig, TrainConfig
from transformer.data.batching import assemble
from transformer.data.objectives.base import given
from transformer.evaluation.subject import Subject
from transformer.lab.interventions import ablated, patched
from transformer.model.layout import unroll
from transformer.model.modules import Linear
from transformer.parallel.mesh import make_mesh, use

T = 6
TEXTS = np.array([[3, 4, 5, 6, 7, 8], [3, 9, 5, 6, 7, 8]], np.int32)  # differ in the second token


def subject_of(family: str, mesh, **fields):
    """Returns a subject with random parameters, and a batch with both texts.

    Of the decoder, only the last token is a target. The encoder-decoder reads the texts, and both
    of its targets are the first text.
    """
    pairs = family == "encoder_decoder"
    model = ModelConfig(**model_fields(family, TINY, **fields))
    objective = "seq2seq" if pairs else "causal_lm"
    data = DataConfig(corpus="tatoeba_en_es" if pairs else "pydoc", objective=objective, length=T)
    subject = Subject(Experiment(model, data, train=TrainConfig(steps=1)), None, "test", mesh)
    empty = np.zeros(0, np.int32)
    reads = lambda text: (text, TEXTS[0]) if pairs else (empty, text)
    batch = assemble([[given(model, 1, *reads(text))] for text in TEXTS], T)
    if not pairs:
        batch["weights"][:, :-1] = 0.0
    one = jnp.ones((1, T), int)
    params = subject.model.init(jax.random.key(0), *([one] * len(model.sides)))
    return subject, params, batch


VARIANTS = {
    "scanned": {},
    "unrolled": {"scan_layers": False},
    "remat": {"remat": "full"},
    "alternating": {"layer_pattern": ({}, {"window": 3})},
    "differential": {"mixer": "differential"},
    "streams": {"norm_placement": "hyper_connections"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_patches_replace_the_residual_stream(variant):
    """A patch has an effect where the texts have been read, and only through later layers.

    The last token of the last layer determines the loss, so its patch is the other text's loss.
    """
    with use(make_mesh(MeshConfig(data=1))) as mesh:
        subject, params, batch = subject_of("decoder", mesh, **VARIANTS[variant])
        (ours, theirs), losses_LxT = patched(subject, params, batch, "decoder")
    effects_LxT = losses_LxT - ours
    assert abs(theirs - ours) > 1e-3 and losses_LxT.shape == (2, T)
    assert losses_LxT[-1, -1] == pytest.approx(theirs, abs=1e-5)
    assert effects_LxT[-1, :-1] == pytest.approx(0, abs=1e-5)  # nothing reads them any more
    # Bos and the first token are equal. The window of 3 does not reach the next one.
    first = 3 if variant == "alternating" else 2
    assert effects_LxT[0, :first] == pytest.approx(0, abs=1e-5)
    assert np.all(np.abs(effects_LxT[0, first:]) > 1e-5)


def test_patches_of_an_encoder():
    """The decoder reads the encoder's last layer, whose patches at all tokens are the other text.

    One token that differs changes all tokens, because an encoder has no causal mask.
    """
    with use(make_mesh(MeshConfig(data=1))) as mesh:
        subject, params, batch = subject_of("encoder_decoder", mesh)
        (ours, theirs), losses_LxT = patched(subject, params, batch, "encoder")
    assert losses_LxT.shape == (2, T) and abs(theirs - ours) > 1e-4
    assert np.all(np.abs(losses_LxT - ours) > 1e-7)


def without_heads(head: int, layer: int, sublayer: str):
    """Returns an interceptor that zeroes what W_O reads of a head, in unrolled layers."""

    def intercept(call, args, kwargs, context):
        if isinstance(context.module, Linear) and context.module.path[1:] == (
            f"layers_{layer}", sublayer, "out",
        ):  # fmt: skip
            (x_BxTxNxH,) = args
            return call(x_BxTxNxH.at[:, :, head].set(0.0))
        return call(*args, **kwargs)

    return intercept


@pytest.mark.parametrize("variant", ["scanned", "alternating", "differential"])
def test_ablated_heads_have_no_output(variant):
    """The losses are those of an unrolled model whose heads are set to zero as it runs."""
    with use(make_mesh(MeshConfig(data=1))) as mesh:
        subject, params, batch = subject_of("decoder", mesh, **VARIANTS[variant])
        losses_LxN = ablated(subject, params, batch, "decoder self_attention", [0, 1])
        config, unrolled = unroll(subject.config.model, params)
        model = Subject(
            Experiment(config, subject.config.data, train=subject.config.train), None, "test", mesh
        ).model
        heads = losses_LxN.shape[1]
        assert heads == (2 if variant == "differential" else 4)
        for layer in range(2):
            for head in range(heads):
                with nn.intercept_methods(without_heads(head, layer, "self_attention")):
                    logits = model.apply(unrolled, batch["inputs"][:1])
                loss = -jax.nn.log_softmax(logits)[0, -1, batch["targets"][0, -1]]
                assert losses_LxN[layer, head] == pytest.approx(float(loss), abs=1e-5)
    assert np.ptp(losses_LxN) > 1e-3


def test_heads_without_output_projection_are_refused():
    with use(make_mesh(MeshConfig(data=1))) as mesh:
        subject, params, batch = subject_of("decoder", mesh, attention_out=False)
        with pytest.raises(UserError, match="attention_out=False leaves no output"):
            ablated(subject, params, batch, "decoder self_attention", [0, 1])
