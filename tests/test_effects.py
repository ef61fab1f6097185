"""Errors of configs: fields without effect, wrong types, and numbers out of range."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import model_fields, small
from flax.core import FrozenDict

from transformer import ModelConfig, UserError
from transformer.checks import Effect, strict
from transformer.config import (
    DataConfig,
    DecodingConfig,
    Experiment,
    MeshConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer.mapping import from_mapping
from transformer.model import positions
from transformer.parallel import mesh as meshes
from transformer.parallel.sharding import Share
from transformer.runs import fits
from transformer.runs.initialize import check_source

MUP = {"parametrization": {"name": "mup", "base": {"d_model": 4}}}
GATED = {"layer_pattern": [{"mixer": "gated_delta"}]}


def experiment(model=(), **sections) -> Experiment:
    data = {"corpus": "pydoc", "length": 16, **sections.pop("data", {})}
    return from_mapping(
        Experiment,
        {"model": model_fields(**{"family": "decoder", **dict(model)}), "data": data, **sections},
    )


ALL = ({"position": "alibi"}, {"position": "rotary"})

LSTMS = {
    "family": "decoder", "vocab_size": 37, "d_model": 16, "num_decoder_layers": 2,
    "max_length": 24, "mixer": "lstm", "position": "none", "feed_forward": "none",
}  # fmt: skip

WITHOUT_EFFECT = {
    "model.encoder": lambda: small("decoder", encoder={"d_ff": 8}),
    "model.token_types": lambda: small("decoder", token_types=2),
    "model.prefix_lm": lambda: small("encoder_decoder", prefix_lm=True),
    "model.causal": lambda: small("encoder", causal=False),
    "model.causal ": lambda: small("decoder", causal=False, prefix_lm=True, position="t5"),
    "model.pooler": lambda: small("encoder_decoder", pooler=True),
    "model.pooler_activation": lambda: small("encoder", pooler_activation="gelu"),
    "model.decoder_start_id": lambda: small("decoder", decoder_start_id=0),
    # Fields that layer_pattern sets in every layer, and entries that no layer uses.
    "model.position": lambda: small("decoder", position="t5", layer_pattern=ALL),
    "model.window": lambda: small(
        "decoder", window=3, layer_pattern=({"window": 2}, {"window": 4})
    ),
    "model.feed_forward": lambda: small(
        "decoder", feed_forward="experts", layer_pattern=({"feed_forward": "dense"},)
    ),
    "model.layer_pattern": lambda: small(
        "decoder", layer_pattern=({"window": 2}, {}, {"window": 3})
    ),
    "model.layer_pattern ": lambda: small("decoder", layer_pattern=({}, {})),
    # Families.
    "model.num_encoder_layers": lambda: small("decoder", num_encoder_layers=2),
    "model.num_decoder_layers": lambda: small("encoder", num_decoder_layers=2),
    "model.share_embeddings": lambda: small("decoder", share_embeddings=False),
    # Layers without attention, or without a feed-forward.
    "model.window ": lambda: ModelConfig(**LSTMS, window=3),
    "model.num_heads": lambda: ModelConfig(**LSTMS, num_heads=4),
    "model.residual_init_scale": lambda: ModelConfig(
        **LSTMS | {"num_decoder_layers": 1}, residual_init_scale=True
    ),
    "model.attention_bias": lambda: ModelConfig(**LSTMS, attention_bias=True),
    "model.attention_scale": lambda: small(
        "decoder", position="none", attention_score="additive", attention_scale=0.5
    ),
    "model.attention_layer_scale": lambda: small(
        "decoder", num_decoder_layers=1, attention_layer_scale=True
    ),
    "model.norm": lambda: ModelConfig(**LSTMS, norm_placement="none", norm="rmsnorm"),
    "model.d_ff": lambda: ModelConfig(**LSTMS, d_ff=32),
    "model.glu": lambda: ModelConfig(**LSTMS, glu=True),
    "model.activation": lambda: ModelConfig(**LSTMS, activation="gelu"),
    "model.activation_dropout": lambda: ModelConfig(**LSTMS, activation_dropout=0.1),
    "model.parallel": lambda: ModelConfig(**LSTMS, parallel=True),
    "model.use_bias": lambda: ModelConfig(
        **LSTMS | {"mixer": "attention"}, attention_bias=True, use_bias=False
    ),
    # Norms, initial values, heads.
    "model.norm ": lambda: small("decoder", norm_placement="none", norm="rmsnorm"),
    "model.norm_offset": lambda: small("decoder", norm="rmsnorm", norm_offset=False),
    "model.norm_epsilon": lambda: small("decoder", norm="dynamic_tanh", norm_epsilon=1e-3),
    "model.norm_zero_centered": lambda: small("decoder", norm_gain=False, norm_zero_centered=True),
    "model.first_norm": lambda: small("decoder", norm_placement="post", first_norm=False),
    "model.init_std": lambda: small("decoder", init_std=0.01),
    "model.random_positions": lambda: small("decoder", position="none", random_positions=50),
    "model.random_positions ": lambda: small("decoder", position="cope", random_positions=50),
    "model.pooling": lambda: small("decoder", pooling="mean"),
    "model.label_bias": lambda: small("decoder", label_bias=False),
    "model.logit_bias": lambda: small("encoder", lm_head=False, num_labels=2, logit_bias=True),
    "model.pipeline_microbatches": lambda: experiment({"pipeline_microbatches": 2}),
    # Text.
    "data.format": lambda: DataConfig(corpus="pydoc", format="jsonl"),
    "data.fields": lambda: DataConfig(train="x", format="text", fields=("a",)),
    "data.reverse": lambda: DataConfig(corpus="pydoc", reverse=True),
    "data.packing": lambda: DataConfig(objective="span_corruption", packing=False),
    "data.buckets": lambda: DataConfig(packing=False, length=32, buckets=(32,)),
    "data.buckets ": lambda: DataConfig(
        objective="ul2", packing=False, length=32, buckets=(16, 32)
    ),
    "data.too_long": lambda: DataConfig(too_long="cut"),
    "data.eval_overlap": lambda: DataConfig(objective="seq2seq", eval_overlap=4),
    "data.held_out": lambda: DataConfig(corpus="wikitext2", held_out=5),
    "data.held_out ": lambda: DataConfig(train="a", valid="b", test="c", held_out=5, format="text"),
    "data.tokenizer.kind": lambda: TokenizerConfig(path="x.model", kind="bpe"),
    "data.tokenizer.byte_fallback": lambda: TokenizerConfig(kind="char", byte_fallback=False),
    # Training, decoding, devices.
    "optimizer.b1": lambda: OptimizerConfig(name="sgd", b1=0.8),
    "optimizer.epsilon": lambda: OptimizerConfig(name="lion", epsilon=1e-8),
    "optimizer.momentum": lambda: OptimizerConfig(momentum=0.5),
    "optimizer.decay_fraction": lambda: OptimizerConfig(decay_fraction=0.5),
    "optimizer.final_fraction": lambda: OptimizerConfig(schedule="constant", final_fraction=0.1),
    "train.init_positions": lambda: TrainConfig(init_positions="extend"),
    "train.init_kv_heads": lambda: TrainConfig(init_kv_heads="mean"),
    "train.init_encoder": lambda: TrainConfig(init_encoder="decoder"),
    "train.average_checkpoints": lambda: TrainConfig(average_checkpoints=2),
    "train.average_checkpoints ": lambda: TrainConfig(
        steps=100, checkpoint_every=60, keep_checkpoints=3, average_checkpoints=3
    ),
    "train.profile": lambda: TrainConfig(steps=8, profile=3),
    "decoding.top_k": lambda: DecodingConfig(top_k=4),
    "decoding.length_penalty": lambda: DecodingConfig(length_penalty=1.0),
    "mesh.slices": lambda: MeshConfig(slices="fsdp"),
    "train.z_loss": lambda: experiment(
        {"family": "encoder", "num_labels": 2, "pooling": "cls"},
        data={"objective": "classification", "packing": False},
        train={"z_loss": 0.1},
    ),
    "decoding.beam_size": lambda: experiment(
        {"family": "encoder"}, data={"objective": "masked_lm"}, decoding={"beam_size": 4}
    ),
}


def test_dynamic_scaling_has_an_effect_with_factor_one():
    scaling = {"name": "dynamic", "factor": 1.0, "original_length": 8}
    scheme = positions.build(FrozenDict({"name": "rotary", "scaling": FrozenDict(scaling)}))
    frequencies = scheme._scaling.frequencies(10_000.0, 8, jnp.array([8, 32]))
    assert scheme._scaling.check(10_000.0, 8) is None
    assert np.all(frequencies[0, 1:] > frequencies[1, 1:]), (
        "frequencies must be lower for longer sequences"
    )


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_field_without_effect_raises(field):
    message = rf"^{re.escape(field.strip())}: .* has no effect( without |, because )"
    with pytest.raises(UserError, match=message):
        WITHOUT_EFFECT[field]()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: small("decoder", position={"name": "rotary", "scaling": {"name": "linear"}}),
            "scaling.factor: 1.0 has no effect",
        ),
        (
            lambda: small(
                "decoder",
                position={
                    "name": "rotary",
                    "scaling": {"name": "llama3", "high_frequency_factor": 1.0},
                },
            ),
            "high_frequency_factor: 1.0 must be more",
        ),
        *(
            (lambda own=own, more=more: small("encoder_decoder", encoder=own, **more), message)
            for own, more, message in (
                ({"d_f": 8}, {}, "encoder: 'd_f' cannot differ from the decoder's; did you mean"),
                ({"d_ff": "wide"}, {}, "model.encoder.d_ff: expected int, got 'wide'"),
                ({"d_ff": -1}, {}, "model.encoder.d_ff: -1 is too small"),
                ({"num_heads": 3}, {}, "model.encoder.d_model: 16 is not divisible by"),
                ({"num_heads": 0}, {}, "model.encoder.num_heads: 0 is too small"),
                ({"d_model": 8}, {}, "encoder.d_model: 8 needs model.share_embeddings=False"),
                ({"layer_pattern": [{"position": "none"}]}, {}, "'position' cannot differ from"),
                ({"layer_pattern": [5]}, {}, "model.encoder.layer_pattern: expected a mapping"),
                ({"layer_pattern": [{"window": 3}] * 3}, {"num_decoder_layers": 3}, "no effect"),
                ({"layer_pattern": []}, GATED, "it would replace model.layer_pattern, which sets"),
                ({"d_ff": 8}, MUP, "model.encoder: the base model of a parametrization has one"),
            )
        ),
        (
            lambda: small("decoder", position={"name": "sinusoidal", "base": -1.0}),
            "model.position.base: -1.0 must be more than 0",
        ),
        (
            lambda: small("decoder", position={"name": "xpos", "scale_base": 0.0}),
            "model.position.scale_base: 0.0 must be more than 0",
        ),
        (
            lambda: small("decoder", position={"name": "learned", "offset": -1}),
            "model.position.offset: -1 is too small",
        ),
        (
            lambda: experiment(decoding={"beam_size": 41}),
            "decoding.beam_size: 41 is too large for model.vocab_size = 40",
        ),
        (
            lambda: experiment(decoding={"temperature": 1.0, "top_k": 40}),
            "decoding.top_k: 40 is too large for model.vocab_size = 40; at most 39",
        ),
        (lambda: DataConfig(packing="x"), "data.packing: expected bool, got 'x'"),
        (lambda: DataConfig(length=True), "data.length: expected int, got True"),
        (lambda: DataConfig(buckets=(8, "x")), "data.buckets: expected int, got 'x'"),
        (
            lambda: small("decoder", position={"name": {1}}),
            "model.position.name: a set, {1}",
        ),
        (lambda: TokenizerConfig(path=3), "data.tokenizer.path: expected text, got 3"),
        (lambda: TokenizerConfig(kind=3), "data.tokenizer.kind: unknown value 3; choose from: bpe"),
        (lambda: TrainConfig(evaluators="order"), "train.evaluators: expected a list"),
        (lambda: OptimizerConfig(b3=0.1), "OptimizerConfig.b3: no such field; did you mean 'b"),
        (lambda: small("decoder", d_model="wide"), "model.d_model: expected int, got 'wide'"),
        (lambda: Experiment(small("decoder"), data=3), "data: expected a mapping of fields"),
        (
            lambda: Experiment(small("decoder")),
            "data: must be set; add the section config.data = dict(...)",
        ),
        (
            lambda: DataConfig(train="a", valid="b", test="c", held_out=5, format="text"),
            "data.held_out: 5 has no effect, because valid and test have their own files; leave",
        ),
        (
            lambda: TrainConfig(average_checkpoints=9, keep_checkpoints=3),
            "train.keep_checkpoints = 3; increase train.keep_checkpoints",
        ),
        (lambda: small("decoder", logit_scale=1e-300), "model.logit_scale: 1e-300 is 0 in float32"),
        (
            lambda: OptimizerConfig(learning_rate=1e39),
            "learning_rate: 1e+39 is infinite in float32",
        ),
        (
            lambda: small("decoder", position={"name": "rotary", "theta": 1e-300}),
            "model.position.theta: 1e-300 is 0",
        ),
        (
            lambda: OptimizerConfig(final_fraction=2),
            "optimizer.final_fraction: 2.0 is too large; at most 1",
        ),
        (
            lambda: DecodingConfig(temperature=1e30),
            "decoding.temperature: 1e+30 is too large; at most 100",
        ),
        (
            lambda: DecodingConfig(temperature=1e-38),
            "decoding.temperature: 1e-38 is too small; at least 1e-6, or 0 (greedy)",
        ),
        (
            lambda: DecodingConfig(beam_size=2, length_penalty=1e30),
            "decoding.length_penalty: 1e+30 is too large; at most 100",
        ),
        (
            lambda: OptimizerConfig(clip_norm=1e30),
            "optimizer.clip_norm: 1e+30 is too large; at most 1,000,000,000",
        ),
        (
            lambda: OptimizerConfig(name={"name": "adafactor", "clip_threshold": 1e30}),
            "optimizer.name.clip_threshold: 1e+30 is too large; at most 1,000,000,000",
        ),
        (
            lambda: small("decoder", attention_soft_cap=1e30),
            "model.attention_soft_cap: 1e+30 is too large; at most 1,000,000,000",
        ),
        (
            lambda: small("decoder", logit_soft_cap=1e30),
            "model.logit_soft_cap: 1e+30 is too large; at most 1,000,000,000",
        ),
        (
            lambda: small("decoder", num_decoder_layers=1001, scan_layers=False),
            "model.num_decoder_layers: 1,001 is too large; at most 1,000; set model.scan_la",
        ),
        (
            lambda: small("decoder", attention_dropout=0.99999),
            "model.attention_dropout: 0.99999 is too large; at most 0.9999: almost nothing",
        ),
        (
            lambda: OptimizerConfig(b2=0.99999999999),
            "optimizer.b2: 0.99999999999 must lie in [0, 1), also in float32",
        ),
        (lambda: OptimizerConfig(b2=1.5), "optimizer.b2: 1.5 must lie in [0, 1)"),
        (
            lambda: OptimizerConfig(name={"name": "adafactor", "decay_rate": -1.0}),
            "optimizer.name.decay_rate: -1.0 must be more than 0",
        ),
        (
            lambda: DataConfig(packing=False, length=32, buckets=(-1, 32)),
            "data.buckets: -1 is too small; at least 1",
        ),
        (
            lambda: DataConfig(packing=False, length=32, buckets=(0, 32)),
            "data.buckets: 0 is too small; at least 1",
        ),
        (
            lambda: small("decoder", feed_forward={"name": "experts", "num_experts": 100_000}),
            "num_experts: 100,000 is too large; at most 4,096",
        ),
        (
            lambda: small("decoder", norm_placement={"name": "pre", "warmup_hint": 3}),
            "no option 'warmup_hint'",
        ),
        (
            lambda: small("decoder", norm_placement={"name": "pre", "branch_gain": -1.0}),
            "branch_gain: -1.0 must be more than 0",
        ),
        (
            lambda: small("decoder", norm_placement={"name": "pre", "layer_scale": -1.0}),
            "layer_scale: -1.0 is too small; at least 0",
        ),
        (
            lambda: experiment({"position": "learned"}, train={"evaluators": ["extrapolation"]}),
            "reads sequences of data.length * times = 256 tokens, but the table",
        ),
        (
            lambda: experiment(
                {"layer_pattern": ({"position": "learned"}, {})},
                train={"evaluators": ["extrapolation"]},
            ),
            "but the table of model.position = 'learned' ends",
        ),
        (
            lambda: experiment(
                train={"evaluators": [{"name": "extrapolation", "times": 1, "sliding": False}]}
            ),
            "sliding: False has no effect with times=1",
        ),
    ],
)
def test_wrong_types_and_ranges_raise(build, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build()


def test_equivalent_types_are_converted():
    data = DataConfig(corpus="pydoc", packing=False, length=np.int64(8), buckets=[4, 8])
    assert data.buckets == (4, 8) and type(data.length) is int
    # A choice without options equals its name.
    assert DataConfig(objective={"name": "causal_lm"}) == DataConfig()
    assert isinstance(OptimizerConfig(learning_rate=1).learning_rate, float)
    assert DecodingConfig(temperature=100) == DecodingConfig(temperature=100.0)


def test_configs_with_values_set_by_the_family_can_be_copied():
    """Values that the family sets do not count as user settings, so that a config can be copied."""
    for family in ("encoder", "decoder", "encoder_decoder"):
        config = small(family)
        assert dataclasses.replace(config) == config
    assert small("decoder", num_encoder_layers=0).num_encoder_layers == 0


def test_strict_rejects_fields_without_effect():
    @strict("mine", (Effect(("b",), "mine.a=True", lambda c: c.a),))
    class Mine:
        a: bool = False
        b: float = 1.0

    assert Mine(b=1) == Mine() and Mine(a=True, b=2).b == 2.0
    with pytest.raises(
        UserError,
        match=(
            r"mine\.b: 2\.0 has no effect without mine\.a=True; "
            r"set that, or leave mine\.b at 1\.0"
        ),
    ):
        Mine(b=2)


def test_infeasible_runs_raise_before_training(tmp_path):
    single_device = meshes.make_mesh(MeshConfig(data=1))
    with pytest.raises(
        UserError,
        match="data.batch_size: 1,000,000,000 sequences of 16 tokens take .* lower data.batch_size",
    ):
        fits.check_training(experiment(data={"batch_size": 1_000_000_000}), Share(single_device))
    fits.check_training(experiment(), Share(single_device))
    with pytest.raises(UserError, match="model.pipeline_rounds: 2 has no effect without stages"):
        fits.check_training(experiment({"pipeline_rounds": 2}), Share(single_device))
    with pytest.raises(
        UserError, match=r"train.init_from: .* is neither a run \(checkpoints/\) nor a Hugging Face"
    ):
        check_source(str(tmp_path))
