"""What a run is measured by beside its loss."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import make, sized, small, tokens

from transformer import UserError
from transformer.config import Experiment
from transformer.data.pipeline import open_data
from transformer.evaluation.loss import evaluate_loss
from transformer.evaluation.measure import measure
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


def experiment(*evaluators, mesh=(), **model) -> Experiment:
    return from_mapping(Experiment, {
        "model": sized(**{"family": "decoder", "vocab_size": 512, "max_length": 32, "position": "rotary", "norm_placement": "pre", **model}),
        "data": {"corpus": "pydoc", "objective": {"encoder_decoder": "span_corruption", "encoder": "masked_lm"}.get(model.get("family"), "causal_lm"), "length": 16, "batch_size": 16, "held_out": 4, "tokenizer": {"kind": "bpe"}},
        "optimizer": {"warmup_steps": 2, "learning_rate": 1e-2}, "mesh": {"data": 1, **dict(mesh)},
        "train": {"steps": 4, "log_every": 2, "eval_every": 2, "eval_batches": 2, "tensorboard": False, "evaluators": evaluators},
    })  # fmt: skip


def measured(config, most=3, in_training=False, like=None):
    """(what is found at the start, with the numbers that `like` starts with; the loss of the same batches, the parameters, a batch)."""
    model, optimizer = build_model(config.model), build_optimizer(config.optimizer, 4)
    with use(make_mesh(config.mesh)) as mesh:
        abstract, placed = abstract_state(config, model, optimizer, mesh)
        if like is None:
            state = init_state(config, model, optimizer, placed)
        else:
            with use(make_mesh(like.mesh)) as alone:
                there = init_state(
                    like,
                    build_model(like.model),
                    optimizer,
                    abstract_state(like, build_model(like.model), optimizer, alone)[1],
                )
            state = jax.device_put(
                jax.device_get(relayout(jax.device_get(there), like.model, config.model, abstract)),
                placed,
            )
        data, share = open_data(config), Share(mesh)
        found = measure(
            Subject(config, data, "valid", mesh, most, optimizer),
            Snapshot(state.params, state.opt_state),
            in_training,
        )
        batches = data.batches("valid", share.rows)
        loss = evaluate_loss(
            make_eval_step(config, model, mesh, placed.params),
            state.params,
            batches,
            share,
            most=most,
        )
        return found, loss["loss"], state.params, batches[0]


def test_loss_by_position_adds_up_to_the_loss():
    found, loss, *_ = measured(experiment({"name": "loss_by_position", "parts": 1}))
    assert found["loss_by_position/00000"] == pytest.approx(loss, rel=1e-5)
    parts, *_ = measured(experiment({"name": "loss_by_position", "parts": 4}))
    assert list(parts) == [f"loss_by_position/{place:05d}" for place in (0, 4, 8, 12)]
    assert len(set(parts.values())) == 4 and min(parts.values()) < loss < max(parts.values())


def test_losses_in_longer_rows():
    found, loss, *_ = measured(
        experiment({"name": "extrapolation", "times": 4, "tokens": 0}), most=0
    )
    before = [found.pop(f"context/{length:06d}") for length in (16, 32, 64)]
    assert list(found) == [
        "extrapolation/000016", "extrapolation/000032", "extrapolation_sliding/000032", "extrapolation/000064", "extrapolation_sliding/000064",
    ]  # fmt: skip
    assert (
        6 < before[0] <= 7.5 and before[0] < before[1] <= 15.5 and before[1] < before[2] <= 31.5
    ), "half a row, less where texts end in it"
    assert found["extrapolation/000016"] == pytest.approx(loss, rel=1e-5)
    assert len({round(x, 6) for x in found.values()}) == 5 and all(
        np.isfinite(x) for x in found.values()
    )


def test_what_sees_no_further_than_a_window_is_the_same_in_longer_rows():
    """Without positions and with a window, two layers of it, a token sees 7 before it: in the second half of any row the same."""
    found, *_ = measured(
        experiment({"name": "extrapolation", "times": 4, "tokens": 0}, position="none", window=4),
        most=0,
    )
    sliding = [found[f"extrapolation_sliding/{length:06d}"] for length in (32, 64)]
    assert sliding[0] == pytest.approx(sliding[1], rel=2e-3) and sliding[0] != pytest.approx(
        found["extrapolation/000016"], rel=1e-5
    )


def test_a_table_of_positions_ends():
    longer = lambda times: experiment(
        {"name": "extrapolation", "times": times, "sliding": False}, position="learned"
    )
    with pytest.raises(
        UserError, match=r"reads sequences of .* = 256 tokens, but the table of .* ends"
    ):
        longer(16)
    found, *_ = measured(longer(2))
    assert [name for name in found if not name.startswith("context")] == [
        "extrapolation/000016",
        "extrapolation/000032",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"accumulate": 4}},
        {"data": {"packing": False, "buckets": (8, 16)}},
        {"model": {"random_positions": 40}},
    ],
)
def test_longer_rows_do_not_ask_what_training_asks_of_its_rows(change):
    """Micro-batches that divide the batch, buckets that end in the length, a range that positions are drawn from in training."""
    plain = experiment(
        {"name": "extrapolation", "times": 8, "sliding": False, "tokens": 2000}, max_length=16
    )
    other = dataclasses.replace(
        plain,
        **{
            part: dataclasses.replace(getattr(plain, part), **fields)
            for part, fields in change.items()
        },
    )
    here, there = measured(plain)[0], measured(other, like=plain)[0]
    assert list(here) == list(there) and "extrapolation/000128" in here
    if "data" not in change:
        assert all(there[name] == pytest.approx(here[name], rel=1e-5) for name in here)


def test_where_a_batch_asks_for_labels_too_tokens_are_measured():
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
    found, loss, *_ = measured(dataclasses.replace(base, data=data))
    assert found["loss_by_position/00000"] == pytest.approx(loss, rel=1e-5) and found[
        "loss_with/model.window=2"
    ] != pytest.approx(loss, rel=1e-5)


def test_padding_has_no_size():
    """However much of it there is behind the tokens, and though biases and positions have made something of it."""
    config = small("decoder", position="learned")
    model, params = make(config)
    params = jax.tree.map(lambda x: x + 0.1, params)
    x = tokens(0, 2, 6)
    sizes = lambda x: flatten(
        model.apply(params, x, padding_mask=x != 0, mutable=["sizes"])[1]["sizes"]
    )
    alone, padded = sizes(x), sizes(np.pad(x, ((0, 0), (0, 6))))
    assert len(alone) > 1
    for path, (of,) in alone.items():
        for name, value in of.items():
            np.testing.assert_allclose(
                padded[path][0][name], value, rtol=1e-4, err_msg=f"{path} {name}"
            )


def test_gradients_by_depth_are_those_of_the_loss():
    config = experiment("depth_profile")
    found, _, params, batch = measured(config)
    with use(make_mesh(config.mesh)) as mesh:

        def loss(params):
            return (
                sums := batch_sums(build_model(config.model), params, batch, config, mesh)["tokens"]
            ).loss / sums.weight

        grads = flatten(jax.jit(jax.grad(loss))(params))
    for sublayer in ("self_attention", "feed_forward"):
        for layer in range(2):
            own = [
                g[layer]
                for path, g in grads.items()
                if path.startswith(f"decoder/layers/{sublayer}/")
            ]
            assert len(own) > 1
            assert found[f"depth/gradient/decoder/{layer:02d}/{sublayer}"] == pytest.approx(
                np.sqrt(sum(np.sum(np.square(g)) for g in own)), rel=1e-4
            )
        matrix = "self_attention/query" if sublayer == "self_attention" else "feed_forward/in"
        own = [g[0] for path, g in grads.items() if path.startswith(f"decoder/layers/{matrix}/")]
        assert found[f"depth/gradient/decoder/00/{matrix}"] == pytest.approx(
            np.sqrt(sum(np.sum(np.square(g)) for g in own)), rel=1e-4
        )
    assert all(0 < value < 10 for name, value in found.items() if "/update/" in name)
    stream = [
        found[f"depth/stream/decoder/{layer:02d}/{sublayer}"]
        for layer in range(2)
        for sublayer in ("self_attention", "feed_forward")
    ]
    branch = [
        found[f"depth/branch/decoder/{layer:02d}/{sublayer}"]
        for layer in range(2)
        for sublayer in ("self_attention", "feed_forward")
    ]
    embedded = np.asarray(params["embedding"]["embedding"])[batch["inputs"]]
    assert stream[0] == pytest.approx(
        np.sqrt(np.mean(np.square(embedded[batch["segments"] > 0]))), rel=1e-4
    )
    assert all(x > 0 for x in branch) and stream == sorted(stream), (
        "a stream that is only added to grows"
    )


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_it_is_the_same_however_the_model_is_laid_out(family):
    evaluators = "depth_profile", "loss_by_position", "attention", "logit_lens"
    # Without biases: that of keys has no gradient but the noise of sums, which Adam makes an update of its full size.
    unbiased = lambda *asked, **more: experiment(*asked, family=family, use_bias=False, **more)
    here, *_ = measured(unbiased(*evaluators))
    others = [
        {"scan_layers": False},
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "attention_backend": "blockwise"},
    ]
    more = [{"pipeline_rounds": 2}, {"mesh": {"stage": 2, "context": 2, "data": 2}}]
    for other in [*others, *more] if family == "decoder" else others:
        there, *_ = measured(unbiased(*evaluators, **other), like=unbiased())
        assert here.keys() == there.keys() and len(here) > 60
        for name, value in here.items():
            assert there[name] == pytest.approx(value, rel=1e-3), (name, other)


def test_a_run_that_asks_is_measured_before_its_first_step_and_at_its_end(tmp_path):
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
    assert losses[0] == losses[1], "being measured changes nothing"


@pytest.mark.parametrize(("evaluator", "message"), [
    ("depth_profil", "train.evaluators: no 'depth_profil'; did you mean 'depth_profile'"), ({"name": "extrapolation", "times": 3}, "times: 3 must be a power of two"),
    ({"name": "loss_with", "change": "seed=3"}, "must be a field of the model"), ({"name": "probe", "task": "copi"}, "did you mean 'copy'"),
    ({"name": "loss_with", "change": "model.cusal=True"}, "loss_with changes model.cusal=True: no such field; did you mean 'causal'"),
    ("probe", "probe requires questions and answers"), ("bleu_by_length", "bleu_by_length requires translations"),
    ({"name": "loss_by_position", "bins": 3}, "has no option 'bins'"), ({"name": "loss_by_position", "parts": 0}, "parts: 0 is too small"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(evaluator, message):
    with pytest.raises(UserError, match=message):
        experiment(evaluator)


def test_the_loss_with_a_field_changed():
    found, loss, *_ = measured(
        experiment(
            {"name": "loss_with", "change": "model.window=16"},
            {"name": "loss_with", "change": "model.causal=False"},
        )
    )
    assert found["loss_with/model.window=16"] == pytest.approx(loss, rel=1e-6), (
        "a window as wide as the row"
    )
    assert abs(found["loss_with/model.causal=False"] - loss) > 1e-3
    with pytest.raises(UserError, match="changes the shapes of parameters"):
        measured(experiment({"name": "loss_with", "change": "model.d_ff=64"}))


@pytest.mark.parametrize(
    ("family", "position", "blind"),
    [("decoder", "none", False), ("encoder", "none", True), ("encoder", "alibi", False)],
)
def test_without_a_mask_and_positions_order_is_nothing(family, position, blind):
    found, *_ = measured(experiment("order", family=family, position=position))
    assert found["order/kl"] < 1e-6 if blind else found["order/kl"] > 1e-4


def test_order_counts_every_full_row_once():
    config = experiment("order")
    model, optimizer = build_model(config.model), build_optimizer(config.optimizer, 4)
    with use(make_mesh(config.mesh)) as mesh:
        params = init_state(
            config, model, optimizer, abstract_state(config, model, optimizer, mesh)[1]
        ).params
        batch = open_data(config).batches("valid")[0]
        rows = np.flatnonzero((batch["segments"] > 0).all(axis=1))[:3]

        def found(chosen, segments):
            taken = {name: x[chosen] for name, x in batch.items()} | {"segments": segments}
            return dict(
                measure(
                    Subject(config, SimpleNamespace(batches=lambda part: [taken]), "valid", mesh),
                    Snapshot(params),
                    False,
                )
            )["order/kl"]

        whole = np.ones((1, 16), np.int32)
        alone = [found(rows[n : n + 1], whole) for n in range(3)]
        assert len(set(alone)) == 3
        beside_one_that_is_not_full = np.concatenate([whole, 0 * whole, whole, whole])
        assert found(rows[[0, 0, 1, 2]], beside_one_that_is_not_full) == pytest.approx(
            np.mean(alone), rel=1e-4
        )


def test_what_is_measured_is_no_part_of_the_step():
    """The training step is the same program, word for word, whether anything is measured or not."""
    texts = []
    for asked in ((), ("depth_profile", "attention", "logit_lens", "order", "loss_by_position")):
        config = experiment(*asked)
        model, optimizer = build_model(config.model), build_optimizer(config.optimizer, 4)
        with use(make_mesh(config.mesh)) as mesh:
            state, placed = abstract_state(config, model, optimizer, mesh)
            texts.append(
                make_train_step(config, model, optimizer, mesh, placed)
                .lower(state, open_data(config).batches("train")[0])
                .as_text()
            )
    assert texts[0] == texts[1] and len(texts[0]) > 10_000


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_the_lens_ends_in_the_loss(placement):
    found, loss, *_ = measured(experiment("logit_lens", norm_placement=placement), most=1)
    assert found["lens/loss/01"] == pytest.approx(loss, rel=1e-5) and found["lens/agrees/01"] == 1.0
    assert abs(found["lens/loss/00"] - loss) > 1e-3 and found["lens/agrees/00"] < 1


def test_only_language_models_read_longer_rows():
    with pytest.raises(UserError, match="extrapolation requires a decoder"):
        measured(experiment("extrapolation", family="encoder_decoder"))
