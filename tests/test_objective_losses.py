"""Objectives with several losses, and objectives with losses of their own."""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_objectives import data_of, experiment

from transformer.config import MeshConfig
from transformer.data.objectives import OBJECTIVES
from transformer.data.objectives.language_model import CausalLM
from transformer.data.pipeline import open_data
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.runs.evaluate import evaluate, load_trained
from transformer.runs.loop import train
from transformer.runs.metrics import read_metrics
from transformer.training.loss import Sums
from transformer.training.optimizer import build_optimizer
from transformer.training.state import TrainState, abstract_state, init_state
from transformer.training.step import batch_sums, make_train_step, training_step


def test_token_and_label_losses_count_equally_and_accumulate(text):
    """loss = mean over tokens + mean over labels, for any number of micro-batches and devices."""
    data = data_of(text, "next sentence")
    batch = data.batches("train")[0]
    results = []
    for mesh_config, accumulate in (
        (MeshConfig(data=1), 1),
        (MeshConfig(data=1), 2),
        (MeshConfig(data=2, fsdp=2), 2),
    ):
        config = dataclasses.replace(
            data.config,
            mesh=mesh_config,
            train=dataclasses.replace(data.config.train, accumulate=accumulate),
        )
        with use(make_mesh(mesh_config)) as mesh:
            model, optimizer = (
                build_model(config.model),
                build_optimizer(config.optimizer, 10, config.model),
            )
            _, placed = abstract_state(config, model, optimizer, mesh)
            state = init_state(config, model, optimizer, placed)
            if not results:
                sums = jax.jit(
                    lambda p: batch_sums(model, p, batch, config, mesh),  # noqa: B023
                )(state.params)
            state, metrics = make_train_step(config, model, optimizer, mesh, placed)(state, batch)
            results.append((jax.device_get(metrics), jax.device_get(state.params)))
    expected = sum(float(loss_sums.nll / loss_sums.weight) for loss_sums in sums.values())
    first, params = results[0]
    assert {"loss", "accuracy", "labels_loss", "labels_accuracy"} <= first.keys()
    assert float(first["objective"]) == pytest.approx(expected, rel=1e-5)
    for metrics, updated in results[1:]:
        assert float(metrics["objective"]) == pytest.approx(float(first["objective"]), rel=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), updated, params)


@dataclasses.dataclass(frozen=True)
class QuietLM(CausalLM):
    """Language modeling that penalizes large hidden states.

    The penalty is `weight` times the mean square of the last hidden state over the target tokens.
    """

    weight: float = 0.5

    def losses(self, outputs, batch):
        square_BxT = jnp.mean(jnp.square(outputs.hidden_BxTxE), axis=-1)
        total = self.weight * jnp.sum(square_BxT * batch["weights"])
        count = jnp.sum(batch["weights"])
        quiet = Sums(total, total, jnp.zeros(()), count)
        return super().losses(outputs, batch) | {"quiet": quiet}

    def weights(self, batch):
        return super().weights(batch) | {"quiet": jnp.sum(batch["weights"])}


def test_objective_with_an_additional_loss(text, monkeypatch):
    """The loss is in the gradient and in the metrics, for any number of micro-batches."""
    monkeypatch.setitem(OBJECTIVES._classes, "quiet_lm", QuietLM)
    lm_config = experiment(text, "causal_lm", "decoder")
    config = experiment(text, {"name": "quiet_lm", "weight": 2.0}, "decoder")
    model, optimizer = build_model(config.model), optax.sgd(1.0)
    batch = open_data(config).batches("train")[0]
    with use(make_mesh(config.mesh)) as mesh:
        params = jax.jit(model.init)(jax.random.key(0), batch["inputs"][:1, :8])

        def update(config):
            state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
            step = jax.jit(training_step(config, model, optimizer, mesh))
            return step(state, batch)

        state, metrics = update(config)
        (lm_state, _), train_in_parts = (
            update(lm_config),
            dataclasses.replace(config.train, accumulate=4),
        )
        state_in_parts, metrics_in_parts = update(dataclasses.replace(config, train=train_in_parts))

        def loss(params):
            apply = lambda method: model.apply(
                params,
                batch["inputs"],
                positions=batch["positions"],
                segment_ids=batch["segments"],
                method=method,
            )
            hidden, head = apply("features")
            logp = jax.nn.log_softmax(head(hidden))
            nll = -jnp.take_along_axis(logp, batch["targets"][..., None], axis=-1)[..., 0]
            token_loss = nll + 2.0 * jnp.mean(jnp.square(hidden), axis=-1)
            return jnp.sum(token_loss * batch["weights"]) / jnp.sum(batch["weights"])

        value, grads = jax.jit(jax.value_and_grad(loss))(params)
    expected = jax.tree.map(lambda p, g: p - g, params, grads)
    distance = lambda a, b: max(
        jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b))
    )
    assert distance(state.params, lm_state.params) > 1e-3
    assert (
        distance(state.params, expected) < 1e-5 and distance(state_in_parts.params, expected) < 1e-5
    )
    np.testing.assert_allclose(metrics["objective"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"] + metrics["quiet_loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics_in_parts["quiet_loss"], metrics["quiet_loss"], rtol=1e-5)


@flax.struct.dataclass
class SquaredError:
    """The minimal protocol of a loss."""

    loss: jax.Array
    weight: jax.Array

    def means(self):
        return {"loss": self.loss / self.weight}


@dataclasses.dataclass(frozen=True)
class SquaredErrorLM(CausalLM):
    """Brings the logit of each target close to 1. Replaces the cross-entropy."""

    def losses(self, outputs, batch):
        logits_BxTxV = outputs.head(outputs.hidden_BxTxE)
        target_BxT = jnp.take_along_axis(logits_BxTxV, batch["targets"][..., None], axis=-1)[..., 0]
        error = jnp.sum(jnp.square(target_BxT - 1) * batch["weights"])
        return {"squared_error": SquaredError(error, jnp.sum(batch["weights"]))}

    def weights(self, batch):
        return {"squared_error": jnp.sum(batch["weights"])}


def test_an_objective_may_replace_the_cross_entropy(text, tmp_path, monkeypatch):
    """It is trained, resumed, validated and tested. Perplexity and accuracy do not exist."""
    monkeypatch.setitem(OBJECTIVES._classes, "squared_error_lm", SquaredErrorLM)
    monkeypatch.setattr(SquaredErrorLM, "name", "squared_error_lm", raising=False)
    config = experiment(text, "squared_error_lm", "decoder")
    train_fields = dataclasses.replace(config.train, steps=12, eval_every=6, log_every=6)
    config = dataclasses.replace(config, train=train_fields)
    assert train(config, tmp_path / "run") == 12
    lines = [line for line in read_metrics(tmp_path / "run") if "eval/loss" in line]
    assert 0 < lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    with use(make_mesh(config.mesh)) as mesh:
        metrics = evaluate(load_trained(tmp_path / "run", config, mesh), mesh)
    assert metrics["loss"] > 0 and not {"perplexity", "accuracy", "bits_per_byte"} & set(metrics)
