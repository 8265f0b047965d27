"""Our optimizers on a plain model: they equal a reference written from the paper, or torch's class of that name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.optim._owners import balanced
from shardfold.optim.adamw8bit import dequantize, quantize
from tests.support import models

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class FromPaper(torch.optim.Optimizer):
    """One parameter at a time, as simple as can be; ``rule(x, g, state, step)`` gives what is subtracted."""

    def __init__(self, params: Any, rule: Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]) -> None:
        super().__init__(params, {})
        self.rule, self.steps = rule, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p -= self.rule(p.double(), p.grad.double(), self.state[p], self.steps).to(p.dtype)


def lamb(x: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
    """arXiv 1904.00962, algorithm 2."""
    m = state["m"] = 0.9 * state.get("m", torch.zeros_like(x)) + 0.1 * g
    v = state["v"] = 0.99 * state.get("v", torch.zeros_like(x)) + 0.01 * g * g
    u = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6) + 0.02 * x
    ratio = x.norm() / u.norm() if x.norm() > 0 and u.norm() > 0 else 1.0
    return 0.01 * ratio * u


def lion(x: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
    """arXiv 2302.06675, algorithm 2."""
    m = state.get("m", torch.zeros_like(x))
    c = (0.9 * m + 0.1 * g).sign()
    state["m"] = 0.99 * m + 0.01 * g
    return 1e-3 * (c + 0.1 * x)


def dynamic_values(signed: bool) -> list[float]:
    """arXiv 2110.02861, figure 2, byte by byte: sign, zeros, a one, and a fraction in what is left."""
    values = [0.0, 1.0]  # the largest has the code of -0, or, with no sign, that of the least magnitude
    bits = 7 if signed else 8
    for byte in range(1 if signed else 2, 2**bits):
        rest = byte.bit_length() - 1
        fraction = (byte - 2**rest + 0.5) / 2**rest
        values.append((0.1 + 0.9 * fraction) * 10.0 ** (rest + 1 - bits))
    return sorted(values + [-v for v in values if 0 < v < 1.0]) if signed else sorted(values)


def nearest(values: Tensor, block: int, signed: bool) -> Tensor:
    """What is left of 1-D values after 8 bits, by brute force; a block's scale is its largest element with its sign."""
    table = torch.tensor(dynamic_values(signed), dtype=torch.float64)
    kept = []
    for part in values.split(block):
        scale = part[part.abs().argmax()]
        codes = (part[:, None] / torch.where(scale == 0, 1.0, scale) - table).abs().argmin(1)
        kept.append(table[codes] * scale)
    return torch.cat(kept)


def adamw_8bit(x: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
    m = 0.9 * state.get("m", torch.zeros_like(x)) + 0.1 * g
    v = 0.999 * state.get("v", torch.zeros_like(x)) + 0.001 * g * g
    small = x.numel() < 256
    state["m"] = m if small else nearest(m.reshape(-1), 64, True).view_as(x)
    state["v"] = v if small else nearest(v.reshape(-1), 64, False).view_as(x)
    return 1e-3 * ((m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + 0.01 * x)


class Two:
    """torch's Muon for matrices of hidden layers and torch's AdamW for the rest, as one."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        params = list(params)
        hidden = [p for p in params if p.dim() == 2 and p.shape[0] != models.VOCAB]
        rest = [p for p in params if all(p is not h for h in hidden)]
        self.both = torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.1, fused=True)

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()


def groups(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return sf.optim.Muon(sf.optim.muon_groups(model, lr=0.02, adamw_lr=1e-3, weight_decay=0.1), **options)


def of_parameters(make: Any) -> Callable[[nn.Module], Any]:
    return lambda model: make(model.parameters())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


CASES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any], float]] = {
    "LAMB": (
        of_parameters(partial(sf.optim.LAMB, lr=0.01, betas=(0.9, 0.99), weight_decay=0.02)),
        of_parameters(partial(FromPaper, rule=lamb)), 2e-5,
    ),
    "Lion": (
        of_parameters(partial(sf.optim.Lion, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)),
        of_parameters(partial(FromPaper, rule=lion)), 1e-9,
    ),
    "Adafactor": (
        of_parameters(partial(sf.optim.Adafactor, weight_decay=0.1)),
        of_parameters(partial(torch.optim.Adafactor, weight_decay=0.1, foreach=False)), 2e-5,
    ),
    "Muon": (partial(groups, ns_dtype=torch.bfloat16), of_parameters(Two), 1e-7),
    "AdamW8bit": (
        of_parameters(partial(sf.optim.AdamW8bit, block=64, min_8bit_size=256)),
        of_parameters(partial(FromPaper, rule=adamw_8bit)), 2e-3,
    ),
}  # fmt: skip


class Odd(models.Small):
    """With a kernel of four dims, a scalar, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.kernel = nn.Parameter(torch.randn(6, 4, 3, 5) * 0.1)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter((torch.randn(models.WIDTH, 3 * models.WIDTH) * 0.1).t())
        self.unused = nn.Parameter(torch.ones(3, 3))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.features(tokens) * self.scale
        x = x + (x @ self.turned.t()).tanh() @ self.turned
        x = x + torch.einsum("...w,abcd->...", x, self.kernel).unsqueeze(-1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def trained(make: Callable[[nn.Module], Any], steps: int, build: Callable[[], nn.Module] = models.small) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    optimizer = make(model)
    for tokens, targets in models.batches(steps):
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def apart(a: nn.Module, b: nn.Module, start: nn.Module) -> float:
    """How far the parameters of ``a`` are from those of ``b``, at most, where the way that ``b`` went is 1."""
    far = 0.0
    for x, y, z in zip(a.parameters(), b.parameters(), start.parameters(), strict=True):
        if not torch.equal(x, y):
            far = max(far, ((x - y).norm() / (y - z).norm()).item())
    return far


@pytest.mark.sampled(10)
@pytest.mark.parametrize("build", [models.small, Odd])
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_equal_the_reference(name: str, build: Callable[[], nn.Module]) -> None:
    """What is rounded to 8 bits may fall to the other side here and there; Muon equals torch's bit for bit; Lion's sign
    of a sum near zero is only that of the reference, which sums in fp64, if the model is in fp64."""
    if name == "Muon" and build is Odd:
        build = models.tied
    build = partial(models.double, build) if name == "Lion" else build
    ours, reference, tolerance = CASES[name]
    assert apart(*(trained(make, steps, build) for make, steps in ((ours, 20), (reference, 20), (ours, 0)))) < tolerance


def test_the_map_of_a_byte_is_the_papers() -> None:
    """0 and the largest value of a block are kept exactly; the next value is at most 6 % of it away."""
    for signed in (True, False):
        table = torch.tensor(dynamic_values(signed), dtype=torch.float64)
        assert len(table) == 256 and len(table.unique()) == 256
        values = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        values = (values if signed else values.square()).float()
        values[5], values[256:512] = 0.0, 0.0
        codes, scales = quantize(values, 256, signed=signed)
        again = dequantize(codes, scales, 256, signed=signed)
        assert torch.allclose(again.double(), nearest(values.double(), 256, signed), rtol=1e-6, atol=0)
        assert again[5] == 0 and not again[256:512].any()
        blocks, kept = values.view(-1, 256), again.view(-1, 256)
        assert torch.equal(kept.abs().amax(1), blocks.abs().amax(1))
        width = table.diff().max().item() / 2
        assert ((blocks - kept).abs() <= width * 1.001 * blocks.abs().amax(1, keepdim=True)).all()
        assert torch.equal(quantize(again, 256, signed=signed)[0], codes)  # a second time changes nothing


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", [256, 2048])
def test_eight_bit_moments_follow_adamw_within_a_bound(block: int) -> None:
    """40 steps: the losses stay within 2e-3, and the parameters nearer than 15 % of the way that they went."""
    build = partial(models.Small, layers=2)
    ours = trained(of_parameters(partial(sf.optim.AdamW8bit, block=block, min_8bit_size=256)), 40, build)
    wide = trained(of_parameters(partial(torch.optim.AdamW, lr=1e-3)), 40, build)
    batch = models.batches(1, seed=9)[0]
    assert ours(*batch).item() == pytest.approx(wide(*batch).item(), rel=2e-3)
    assert apart(ours, wide, trained(of_parameters(partial(torch.optim.SGD, lr=0.0)), 0, build)) < 0.15


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_state_is_saved_copied_and_restored_exactly(name: str) -> None:
    """Also in bf16, where PyTorch would round what is kept in fp32 and widen what is kept in bytes."""
    make = CASES[name][0]
    torch.manual_seed(0)
    model = models.small().bfloat16()
    optimizer = make(model)
    batches = models.batches(6)

    def run(model: nn.Module, optimizer: Any, part: slice) -> None:
        for batch in batches[part]:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    run(model, optimizer, slice(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    restored = make(other)
    restored.load_state_dict(torch.load(file, weights_only=True))
    both = copy.deepcopy((model, optimizer))
    dtypes = [v.dtype for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    assert [v.dtype for s in restored.state.values() for v in s.values() if isinstance(v, Tensor)] == dtypes
    for pair in ((model, optimizer), (other, restored), both):
        run(*pair, slice(3, 6))
    for a, b, c in zip(model.parameters(), other.parameters(), both[0].parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_state_bytes_are_what_is_held() -> None:
    """What an optimizer says that it keeps is what its tensors take."""
    for name, (make, _, _) in CASES.items():
        torch.manual_seed(0)
        model = models.tied() if name == "Muon" else Odd()
        optimizer = make(model)
        model(*models.batches(1)[0]).backward()
        optimizer.step()
        for group, p, place in optimizer.parts():
            if p.grad is None or not p.numel():
                assert not optimizer.state.get(p)
                continue
            held = sum(v.untyped_storage().size() for v in optimizer.state[p].values() if isinstance(v, Tensor))
            assert held == optimizer.state_bytes(group, place, p.itemsize), (name, tuple(p.shape))


def test_muon_groups_sort_the_parameters_of_hidden_layers() -> None:
    model = models.tied()
    hidden, rest = sf.optim.muon_groups(model, lr=0.1, adamw_lr=0.2, betas=(0.5, 0.6))
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].rsplit(".", 2)[1] for p in hidden["params"]} == {"up", "down"}
    assert len(hidden["params"]) + len(rest["params"]) == len(names)
    assert (hidden["lr"], rest["lr"], rest["adamw"], rest["betas"]) == (0.1, 0.2, True, (0.5, 0.6))


def _direction(matrix: Tensor) -> Tensor:
    """Newton-Schulz as its author has it, in the dtype that it is given."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("given", [None, torch.bfloat16, torch.float32])
def test_muon_multiplies_in_what_the_device_is_fast_in(
    monkeypatch: pytest.MonkeyPatch, fast: torch.dtype, given: torch.dtype | None
) -> None:
    """Where no dtype is given; what is given is kept. Matrices are rounded to bf16 either way, as they travel in it."""
    monkeypatch.setattr("shardfold.accelerator.product_dtype", lambda device: fast)
    weight = nn.Parameter(torch.zeros(24, 16, dtype=torch.float64))
    weight.grad = torch.randn(24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sf.optim.Muon([weight], lr=1.0, weight_decay=0.0, nesterov=False, momentum=0.0, ns_dtype=given).step()
    travels, products = given or torch.bfloat16, given or fast
    expected = _direction(weight.grad.to(travels).double()) * 1.5**0.5
    far = ((weight.detach() + expected).abs().max() / expected.abs().max()).item()
    rounded = 2.0**-8 if travels is torch.bfloat16 else 1e-5  # of what comes back; bf16 products are off by more
    assert far < 0.2 and (far <= rounded) == (products is torch.float32)


def test_owners_share_the_cost() -> None:
    """No owner has more than the mean and one thing besides, whatever the things are."""
    draw = torch.Generator().manual_seed(0)
    for ranks in (1, 2, 3, 7):
        costs = torch.randint(1, 100, (40,), generator=draw).tolist()
        owners = balanced(costs, ranks)
        load = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(ranks)]
        assert max(load) <= sum(costs) / ranks + max(costs) and set(owners) == set(range(ranks))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: sf.optim.LAMB(p, lr=-1), "LAMB.lr=-1.*number >= 0"),
        (lambda p: sf.optim.LAMB(p, trust_range=(2, 1)), "trust_range"),
        (lambda p: sf.optim.Lion(p, betas=(0.9, 1.0)), "betas=1.0.*< 1"),
        (lambda p: sf.optim.Lion(p, betas=0.9), "betas=0.9.*pair"),
        (lambda p: sf.optim.Adafactor(p, d=0.5), "d=0.5.*>= 1"),
        (lambda p: sf.optim.Adafactor(p, beta2_decay=0.8), "beta2_decay=0.8"),
        (lambda p: sf.optim.Muon(p), "shape .*muon_groups"),
        (lambda p: sf.optim.Muon(p, adamw=True, adjust_lr_fn="orginal"), "Did you mean 'original'"),
        (lambda p: sf.optim.Muon(p, ns_steps=0), "ns_steps=0.*1 to 99"),
        (lambda p: sf.optim.Muon(p, ns_dtype="bf16"), "ns_dtype='bf16'.*floating dtype, as torch.float32, or None"),
        (lambda p: sf.optim.AdamW8bit(p, block=100), "block=100.*power of 2"),
    ],
)
def test_hyper_parameters_are_refused_in_a_sentence(make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        make(models.small().parameters())
    assert "\n" not in str(error.value)


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = sf.optim.Lion(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        optimizer.step()
