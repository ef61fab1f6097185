"""Random valid models of all families: two real steps of training, and what must hold of any model.

Fields are drawn at random; those that the config refuses are drawn again. Each model trains two steps through the command's own path
(text, batches, state, step, evaluation, checkpoint). Then, on the trained parameters: other sequences of a batch, later tokens under a
causal mask, and padding change no output of a token that does not see them.
"""

import dataclasses
import itertools
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.mapping import from_mapping
from transformer.model.config import ModelConfig
from transformer.model.network import build_model
from transformer.model.placements import PLACEMENTS
from transformer.model.positions import SCHEMES
from transformer.parallel.mesh import make_mesh, use
from transformer.runs.evaluate import load_trained
from transformer.runs.loop import train
from transformer.runs.metrics import read_metrics

SIZES = {"vocab_size": 480, "d_model": 16, "d_ff": 24, "num_heads": 4, "max_length": 16}

OPTIONS = {
    "mixer": ("attention", "mla", "gated_delta", "lstm", {"name": "lstm", "source": "attention"}),
    "position": tuple(SCHEMES),
    "norm_placement": tuple(PLACEMENTS),
    "norm": ("layernorm", "rmsnorm"),
    "norm_gain": (True, False),
    "norm_offset": (True, False),
    "norm_zero_centered": (False, True),
    "embedding_norm": (False, True),
    "first_norm": (True, False),
    "parallel": (False, True),
    "num_kv_heads": (0, 1, 2),
    "d_head": (0, 8),
    "d_value": (0, 6),
    "d_embedding": (0, 8),
    "qk_norm": (False, True),
    "attention_scale": (None, 0.3),
    "attention_soft_cap": (0.0, 20.0),
    "attention_sink": (False, True),
    "window": (0, 5),
    "layer_pattern": (
        (),
        ({"window": 3}, {}),
        ({"position": "none"}, {"window": 4}),
        ({"mixer": "gated_delta"}, {}),
        ({"mixer": "lstm"}, {"feed_forward": "none"}),
        ({"mixer": "mla", "norm_placement": "post"}, {"norm_placement": "pre"}),
        ({"feed_forward": {"name": "experts", "num_experts": 2, "top_k": 1}}, {}),
    ),
    "feed_forward": (
        "dense",
        "none",
        {"name": "experts", "num_experts": 4, "top_k": 2},
        {"name": "experts", "num_experts": 2, "top_k": 1, "capacity_factor": 1.5},
    ),
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "glu": (False, True),
    "use_bias": (True, False),
    "qkv_bias": (None, True, False),
    "tie_embeddings": (True, False),
    "share_embeddings": (True, False),
    "logit_bias": (False, True),
    "logit_scale": (1.0, 0.5),
    "logit_soft_cap": (0.0, 30.0),
    "head_transform": (False, True),
    "embedding_scale": (False, True),
    "prefix_lm": (False, True),
    "random_positions": (0, 40),
    "dropout": (0.0, 0.1),
    "attention_dropout": (0.0, 0.1),
    "activation_dropout": (0.0, 0.1),
    "initializer": ("xavier_uniform", "lecun_normal", "normal"),
    "residual_init_scale": (False, True),
    "scan_layers": (True, False),
    "remat": ("none", "full", "dots"),
    "dtype": ("float32", "float32", "bfloat16"),
    "param_dtype": ("float32", "float32", "float32", "bfloat16"),
    "attention_backend": ("auto", "reference", "blockwise"),
}
"""What is drawn from, the default first."""

OBJECTIVES = {
    "encoder": ("masked_lm",),
    "decoder": ("causal_lm", "prefix_lm", "span_corruption"),
    "encoder_decoder": ("span_corruption", "prefix_lm"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its objective."""

    seed: int
    number: int
    tree: dict
    refused: int  # drawn before it

    def __str__(self) -> str:
        return f"combination {self.number} of seed {self.seed}: {self.tree['model']}, {self.tree['data']['objective']}"


def cases(seed: int) -> Iterator[Case]:
    """Without end."""
    draw = random.Random(seed)
    for number in itertools.count():
        for refused in itertools.count():
            tree = _tree(draw)
            try:
                from_mapping(Experiment, tree)
            except UserError as e:
                if "\n" in str(e):
                    raise AssertionError(f"{tree}: {e}") from e
                continue
            yield Case(seed, number, tree, refused)
            break


def _tree(draw: random.Random) -> dict:
    family = draw.choice(tuple(OBJECTIVES))
    share = draw.choice((0.1, 0.3))  # few fields at once, or many
    fields = {
        name: draw.choice(values) for name, values in OPTIONS.items() if draw.random() < share
    }
    if draw.random() < 0.8:
        fields["position"] = draw.choice(OPTIONS["position"])
        fields["norm_placement"] = draw.choice(OPTIONS["norm_placement"])
    sizes = dict(SIZES)
    for side in ("encoder", "decoder"):
        if side in family:
            sizes[f"num_{side}_layers"] = draw.choice((1, 2, 2, 4))
    if fields.get("mixer") == "lstm" and "layer_pattern" not in fields and family == "decoder":
        del sizes["num_heads"]
    if fields.get("feed_forward") == "none":
        del sizes["d_ff"]
    objective = draw.choice(OBJECTIVES[family])
    if objective != "causal_lm" and family == "decoder":
        fields["prefix_lm"] = True
    return {
        "model": {"family": family, **sizes, **fields},
        "data": {
            "corpus": "pydoc", "objective": objective, "length": 16, "batch_size": 4, "held_out": 4, "tokenizer": {"kind": "bpe"},
        },
        "optimizer": {"warmup_steps": 1, "learning_rate": 1e-3},
        "train": {"steps": 2, "log_every": 1, "eval_batches": 1, "tensorboard": False},
        "mesh": {"data": 1},
        "seed": draw.randrange(2**31),
    }  # fmt: skip


def check(case: Case) -> str:
    """AssertionError, with the case, unless it trains and the properties hold."""
    config = from_mapping(Experiment, case.tree)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            steps = train(config, run)
        except UserError as e:
            raise AssertionError(f"{case}: accepted, but {e}") from e
        lines = read_metrics(run)
        losses = [line["train/loss"] for line in lines if "train/loss" in line]
        assert steps == 2 and len(losses) == 2, f"{case}: {lines}"
        assert all(math.isfinite(x) and 0 < x < 100 for x in losses), f"{case}: losses {losses}"
        with use(make_mesh(config.mesh)) as mesh:
            params = jax.device_get(load_trained(run, config, mesh).params)
    _check_outputs(case, config.model, {"params": params})
    return f"{config.model.family}: trained"


def _check_outputs(case: Case, config: ModelConfig, params) -> None:
    kinds = [layer.feed_forward_kind for side in config.sides for layer in config.layers(side)]
    if config.dtype != "float32" or any(getattr(kind, "capacity_factor", 0) for kind in kinds):
        return  # rounding; or tokens compete for places
    draw, model = np.random.default_rng(case.seed), build_model(config)
    ids = lambda: draw.integers(4, config.vocab_size, (2, 12)).astype(np.int32)
    one, mask = ids(), np.arange(12) < np.array([[9], [12]])
    source, source_mask = (ids(), mask) if config.is_encoder_decoder else (None, None)

    @jax.jit
    def outputs(tokens, mask, source, source_mask):
        if source is None:
            return model.apply(params, tokens, padding_mask=mask)
        return model.apply(
            params, source, tokens, padding_mask=mask, source_padding_mask=source_mask
        )

    base = np.asarray(outputs(one, mask, source, source_mask))
    scale = np.abs(base).max()
    assert np.isfinite(base).all(), f"{case}: outputs are not finite"

    def same(what: str, keep, *inputs) -> None:
        now = np.asarray(outputs(*inputs))
        worst = np.abs((now - base)[keep]).max()
        assert worst <= 2e-5 * scale, (
            f"{case}: {what} changes outputs by {worst:.2e} of {scale:.2e}"
        )

    row = np.where(np.arange(2)[:, None] == 0, one, ids())
    same("another sequence of the batch", np.s_[:1], row, mask, source, source_mask)
    same("padding", mask, np.where(mask, one, ids()), mask, source, source_mask)
    if config.is_encoder_decoder:
        other = np.where(source_mask, source, ids())
        same("padding of the source", mask, one, mask, other, source_mask)
    if "decoder" in config.sides and config.causal:
        later = np.where(np.arange(12) < 6, one, ids())
        same("a later token", np.s_[:, :6], later, mask, source, source_mask)
