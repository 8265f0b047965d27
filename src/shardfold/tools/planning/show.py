"""A plan as text: what each layout needs, what the peak is made of, and what would lower it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote

from shardfold.parallel.pipeline.simulate import timeline
from shardfold.parallel.pipeline.stage_order import choose_order, make_order
from shardfold.plan import presets
from shardfold.plan.axes import Mesh
from shardfold.plan.checks import human
from shardfold.plan.cost import resting_bytes
from shardfold.plan.holders import death_told, holders, lost_told, usual_hosts
from shardfold.plan.layout import Layout, Precision, Sizes, Tier
from shardfold.planner.candidate import STAGES, Candidate, FittingCandidate
from shardfold.planner.choice import Option
from shardfold.planner.division import Division
from shardfold.planner.hardware import Cluster, Device
from shardfold.planner.inference import RESERVE, Generating, Served, Size
from shardfold.planner.ranking import Ranking
from shardfold.tools.planning.known_models import Planned

__all__ = [
    "advice",
    "detail",
    "generation",
    "head",
    "lost",
    "notes",
    "ranking",
    "served_by",
    "serving",
    "stages",
    "states",
    "table",
]

_THERE = {Tier.DEVICE: "on the device", Tier.HOST: "in host memory", Tier.DISK: "on disk"}


def head(model: Planned, cluster: Cluster, precision: str, mesh: Mesh | None = None) -> str:
    """What is planned for; ``mesh``: of all ranks."""
    length = f", {model.length:,} tokens each" if model.length else ""
    budget = human(cluster.device.usable)
    return (
        f"{model.name}: {states(model, precision)}; {cluster} with {budget} for training{length}{_divided(model, mesh)}"
    )


def states(model: Planned, precision: str) -> str:
    """How many parameters, in which dtypes they are under a policy, and their optimizer."""
    policy = Precision.named(precision)
    rules, cuts = model.subject.cuts(presets.ddp, policy, model.subject.mesh)
    layout, ways = rules.layouts[-1], dict[str, int]()
    for segment in (segment for c in cuts if c.spec is not None for segment in c.spec.segments):
        way = f"kept in {segment.dtype}"
        if segment.trainable and "master" not in segment.table_or(layout).aliases(own=segment.own):
            way = f"computed in {segment.dtype} with masters kept in {segment.dtype_for('master', layout)}"
        ways[way] = ways.get(way, 0) + segment.numel
    if not ways:
        return "no parameters"
    if len(ways) == 1:
        return f"{model.parameters:,} parameters, {next(iter(ways))} under precision {precision}; {model.optimizer}"
    each = ", ".join(f"{numel:,} {way}" for way, numel in sorted(ways.items(), key=lambda pair: -pair[1]))
    return f"{model.parameters:,} parameters, {each} under precision {precision}; {model.optimizer}"


def notes(zeros: Iterable[str], losses: Iterable[str] = (), where: Cluster | None = None, precision: str = "") -> str:
    """What to know about a plan, a line each.

    Args:
        zeros: of its traces, why they ran on zeros.
        losses: of its traces, what was taken for a loss.
        where: devices, which may have no units for the dtype of ``precision``.
        precision: policy.
    """
    said = [
        f"Note: the model was run on zeros with memory, as {why}; where it goes by values, the plan is of zeros."
        for why in dict.fromkeys(zeros)
        if why
    ]
    said += [
        f"Note: the model gives no loss, so {what} is taken for it. What a loss of your own takes is not in "
        "the plan: have the forward give it."
        for what in dict.fromkeys(losses)
        if what
    ]
    policy = Precision.named(precision) if where is not None else Precision()
    if where is not None and "bf16" in (policy.compute, policy.autocast):
        best, times = where.device.faster("bf16")
        if best != "bf16":
            said.append(
                f"Note: a {where.device.name} has no units for products in bf16: in {best} (--precision {best}) they "
                f"are {times:.2g} times as fast."
            )
    return "\n".join(said)


def _divided(model: Planned, mesh: Mesh | None) -> str:
    """How ranks share the model."""
    division = model.subject.division
    if mesh is None or not division.axes:
        return ""
    readers = mesh.parts(mesh.sampling)
    own = sum({id(p): p.numel() for p in model.subject.hollow.parameters()}.values())
    samples = f"{readers} ranks read other samples" if readers > 1 else "all ranks read the same samples"
    return f"\n{division}: {own:,} parameters on rank 0 before the layout divides them; {samples}"


def stages(division: Division) -> str:
    """What an order of stages costs, in slots of which a backward takes two."""
    count, ranks = division.micro_batches, division.pipeline
    choice = choose_order(division.order)
    stages = len(choice.places(ranks))
    line = timeline(make_order(choice, ranks, count), stages)
    kept = ", ".join(map(str, line.kept))
    many = f"{count} micro-batches" if count > 1 else "1 micro-batch"
    of, whose = ("stage", "stage") if stages == ranks else ("rank, of its stages", "rank")
    on = "" if stages == ranks else f" on {ranks} ranks"
    return (
        f"{choice!s} of {many} over {stages} stages{on}: ranks wait {line.bubble:.1%} of a step; kept at most, by "
        f"{of}: {kept}. The table is of the {whose} that needs the most."
    )


def table(options: Sequence[Option]) -> str:
    """One line for each way to train."""
    lines = [
        f"{'layout':<10}{'activations':<13}{'at rest':>11}{'peak':>11}{'host':>11}{'step':>12}  "
        f"{'largest micro-batch':>19}  {_whose(options)}"
    ]
    for each in options:
        host = each.plan.tiers.get(Tier.HOST, 0.0)
        fits = "fits" if each.fits else "too much"
        lines.append(
            f"{each.layout:<10}{each.mode:<13}{human(each.plan.rest):>11}{human(each.plan.peak):>11}"
            f"{human(host) if host else '-':>11}{_step(each):>12}  {each.largest or 'none':>19}  {fits}"
        )
    return "\n".join(lines)


def _step(option: Option) -> str:
    """How long a step takes."""
    return "-" if option.seconds is None else f"{option.seconds.step:.3g} s"


def lost(model: Planned, tables: Mapping[str, Layout], sizes: Sizes, precision: str) -> str:
    """What of each layout's states is lost with a rank and with a host, and, where ranks hold copies, what a rank's
    death costs those that go on; layouts of which the same is true have one line."""
    mesh = Mesh.of(sizes)
    if mesh.size == 1:
        return ""
    policy, said = Precision.named(precision), dict[str, list[str]]()
    for name, table in tables.items():
        on = Mesh(mesh.axes, table.rare)
        found = holders(table.bind(policy, on), on, usual_hosts(on))
        said.setdefault(lost_told(found, by_host=mesh.get("inter", 1) > 1), []).append(name)
        if table.copies:
            rules, cuts = model.subject.cuts(table, policy, on)
            held = resting_bytes(rules.layouts[-1], [cut.spec for cut in cuts if cut.spec is not None], on)
            if told := death_told(rules.layouts[-1], on, found, held):
                said.setdefault(f"{told[0]} {'; '.join(map(str.strip, told[1:]))}", []).append(name)
    return "\n".join(f"{', '.join(names)}: {what}" for what, names in said.items())


def _whose(options: Sequence[Option]) -> str:
    """Of which micro-batch the peaks are."""
    sizes = {each.micro_batch for each in options}
    return f"of {sizes.pop()}" if len(sizes) == 1 else "of the largest" if sizes else ""


def ranking(found: Ranking, where: Cluster, precision: str, recipe: str = "", price: float | None = None) -> str:
    """The fastest micro-batch of each layout, axes and mode, the fastest of all first; then what does not fit, and
    why. ``recipe``: what `shardfold train` calls the model; empty: it does not train it. ``price``: of a device for an
    hour."""
    every = [*(each.candidate.division for each in found.found), *(each.division for each in found.refused)]
    wide = max((len(str(division)) + 2 for division in every if division.axes), default=0)
    wired = [*(each.candidate.wired for each in found.found), *(each.wired for each in found.refused)]
    long = max((len(each) + 2 for each in wired if each), default=0)
    lines = [
        f"{'layout':<10}{'axes' * bool(wide):<{wide}}{'wires' * bool(long):<{long}}{'activations':<13}"
        f"{'micro-batch':>12}{'peak':>11}{'host':>11}"
        f"{'step':>12}{'samples/s':>11}{'tokens/s':>11}{'MFU':>6}{'waits':>7}"
    ]
    policy = Precision.named(precision)
    rate = where.device.rate("fp8" if policy.linear else policy.autocast or policy.compute)
    shown: set[tuple[str, str, str]] = set()
    for each in found.found:
        candidate, seconds = each.candidate, each.seconds
        axes = str(candidate.division)
        if (key := (candidate.layout, axes, candidate.mode)) in shown:
            continue
        shown.add(key)
        size = f"{candidate.micro_batch}" + (f" x {candidate.accumulate}" if candidate.accumulate > 1 else "")
        waits = max(seconds.exposed / seconds.step, 0.0)
        tokens = f"{seconds.tokens_per_second * where.size / candidate.division.sharing:,.0f}"
        lines.append(
            f"{candidate.layout:<10}{axes:<{wide}}{candidate.wired:<{long}}{candidate.mode:<13}{size:>12}{human(each.peak):>11}"
            f"{human(each.host) if each.host else '-':>11}{seconds.step:>10.3g} s{each.samples:>11.4g}"
            f"{tokens if seconds.tokens else '-':>11}"
            f"{100 * seconds.mfu(rate, attention=False):>4.0f} %{100 * waits:>5.0f} %"
        )
    for r in found.refused:
        if (key := (r.layout, str(r.division), r.mode)) not in shown:
            shown.add(key)
            lines.append(f"{r.layout:<10}{r.division!s:<{wide}}{r.wired:<{long}}{r.mode:<13}{r.why}")
    if long:
        lines += ["", _wires_of(found)]
    if found.found:
        best = found.found[0].candidate
        settings = {**best.engine, "layout": best.layout}
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items() if name != "overlap")
        if best.changes:
            changes = ", ".join(f"{name}={value!r}" for name, value in best.changes.items())
            given = given.replace(f"layout={best.layout!r}", f"layout=sf.PRESETS[{best.layout!r}].replace({changes})")
        lot = "1 sample" if best.micro_batch == 1 else f"{best.micro_batch:,} samples"
        sizes = f"{lot} on each device at a time, {found.found[0].batch:,} a step"
        lines += ["", f"fastest: Engine({given}), {sizes}"]
        if recipe and where.nodes == 1:
            settings = {"size": recipe, "procs": where.size, **best.train}
            options = " ".join(_option(name, value) for name, value in settings.items())
            lines.append(f"         shardfold train {options}")
        lines += [f"         {line}" for line in (*_as_deepspeed(best), *_costs(found.found[0], rate, price))]
    else:
        lines += ["", "Nothing fits."]
    return "\n".join(lines)


def _wires_of(found: Ranking) -> str:
    """How many wires were looked at, of which the fastest is shown."""
    ways = {(c.layout, str(c.division), c.mode, c.wired) for c in (each.candidate for each in found.found)}
    ways |= {(r.layout, str(r.division), r.mode, r.wired) for r in found.refused}
    rows = {way[:3] for way in ways}
    return f"{len(ways)} ways were looked at, with all wires; each of the {len(rows)} lines has the fastest of its own."


def _as_deepspeed(best: Candidate) -> list[str]:
    """The same as a DeepSpeed config, and what that does not say."""
    if best.layout not in STAGES:
        return []
    unsaid = [best.unsaid[0].upper() + best.unsaid[1:]] if best.unsaid else []
    return [f"DeepSpeed config: {json.dumps(best.deepspeed)}", *unsaid]


def _option(name: str, value: object) -> str:
    """A setting as an option of `shardfold train`."""
    option = "--" + name.replace("_", "-")
    return option if value is True else f"{option} {quote(str(value))}"


def _costs(found: FittingCandidate, rate: float, price: float | None) -> list[str]:
    """What the model's operations reach, and what a billion tokens take."""
    seconds = found.seconds
    reached = (
        f"MFU {seconds.mfu(rate):.1%}, or {seconds.mfu(rate, attention=False):.1%} without what attention does between "
        "tokens"
    )
    if not seconds.tokens:
        return [f"{reached}."]
    hours = found.device_hours()
    paid = "" if price is None else f", which cost {price * hours:,.4g} at {price:g} an hour"
    return [f"{reached}; 10^9 tokens take {hours:,.4g} hours of a device, all devices added up{paid}."]


def served_by(model: Planned, where: Cluster) -> float:
    """Bytes of all devices, or of each of those that share a model."""
    return where.device.usable * (1 if model.subject.division.axes else where.size)


def serving(model: Planned, where: Cluster, sizes: Sequence[Size], served: Served, what: str = "cache") -> str:
    """What it takes to serve a model, one line for each dtype of its weights; and to train it on one device.

    ``what``: a sequence takes beside weights; of a model that keeps no keys and values it is its forward's activations.
    """
    division = model.subject.division
    alone = not division.axes
    each, sequences, budget = served
    one, wide = ("sequence", 12) if what == "cache" else ("sample", 18)
    many = f"{sequences:,} {one}s" if sequences > 1 else f"1 {one}"
    keeps = (
        f"with {human(each)} of keys and values in 16 bits"
        if what == "cache"
        else (f"with {human(each)} of activations in 16 bits in its forward, as the model keeps no keys and values")
    )
    length = f" of {model.length:,} tokens" if model.length else ""
    devices = " on all devices together" if where.size > 1 else ""
    room = (
        f"for serving{devices}"
        if alone
        else f"for serving each, of which {division.ranks} share the model by {division}: the part of each"
    )
    lines = [
        f"{model.name}: {model.parameters:,} parameters; {where} with {human(budget)} {room}; {many}{length}, each "
        f"{keeps}",
        "",
        f"{'weights':<9}{'largest layer':>14}{'all':>11}{f'with {what}':>{wide}}{f'+ {RESERVE:.0%}':>11}  {'':<9}"
        f"{f'most {one}s':>14}{'training, Adam':>16}",
    ]
    for size in sizes:
        cache, most = each * sequences, served.largest(size)
        lines.append(
            f"{size.dtype:<9}{human(size.largest):>14}{human(size.weights):>11}{human(size.weights + cache):>{wide}}"
            f"{human(size.needed(cache)):>11}  {'fits' if served.fits(size) else 'too much':<9}"
            f"{'any' if most is None else most or 'none':>14}{human(size.training) if size.training else '-':>16}"
        )
    return "\n".join(lines)


def generation(found: Generating, precision: str, length: int, page: int, bits: int | None, device: Device) -> str:
    """A generation of many texts at once, on each device."""
    kind = precision if bits is None else f"{bits} bits and {precision}"
    held = ", ".join(f"{human(num_bytes)} {_THERE[tier]}" for tier, num_bytes in found.resting.items() if num_bytes)
    takes = {
        "disk": f"the drive's {(device.reads or device.disk) / 1e9:.3g} GB/s",
        "host": f"the link's {device.host / 1e9:.3g} GB/s",
        "memory": "reading weights, keys and values from memory",
        "products": "products",
    }[found.limit]
    moved = f", of which {human(found.moved)} are moved" if found.moved else ""
    window = ""
    if not device.streams:  # where all of it is one memory
        window = f"  memory   {human(found.memory)} with {human(found.window)} of weights as they are read or decoded\n"
    return (
        f"\nA generation of {found.rows:,} texts of {length:,} tokens, weights in {kind}, on each device:\n"
        f"  weights  {held}\n"
        f"  pages    {human(found.pages)} of keys and values, {page} tokens each\n{window}"
        f"  forward  {found.seconds * 1e3:,.3g} ms{moved}: {found.tokens_per_second:,.3g} tokens/s, by {takes}"
    )


def detail(option: Option) -> str:
    """What the peak of one is made of, and where it is."""
    stage = f" on the rank of {option.stage}" if option.stage else ""
    lines = [
        f"{option.layout} with activations={option.mode!r}, micro-batch {option.micro_batch}{stage}: "
        f"{human(option.plan.peak)} at {option.plan.top.where}"
    ]
    for name, num_bytes in sorted(option.plan.terms.items(), key=lambda pair: -pair[1]):
        lines.append(f"  {name:<20}{human(num_bytes):>11}{100 * num_bytes / option.plan.peak:>7.1f} %")
    return "\n".join([*lines, *(f"  {line}" for line in advice(option))])


def advice(option: Option) -> list[str]:
    """What would lower the peak, by its largest terms."""
    terms, found = option.plan.terms, []
    shares = {name: n / option.plan.peak for name, n in terms.items()}
    if shares.get("activations", 0) > 0.25 and option.mode != "recompute":
        found.append("less: activations='recompute', or a smaller micro-batch")
    if shares.get("temporaries", 0) > 0.25:
        parts = "a loss in parts (shardfold.nn.chunked_cross_entropy), or " * (not option.loss)
        found.append(f"less: {parts}a smaller micro-batch")
    if shares.get("moments", 0) + shares.get("master", 0) > 0.3:
        split = "zero1 and up split these over ranks; " * (option.layout == "ddp")
        found.append(f"less: {split}offload='host' lets them rest in host memory")
    if shares.get("gradients", 0) + shares.get("gathered", 0) > 0.3:
        found.append("less: smaller units (Init(units=...)), as the largest are whole while they run")
    return found
