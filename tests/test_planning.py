"""`plan`: topologies, plans and searches for absent machines, errors, and the TPU compiler."""

import importlib.util
import json
import re

import jax
import pytest
from test_objectives import CASES, experiment
from test_planned_programs import FF, ROWS, D, V, planned_experiment

from transformer.cli import main
from transformer.config import MeshConfig
from transformer.data.pipeline import open_data
from transformer.errors import UserError
from transformer.parallel.mesh import make_mesh
from transformer.planning import chips, page as pages, programs
from transformer.planning.chips import Topology, topology
from transformer.planning.plan import make_plan
from transformer.planning.programs import batch_shapes
from transformer.planning.search import _kept_bytes, page, search

# ---- the shapes of a batch, without its text


@pytest.mark.parametrize("case", CASES)
def test_planned_batch_shapes_match_real_batches(text, case):
    objective, family, model, data = CASES[case]
    config = experiment(text, objective, family, model.items(), **data)
    real = open_data(config).batches("train")[0]
    synthetic = batch_shapes(config, make_mesh(MeshConfig(data=1)))
    assert {name: (x.shape, x.dtype) for name, x in synthetic.items()} == {
        name: (x.shape, x.dtype) for name, x in real.items()
    }


# ---- topologies


@pytest.mark.parametrize(
    ("machine", "shape", "count"),
    [
        ("v5p:4x4x8", (4, 4, 8), 128),
        ("v5p-128", (4, 4, 4), 64),
        ("v5p-512", (4, 8, 8), 256),
        ("v5p-2048", (8, 8, 16), 1024),
        ("v4-64", (2, 4, 4), 32),
        ("v4-8", (2, 2, 1), 4),
        ("v5e-16", (4, 4), 16),
        ("v5litepod-256", (16, 16), 256),
        ("v6e-64", (8, 8), 64),
        ("v5e-8", (2, 4), 8),
        ("h100:64", (64,), 64),
        ("cpu:8", (8,), 8),
    ],
)
def test_topology_parses_shapes_and_names(machine, shape, count):
    parsed = topology(machine)
    assert parsed.shape == shape and parsed.chips == count


@pytest.mark.parametrize(
    ("machine", "slices", "message"),
    [
        ("v5p", 1, "write v5p:4x4x8"),
        ("v7:2x2", 1, "no chip 'v7'; choose from: v4, v5e"),
        ("v5p:4x4", 1, "has the wrong number of axes; a TPU v5p slice has 3 axes, like"),
        ("v5e-12", 1, "is a power of two; or write the shape, v5e:4x4"),
        ("v5e:32x32", 1, "has 256 chips at most, 16 along an axis"),
        ("h100:2x4", 1, "write their number, h100:8"),
        ("h100:8", 2, "--slices: 2"),
        ("v5p:0x4x4", 1, "has no chips"),
        ("v5e-16", 0, "--slices: 0"),
    ],
)
def test_invalid_topologies_raise(machine, slices, message):
    with pytest.raises(UserError, match=message):
        topology(machine, slices)


# ---- plans


def test_plan_of_simulated_devices(tmp_path, capsys):
    """Checks the sharded state, the collectives, the page and the command line.

    Numbers that are unknown for a CPU are left out.
    """
    (tmp_path / "x.py").write_text(
        "def get_config():\n"
        "    return dict(model=dict(family='decoder', vocab_size=48, d_model=32, d_ff=64,"
        " num_heads=4, num_decoder_layers=2, max_length=32),"
        " data=dict(train='nowhere', format='text', objective='causal_lm',"
        " length=32, batch_size=16),"
        " mesh=dict(data=1, fsdp=-1))\n"
    )
    command = [
        "plan",
        f"--config={tmp_path / 'x.py'}",
        "--topology=cpu:8",
        f"--json={tmp_path / 'plan.json'}",
        "--only=train,decode",
    ]
    assert main(command) == 0
    out, plan = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    assert "mesh        fsdp 8" in out and "all-reduce" in out and "MFU" not in out
    train = plan["programs"]["train"]
    assert plan["step_seconds_at_least"] is None and set(plan["programs"]) == {"train", "decode"}
    # Norms and biases are replicated.
    assert 1 <= train["memory_bytes"]["parameters"] * 8 / (4 * plan["parameters"]) < 1.3
    assert train["memory_bytes"]["optimizer"] == pytest.approx(
        2 * train["memory_bytes"]["parameters"], rel=0.01
    )
    assert train["memory_bytes"]["activations"] > 0
    assert main([*command[:-1], "--only=trane"]) == 2
    assert "--only: no program 'trane'; did you mean 'train'" in capsys.readouterr().err
    assert main([*command[:-2], f"--json={tmp_path / 'no' / 'plan.json'}"]) == 2
    assert f"--json: no folder {tmp_path / 'no'}" in capsys.readouterr().err


def test_plan_compares_every_arm(tmp_path, capsys):
    (tmp_path / "x.py").write_text(
        "from transformer import vary\n"
        "def sweep():\n    return vary('model.position', 'none', 't5')\n"
        "def get_config():\n"
        "    return dict(model=dict(family='decoder', vocab_size=48, d_model=32, d_ff=64,"
        " num_heads=4, num_decoder_layers=2, max_length=32),"
        " data=dict(train='nowhere', format='text', objective='causal_lm',"
        " length=32, batch_size=16))\n"
    )
    command = [
        "plan",
        f"--config={tmp_path / 'x.py'}",
        "--topology=cpu:2",
        f"--json={tmp_path / 'plan.json'}",
    ]
    assert main([*command, "--arms"]) == 0
    plans = json.loads((tmp_path / "plan.json").read_text())
    assert plans["t5"]["parameters"] - plans["none"]["parameters"] == 32 * 4
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "none",
        "t5",
    ] and f"{plans['t5']['parameters']:,}" in lines[2]
    assert main([*command, "--arms", "--search"]) == 2
    (tmp_path / "x.py").write_text(
        (tmp_path / "x.py").read_text().replace("def sweep", "def other")
    )
    assert main([*command, "--arms"]) == 2
    assert "defines no sweep()" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--topology=cpu:2 --price=1",
            "--price: 1 has no effect on a CPU, whose speed is unknown",
        ),
        ("--topology=h100:2 --price=-1", "--price: -1 is not a price; set that of one chip"),
        (
            "--topology=h100:2 --price=1 --only=evaluate",
            "--price: 1 is for the training run; add train to --only",
        ),
        ("--topology=cpu:2 --search", "--search: the speed of a CPU is unknown"),
    ],
)
def test_invalid_plan_arguments_are_rejected(flags, message, capsys):
    assert main(["plan", "--config=experiments/smoke.py", *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("machine", ["v5e-1", "v6e:2x2", "v5p:1x1x1", "v5p:2x2x1"])
def test_topologies_within_one_host(machine):
    assert len(programs.start(topology(machine))) == topology(machine).devices


def test_nonexistent_topology_shape_raises():
    with pytest.raises(UserError, match="v5e:3x5 does not exist; shapes are 1x1, 2x2, 2x4"):
        programs.start(topology("v5e:3x5"))


def test_plan_that_does_not_fit_suggests_remedies(monkeypatch):
    monkeypatch.setitem(
        chips.CHIPS, "h100", chips.Chip("a small one", 1e12, 150_000, 1e12, 1e9, 1e9)
    )
    plan = make_plan(
        planned_experiment(mesh={"data": 4}),
        Topology("h100", (4,)),
        jax.devices()[:4],
        only=("train",),
        price=2.0,
    )
    text = pages.page(plan)
    assert not plan.fits and "IT DOES NOT FIT: train takes" in text
    assert "mesh.fsdp=4 mesh.data=1" in text and "remat=full" in text
    assert (
        plan.run["money"] == pytest.approx(plan.step * 1000 / 3600 * 4 * 2.0)
        and plan.train.roofline.bound in text
    )
    assert 0 < plan.mfu <= 1
    assert "  compute at 1.0 TFLOP/s" in text
    assert "within the host\n" in text and "between hosts" not in text
    assert re.search(r"run: at least .* chip-hours, price .* \(2 per chip-hour\)", text)


def test_search_ranks_fitting_plans_by_step_time(monkeypatch):
    monkeypatch.setitem(
        chips.CHIPS, "h100", chips.Chip("a small one", 1e12, 2_300_000, 1e10, 1e9, 1e9)
    )
    progress = []
    plans = search(
        planned_experiment(), Topology("h100", (4,)), jax.devices()[:4], 3, progress.append
    )
    assert plans[0].fits and len(plans) <= 3 and len(progress) >= len(plans)
    steps = [plan.step for plan in plans if plan.fits]
    assert steps == sorted(steps) and "best: --config.mesh.data=" in page(plans)
    monkeypatch.setitem(
        chips.CHIPS, "h100", chips.Chip("far too small", 1e12, 1000, 1e10, 1e9, 1e9)
    )
    with pytest.raises(
        UserError, match="nothing to try .* parameters, gradients and optimizer take"
    ):
        search(planned_experiment(), Topology("h100", (4,)), jax.devices()[:4], 3, progress.append)


def test_search_counts_what_each_stack_keeps():
    """Each stack keeps activations of its own layers, tokens and widths."""
    mesh = dict.fromkeys(("data", "stage", "fsdp", "expert", "context", "tensor"), 1)
    kept = lambda **fields: _kept_bytes(planned_experiment("encoder_decoder", **fields), mesh)
    decoder = _kept_bytes(planned_experiment(), mesh)
    both = kept(num_encoder_layers=3)
    assert both == pytest.approx(2 * decoder)  # equal stacks
    # A stage has half of the layers, and all sequences pass through it.
    assert _kept_bytes(planned_experiment(), mesh | {"stage": 2}) == pytest.approx(decoder / 2)
    assert kept(num_encoder_layers=1) == pytest.approx(decoder * 4 / 3)
    narrow = {"encoder": {"d_model": D // 2, "d_ff": FF // 2}, "share_embeddings": False}
    assert kept(num_encoder_layers=3, **narrow) == pytest.approx(1.5 * decoder)


# ---- the TPU compiler, which needs no TPU


@pytest.mark.parametrize(("machine", "position"), [("v5e:2x2", "t5"), ("v5p:2x2x1", "rotary")])
def test_training_step_compiles_for_tpu_with_flash_attention(machine, position):
    assert importlib.util.find_spec("libtpu"), "the extra [test] brings it"
    target = topology(machine)
    config = planned_experiment(
        mesh={"fsdp": 2, "tensor": 2},
        data={"length": 1024},
        position=position,
        attention_backend="auto",
        dtype="bfloat16",
        d_head=64,
        max_length=1024,
        remat="full",
    )
    plan = make_plan(config, target, programs.start(target), only=("train",))
    kernels = {
        op.name.split(".")[0]
        for op, *_ in plan.train.compiled.program.runs
        if op.opcode == "custom-call" and "flash" in op.name
    }
    assert plan.train.compiled.attention == {"flash": ""}
    assert kernels == {"flash_forward", "flash_backward"}
    assert plan.fits and 0 < plan.mfu < 1 and plan.train.memory["activations"] > 0
    # The products of the layers run four times (forward, rematerialized, two gradients), and those
    # of the head three times. Attention has two products in the forward pass, two rematerialized,
    # and five in the backward pass. It computes three quarters of all tiles of 512.
    tokens, width = ROWS * 1024, 4 * 64
    layers = 4 * 3 * 2 * tokens * (4 * D * width + 2 * D * FF)
    attention = 3 * (2 + 2 + 5) * 64 * 2 * ROWS * 1024**2 * 4 * 0.75
    # On a TPU, the rotation of a query or key head is a product, three times.
    rotations = 3 * 3 * 2 * tokens * (4 + 4) * 64**2 if position == "rotary" else 0
    assert plan.train.roofline.flops * 4 == pytest.approx(
        layers + 3 * 2 * tokens * D * V + attention + rotations, rel=0.01
    )


@pytest.mark.parametrize(
    ("machine", "mesh"), [("v5e:2x2", {"expert": 2, "fsdp": 2}), ("v5p:2x2x1", {"fsdp": 4})]
)
def test_dropless_experts_on_tpu_compute_each_pair_once(machine, mesh):
    """Each pair of token and expert is computed once.

    This holds whether the experts are sharded over devices or each device holds all of them.
    """
    experts, top_k = 4, 2
    target = topology(machine)
    mixture = {"name": "experts", "num_experts": experts, "top_k": top_k}
    config = planned_experiment(
        mesh=mesh, data={"length": 256}, dtype="bfloat16", max_length=256, feed_forward=mixture
    )
    plan = make_plan(config, target, programs.start(target), only=("train",))
    runs = plan.train.compiled.program.runs
    assert {op.name.partition(".")[0] for op, *_ in runs if "gmm" in op.name} >= {"gmm", "tgmm"}
    layer, pairs = 4 * D * D + top_k * 2 * D * FF + D * experts, 2 * 256 * D
    expected_flops = lambda layer: 3 * 2 * ROWS * 256 * (3 * layer + D * V)
    # The reference attention also computes masked pairs. On a TPU, the rotation of a query or key
    # head is a product, in the forward and in the backward pass.
    rotations = 3 * 2 * 2 * ROWS * 256 * (4 + 4) * 8**2
    compiled_flops = expected_flops(layer + pairs) + rotations
    assert plan.train.roofline.flops * 4 == pytest.approx(compiled_flops, rel=0.001)
    assert plan.model_flops == pytest.approx(expected_flops(layer + pairs * 257 / 512), rel=0.01)
