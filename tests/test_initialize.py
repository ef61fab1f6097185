"""Fine-tuning: a run starts from the parameters of another run or of a Hugging Face directory."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import make, model_fields

from transformer import ModelConfig, save_hf
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.mapping import from_mapping
from transformer.model.layout import flatten, part, where
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.runs import loop
from transformer.runs.checkpoint import Checkpoints
from transformer.runs.initialize import start_from
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state, init_state

MODEL = model_fields("decoder", vocab_size=512, max_length=32, position="learned", logit_bias=True)


def experiment(model=(), train=(), data=()):
    return from_mapping(
        Experiment,
        {
            "model": {**MODEL, **dict(model)},
            "data": {
                "corpus": "pydoc",
                "length": 16,
                "batch_size": 8,
                "held_out": 4,
                "tokenizer": {"kind": "bpe"},
                **dict(data),
            },
            "optimizer": {"warmup_steps": 2},
            "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
            "train": {"steps": 3, "tensorboard": False, "eval_batches": 1, **dict(train)},
        },
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run of three steps, and its parameters by unrolled name."""
    workdir, config = tmp_path_factory.mktemp("run") / "run", experiment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFORMER_DATA", str(tmp_path_factory.getbasetemp() / "data"))
        assert loop.train(config, workdir) == 3
    return workdir, restored_params(config, state_and_shardings(config)[0].params, workdir)


def state_and_shardings(config):
    """Returns (abstract state, shardings) of a config on its mesh."""
    with use(make_mesh(config.mesh)) as mesh:
        return abstract_state(
            config,
            build_model(config.model),
            build_optimizer(config.optimizer, 3, config.model),
            mesh,
        )


def restored_params(config, abstract, workdir):
    params = Checkpoints(workdir, config.train).evaluation_params(abstract)
    return unstack(config.model, params)


def unstack(model: ModelConfig, params):
    flat = flatten(params)
    return {name: np.asarray(part(flat[path], i)) for name, (path, i) in where(model, flat).items()}


def fresh_and_initialized(config):
    """Returns (newly initialized parameters, parameters after `start_from`), by unrolled name."""
    with use(make_mesh(config.mesh)) as mesh:
        model, optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, 3, config.model),
        )
        _, placed = abstract_state(config, model, optimizer, mesh)
        fresh = init_state(config, model, optimizer, placed)
        initialized = start_from(config, fresh, placed, mesh)
        jax.tree.map(
            lambda x, s: None if x.sharding == s else pytest.fail("the sharding changed"),
            initialized.params,
            placed.params,
        )
        return unstack(config.model, fresh.params), unstack(config.model, initialized.params)


@pytest.mark.parametrize("scan", [True, False])
def test_run_starts_from_another_run_in_any_layout(trained, scan):
    workdir, pretrained = trained
    fresh, initialized = fresh_and_initialized(
        experiment({"scan_layers": scan}, {"init_from": str(workdir), "ema_decay": 0.9})
    )
    assert initialized.keys() == pretrained.keys()
    assert max(np.abs(fresh[name] - pretrained[name]).max() for name in pretrained) > 1e-3
    for name, x in pretrained.items():
        np.testing.assert_array_equal(initialized[name], x, err_msg=name)


def test_heads_are_dropped_and_added_by_name(trained):
    workdir, pretrained = trained
    model = {"lm_head": False, "num_labels": 3, "pooling": "last", "logit_bias": False}
    data = {"objective": "classification", "packing": False}
    with pytest.raises(
        UserError,
        match=r"has no classifier/labels/bias, classifier/labels/kernel; list these in",
    ):
        fresh_and_initialized(experiment(model, {"init_from": str(workdir)}, data))
    train = {"init_from": str(workdir), "init_new": ("classifier/*",)}
    with pytest.raises(
        UserError,
        match=r"this model has no parameter unembedding/bias; list these in train\.init_drop",
    ):
        fresh_and_initialized(experiment(model, train, data))
    fresh, initialized = fresh_and_initialized(
        experiment(model, train | {"init_drop": ("unembedding/*",)}, data)
    )
    np.testing.assert_array_equal(
        initialized["classifier/labels/kernel"], fresh["classifier/labels/kernel"]
    )
    np.testing.assert_array_equal(
        initialized["embedding/embedding"], pretrained["embedding/embedding"]
    )
    assert np.abs(fresh["embedding/embedding"] - pretrained["embedding/embedding"]).max() > 1e-3


def test_position_table_is_extended_or_interpolated(trained):
    workdir, pretrained = trained
    longer, name = {"max_length": 64}, "decoder/position_embedding"
    with pytest.raises(
        UserError, match=rf"{name} is 32x16 there and 64x16 here; set train\.init_positions"
    ):
        fresh_and_initialized(experiment(longer, {"init_from": str(workdir)}))
    fresh, initialized = fresh_and_initialized(
        experiment(longer, {"init_from": str(workdir), "init_positions": "extend"})
    )
    np.testing.assert_array_equal(initialized[name][:32], pretrained[name])
    np.testing.assert_array_equal(initialized[name][32:], fresh[name][32:])
    _, initialized = fresh_and_initialized(
        experiment(longer, {"init_from": str(workdir), "init_positions": "interpolate"})
    )
    positions = (np.arange(64) + 0.5) / 2 - 0.5
    expected = np.stack(
        [np.interp(positions, np.arange(32), column) for column in pretrained[name].T], axis=1
    )
    np.testing.assert_allclose(initialized[name], expected, atol=1e-6)


def test_key_value_heads_are_averaged_in_groups(trained):
    """4 heads become 2. Query head n read key head n, and now reads head n // 2."""
    workdir, pretrained = trained
    model, train = {"num_kv_heads": 2}, {"init_from": str(workdir)}
    with pytest.raises(
        UserError, match="key/bias is 4x4 there and 2x4 here; set train.init_kv_heads=mean"
    ):
        fresh_and_initialized(experiment(model, train))
    with pytest.raises(UserError, match="here; name it in train.init_new and train.init_drop"):
        fresh_and_initialized(experiment({"d_head": 8}, train))
    _, initialized = fresh_and_initialized(experiment(model, train | {"init_kv_heads": "mean"}))
    for name, x in pretrained.items():
        if "/key/" in name or "/value/" in name:
            heads = np.moveaxis(x, -2, 0)
            assert np.abs(heads[0] - heads[1]).max() > 1e-3 or "bias" in name
            x = np.stack([(heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2], axis=-2)
        np.testing.assert_allclose(initialized[name], x, atol=1e-7, err_msg=name)


def test_an_encoder_decoder_starts_from_a_decoder(trained):
    workdir, pretrained = trained
    model = {"family": "encoder_decoder", "num_encoder_layers": 2}
    data, train = {"objective": "span_corruption"}, {"init_from": str(workdir)}
    with pytest.raises(UserError, match="has no decoder/layers_0/cross_attention"):
        fresh_and_initialized(experiment(model, train, data))
    _, initialized = fresh_and_initialized(
        experiment(model, train | {"init_encoder": "decoder"}, data)
    )
    assert {x.split("/")[0] for x in initialized} == {
        "embedding",
        "encoder",
        "decoder",
        "unembedding",
    }
    for name, x in initialized.items():
        origin = name.replace("encoder/", "decoder/").replace("cross_attention", "self_attention")
        np.testing.assert_array_equal(x, pretrained[origin], err_msg=name)
    assert any("cross_attention/query" in name for name in initialized)


def test_run_starts_from_a_hugging_face_directory(tmp_path):
    pytest.importorskip("safetensors", reason="the test extra brings it")
    config = dataclasses.replace(
        ModelConfig(
            **MODEL | {"logit_bias": False, "activation": "gelu_tanh", "norm_epsilon": 1e-5}
        ),
        scan_layers=False,
    )
    _, params = make(config)
    save_hf(tmp_path / "hf", config, params, family="gpt2")
    model = {"logit_bias": False, "activation": "gelu_tanh", "norm_epsilon": 1e-5}
    _, initialized = fresh_and_initialized(experiment(model, {"init_from": str(tmp_path / "hf")}))
    for name, x in unstack(config, params).items():
        np.testing.assert_array_equal(initialized[name], x, err_msg=name)


def test_training_starts_from_a_run_and_rejects_another_tokenizer(trained, tmp_path):
    workdir, _ = trained
    config = experiment(train={"init_from": str(workdir), "steps": 1})
    assert loop.train(config, tmp_path / "tuned") == 1
    other = experiment(train={"init_from": str(workdir)}, data={"tokenizer": {"kind": "unigram"}})
    with pytest.raises(UserError, match=r"its tokenizer differs; set data\.tokenizer\.path="):
        loop.train(other, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_from": "nowhere"}, "train.init_from: nowhere is neither a run"),
        (
            {"init_new": ("classifier/*",)},
            "has no effect without parameters to start from: train.init_from",
        ),
        ({"init_positions": "strech"}, "train.init_positions: unknown value 'strech'"),
        ({"init_kv_heads": "max"}, "train.init_kv_heads: unknown value 'max'"),
        ({"init_encoder": "yes"}, "train.init_encoder: unknown value 'yes'"),
    ],
)
def test_invalid_init_fields_raise(fields, message):
    with pytest.raises(UserError, match=message):
        fresh_and_initialized(experiment(train=fields))
