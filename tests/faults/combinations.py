"""Random valid models of all families: two training steps, then invariances of the outputs.

Fields are drawn at random, and drawn again if the config refuses them. Each model trains for two
steps with the code of the train command (text, batches, state, step, evaluation, checkpoint). With
the trained parameters, the output of a token must not depend on tokens that it does not attend to:
other sequences of the batch, later tokens under a causal mask, and padding.
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
from transformer.model.placements.base import PLACEMENTS
from transformer.model.positions import SCHEMES
from transformer.parallel.mesh import make_mesh, use
from transformer.runs.evaluate import load_trained
from transformer.runs.loop import train
from transformer.runs.metrics import Diverged, read_metrics

SIZES = {"vocab_size": 480, "d_model": 16, "d_ff": 24, "num_heads": 4, "max_length": 16}

OPTIONS = {
    "mixer": (
        "attention",
        "mla",
        "gated_delta",
        "lstm",
        "gru",
        "rnn",
        {"name": "lstm", "source": "attention"},
    ),
    "position": tuple(SCHEMES),
    "cross_position": ("none", "none", "rotary", "t5", "shaw"),
    "norm_placement": tuple(PLACEMENTS),
    "norm": ("layernorm", "rmsnorm"),
    "norm_gain": (True, False),
    "norm_offset": (True, False),
    "norm_zero_centered": (False, True),
    "embedding_norm": (False, True),
    "first_norm": (True, False),
    "parallel": (False, True),
    "encoder": ({}, {}, {"d_ff": 40, "d_head": 6, "num_heads": 2, "num_kv_heads": 1}),
    "num_kv_heads": (0, 1, 2),
    "d_head": (0, 8),
    "d_value": (0, 6),
    "d_embedding": (0, 8),
    "qk_norm": (False, True),
    "attention_scale": (None, 0.3),
    "attention_layer_scale": (False, True),
    "attention_soft_cap": (0.0, 20.0),
    "attention_sink": (False, True),
    "canon": ("", "", "ABCD", "C"),
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
        {"name": "experts", "num_experts": 4, "top_k": 2, "router_use_bias": True},
        {"name": "experts", "num_experts": 2, "top_k": 1, "capacity_factor": 1.5},
    ),
    "activation": ("relu", "gelu", "gelu_tanh", "silu", "quick_gelu"),
    "glu": (False, True),
    "glu_limit": (0.0, 0.0, 0.5),
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
"""Field -> values to draw from. The default comes first."""

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
    refused: int  # number of refused configs drawn before this one

    def __str__(self) -> str:
        return (
            f"combination {self.number} of seed {self.seed}: {self.tree['model']}, "
            f"{self.tree['data']['objective']}"
        )


def cases(seed: int) -> Iterator[Case]:
    """Yields random valid cases without end."""
    rng = random.Random(seed)
    for number in itertools.count():
        for refused in itertools.count():
            tree = _tree(rng)
            try:
                from_mapping(Experiment, tree)
            except UserError as e:
                if "\n" in str(e):
                    raise AssertionError(f"{tree}: {e}") from e
                continue
            yield Case(seed, number, tree, refused)
            break


def _tree(rng: random.Random) -> dict:
    family = rng.choice(tuple(OBJECTIVES))
    share = rng.choice((0.1, 0.3))  # fraction of fields that are drawn
    fields = {name: rng.choice(values) for name, values in OPTIONS.items() if rng.random() < share}
    if rng.random() < 0.8:
        fields["position"] = rng.choice(OPTIONS["position"])
        fields["norm_placement"] = rng.choice(OPTIONS["norm_placement"])
    sizes = dict(SIZES)
    for side in ("encoder", "decoder"):
        if side in family:
            sizes[f"num_{side}_layers"] = rng.choice((1, 2, 2, 4))
    if (
        fields.get("mixer") in ("lstm", "gru", "rnn")
        and "layer_pattern" not in fields
        and family == "decoder"
    ):
        del sizes["num_heads"]
    if fields.get("feed_forward") == "none":
        del sizes["d_ff"]
    objective = rng.choice(OBJECTIVES[family])
    if objective != "causal_lm" and family == "decoder":
        fields["prefix_lm"] = True
    return {
        "model": {"family": family, **sizes, **fields},
        "data": {
            "corpus": "pydoc", "objective": objective, "length": 16, "batch_size": 4,
            "held_out": 4, "tokenizer": {"kind": "bpe"},
        },
        "optimizer": {"warmup_steps": 1, "learning_rate": 1e-3},
        "train": {"steps": 2, "log_every": 1, "eval_batches": 1, "tensorboard": False},
        "mesh": {"data": 1},
        "seed": rng.randrange(2**31),
    }  # fmt: skip


def check(case: Case) -> str:
    """Raises AssertionError, with the case, unless the model trains and the invariances hold."""
    config = from_mapping(Experiment, case.tree)
    # Without norms, each gated feed-forward squares the stream, which may overflow.
    without_norms = case.tree["model"].get("norm_placement") == "none"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            steps = train(config, run)
        except Diverged as e:
            if without_norms:
                return f"{config.model.family} without norms: reported as diverged"
            raise AssertionError(f"{case}: {e}") from e
        except UserError as e:
            raise AssertionError(f"{case}: accepted, but {e}") from e
        lines = read_metrics(run)
        losses = [line["train/loss"] for line in lines if "train/loss" in line]
        assert steps == 2 and len(losses) == 2, f"{case}: {lines}"
        largest = math.inf if without_norms else 100
        assert all(0 < x < largest for x in losses), f"{case}: losses {losses}"
        with use(make_mesh(config.mesh)) as mesh:
            params = jax.device_get(load_trained(run, config, mesh).params)
    _check_outputs(case, config.model, params)
    return f"{config.model.family}: trained"


def _check_outputs(case: Case, config: ModelConfig, params) -> None:
    kinds = [layer.feed_forward_kind for side in config.sides for layer in config.layers(side)]
    if config.dtype != "float32" or any(getattr(kind, "capacity_factor", 0) for kind in kinds):
        return  # outputs differ by rounding, or tokens compete for capacity slots
    rng, model = np.random.default_rng(case.seed), build_model(config)
    random_ids = lambda: rng.integers(4, config.vocab_size, (2, 12)).astype(np.int32)
    ids, mask = random_ids(), np.arange(12) < np.array([[9], [12]])
    source, source_mask = (random_ids(), mask) if config.is_encoder_decoder else (None, None)

    @jax.jit
    def outputs(tokens, mask, source, source_mask):
        if source is None:
            return model.apply(params, tokens, padding_mask=mask)
        return model.apply(
            params, source, tokens, padding_mask=mask, source_padding_mask=source_mask
        )

    expected = np.asarray(outputs(ids, mask, source, source_mask))
    scale = np.abs(expected).max()
    assert np.isfinite(expected).all(), f"{case}: outputs are not finite"

    def assert_same(change: str, compared, *inputs) -> None:
        changed = np.asarray(outputs(*inputs))
        difference = np.abs((changed - expected)[compared]).max()
        assert difference <= 2e-5 * scale, (
            f"{case}: {change} changes outputs by {difference:.2e} of {scale:.2e}"
        )

    other_row = np.where(np.arange(2)[:, None] == 0, ids, random_ids())
    assert_same("another sequence of the batch", np.s_[:1], other_row, mask, source, source_mask)
    assert_same("padding", mask, np.where(mask, ids, random_ids()), mask, source, source_mask)
    if config.is_encoder_decoder:
        other_source = np.where(source_mask, source, random_ids())
        assert_same("padding of the source", mask, ids, mask, other_source, source_mask)
    if "decoder" in config.sides and config.causal:
        later = np.where(np.arange(12) < 6, ids, random_ids())
        assert_same("a later token", np.s_[:, :6], later, mask, source, source_mask)
