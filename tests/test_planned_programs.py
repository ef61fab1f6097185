"""What the planner reads from a compiled program: work, memory and collectives."""

import types

import jax
import numpy as np
import pytest
from conftest import TINY, model_fields, small

from transformer.config import Experiment
from transformer.mapping import from_mapping
from transformer.planning import chips
from transformer.planning.chips import topology
from transformer.planning.hlo import HloProgram, kept
from transformer.planning.model_flops import allowed_share, tile_counts
from transformer.planning.programs import Programs
from transformer.planning.roofline import roofline, sent
from transformer.planning.work import Collective, collectives, flops, hbm_bytes, kernel

D, FF, V, T, ROWS = 32, 64, 48, 64, 16


def planned_experiment(family="decoder", mesh=None, train=(), data=(), **model):
    objective = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder_decoder": "seq2seq"}[
        family
    ]
    return from_mapping(
        Experiment,
        {
            "model": model_fields(
                family,
                {**TINY, "num_decoder_layers": 3},
                **{
                    "vocab_size": V,
                    "d_model": D,
                    "d_ff": FF,
                    "max_length": T,
                    "use_bias": False,
                    "norm_placement": "pre",
                    "position": "rotary",
                    "attention_backend": "reference",
                    **model,
                },
            ),
            "data": {
                "train": "nowhere",
                "format": "text",
                "objective": objective,
                "length": T,
                "batch_size": ROWS,
                **dict(data),
            },
            "train": {"steps": 1000, **dict(train)},
            "mesh": {"data": 1, **(mesh or {})},
            "decoding": {"batch_size": 8},
        },
    )


@pytest.mark.parametrize("scan", [True, False])
def test_products_in_loops_count_once_per_iteration(scan):
    """A forward pass on one device, with all query-key pairs of reference attention."""
    config = planned_experiment(scan_layers=scan)
    tokens = ROWS * T
    layer_flops = 2 * tokens * (4 * D * D + 2 * D * FF) + 4 * ROWS * T * T * D
    compiled = Programs(config, jax.devices()[:1]).compile("evaluate")
    assert flops(compiled.program) == 3 * layer_flops + 2 * tokens * D * V


def test_accumulation_reduces_saved_activations():
    programs = lambda count: Programs(
        planned_experiment(train={"accumulate": count}), jax.devices()[:1]
    )
    whole, quarters = (kept(programs(count).compile("train").program) for count in (1, 4))
    assert 0 < quarters < whole


@pytest.mark.parametrize(
    ("window", "expected", "tiles"),
    [(0, 65 / 128, 10), (1, 1 / 64, 4), (16, (16 * 64 - 120) / 64**2, 7)],
)
def test_allowed_share_of_a_causal_mask(window, expected, tiles):
    assert allowed_share(f"/decoder/pairs.64.64.1.{window}/") == pytest.approx(expected)
    assert sum(tile_counts(f"/decoder/pairs.64.64.1.{window}.16.16/")) == tiles


def test_allowed_share_of_other_masks():
    mask = np.abs(np.arange(40)[:, None] - np.arange(40)) < 7
    assert allowed_share("/encoder/pairs.40.40.0.7") == pytest.approx(mask.mean())
    assert allowed_share("/cross_attention/pairs.40.24.0.0") == allowed_share("/query") == 1.0


TEXT = """HloModule made_up

%inner (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %n = f32[8,4]{1,0} negate(%p)
}

%body (arg: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%arg), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %after = s32[] add(%next, %one)
  %sum = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  %kernel = f32[8,4]{1,0} custom-call(%sum), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"block": "{1}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%after, %kernel)
}

%condition (arg: (s32[], f32[8,4])) -> pred[] {
  %arg = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %end = s32[] constant(9)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{1,0}) tuple(%zero, %a)
  %loop = (s32[], f32[8,4]{1,0}) while(%start), condition=%condition, \
body=%body, metadata={op_name="jit(f)/jvp(layers)/while"}
  %made = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %gathered = f32[32,4]{1,0} all-gather(%made), replica_groups=mesh['x'=2,'y'=4] {'y'}, \
dimensions={0}
  %moved = f32[8,4]{1,0} collective-permute(%made), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %turned = f32[8,4]{1,0} all-to-all(%moved), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %kept = f32[8,4]{1,0:S(1)} fusion(%turned), kind=kLoop, calls=%inner
  ROOT %back = f32[8,4]{1,0} add(%made, %turned), \
metadata={op_name="jit(f)/transpose(jvp(layers))/add"}
}
"""


def test_parses_hlo_text():
    """Reads a loop that counts by twos, all four notations of groups, and multi-line attributes.

    Also reads arrays in on-chip memory, and arrays that are kept for the backward pass.
    """
    program = HloProgram.read(TEXT)
    by_kind = {message.kind: message for message in collectives(program)}
    assert by_kind["all-reduce"].times == 5 and by_kind["all-reduce"].groups.tolist() == [
        [0, 1],
        [2, 3],
    ]
    assert (
        by_kind["all-gather"].groups.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        and by_kind["all-gather"].bytes == 4 * 128
    )
    assert by_kind["collective-permute"].groups.tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert by_kind["all-to-all"].groups.tolist() == [[0, 2], [1, 3]]
    custom_call = next(
        (op, times) for op, _, times, _ in program.runs if op.opcode == "custom-call"
    )
    assert custom_call[0].source == "jit(f)/kernel" and custom_call[1] == 5
    # The backward pass reads the results of the loop and of the all-to-all.
    assert kept(program) == 2 * 128
    array = 128
    # The sum, the kernel and two scalar additions read their operands and write their results.
    loop = 5 * (2 * array + 2 * array + 3 * 4 * 2)
    compare = 5 * 0  # conditions of loops do not count
    assert (
        hbm_bytes(program)
        == loop + compare + (array + 4 * array) + 2 * array + 2 * array + array + 3 * array
    )


MOVES = """HloModule moves

%sliced (w: f32[16,64], i: s32[]) -> f32[1,64] {
  %w = f32[16,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %one = f32[1,64]{1,0} dynamic-slice(%w, %i, %zero), dynamic_slice_sizes={1,64}
}

%put (whole: f32[16,64], part: f32[1,64], i: s32[]) -> f32[16,64] {
  %whole = f32[16,64]{1,0} parameter(0)
  %part = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %out = f32[16,64]{1,0} dynamic-update-slice(%whole, %part, %i, %zero)
}

ENTRY %main (w: f32[16,64], i: s32[]) -> f32[16,64] {
  %w = f32[16,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %one = f32[1,64]{1,0} fusion(%w, %i), kind=kLoop, calls=%sliced
  %start = (f32[1,64]{1,0}, f32[1,64]{1,0:S(1)}, u32[]) copy-start(%one)
  %done = f32[1,64]{1,0:S(1)} copy-done(%start)
  %all = f32[16,64]{1,0} fusion(%w, %one, %i), kind=kLoop, calls=%put
  ROOT %sum = f32[16,64]{1,0} all-reduce(%all), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_moved_bytes_are_counted_once():
    """Counts a slice with its index, a copy to on-chip memory, and the update of a part.

    The program also contains an all-gather that is written as a sum of zero-padded parts.
    """
    program = HloProgram.read(MOVES)
    part, whole = 4 * 64, 4 * 1024
    # An index takes four bytes. The update reads and writes the part.
    sliced, copied, updated = ((part + 4) + part, part, part + part + 4)
    assert hbm_bytes(program) == sliced + copied + updated + 2 * whole
    (message,) = collectives(program)
    assert (message.kind, message.bytes) == ("all-gather", whole)


SPREAD = """HloModule spread

%work (shard: f32[4,64], whole: f32[16,64], x: f32[8,8]) -> (f32[8,8], f32[4,64], f32[16,64]) {
  %shard = f32[4,64]{1,0} parameter(0)
  %whole = f32[16,64]{1,0} parameter(1)
  %x = f32[8,8]{1,0} parameter(2)
  %y = f32[8,8]{1,0} negate(%x)
  %gathered = f32[16,64]{1,0} all-gather(%shard), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %all = (f32[8,8]{1,0}, f32[4,64]{1,0}, f32[16,64]{1,0}) tuple(%y, %shard, %gathered)
}

ENTRY %main (shard: f32[4,64], whole: f32[16,64], x: f32[8,8]) -> f32[8,8] {
  %shard = f32[4,64]{1,0} parameter(0)
  %whole = f32[16,64]{1,0} parameter(1)
  %x = f32[8,8]{1,0} parameter(2)
  %spread = (f32[8,8]{1,0}, f32[4,64]{1,0}, f32[16,64]{1,0}) fusion(%shard, %whole, %x), kind=kCustom, calls=%work
  ROOT %y = f32[8,8]{1,0} get-tuple-element(%spread), index=0
}
"""  # noqa: E501


def test_fusion_that_passes_on_a_collective_moves_only_its_own_arrays():
    assert hbm_bytes(HloProgram.read(SPREAD)) == 2 * 4 * 64


SCATTER = """HloModule scatter

%all-reduce-scatter.1 (input: bf16[64,8]) -> bf16[16,8] {
  %input = bf16[64,8]{1,0} parameter(0)
  %sum = bf16[64,8]{1,0} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  %at = u32[] partition-id()
  %zero = u32[] constant(0)
  ROOT %part = bf16[16,8]{1,0} dynamic-slice(%sum, %at, %zero), dynamic_slice_sizes={16,8}
}

ENTRY %main (a: bf16[64,8]) -> bf16[16,8] {
  %a = bf16[64,8]{1,0} parameter(0)
  ROOT %part = bf16[16,8]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_fused_all_reduce_scatter_is_a_reduce_scatter():
    (message,) = collectives(HloProgram.read(SCATTER))
    assert (message.kind, message.bytes) == ("reduce-scatter", 1024)


def kernel_work(name, out, operands, scope, **model):
    """Returns the work of a call of kernel `name` with operands of the given shapes."""
    operands = ", ".join(f"bf16[{dims}]{{1,0}}" for dims in operands)
    line = (
        f"  %{name} = bf16[{out}]{{1,0}} custom-call(%q, %k, %v), "
        f'custom_call_target="tpu_custom_call", '
        f"operand_layout_constraints={{s8[1,2,2]{{2,1,0}}, {operands}}}, "
        f'metadata={{op_name="jit(step)/decoder/layers/{scope}"}}'
    )
    program = HloProgram.read("ENTRY %main (q: f32[]) -> f32[] {\n" + line + "\n}\n")
    return kernel(program.computations["main"][name], small("decoder", **model))


def test_attention_kernel_flops_count_only_unmasked_blocks():
    shapes = "2,4,1024,64", ("2,4,1024,64", "2,2,1024,64", "2,2,1024,64")
    count = lambda kind, causal=1, tile=512: (
        kernel_work(
            f"flash_{kind}.1",
            *shapes,
            f"attention/pairs.1024.1024.{causal}.0.{tile}.{tile}/shard_map",
        ).flops
    )
    whole = 2 * 2 * 4 * 1024 * 1024 * 64
    assert [count(kind) / whole for kind in ("forward", "backward")] == [2 * 0.75, 5 * 0.75]
    assert count("forward", causal=0) == 2 * whole
    assert count("forward", tile=256) == 2 * 0.625 * whole


def test_grouped_kernel_computes_its_share_of_the_rows():
    """A device with 2 of 8 experts computes a quarter of 1024 rows."""
    mixture = {"feed_forward": {"name": "experts", "num_experts": 8}}
    forward = kernel_work("gmm.3", "1024,96", ("1024,64", "2,64,96"), "feed_forward", **mixture)
    by_matrices = kernel_work(
        "tgmm.1", "2,64,96", ("1024,64", "1024,96"), "feed_forward", **mixture
    )
    assert forward == by_matrices  # the gradient with respect to the matrices
    assert (forward.flops, forward.untouched) == (2 * 256 * 64 * 96, 768 * (64 + 96) * 2)
    by_rows = kernel_work("gmm.4", "1024,64", ("1024,96", "2,64,96"), "feed_forward", **mixture)
    assert by_rows == forward  # the gradient with respect to the rows


KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def test_bytes_sent_within_a_slice():
    sizes = {kind: sent(Collective(kind, 100, np.arange(4)[None], 3)) for kind in KINDS}
    assert {kind: outer for kind, (_, outer) in sizes.items()} == dict.fromkeys(KINDS, 0)
    assert [inner for inner, _ in sizes.values()] == [225, 225, 450, 225, 300]


def test_traffic_between_slices_is_shared_by_their_devices():
    """Eight devices in two slices.

    In an all-gather, a device receives 3/4 of the array in its slice. Its share of the traffic
    beyond the slice is a quarter of the other half.
    """
    sizes = {kind: sent(Collective(kind, 800, np.arange(8)[None], 1), slices=2) for kind in KINDS}
    assert sizes["all-gather"] == sizes["reduce-scatter"] == (600, 100) and sizes["all-reduce"] == (
        1200,
        200,
    )
    assert sizes["all-to-all"] == (300, 400) and sizes["collective-permute"] == (0, 800)


def test_reads_transfers_between_slices():
    """The TPU compiler writes a collective between slices as a send to the host."""
    text = (
        "ENTRY %main (a: bf16[1000]) -> bf16[1000] {\n"
        "  %a = bf16[1000]{0} parameter(0)\n"
        "  %t = token[] after-all()\n"
        "  %s = (bf16[1000]{0}, u32[], token[]) send(%a, %t), channel_id=2, is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_target="{1,2}x{0:7}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}\n}\n'
    )
    devices = [types.SimpleNamespace(coords=(i, 0, 0), slice_index=i // 8) for i in range(16)]
    result = roofline(HloProgram.read(text), topology("v5p:2x2x2", 2), devices)
    assert result.traffic["all-reduce"].inner == 0 and result.traffic["all-reduce"].outer == 2000
    assert result.seconds["slices"] == 2000 / chips.CHIPS["v5p"].outer_rate


@pytest.mark.parametrize(
    ("kind", "devices", "expected"),
    [("h100", [0, 1, 2, 3], (0.75e9, 0)), ("h100", [0, 1, 8, 9], (0.5e9, 0.25e9))],
)
def test_traffic_between_hosts_is_counted_separately(kind, devices, expected):
    """Ten GPUs: eight in one host, two in another."""
    all_devices = [types.SimpleNamespace(id=i) for i in range(10)]
    text = (
        "ENTRY %main (a: f32[8]) -> f32[8] {\n"
        "  %a = f32[62500000]{0} parameter(0)\n"
        "  %g = f32[250000000]{0} all-gather(%a), "
        f"replica_groups={{{{{','.join(map(str, devices))}}}}}\n}}\n"
    )
    result = roofline(HloProgram.read(text), topology(f"{kind}:10"), all_devices)
    assert (result.traffic["all-gather"].inner, result.traffic["all-gather"].outer) == expected
    chip = chips.CHIPS[kind]
    assert (
        result.seconds["network"] == expected[0] / chip.link_rate
        and result.seconds["slices"] == expected[1] / chip.outer_rate
    )
