"""Configs: unknown keys, wrong types, invalid combinations; experiment files; overrides."""

import dataclasses
import json
import re
from pathlib import Path

import ml_collections
import pytest

from transformer import ModelConfig, UserError, load_experiment
from transformer.config import Experiment, MeshConfig, TokenizerConfig
from transformer.config_io import load_arms
from transformer.mapping import apply_overrides, from_mapping, to_mapping

ROOT = Path(__file__).parent.parent
EXPERIMENTS = [
    file
    for folder in ("experiments", "experiments/findings", "experiments/scale")
    for file in sorted((ROOT / folder).glob("*.py"))
]
MODEL = {"family": "decoder", "vocab_size": 50}
YARN = {"name": "yarn", "factor": 2.0, "original_length": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "decodr"}, r"model.family: unknown value 'decodr'; did you mean 'decoder'"),
        (
            {"d_model": 100, "num_heads": 8},
            r"model.d_model: 100 is not divisible by model.num_heads = 8; "
            r"change one, or set model.d_head",
        ),
        ({"num_heads": 8, "num_kv_heads": 3}, r"model.num_kv_heads: 3 does not divide"),
        ({"position": "rotory"}, r"model.position: unknown value 'rotory'; did you mean 'rotary'"),
        (
            {"position": {"name": "rotary", "thea": 1.0}},
            r"model.position: 'rotary' has no option 'thea'; did you mean 'theta'",
        ),
        ({"position": {"name": "none", "x": 1.0}}, r"takes no options"),
        (
            {"position": {"name": "rotary", "layout": "x"}},
            r"model.position.layout: unknown value 'x'; choose from: halves, interleaved",
        ),
        ({"d_model": 8, "init_std": "x"}, r"model.init_std: expected a number, got 'x'"),
        ({"position": "rotary", "d_head": 5}, r"rotation needs pairs"),
        (
            {
                "position": {"name": "rotary", "scaling": {"name": "ntk", "factor": 2.0}},
                "d_head": 2,
            },
            r"model.position.scaling.name: 'ntk' needs at least 4 rotated dimensions, not 2",
        ),
        (
            {
                "position": {
                    "name": "rotary",
                    "scaling": {"name": "dynamic", "factor": 2.0, "original_length": 8},
                },
                "d_head": 2,
            },
            r"'dynamic' needs at least 4",
        ),
        (
            {"position": {"name": "rotary", "theta": 1.0, "scaling": YARN}},
            r"scaling.name: 'yarn' needs model.position.theta over 1, not 1.0",
        ),
        ({"position": "sinusoidal", "d_model": 15, "num_heads": 3}, r"even model.d_model"),
        ({"position": {"name": "t5", "num_buckets": 3}}, r"needs at least 4 num_buckets"),
        (
            {"attention_out": False, "d_value": 3},
            r"model.attention_out: False leaves num_heads \* d_value = \d+ outputs, but model.d_m",
        ),
        ({"canon": "BA"}, r"model.canon: 'BA' must be letters of 'ABCD', in this order"),
        ({"canon": "D", "feed_forward": "experts"}, r"'D' a dense one, not 'experts'"),
        ({"canon": "C", "feed_forward": "none", "d_ff": 0}, r"'C' needs a feed-forward"),
        ({"canon": "A", "causal": False}, r"model.canon: 'A' is causal; set model.family='dec"),
        ({"canon": "A", "mixer": "lstm"}, r"model.canon: mixer = 'lstm' does not support it"),
        ({"attention_gate": "heads"}, r"model.attention_gate: unknown value 'heads'"),
        (
            {"attention_score": "additive", "position": "rotary"},
            "model.attention_score: 'additive' scores do not support position = 'rotary'",
        ),
        ({"norm_placement": "prenorm"}, r"model.norm_placement: unknown value 'prenorm'"),
        (
            {"norm_placement": {"name": "pre", "outnorm": True}},
            r"no option 'outnorm'; did you mean 'out_norm'",
        ),
        (
            {"norm_placement": {"name": "pre", "out_norm": 3}},
            r"model.norm_placement.out_norm: expected bool, got 3",
        ),
        ({"activation": "relu2"}, r"model.activation: unknown value 'relu2'; did you mean 'relu'"),
        ({"dropout": 1.0}, r"model.dropout: 1.0 must lie in \[0, 1\)"),
        ({"num_decoder_layers": 0}, r"a family with a decoder needs at least 1"),
        (
            {"num_decoder_layers": 2 * 10**9},
            r"model.num_decoder_layers: 2,000,000,000 is too large; at most 10,000",
        ),
        ({"pad_id": 50}, r"model.pad_id: 50 is not in a vocabulary of 50 tokens"),
        ({"d_model": 2**40}, r"model.d_model: 1099511627776 is too large; at most"),
        ({"norm_epsilon": 0.0}, r"model.norm_epsilon: 0.0 must be more than 0"),
        ({"init_std": -0.1}, r"model.init_std: -0.1 must be more than 0"),
        ({"attention_scale": float("nan")}, r"model.attention_scale: nan must be more than 0"),
        ({"num_kv_heads": -1}, r"model.num_kv_heads: -1 is too small"),
        (
            {"position": {"name": "rotary", "theta": 0.0}},
            r"model.position.theta: 0.0 must be more than 0",
        ),
        (
            {"position": {"name": "rotary", "theta": float("inf")}},
            r"model.position.theta: inf is not finite",
        ),
        (
            {"norm_placement": {"name": "pre", "out_norm": {"x": 2}}},
            r"out_norm: expected bool, got \{'x': 2\}$",
        ),
        ({"dtype": "float16"}, r"model.dtype: unknown value 'float16'"),
    ],
)
def test_invalid_model_configs_raise(fields, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**{**MODEL, **fields})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"modle": {}}, r"modle: no such field; did you mean 'model'"),
        ({"tokenizer": {"kind": "char"}}, r"tokenizer: no such field; use data\.tokenizer$"),
        (
            {"model": {**MODEL, "batch_size": 3}},
            r"model.batch_size: no such field; use data\.batch_size or decoding\.batch_size",
        ),
        (
            {"model": MODEL, "data": {"tokenizer": "char"}},
            r"data.tokenizer: expected a mapping of fields, dict\(kind=...\), got 'char'",
        ),
        (
            {"model": {**MODEL, "d_modle": 3}},
            r"model.d_modle: no such field; did you mean 'd_model'",
        ),
        ({"model": {**MODEL, "d_model": "wide"}}, r"model.d_model: expected int, got 'wide'"),
        ({"model": {**MODEL, "use_bias": 1}}, r"model.use_bias: expected bool, got 1"),
        ({"model": {"vocab_size": 3}}, r"model.family: must be set"),
        ({"model": 3}, r"model: expected a mapping of fields"),
        (
            {"model": {**MODEL, "max_length": 64}, "data": {"corpus": "pydoc", "length": 128}},
            r"data.length: 128 is longer than model.max_length = 64; reduce it, or increase model",
        ),
        (
            {"model": {**MODEL, "family": "encoder_decoder"}},
            r"'causal_lm' trains a model of family 'decoder', .*; change one of them",
        ),
        (
            {"model": MODEL, "train": {"accumulate": 3}},
            r"train.accumulate: 3 does not divide data.batch_size = 32; change one of them",
        ),
        (
            {"model": MODEL, "mesh": {"data": -1, "fsdp": -1}},
            r"more than one -1; set at most one axis to -1",
        ),
        ({"model": MODEL, "mesh": {"data": 0}}, r"mesh.data: 0"),
        ({"model": MODEL, "optimizer": {"name": "adam"}}, r"did you mean 'adamw'"),
        (
            {"model": MODEL, "optimizer": {"schedule": "inverse_sqrt", "warmup_steps": 0}},
            r"optimizer.warmup_steps",
        ),
        ({"model": MODEL, "train": {"average_checkpoints": 5}}, r"train.keep_checkpoints = 2"),
        (
            {"model": MODEL, "train": {"average_checkpoints": 2, "ema_decay": 0.9}},
            r"both average the parameters",
        ),
        (
            {"model": MODEL, "decoding": {"beam_size": 4, "temperature": 1.0}},
            r"beam search does not sample",
        ),
        ({"model": MODEL, "platform": "tpus"}, r"did you mean 'tpu'"),
        ({"model": MODEL, "seed": -1}, r"seed: -1 is too small; at least 0"),
        (
            {"model": MODEL, "optimizer": {"learning_rate": float("inf")}},
            r"optimizer.learning_rate: inf is not finite",
        ),
        (
            {"model": MODEL, "optimizer": {"epsilon": 0.0}},
            r"optimizer.epsilon: 0.0 must be more than 0",
        ),
        ({"model": MODEL, "train": {"profile": -1}}, r"train.profile: -1 is too small"),
        ({"model": MODEL, "train": {"steps": 10**11}}, r"train.steps: 100000000000 is too large"),
    ],
)
def test_invalid_experiments_raise(tree, message):
    with pytest.raises(UserError, match=message):
        from_mapping(Experiment, {"data": {"corpus": "pydoc"}, **tree})


def test_experiment_round_trips_through_mapping():
    tree = {
        "model": {**MODEL, "position": {"name": "rotary", "theta": 5e5}, "attention_scale": 1.0},
        "data": {"corpus": "pydoc"},
    }
    config = from_mapping(Experiment, ml_collections.ConfigDict(tree))
    assert config.model.position["theta"] == 5e5
    assert from_mapping(Experiment, to_mapping(config)) == config
    assert hash(config.model) == hash(from_mapping(Experiment, to_mapping(config)).model)


def test_overrides_are_parsed_by_field_type():
    config = from_mapping(
        Experiment, {"model": {**MODEL, "position": "rotary"}, "data": {"corpus": "pydoc"}}
    )
    changed = apply_overrides(
        config,
        {
            "model.d_model": "256",
            "model.position.theta": "5e5",
            "model.use_bias": "false",
            "optimizer.learning_rate": "3e-4",
            "train.wandb": "007",
            "data.tokenizer.kind": "bpe",
            "model.attention_scale": "none",
        },
    )
    assert (changed.model.head_size, changed.model.kv_heads) == (32, 8)
    assert (changed.model.d_model, changed.model.use_bias, changed.optimizer.learning_rate) == (
        256,
        False,
        3e-4,
    )
    assert dict(changed.model.position) == {"name": "rotary", "theta": 5e5}
    assert changed.train.wandb == "007"
    scaled = apply_overrides(
        config, {"model.position.scaling.name": "linear", "model.position.scaling.factor": "4"}
    )
    assert dict(scaled.model.position["scaling"]) == {"name": "linear", "factor": 4}
    assert changed.data.tokenizer.kind == "bpe"
    for key, message in [
        ("model.d_modle", "did you mean 'd_model'"),
        ("modl.d_model", "did you mean 'model'"),
        ("seed.x", "seed"),
        ("nope", "no such field"),
    ]:
        with pytest.raises(UserError, match=message):
            apply_overrides(config, {key: "3"})


def test_overrides_accept_none_nested_options_and_tuples():
    config = from_mapping(
        Experiment,
        {"model": MODEL, "data": {"train": "x.jsonl", "format": "jsonl", "packing": False}},
    )
    changed = apply_overrides(
        config,
        {
            "model.position": "none",
            "model.norm_placement.final_norm": "true",
            "data.fields": "en,es",
            "data.buckets": "32,128",
        },
    )
    assert changed.model.position == "none"
    assert dict(changed.model.norm_placement) == {"name": "pre", "final_norm": True}
    assert changed.data.fields == ("en", "es") and changed.data.buckets == (32, 128)


def test_unknown_field_in_python_suggests_the_nearest():
    with pytest.raises(
        UserError, match=r"ModelConfig.d_modle: no such field; did you mean 'd_model'"
    ):
        ModelConfig(**MODEL, d_modle=3)


def test_positional_arguments_are_checked():
    assert MeshConfig(1, 2) == MeshConfig(data=1, stage=2)
    with pytest.raises(UserError, match=r"^MeshConfig: 9 values for \d fields; pass them"):
        MeshConfig(1, 1, 1, 1, 1, 1, "data", "junk", 3)
    with pytest.raises(UserError, match=r"^data.tokenizer.kind: given twice, .*; leave one out"):
        TokenizerConfig("bpe", kind="char")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.py", "def get_config(:\n", r"x.py:1: SyntaxError"),
        ("x.py", "def get_config():\n    return 1 / 0\n", r"x.py:2: ZeroDivisionError"),
        ("x.py", "def get_config():\n    import sys\n    sys.exit(3)\n", r"x.py:3: SystemExit"),
        (
            "x.py",
            "def get_config():\n    return 3\n",
            r"returns 3; a ConfigDict or a dict is expected",
        ),
        ("x.py", "def get_config():\n    return [1]\n", r"returns \[1\]"),
        (
            "x.py",
            "from ml_collections import ConfigDict\n\n\ndef get_config():\n"
            "    config = ConfigDict(dict(data=dict(objective='causal_lm')))\n"
            "    config.data.objective = dict(name='masked_lm')\n",
            r"x.py:6: TypeError: .*; set 'objective' once, where its section is created",
        ),
        ("x.txt", "", "neither a Python file nor a config.json"),
        ("x.json", "{", "damaged"),
    ],
)
def test_broken_config_file_raises_and_names_the_line(
    tmp_path, monkeypatch, name, content, message
):
    (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / name), name):
        with pytest.raises(UserError, match=message):
            load_experiment(path)


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_experiment_file_builds_every_arm(file, isolate_registries):
    """Its docstring also contains a question, its command and the hardware."""
    import importlib.util

    import jax

    from transformer.model.network import build_model
    from transformer.parallel.mesh import make_mesh, use
    from transformer.training.optimizer import build_optimizer
    from transformer.training.state import abstract_state

    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert f"--config={file.relative_to(ROOT)}" in module.__doc__
    assert "?" in module.__doc__ and "Hardware" in module.__doc__
    sweeps = hasattr(module, "sweep")
    load = lambda name: list(load_arms(name)[1].values()) if sweeps else [load_experiment(name)]
    configs = load(str(file))
    # At the scale of the paper, every arm is loaded but only one is built.
    for scale in getattr(module, "ARGUMENTS", ())[1:]:
        assert f"--config={file.relative_to(ROOT)}:{scale}" in module.__doc__
        configs += load(f"{file}:{scale}")[:1]
    built = set()
    for config in configs:
        model = build_model(config.model)
        optimizer = build_optimizer(config.optimizer, config.train.steps, config.model)
        # Arms that differ in other fields, such as a learning rate, have states of equal shapes.
        key = repr((config.model, config.mesh, config.optimizer.rule, config.train.ema_decay))
        if key not in built:
            with use(make_mesh(config.mesh)) as mesh:
                abstract, _ = abstract_state(config, model, optimizer, mesh)
            assert len(jax.tree.leaves(abstract.params)) > 5
            built.add(key)


def test_missing_config_file_or_get_config_raises(tmp_path):
    with pytest.raises(UserError, match="no file"):
        load_experiment(str(tmp_path / "none.py"))
    (tmp_path / "x.py").write_text("a = 1\n")
    with pytest.raises(UserError, match=r"defines no get_config"):
        load_experiment(str(tmp_path / "x.py"))


def test_layer_pattern_round_trips_through_json_and_overrides(tmp_path):
    pattern = ({"window": 3, "position": {"name": "rotary", "theta": 50.0}}, {"position": "none"})
    config = from_mapping(
        Experiment,
        {
            "model": {
                "family": "decoder",
                "vocab_size": 40,
                "d_model": 16,
                "num_heads": 4,
                "layer_pattern": pattern,
            },
            "data": {"corpus": "pydoc"},
        },
    )
    assert from_mapping(Experiment, json.loads(json.dumps(to_mapping(config)))) == config
    changed = apply_overrides(config, {"model.layer_pattern": "[{'window': 5}, {}]"})
    assert [layer.window for layer in changed.model.layers("decoder")] == [5, 0] * 3
    for invalid, message in {
        "[{'position': 3}]": "model.layer_pattern.position: expected text or a mapping",
        "[{'window': 2.5}]": "model.layer_pattern.window: expected int, got 2.5",
        "[{'window': True}]": "model.layer_pattern.window: expected int, got True",
        "[{'position': {'name': ['a']}}]": "name: ",
        "abc": "model.layer_pattern: expected a mapping",
        "[{'mixer': {1, 2}}]": "model.layer_pattern.mixer: a set, {1, 2}; write a list",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            apply_overrides(config, {"model.layer_pattern": invalid})


def test_replacing_a_field_updates_derived_fields():
    config = ModelConfig(family="decoder", vocab_size=8, num_encoder_layers=6)
    assert (config.head_size, config.kv_heads, config.num_layers("encoder")) == (64, 8, 0)
    wider = dataclasses.replace(config, d_model=1024)
    assert wider.head_size == wider.value_size == 128 and wider.stack_facts("decoder").d_head == 128
    more_heads = dataclasses.replace(config, num_heads=16)
    assert (more_heads.head_size, more_heads.kv_heads) == (32, 16)
    encoder_decoder = dataclasses.replace(config, family="encoder_decoder")
    assert encoder_decoder.num_layers("encoder") == 6
    for variant in (config, wider, more_heads, encoder_decoder):
        assert from_mapping(ModelConfig, to_mapping(variant)) == variant
