"""The table: what contradicts itself is refused in one sentence, words become dtypes, equal states are one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardfold.errors import ConfigError, LayoutError
from shardfold.plan import presets
from shardfold.plan.layout import DATA_AXES, PRECISIONS, Activations, Cell, Layout, Precision, Tier, Wire
from shardfold.plan.offload import offloaded
from shardfold.plan.presets import PRESETS, ddp, fsdp2, hpz, hsdp, zero1, zero2, zero3

MESH = {"inter": 2, "intra": 4}
BF16 = PRECISIONS["bf16"]
INTRA = ("intra",)

# What is wrong, and words that its message must have: what, where and how to mend it.
CONTRADICTIONS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "moments split unlike master": (
        lambda: ddp.edit("moments", over=INTRA),
        ["master is split over nothing", "moments over intra", "split them alike"],
    ),
    "grads split unlike master": (
        lambda: zero1.edit("grads", over=INTRA),
        ["grads are split over intra", "master over inter+intra", "do not split grads"],
    ),
    "grads split, master whole": (
        lambda: ddp.edit("grads", over=INTRA),
        ["grads are split over intra", "master over nothing"],
    ),
    "params split finer than master": (
        lambda: ddp.edit("params", over=INTRA),
        ["params are split over intra", "master over nothing", "first axes of master"],
    ),
    "params split over master's last axes": (
        lambda: zero2.edit("params", over=INTRA),
        ["params are split over intra", "master over inter+intra", "first axes of master"],
    ),
    "held split over more than params": (
        lambda: hsdp.replace(held=Cell(dtype="compute", over=DATA_AXES)),
        ["held is split over inter+intra", "params only over intra", "drop the extra axes"],
    ),
    "held split, params whole": (
        lambda: zero1.replace(held=Cell(dtype="compute", over=INTRA)),
        ["held is split over intra", "params only over nothing"],
    ),
    "an axis named twice": (
        lambda: ddp.edit("master", "moments", over=("intra", "intra")),
        ["master is split over intra+intra", "name each once"],
    ),
    "axes that are a word": (
        lambda: ddp.edit("master", "moments", over="intra"),
        ["master is split over 'intra'", "takes a tuple"],
    ),
    "a dtype that is none": (
        lambda: ddp.edit("grads", dtype="bf61"),
        ["grads has dtype 'bf61'", "Did you mean 'bf16'?"],
    ),
    "a dtype word that is none": (
        lambda: ddp.edit("params", dtype="comput"),
        ["params has dtype 'comput'", "Did you mean 'compute'?"],
    ),
    "a wire's word that is none": (
        lambda: ddp.replace(reduce=Wire(format="redcue")),
        ["reduce travels as 'redcue'", "Did you mean 'reduce'?"],
    ),
    "a format that is none": (
        lambda: zero3.replace(gather="bf61"),
        ["gather travels as 'bf61'", "Did you mean 'bf16'?"],
    ),
    "signs for parameters": (
        lambda: zero3.replace(gather="sign"),
        ["gather travels as sign/256", "cannot compute with signs", "'int8'"],
    ),
    "a wire that is no wire": (lambda: zero3.replace(gather=16), ["gather of the table is 16", "it is a Wire"]),
    "integers for parameters": (
        lambda: zero3.replace(gather="uint8").bind(PRECISIONS["fp32"], MESH),
        ["gather travels as uint8", "Precision.compute is fp32", "narrower"],
    ),
    "integers for gradients": (
        lambda: zero3.replace(reduce="uint8").bind(PRECISIONS["fp32"], {"inter": 1, "intra": 1}),
        ["reduce travels as uint8", "grads accumulate in fp32"],
    ),
    "rounding where nothing is gathered": (
        lambda: ddp.replace(gather="bf16").bind(PRECISIONS["fp32"], MESH),
        ["gather travels as bf16", "params rest whole", "split params"],
    ),
    "rounding what others update only": (
        lambda: zero3.edit("params", over=("inter",)).replace(gather="bf16").bind(PRECISIONS["fp32"], MESH),
        ["gather travels as bf16", "params are split over inter and master over inter+intra", "split both alike"],
    ),
    "a tier that is none": (
        lambda: ddp.edit("moments", tier="hots"),
        ["moments rest in tier 'hots'", "Did you mean 'host'?"],
    ),
    "editing a state that is none": (
        lambda: ddp.edit("momnets", over=INTRA),
        ["no state 'momnets'", "Did you mean 'moments'?"],
    ),
    "editing a state the table has not": (
        lambda: fsdp2.edit("params", over=INTRA),
        ["no params to edit", "replace(params=Cell(...))"],
    ),
    "an unknown preset": (lambda: presets.named("zero-3"), ["layout 'zero-3'", "Did you mean 'zero3'?"]),
    "a preset far from all": (lambda: presets.named("qqq"), ["layout 'qqq'", "Known: ddp, fsdp2, hpz"]),
    "an unknown precision": (lambda: Precision.named("bf-16"), ["precision 'bf-16'", "Did you mean 'bf16'?"]),
    "autocast over 16 bits": (
        lambda: Precision(compute="bf16", autocast="bf16"),
        ["Precision.autocast is 'bf16' with compute 'bf16'", "compute='fp32'"],
    ),
    "a policy for buffers": (lambda: Precision(buffers="computed"), ["'computed'", "Did you mean 'compute'?"]),
    "an unknown dtype in a precision": (
        lambda: Precision(compute="bfloat16"),
        ["Precision.compute is 'bfloat16'", "Did you mean 'bf16'?"],
    ),
    "an integer dtype in a precision": (lambda: Precision(moments="int8"), ["Precision.moments is 'int8'"]),
    "a precision whose master is coarser": (
        lambda: Precision(master="bf16"),
        ["Precision.master is bf16", "compute is fp32", "widen master"],
    ),
    "an axis that the mesh lacks": (
        lambda: ddp.edit("master", "moments", over=("inta",)).bind(BF16, MESH),
        ["master is split over 'inta'", "mesh", "Did you mean 'intra'?"],
    ),
    "grads that would change dtype in place": (
        lambda: ddp.bind(Precision(compute="bf16", grads="fp32", reduce="bf16"), MESH),
        ["grads accumulate unreduced in fp32", "travel as bf16", "split grads"],
    ),
    "grads that would grow to travel": (
        lambda: zero1.bind(Precision(compute="bf16", grads="bf16", reduce="fp32"), MESH),
        ["grads accumulate unreduced in bf16", "travel as fp32", "split grads"],
    ),
    "params that rest unlike they are read": (
        lambda: zero1.edit("params", dtype="fp16").bind(BF16, MESH),
        ["params is fp16", "Precision.compute is bf16"],
    ),
    "held that rests unlike it is read": (
        lambda: hpz.edit("held", dtype="fp32").bind(BF16, MESH),
        ["held is fp32", "Precision.compute is bf16"],
    ),
    "a gather that would widen": (
        lambda: zero3.replace(gather="fp32").bind(BF16, MESH),
        ["gather travels as fp32", "Precision.compute is bf16"],
    ),
    "a table whose master is coarser": (
        lambda: zero3.edit("master", dtype="bf16").bind(PRECISIONS["fp32"], MESH),
        ["master is bf16", "Precision.compute is fp32", "widen master"],
    ),
}


@pytest.mark.parametrize(("build", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_contradiction_is_refused_in_one_sentence_that_says_where_and_how_to_mend_it(
    build: Callable[[], object], words: list[str]
):
    with pytest.raises(LayoutError) as caught:
        build()
    message = str(caught.value)
    assert isinstance(caught.value, ConfigError | ValueError)
    for word in words:
        assert word in message
    assert "\n" not in message and len(message) < 240
    sentence = message.partition(" Did you mean ")[0].partition(" Known: ")[0]
    assert sentence.endswith(".") and ". " not in sentence


@pytest.mark.sampled(216)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mesh", [{"inter": i, "intra": j} for i in (1, 2) for j in (1, 4)], ids=str)
def test_every_preset_binds_in_every_precision_on_every_mesh_and_binding_again_changes_nothing(
    name: str, precision: str, mesh: dict[str, int]
):
    policy = Precision.named(precision)
    bound = presets.named(name).bind(policy, mesh)
    for cell in bound.cells().values():
        assert all(mesh[axis] > 1 for axis in cell.over)
        assert cell.dtype in ("fp32", "bf16", "fp16")
    assert bound.bind(policy, mesh) == bound


def test_values_are_their_own_names():
    assert presets.named(hpz) is hpz
    assert Precision.named(BF16) is BF16


def test_bind_drops_axes_of_size_one():
    bound = zero3.bind(BF16, {"inter": 1, "intra": 4})
    assert {cell.over for cell in bound.cells().values()} == {INTRA}
    assert {cell.over for cell in zero3.bind(BF16, {"inter": 1, "intra": 1}).cells().values()} == {()}


def test_bind_resolves_words_to_dtypes_and_leaves_literal_dtypes_alone():
    precision = Precision(compute="bf16", grads="fp32", reduce="bf16", moments="bf16")
    bound = zero3.edit("moments", dtype="fp64").bind(precision, MESH)
    assert {name: cell.dtype for name, cell in bound.cells().items()} == {
        "params": "bf16",
        "grads": "fp32",
        "master": "fp32",
        "moments": "fp64",
    }
    assert (bound.gather.format, bound.reduce.format) == ("bf16", "bf16")


def test_grads_may_accumulate_in_another_dtype_where_nothing_travels():
    mixed = Precision(compute="bf16", grads="fp32", reduce="bf16")
    assert zero1.bind(mixed, {"inter": 1, "intra": 1}).grads.dtype == "fp32"


def test_a_held_copy_split_like_what_rests_is_no_copy():
    assert hpz.bind(BF16, {"inter": 1, "intra": 4}).held is None
    assert hpz.bind(BF16, MESH).held == Cell(dtype="bf16", over=INTRA)


def test_a_table_without_params_keeps_the_cast_copy_where_nothing_is_gathered():
    bound = fsdp2.bind(BF16, {"inter": 1, "intra": 1})
    assert bound.params == Cell(dtype="bf16")
    assert fsdp2.bind(BF16, MESH).params is None


def test_in_fp32_master_is_the_owners_range_of_params():
    for layout in (ddp, zero1, zero2, zero3, hsdp, hpz):
        assert layout.bind(PRECISIONS["fp32"], MESH).aliases() == {"master": "params"}
        assert layout.bind(BF16, MESH).aliases() == {}
    assert zero1.bind(PRECISIONS["bf16-pure"], MESH).aliases() == {"master": "params"}


def test_states_in_different_tiers_are_never_one():
    apart = zero1.edit("master", "moments", tier=Tier.HOST).bind(PRECISIONS["fp32"], MESH)
    assert apart.aliases() == {}


def test_a_held_copy_that_is_whole_is_the_gathered_buffer():
    assert hpz.bind(BF16, {"inter": 4, "intra": 1}).aliases() == {"held": "gathered"}


def test_rest_and_kept_follow_the_cells_that_are_there():
    assert fsdp2.rest is fsdp2.master and fsdp2.kept is fsdp2.master
    assert hpz.rest is hpz.params and hpz.kept is hpz.held


def test_edit_changes_only_the_named_cells():
    assert zero1.edit("grads", over=DATA_AXES) == zero2
    assert zero1 == Layout(master=Cell(dtype="master", over=DATA_AXES), moments=Cell(dtype="moments", over=DATA_AXES))


def test_a_table_prints_as_a_table():
    assert str(zero1) == (
        "state        split over      dtype     memory\n"
        "params       nothing         compute   device\n"
        "held         same as params\n"
        "grads        nothing         grads     device\n"
        "master       inter+intra     master    device\n"
        "moments      inter+intra     moments   device\n"
        "activations  nothing         as made   device\n"
        "communication: gather as compute, reduce as reduce"
    )


def test_a_table_without_params_says_what_stands_in_for_them():
    lines = str(fsdp2.bind(BF16, MESH)).splitlines()
    assert lines[1:3] == ["params       same as master, cast while gathering", "held         same as master"]
    assert lines[-1] == "communication: gather as bf16, reduce as fp32"


@pytest.mark.parametrize(
    ("mode", "tier", "fate"),
    [
        ("keep", Tier.DEVICE, "device"),
        ("recompute", None, "recomputed"),
        ("select", Tier.DEVICE, "recomputed, but products"),
        ("host", Tier.HOST, "host"),
        ("disk", Tier.DISK, "disk"),
        ("fit:1GiB", None, "fit:1GiB"),
    ],
)
def test_activations_are_a_cell_that_every_layout_may_have(mode: str, tier: Tier | None, fate: str) -> None:
    assert Activations(mode=mode).tier is tier
    for table in PRESETS.values():
        changed = table.edit("activations", mode=mode)
        assert changed == table.replace(activations=mode) == table.replace(activations=Activations(mode=mode))
        assert (changed == table) == (mode == "keep")
        assert changed.bind(BF16, MESH).activations == Activations(mode=mode)
        assert changed.cells() == table.cells()
        assert str(changed).splitlines()[-2] == f"activations  nothing         as made   {fate}"


def test_activations_that_can_not_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'recompute'"):
        zero1.replace(activations="recomputed")
    with pytest.raises(ConfigError, match="it is the name of an axis, as 'tensor'"):
        zero1.edit("activations", over=("intra",))
    with pytest.raises(LayoutError, match="Did you mean 'activations'"):
        zero1.edit("activation", mode="host")


def test_tiers_as_text_are_those_of_a_dict():
    """By state with commas, as a command line has them; a state that is named twice is refused."""
    asked = {"optimizer": "disk", "grads": "host"}
    assert offloaded(zero3, "optimizer=disk, grads=host") == offloaded(zero3, asked)
    with pytest.raises(ConfigError, match="names grads twice"):
        offloaded(zero3, "grads=host,grads=disk")


def test_presets_are_asked_for_by_name() -> None:
    """Also those that round, which a list of presets leaves out; what is unknown is told with its nearest name."""
    assert PRESETS["zeropp"] == presets.named("zeropp") and "zeropp" not in PRESETS
    with pytest.raises(LayoutError, match=r"layout 'zero33' is unknown. Did you mean 'zero3'\?"):
        PRESETS["zero33"]
    with pytest.raises(LayoutError, match=r"Did you mean 'zeropp'\?"):
        PRESETS["zero++"]
