"""Statistics of attention heads, and the page that `inspect` writes."""

import html
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, small, tokens
from flax.core import meta

from transformer.cli import main
from transformer.lab.inspection import observe_text, page
from transformer.model import attention_statistics
from transformer.model.attention_backends import Inputs
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens
from transformer.model.modules import WATCHED
from transformer.parallel.mesh import make_mesh, use
from transformer.runs.evaluate import load_trained
from transformer.runs.rundir import load_config

T = 12


def head_statistics(q_TxNxH, k_TxNxH, segments=None, **options):
    positions = jnp.arange(T)[None]
    tokens = Tokens(
        positions,
        jnp.ones((1, T), jnp.int32) if segments is None else jnp.asarray(segments)[None],
        order="contiguous",
    )
    inputs = Inputs(SAME_SEGMENT & CAUSAL, tokens, tokens, None, 1.0, **options)
    return attention_statistics.heads(
        jnp.asarray(q_TxNxH, jnp.float32)[None], jnp.asarray(k_TxNxH, jnp.float32)[None], inputs
    )


def test_statistics_of_heads_with_known_attention():
    """Keys are one-hot positions, and each head's queries select a position.

    Head 0 selects none, head 1 the previous one, head 2 the first, head 3 the one T / 2 - 1 back.
    """
    eye, select = np.eye(T), lambda positions: 50.0 * np.eye(T)[np.maximum(positions, 0)]
    index = np.arange(T)
    q = np.stack(
        [np.zeros((T, T)), select(index - 1), select(0 * index), select(index - (T // 2 - 1))],
        axis=1,
    )
    stats = {
        name: np.asarray(x)
        for name, x in head_statistics(q, np.repeat(eye[:, None], 4, axis=1)).items()
    }
    queries = np.arange(1, T)  # the first query only attends to itself
    assert stats["entropy"] == pytest.approx([np.mean(np.log(queries + 1)), 0, 0, 0], abs=1e-4)
    assert stats["sink"] == pytest.approx([np.mean(1 / (queries + 1)), 1 / 11, 1, 5 / 11], abs=1e-4)
    assert stats["distance"] == pytest.approx(
        [np.mean(queries / 2), 1, np.mean(queries), np.mean(np.minimum(queries, 5))], abs=1e-4
    )
    assert stats["previous"][1] == pytest.approx(1) and stats["previous"][2] == pytest.approx(
        1 / 11, abs=1e-4
    )
    assert stats["repeated"][[1, 3]] == pytest.approx([0, 1], abs=1e-4)
    assert stats["logit"] == pytest.approx([0, 50, 50, 50])


def test_head_statistics_ignore_masked_keys():
    generator = np.random.default_rng(0)
    q, k = generator.normal(size=(2, T, 4, 8))
    unmasked = head_statistics(q, k)
    poisoned = k.copy()
    poisoned[8:] = 1e3
    segments = np.array([1] * 8 + [0] * 4)
    masked, masked_poisoned = (
        head_statistics(q, k, segments),
        head_statistics(q, poisoned, segments),
    )
    for name, values in masked.items():
        assert np.array_equal(values, masked_poisoned[name])
        assert name == "logit" or not np.allclose(values, unmasked[name], rtol=1e-3)
    with_sink = head_statistics(q, k, sink_N=jnp.full(4, 2.0))
    assert np.all(with_sink["sink"] > unmasked["sink"]) and np.all(
        with_sink["entropy"] != unmasked["entropy"]
    )


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_head_statistics_match_the_attention_weights(family, monkeypatch):
    """Statistics of packed documents, computed in query blocks, match the attention weights."""
    monkeypatch.setattr(attention_statistics, "BLOCK", 8)
    model, params = make(small(family, position="alibi"))
    target = tokens(0, 2, 20)
    segments = jnp.asarray([[1] * 12 + [2] * 8, [1] * 15 + [0] * 5])
    positions = jnp.asarray([[*range(12), *range(8)], [*range(15), *range(5)]])
    args, source = (target,), {}
    if family == "encoder_decoder":
        args = tokens(1, 2, 17), target
        source = {"source_segment_ids": jnp.asarray([[1] * 9 + [2] * 8, [1] * 17])}
    _, watched = model.apply(
        params, *args, positions=positions, segment_ids=segments, **source, mutable=list(WATCHED)
    )
    weights = np.asarray(watched["maps"]["decoder"]["layers"]["self_attention"]["weights"][0])
    heads = watched["heads"]["decoder"]["layers"]["self_attention"]["heads"][0]
    assert weights.shape == (2, 2, 4, 20, 20)
    has_choice = np.array(
        [
            [position > 0 and segment > 0 for position, segment in zip(*row, strict=True)]
            for row in zip(positions, segments, strict=True)
        ]
    )
    per_query = np.moveaxis(weights, 2, 1)[:, :, has_choice]  # [L, N, queries, S]
    positions = np.asarray(positions)
    distance = np.abs(positions[:, :, None] - positions[:, None, :])[has_choice]
    is_first = ((positions == 0)[:, None, :] & np.ones((1, 20, 1), bool))[has_choice]
    assert heads["distance"] == pytest.approx(
        np.mean(np.sum(per_query * distance, -1), -1), rel=1e-4
    )
    assert heads["sink"] == pytest.approx(np.mean(np.sum(per_query * is_first, -1), -1), rel=1e-4)
    assert heads["entropy"] == pytest.approx(
        -np.mean(np.sum(per_query * np.log(np.maximum(per_query, 1e-30)), -1), -1), rel=1e-4
    )
    assert meta.unbox(watched["streams"])["decoder"]["layers"]["after"][0].shape == (2, 2, 20, 16)


def test_layers_without_heads_keep_their_indices(tmp_path):
    """Only the second of three layers has attention."""
    (tmp_path / "run.py").write_text(RUN)
    pattern = "({'mixer': 'lstm'}, {}, {'mixer': 'lstm'})"
    changes = [f"--config.model.layer_pattern={pattern}", "--config.model.num_decoder_layers=3"]
    workdir = f"--workdir={tmp_path}/run"
    assert main(["train", f"--config={tmp_path}/run.py:decoder", workdir, *changes]) == 0
    config = load_config(tmp_path / "run")
    with use(make_mesh(config.mesh)) as mesh:
        trained = load_trained(tmp_path / "run", config, mesh)
        view = observe_text(trained, "The assert statement")
    (attention_map,) = view.maps
    assert attention_map.layers == [1] and len(attention_map.weights_LxNxTxS) == 1
    assert len(view.lens_L) == 3
    layers = {name: sizes["layer"] for name, sizes in view.sizes.items()}
    assert layers["decoder lstm"] == [0, 2] and layers["decoder self_attention"] == [1]
    assert layers["decoder feed_forward"] == [0, 1, 2]
    text = page(view, "title", [])
    assert '"layers": [1]' in text
    table = text[text.index("Entropy of the weights") :]
    assert table.index("<td>layer 1</td>") < table.index("</table>") and "layer 0</td>" not in table


RUN = """
def get_config(family):
    objective = {
        "decoder": "causal_lm", "encoder": "masked_lm", "encoder_decoder": "span_corruption"
    }[family]
    layers = {f"num_{side}_layers": 2 for side in ("encoder", "decoder") if side in family}
    size = {"d_model": 16, "d_ff": 32, "num_heads": 4, **layers}
    return {
        "model": {
            "family": family, "vocab_size": 512, "max_length": 32, "norm_placement": "post", **size
        },
        "data": {
            "corpus": "pydoc", "objective": objective, "length": 16, "batch_size": 16,
            "held_out": 4, "tokenizer": {"kind": "bpe"},
        },
        "optimizer": {"warmup_steps": 2},
        "train": {"steps": 2, "tensorboard": False},
        "mesh": {"data": 1},
    }
"""


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder_decoder"])
def test_inspect_writes_one_page(family, tmp_path, capsys):
    (tmp_path / "run.py").write_text(RUN)
    folder = tmp_path / "run"
    assert main(["train", f"--config={tmp_path}/run.py:{family}", f"--workdir={folder}"]) == 0
    target = ["--target=a <list> of"] if family == "encoder_decoder" else []
    assert main(["inspect", f"--workdir={folder}", "--text=The <assert> statement", *target]) == 0
    text = (folder / "inspect.html").read_text()
    assert (
        "<assert>" not in text
        and "&lt;assert&gt; statement" in text
        and not re.search(r"(src|href)=['\"]?http", text)
        and "<title>Token losses, predictions and attention of" in text
        and " on: The &lt;assert&gt; statement</title>" in text
    )
    maps = [
        json.loads(data)
        for data in re.findall(r"<script type=application/json>(.*?)</script>", text)
    ]
    assert len(maps) == (3 if family == "encoder_decoder" else 1)
    for data in maps:
        layers, heads, queries, keys = data["shape"]
        assert (layers, heads, queries, keys) == (2, 4, len(data["queries"]), len(data["keys"]))
    if family == "encoder_decoder":
        assert (
            maps[2]["keys"] == maps[0]["keys"]
            and maps[2]["queries"] == maps[1]["queries"] != maps[0]["queries"]
        )
    assert text.count("layer 1 <span class=note>") == 1
    assert "Activation patching" not in text and "Loss without the head" not in text
    other = "statement The <assert>"  # as many tokens, since no token contains parts of two words
    options = ["--ablate", *([f"--patch={other}"] if family != "encoder" else []), *target]
    assert main(["inspect", f"--workdir={folder}", "--text=The <assert> statement", *options]) == 0
    text = (folder / "inspect.html").read_text()
    assert text.count("Loss without the head, less that with it (nats)") == len(maps)
    assert (html.escape(other) in text) == (family != "encoder")
    if family != "encoder":
        table = text[text.index("Activation patching") :]
        table = table[: table.index("</table>")]
        assert table.count("<td class=cell") == 2 * len(maps[0]["queries"])
        options = ["--text=a", "--patch=the statement a"], "patching needs two texts of the same"
    else:
        options = ["--text=a", "--patch=b"], "an encoder reads the tokens that it predicts"
    capsys.readouterr()
    for arguments, message in (
        (["--text= "], "--text: empty"),
        (["--text=a", "--output=/nowhere/x.html"], "its folder is missing"),
        *(() if target else ((["--text=a", "--target=b"], "takes one text"),)),
        options,
    ):
        assert main(["inspect", f"--workdir={folder}", *arguments]) == 2
        assert message in capsys.readouterr().err
