"""Evaluators: the metrics of a run besides its loss."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import make, model_fields, small, tokens

from transformer import UserError
from transformer.config import Experiment
from transformer.data.pipeline import open_data
from transformer.evaluation.evaluators.base import measure
from transformer.evaluation.losses import evaluate_loss
from transformer.evaluation.subject import Snapshot, Subject
from transformer.mapping import from_mapping
from transformer.model.layout import flatten
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.parallel.sharding import Share
from transformer.runs.evaluate import evaluate, load_trained
from transformer.runs.loop import train
from transformer.runs.metrics import read_metrics
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state, init_state, relayout
from transformer.training.step import batch_sums, make_eval_step, make_train_step

OBJECTIVES = {"encoder_decoder": "span_corruption", "encoder": "masked_lm"}


def experiment(*evaluators, mesh=(), **model) -> Experiment:
    return from_mapping(
        Experiment,
        {
            "model": model_fields(
                **{
                    "family": "decoder",
                    "vocab_size": 512,
                    "max_length": 32,
                    "position": "rotary",
                    "norm_placement": "pre",
                    **model,
                }
            ),
            "data": {
                "corpus": "pydoc",
                "objective": OBJECTIVES.get(model.get("family"), "causal_lm"),
                "length": 16,
                "batch_size": 16,
                "held_out": 4,
                "tokenizer": {"kind": "bpe"},
            },
            "optimizer": {"warmup_steps": 2, "learning_rate": 1e-2},
            "mesh": {"data": 1, **dict(mesh)},
            "train": {
                "steps": 4,
                "log_every": 2,
                "eval_every": 2,
                "eval_batches": 2,
                "tensorboard": False,
                "evaluators": evaluators,
            },
        },
    )


def initial_state(config, optimizer, mesh):
    """Returns the state in which training starts."""
    model = build_model(config.model)
    return init_state(config, model, optimizer, abstract_state(config, model, optimizer, mesh)[1])


def measure_at_start(config, max_batches=3, in_training=False, like=None):
    """Measures a model at the start of training. If `like` is set, its initial state is used.

    Returns (metrics, loss of the same batches, parameters, first batch).
    """
    model, optimizer = build_model(config.model), build_optimizer(config.optimizer, 4, config.model)
    with use(make_mesh(config.mesh)) as mesh:
        abstract, placed = abstract_state(config, model, optimizer, mesh)
        if like is None:
            state = init_state(config, model, optimizer, placed)
        else:
            with use(make_mesh(like.mesh)) as like_mesh:
                initial = jax.device_get(initial_state(like, optimizer, like_mesh))
            state = jax.device_put(
                jax.device_get(relayout(initial, like.model, config.model, abstract)), placed
            )
        data, share = open_data(config), Share(mesh)
        metrics = measure(
            Subject(config, data, "valid", mesh, max_batches, optimizer),
            Snapshot(state.params, state.opt_state),
            in_training,
        )
        batches = data.batches("valid", share.sequences)
        loss = evaluate_loss(
            make_eval_step(config, model, mesh, placed.params),
            state.params,
            batches,
            share,
            max_batches=max_batches,
        )
        return metrics, loss["loss"], state.params, batches[0]


def test_loss_by_position_averages_to_the_loss():
    metrics, loss, *_ = measure_at_start(experiment({"name": "loss_by_position", "parts": 1}))
    assert metrics["loss_by_position/00000"] == pytest.approx(loss, rel=1e-5)
    parts, *_ = measure_at_start(experiment({"name": "loss_by_position", "parts": 4}))
    assert list(parts) == [f"loss_by_position/{position:05d}" for position in (0, 4, 8, 12)]
    assert len(set(parts.values())) == 4 and min(parts.values()) < loss < max(parts.values())


def test_evaluators_measure_token_loss_of_batches_with_labels():
    base = experiment(
        {"name": "loss_by_position", "parts": 1},
        {"name": "loss_with", "change": "model.window=2"},
        family="encoder",
        token_types=2,
        num_labels=2,
        pooling="cls",
        pooler=True,
    )
    data = dataclasses.replace(
        base.data, objective={"name": "masked_lm", "next_sentence": True}, packing=False
    )
    metrics, loss, *_ = measure_at_start(dataclasses.replace(base, data=data))
    assert metrics["loss_by_position/00000"] == pytest.approx(loss, rel=1e-5) and metrics[
        "loss_with/model.window=2"
    ] != pytest.approx(loss, rel=1e-5)


def test_sizes_ignore_padding():
    """Padding does not affect sizes, although biases and positions make its activations nonzero."""
    config = small("decoder", position="learned")
    model, params = make(config)
    params = jax.tree.map(lambda x: x + 0.1, params)
    x = tokens(0, 2, 6)
    sizes = lambda x: flatten(
        model.apply(params, x, padding_mask=x != 0, mutable=["sizes"])[1]["sizes"]
    )
    unpadded, padded = sizes(x), sizes(np.pad(x, ((0, 0), (0, 6))))
    assert len(unpadded) > 1
    for path, (sown_sizes,) in unpadded.items():
        for name, value in sown_sizes.items():
            np.testing.assert_allclose(
                padded[path][0][name], value, rtol=1e-4, err_msg=f"{path} {name}"
            )


def test_depth_profile_matches_gradients_of_the_loss():
    config = experiment("depth_profile", canon="A")
    metrics, _, params, batch = measure_at_start(config)
    with use(make_mesh(config.mesh)) as mesh:

        def loss(params):
            return (
                sums := batch_sums(build_model(config.model), params, batch, config, mesh)["tokens"]
            ).loss / sums.weight

        grads = flatten(jax.jit(jax.grad(loss))(params))
    for sublayer in ("self_attention", "feed_forward"):
        for layer in range(2):
            sublayer_grads = [
                g[layer]
                for path, g in grads.items()
                if path.startswith(f"decoder/layers/{sublayer}/")
            ]
            assert len(sublayer_grads) > 1
            assert metrics[f"depth/gradient/decoder/{layer:02d}/{sublayer}"] == pytest.approx(
                np.sqrt(sum(np.sum(np.square(g)) for g in sublayer_grads)), rel=1e-4
            )
        matrix = "self_attention/query" if sublayer == "self_attention" else "feed_forward/in"
        matrix_grads = [
            g[0] for path, g in grads.items() if path.startswith(f"decoder/layers/{matrix}/")
        ]
        assert metrics[f"depth/gradient/decoder/00/{matrix}"] == pytest.approx(
            np.sqrt(sum(np.sum(np.square(g)) for g in matrix_grads)), rel=1e-4
        )
    canon_gradient = np.linalg.norm(grads["decoder/layers/canon_A"][1])
    assert metrics["depth/gradient/decoder/01/canon_A"] == pytest.approx(canon_gradient, rel=1e-4)
    assert all(0 < value < 10 for name, value in metrics.items() if "/update/" in name)
    stream = [
        metrics[f"depth/stream/decoder/{layer:02d}/{sublayer}"]
        for layer in range(2)
        for sublayer in ("self_attention", "feed_forward")
    ]
    branch = [
        metrics[f"depth/branch/decoder/{layer:02d}/{sublayer}"]
        for layer in range(2)
        for sublayer in ("self_attention", "feed_forward")
    ]
    embedded = np.asarray(params["embedding"]["embedding"])[batch["inputs"]]
    assert stream[0] == pytest.approx(
        np.sqrt(np.mean(np.square(embedded[batch["segments"] > 0]))), rel=1e-4
    )
    assert all(x > 0 for x in branch) and stream == sorted(stream), (
        "the residual stream must grow with depth"
    )


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_evaluators_agree_across_layouts_and_meshes(family):
    evaluators = "depth_profile", "loss_by_position", "attention", "logit_lens"
    # Without biases: the gradient of the key bias is only rounding noise, which Adam scales up to
    # updates of normal size.
    unbiased = lambda *names, **fields: experiment(*names, family=family, use_bias=False, **fields)
    expected, *_ = measure_at_start(unbiased(*evaluators))
    layouts = [
        {"scan_layers": False},
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "attention_backend": "blockwise"},
    ]
    pipeline_layouts = [{"pipeline_rounds": 2}, {"mesh": {"stage": 2, "context": 2, "data": 2}}]
    for layout in [*layouts, *pipeline_layouts] if family == "decoder" else layouts:
        metrics, *_ = measure_at_start(unbiased(*evaluators, **layout), like=unbiased())
        assert expected.keys() == metrics.keys() and len(expected) > 60
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-3), (name, layout)


def test_evaluators_run_before_the_first_step_and_at_the_end(tmp_path):
    config = experiment(
        "depth_profile", "loss_by_position", {"name": "extrapolation", "times": 2, "tokens": 1000}
    )
    assert train(config, tmp_path / "run") == 4
    lines = [
        line
        for line in read_metrics(tmp_path / "run")
        if "eval/depth/stream/decoder/00/self_attention" in line
    ]
    assert [line["step"] for line in lines] == [0, 2, 4] and not any(
        "eval/extrapolation" in name for line in lines for name in line
    )
    with use(make_mesh(config.mesh)) as mesh:
        evaluate(load_trained(tmp_path / "run", config, mesh), mesh)
    report = json.loads((tmp_path / "run" / "test.json").read_text())
    assert {
        "extrapolation/000032",
        "loss_by_position/00000",
        "depth/gradient/decoder/01/feed_forward",
    } <= report.keys()
    plain = dataclasses.replace(config, train=dataclasses.replace(config.train, evaluators=()))
    train(plain, tmp_path / "plain")
    losses = [
        [line["train/loss"] for line in read_metrics(tmp_path / name) if "train/loss" in line]
        for name in ("run", "plain")
    ]
    assert losses[0] == losses[1], "evaluators must not change training"


@pytest.mark.parametrize(
    ("evaluator", "message"),
    [
        ("depth_profil", "unknown value 'depth_profil'; did you mean 'depth_profile'"),
        ({"name": "extrapolation", "times": 3}, "times: 3 must be a power of two"),
        ({"name": "loss_with", "change": "seed=3"}, "must be a field of the model"),
        ({"name": "probe", "task": "copi"}, "did you mean 'copy'"),
        (
            {"name": "loss_with", "change": "model.cusal=True"},
            "loss_with changes model.cusal=True: no such field; did you mean 'causal'",
        ),
        ("probe", "probe requires questions and answers"),
        ("bleu_by_length", "bleu_by_length requires translations"),
        ({"name": "loss_by_position", "bins": 3}, "has no option 'bins'"),
        ({"name": "loss_by_position", "parts": 0}, "parts: 0 is too small"),
    ],
)
def test_invalid_evaluators_raise(evaluator, message):
    with pytest.raises(UserError, match=message):
        experiment(evaluator)


def test_loss_with_measures_a_changed_field():
    metrics, loss, *_ = measure_at_start(
        experiment(
            {"name": "loss_with", "change": "model.window=16"},
            {"name": "loss_with", "change": "model.causal=False"},
        )
    )
    assert metrics["loss_with/model.window=16"] == pytest.approx(loss, rel=1e-6), (
        "a window as long as the sequence must not change the loss"
    )
    assert abs(metrics["loss_with/model.causal=False"] - loss) > 1e-3
    for change in ("model.d_ff=64", "model.norm_placement=post"):
        with pytest.raises(UserError, match="changes the names or shapes of parameters"):
            measure_at_start(experiment({"name": "loss_with", "change": change}))


@pytest.mark.parametrize(
    ("family", "position", "blind"),
    [("decoder", "none", False), ("encoder", "none", True), ("encoder", "alibi", False)],
)
def test_order_has_no_effect_without_mask_and_positions(family, position, blind):
    metrics, *_ = measure_at_start(experiment("order", family=family, position=position))
    assert metrics["order/kl"] < 1e-6 if blind else metrics["order/kl"] > 1e-4


def test_order_averages_over_full_sequences():
    config = experiment("order")
    optimizer = build_optimizer(config.optimizer, 4, config.model)
    with use(make_mesh(config.mesh)) as mesh:
        params = initial_state(config, optimizer, mesh).params
        batch = open_data(config).batches("valid")[0]
        rows = np.flatnonzero((batch["segments"] > 0).all(axis=1))[:3]

        def order(chosen, segments):
            chosen_batch = {name: x[chosen] for name, x in batch.items()} | {"segments": segments}
            return dict(
                measure(
                    Subject(
                        config, SimpleNamespace(batches=lambda part: [chosen_batch]), "valid", mesh
                    ),
                    Snapshot(params),
                    False,
                )
            )["order/kl"]

        full = np.ones((1, 16), np.int32)
        separate = [order(rows[n : n + 1], full) for n in range(3)]
        assert len(set(separate)) == 3
        second_is_padding = np.concatenate([full, 0 * full, full, full])
        assert order(rows[[0, 0, 1, 2]], second_is_padding) == pytest.approx(
            np.mean(separate), rel=1e-4
        )


def test_evaluators_do_not_change_the_training_step():
    """The program of the training step is the same text with and without evaluators."""
    programs = []
    for names in ((), ("depth_profile", "attention", "logit_lens", "order", "loss_by_position")):
        config = experiment(*names)
        model, optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, 4, config.model),
        )
        with use(make_mesh(config.mesh)) as mesh:
            state, placed = abstract_state(config, model, optimizer, mesh)
            programs.append(
                make_train_step(config, model, optimizer, mesh, placed)
                .lower(state, open_data(config).batches("train")[0])
                .as_text()
            )
    assert programs[0] == programs[1] and len(programs[0]) > 10_000


@pytest.mark.parametrize("placement", ["pre", "post", "resi_dual", "attention_residuals"])
def test_logit_lens_of_the_last_layer_equals_the_loss(placement):
    metrics, loss, *_ = measure_at_start(
        experiment("logit_lens", norm_placement=placement), max_batches=1
    )
    assert metrics["lens/loss/01"] == pytest.approx(loss, rel=1e-5)
    assert metrics["lens/agrees/01"] == 1.0
    assert abs(metrics["lens/loss/00"] - loss) > 1e-3 and metrics["lens/agrees/00"] < 1
