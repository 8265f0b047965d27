"""sf.nn.SyncBatchNorm is BatchNorm on the whole batch, however ranks share it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ModelError, OrderError
from shardfold.nn.batchnorm import _Normalize
from shardfold.testing import Ranks

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
SHARES = [5, 3]  # rows of the whole batch on each rank


class Net(nn.Module):
    """Normalizes images and vectors; ``momentum=None`` is the cumulative average, ``affine=False`` has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
            for momentum in (0.1, None, 0.3)
        )
        self.last, self.head = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x.mean((2, 3))))


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(3 + 2 * torch.randn(8, 4, 5, 5, generator=draw), torch.randn(8, 3, generator=draw)) for _ in range(steps)]


def trains_as_the_whole_batch(layout: str) -> None:
    mesh = {"inter": 2, "intra": 1} if layout in ("hsdp", "hpz") else None
    torch.manual_seed(0)
    plain = Net()
    optimizer = SGD(plain.parameters())
    torch.manual_seed(0)
    engine = sf.Engine(sf.nn.convert_sync_batchnorm(Net()), optimizer=SGD, layout=layout, parallel=mesh, clip_norm=0.5)
    for x, y in batches(5):
        whole = (plain(x) - y).square().sum() / len(x)
        whole.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        mine_x, mine_y = (t.split(SHARES)[engine.rank] for t in (x, y))
        loss = (engine(mine_x) - mine_y).square().sum() / len(x) * engine.world_size
        engine.backward(loss)
        report = engine.step()
        assert engine.mean(loss.item()) == pytest.approx(whole.item(), rel=1e-5)
        assert float(report.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    state = engine.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-5), name
    plain.eval(), engine.module.eval()
    with torch.no_grad():
        for x, _ in batches(2 - engine.rank):  # of unequal number: nothing is sent for statistics
            assert torch.allclose(engine(x), plain(x), rtol=1e-4, atol=1e-4)
    engine.mean(0.0)
    engine.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", list(sf.PRESETS))
def test_training_on_unequal_batches_is_that_of_batch_norm_on_the_whole_batch(ranks: Ranks, layout: str) -> None:
    ranks.run(trains_as_the_whole_batch, layout, world_size=2)


def narrow_and_empty() -> None:
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        x = (200 + 5 * torch.randn(8, 4, 50, generator=draw)).to(dtype)  # sums of squares are inf in fp16
        wide = x.float().requires_grad_()
        whole = nn.BatchNorm1d(4)
        (whole(wide) * torch.linspace(-1, 1, 50)).square().sum().backward()
        norm = sf.nn.SyncBatchNorm(4)
        norm.weight.data, norm.bias.data = norm.weight.data.to(dtype), norm.bias.data.to(dtype)
        mine = x.split([8, 0])[rank].requires_grad_()  # one rank has no rows
        out = norm(mine)
        assert out.dtype == dtype and norm.running_var.dtype == torch.float32
        (out * torch.linspace(-1, 1, 50).to(dtype)).float().square().sum().backward()
        assert torch.allclose(norm.running_mean, whole.running_mean, rtol=1e-5)
        assert torch.allclose(norm.running_var, whole.running_var, rtol=1e-5)
        if rank == 0:
            scale = wide.grad.abs().max()
            assert torch.allclose(mine.grad.float(), wide.grad, atol=2 * torch.finfo(dtype).eps * scale)


def test_statistics_of_16_bits_are_fp32_and_a_rank_may_have_no_rows(ranks: Ranks) -> None:
    ranks.run(narrow_and_empty, world_size=2)


def test_its_gradient_is_that_of_its_forward() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(6, 3, 2), (3,), (3,)]
    args = [torch.randn(s, dtype=torch.float64, generator=draw).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(lambda *a: _Normalize.apply(*a, 1e-5, None)[0], args)


def test_conversion_keeps_parameters_buffers_and_hooks_and_refuses_classes_it_does_not_know() -> None:
    class Own(nn.BatchNorm1d):
        pass

    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.BatchNorm2d(5, affine=False)), nn.InstanceNorm1d(3)).eval()
    heard: list[int] = []
    shared.register_forward_hook(lambda *_: heard.append(1))
    before = model.state_dict(keep_vars=True)
    assert sf.nn.convert_sync_batchnorm(model) is model
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value for name, value in before.items()) and after.keys() == before.keys()
    assert model[0] is model[1][0] and type(model[0]) is type(model[1][1]) is sf.nn.SyncBatchNorm
    assert type(model[2]) is nn.InstanceNorm1d and not model[0].training
    model[0](torch.ones(2, 3))
    assert heard == [1]
    assert type(sf.nn.convert_sync_batchnorm(nn.BatchNorm3d(2))) is sf.nn.SyncBatchNorm
    with pytest.raises(ModelError, match=r"'1' is of class Own, which may normalize in a way of its own"):
        sf.nn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2), Own(2)))


def skips_it_on_one_rank() -> str:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.blocks = sf.nn.SyncBatchNorm(4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor, skip: bool) -> Tensor:
            x = self.blocks[0](x)
            return self.blocks[1](x if skip else self.norm(x))

    engine = sf.Engine(Sometimes(), optimizer=SGD, layout="zero3", runtime=sf.Runtime(patience=2.0))
    said = ""
    try:
        for i in range(3):
            engine.backward(engine(torch.ones(4, 4), skip=i == 2 and engine.rank == 1).square().mean())
            engine.step()
    except OrderError as error:
        said = str(error)
    return said


def test_a_rank_that_skips_it_raises_on_every_rank(ranks: Ranks) -> None:
    for said in ranks.run(skips_it_on_one_rank, world_size=2, timeout=60.0):
        assert "all_gather, called at batchnorm.py" in said
