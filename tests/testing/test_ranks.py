"""Ranks for tests: results by rank, every failure explained, nothing left running, warm workers reused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfold.errors import UsageError
from shardfold.testing import Ranks, RanksFailed, run_ranks, same_training
from shardfold.testing._training import _compare, _Job, _slice, _train_plain, _Trained


def rank_sum(scale: float = 1.0) -> float:
    value = torch.tensor(float(dist.get_rank() + 1)) * scale
    dist.all_reduce(value)
    return value.item()


def surroundings() -> dict[str, object]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDFOLD_TEST_FLAG")
    return {
        **{name: os.environ.get(name) for name in names},
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "pid": os.getpid(),
        "directory": os.getcwd(),
    }


def tensors() -> dict[str, torch.Tensor]:
    return {"rank": torch.full((1000, 100), float(dist.get_rank())), "half": torch.ones(3, dtype=torch.bfloat16)}


def two_ranks_raise() -> None:
    if dist.get_rank() == 1:
        raise ValueError("shape of rank one")
    if dist.get_rank() == 2:
        raise KeyError("the key of rank two")


def one_raises_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one gives up")
    dist.barrier()


def one_raises_another_is_busy() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one gives up")
    a_busy_function()


def a_busy_function() -> None:
    threading.Event().wait()


def rank_zero_hangs() -> None:
    if dist.get_rank() == 0:
        a_busy_function()


def die(how: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), how)
    dist.barrier()


def exit_quietly() -> None:
    if dist.get_rank() == 1:
        os._exit(0)


def leave_by_system_exit() -> None:
    sys.exit(3)


def warn() -> str:
    warnings.warn("mind the gap", UserWarning, stacklevel=1)
    return "went on"


def give_back_a_lock() -> object:
    return threading.Lock()


def start_a_helper_and_die(path: str) -> None:
    # The helper holds the pipe to the caller open after its parent is gone.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: the helper only waits
        helper = os.fork()
    if helper == 0:
        threading.Event().wait(60)
        os._exit(0)
    with open(path, "w") as file:
        file.write(str(helper))
    os.kill(os.getpid(), signal.SIGKILL)


def hang_collective() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        a_busy_function()


def say_pid_and_wait() -> None:
    os.write(1, f"{os.getpid()}\n".encode())
    a_busy_function()


def has_module(name: str) -> bool:
    return name in sys.modules


def test_results_come_by_rank():
    """`run_ranks` returns what each rank returned, in the order of the ranks, after real collectives."""
    assert run_ranks(rank_sum, 3, 2.0) == [12.0, 12.0, 12.0]


def test_keyword_arguments_reach_the_function(ranks: Ranks):
    """Keyword arguments that are not options of `run` are the function's."""
    assert ranks.run(rank_sum, scale=3.0, world_size=2) == [9.0, 9.0]


def test_a_rank_knows_its_place(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A rank has torchrun's variables, one thread, and the caller's environment and directory of this moment."""
    monkeypatch.setenv("SHARDFOLD_TEST_FLAG", "set after the workers started")
    monkeypatch.chdir(tmp_path)
    for rank, seen in enumerate(ranks.run(surroundings, world_size=3)):
        assert (seen["RANK"], seen["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (seen["threads"], seen["backend"]) == (1, "gloo")
        assert seen["SHARDFOLD_TEST_FLAG"] == "set after the workers started"
        assert os.path.samefile(str(seen["directory"]), tmp_path)


def test_one_rank_has_a_group_unless_told_otherwise(ranks: Ranks):
    """world_size=1 initialises a group too; `distributed=False` makes none."""
    assert ranks.run(surroundings, world_size=1)[0]["backend"] == "gloo"
    assert ranks.run(surroundings, world_size=1, distributed=False)[0]["backend"] is None


def test_tensors_come_back_whole(ranks: Ranks):
    """Results are copies: a tensor outlives the rank that made it."""
    results = ranks.run(tensors, world_size=2)
    assert results[1]["rank"].shape == (1000, 100)
    assert results[1]["rank"].unique().tolist() == [1.0]
    assert results[0]["half"].dtype == torch.bfloat16


def test_workers_are_reused():
    """Calls of a pool run in the same processes, with any number of ranks, and the processes end with the pool."""
    with Ranks(3) as pool:
        first = [seen["pid"] for seen in pool.run(surroundings)]
        again = [seen["pid"] for seen in pool.run(surroundings, world_size=2)]
        assert again == first[:2]
        assert pool.run(rank_sum) == [6.0] * 3
        assert pool.pids == first
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in first)
    with pytest.raises(UsageError, match="closed"):
        pool.run(rank_sum)


def test_every_failed_rank_is_shown():
    """The error has the traceback of each rank that raised, down to the line, and names the others by absence."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(two_ranks_raise, 4)
    text = str(caught.value)
    assert "2 of 4 ranks failed" in text
    assert 'raise ValueError("shape of rank one")' in text
    assert 'raise KeyError("the key of rank two")' in text
    assert {failure.rank for failure in caught.value.failures} == {1, 2}


def test_the_cause_comes_before_its_consequences():
    """Ranks that lose their connection because another failed are listed after it."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(one_raises_others_wait, 3)
    first, *others = caught.value.failures
    assert (first.rank, first.summary) == (1, "ValueError: rank one gives up")
    assert {failure.rank for failure in others} == {0, 2}


def test_a_busy_rank_is_stopped_when_another_failed(monkeypatch: pytest.MonkeyPatch):
    """One failure ends the call soon, not after the timeout, and shows where the busy rank stood."""
    monkeypatch.setattr("shardfold.testing.ranks.SETTLE", 0.5)
    with pytest.raises(RanksFailed, match="rank one gives up") as caught:
        run_ranks(one_raises_another_is_busy, 2, timeout=100)
    assert [failure.kind for failure in caught.value.failures] == ["raised", "stopped"]
    assert "a_busy_function" in caught.value.failures[1].text


def test_a_timeout_shows_where_each_rank_stood(ranks: Ranks):
    """When the time is over the error has the stacks of the ranks that were still running, and only theirs."""
    with pytest.raises(RanksFailed, match=r"did not return within 0\.5 s") as caught:
        ranks.run(rank_zero_hangs, world_size=2, timeout=0.5)
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (0, "hung")
    assert "a_busy_function" in failure.text
    assert "rank_zero_hangs" in failure.text


def test_a_collective_can_have_its_own_timeout(ranks: Ranks):
    """`group_timeout` bounds one collective; the rank that waited in it raises by itself."""
    with pytest.raises(RanksFailed) as caught:
        ranks.run(hang_collective, world_size=2, timeout=1.5, group_timeout=0.5)
    assert {failure.rank: failure.kind for failure in caught.value.failures} == {0: "raised", 1: "stopped"}
    assert "Timed out" in caught.value.failures[0].summary


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_the_signal_that_killed_a_rank_is_named(how: signal.Signals):
    """A rank that a signal ended comes first, with the signal's name and exit code."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(die, 2, int(how))
    first = caught.value.failures[0]
    assert (first.rank, first.kind) == (1, "died")
    assert first.summary == f"killed by {how.name} (exit code {-how})"


def test_a_rank_that_exits_did_not_succeed(ranks: Ranks):
    """Neither os._exit(0) nor sys.exit count as a result."""
    with pytest.raises(RanksFailed, match="exited with code 0 before its function returned"):
        ranks.run(exit_quietly, world_size=2)
    with pytest.raises(RanksFailed, match="SystemExit: 3"):
        ranks.run(leave_by_system_exit, world_size=1)


def test_a_death_is_noticed_though_a_grandchild_holds_the_pipe(tmp_path: Path):
    """A killed rank whose own child lives on is reported at once, not after the timeout."""
    path = tmp_path / "helper"
    try:
        with pytest.raises(RanksFailed, match="SIGKILL"):
            run_ranks(start_a_helper_and_die, 1, str(path), distributed=False, timeout=200)
    finally:
        os.kill(int(path.read_text()), signal.SIGKILL)


def environment() -> dict[str, str]:
    """Of a program that imports this module."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


@pytest.mark.soak
def test_ranks_end_with_their_caller(tmp_path: Path):
    """When the calling process is killed its ranks end too, in the middle of their work."""
    code = "import tests.testing.test_ranks as t; t.run_ranks(t.say_pid_and_wait, 2)"
    settings = environment() | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=settings) as caller:
        assert caller.stdout is not None
        ranks = [psutil.Process(int(caller.stdout.readline())) for _ in range(2)]
        caller.kill()
        _, alive = psutil.wait_procs(ranks, timeout=30)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.soak
def test_ranks_have_what_was_imported_once():
    """In a program of its own: this one has a process to fork from already."""
    code = (
        "import tests.testing.test_ranks as t\n"
        "with t.Ranks(1, preload=['this']) as ranks: print(ranks.run(t.has_module, 'this'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.splitlines()[-1] == "[True]"


def test_a_pool_survives_a_failure(ranks: Ranks):
    """After a failed call the pool goes on with fresh workers in place of those that took part."""
    before = [seen["pid"] for seen in ranks.run(surroundings, world_size=3)]
    with pytest.raises(RanksFailed):
        ranks.run(one_raises_others_wait, world_size=2)
    after = [seen["pid"] for seen in ranks.run(surroundings, world_size=3)]
    assert not set(before[:2]) & set(after)
    assert before[2] in after
    assert ranks.run(rank_sum) == [10.0] * 4


def test_a_worker_killed_between_calls_is_replaced():
    """A pool looks at its workers before it uses them."""
    with Ranks(2) as pool:
        victim = pool.run(surroundings)[0]["pid"]
        os.kill(victim, signal.SIGKILL)
        psutil.wait_procs([p for p in psutil.Process().children(recursive=True) if p.pid == victim], timeout=10)
        assert pool.run(rank_sum) == [3.0, 3.0]


def test_a_killed_worker_is_missed_before_the_fork_server_has_said_so():
    """A pool learns of a worker's end from its pipe: the fork server, which reaps it, may be late to tell."""
    with Ranks(2) as pool:
        victim = psutil.Process(pool.run(surroundings)[0]["pid"])
        server = victim.parent()
        assert server is not None
        server.suspend()
        try:
            victim.kill()
            deadline = time.monotonic() + 30
            while victim.pid in pool.pids and time.monotonic() < deadline:
                time.sleep(0.01)  # its threads end
            seen = victim.status(), victim.pid in pool.pids
        finally:
            server.resume()
        assert seen == (psutil.STATUS_ZOMBIE, False)
        assert pool.run(rank_sum) == [3.0, 3.0]


def test_ranks_have_the_callers_warning_filters(ranks: Ranks):
    """Here warnings are errors, so they are in a rank; a filter of this test holds there too."""
    with pytest.raises(RanksFailed, match="UserWarning: mind the gap"):
        ranks.run(warn, world_size=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mind the")
        assert ranks.run(warn, world_size=1) == ["went on"]
    with pytest.raises(RanksFailed, match="mind the gap"):
        ranks.run(warn, world_size=1, warnings_as_errors=True)


def test_bad_arguments_end_in_one_sentence(ranks: Ranks):
    """What cannot be run is refused before any rank starts on it."""
    with pytest.raises(UsageError, match="top level of a module"):
        ranks.run(lambda: None)
    with pytest.raises(UsageError, match="world_size must be a positive integer, not 0"):
        ranks.run(rank_sum, world_size=0)
    with pytest.raises(UsageError, match="world_size=9 is more than the 4 ranks"):
        ranks.run(rank_sum, world_size=9)
    with pytest.raises(RanksFailed, match=r"result, a lock, cannot be pickled"):
        ranks.run(give_back_a_lock, world_size=1)
    for wrong in ("torch", None, [3]):
        with pytest.raises(UsageError, match="names of modules"):
            Ranks(1, preload=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="no such module is installed"):
        Ranks(1, preload=["nothing.here"])
    with pytest.raises(UsageError, match="equal slices"):
        same_training(tiny, [torch.ones(6, 4)], layout="ddp", world_size=2, accumulate=2)
    with pytest.raises(UsageError, match="equal slices"):
        same_training(tiny, [{"x": torch.ones(3, 4)}], layout="ddp", world_size=2)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


def tiny() -> nn.Module:
    return Tiny()


def test_slices_cover_the_global_batch():
    """The slices of a batch are equal and together are the batch."""
    batch = (torch.arange(12).view(6, 2), "as it is")
    parts = [_slice(batch, index, 3) for index in range(3)]
    assert torch.cat([part[0] for part in parts]).equal(batch[0])
    assert {part[1] for part in parts} == {"as it is"}
    assert _slice({"x": batch[0], "how": "as it is"}, 1, 3).keys() == {"x", "how"}


def test_a_batch_may_be_keyword_arguments(ranks: Ranks):
    """A mapping is what forward is called with, whole: the training is that of positional arguments."""
    values = [torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    matches = [
        same_training(tiny, batches, layout="zero2", world_size=2, steps=3, ranks=ranks)
        for batches in (values, [{"x": value} for value in values])
    ]
    assert matches[0].losses == matches[1].losses
    assert matches[0].reference_losses == matches[1].reference_losses


def test_the_reference_is_plain_pytorch(ranks: Ranks):
    """The reference losses are those of a bare loop."""
    batches = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(n)),) for n in range(2)]
    torch.manual_seed(0)
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for step in range(4):
        loss = model(*batches[step % 2])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    job = _Job(
        build=tiny, batches=batches, optimizer=sgd, loss=None, clip_norm=0.01, steps=4, seed=0, want_parameters=True
    )
    trained = ranks.run(_train_plain, job, world_size=1, distributed=False)[0]
    assert trained.losses == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(trained.parameters, dict(model.state_dict()))


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def test_a_departure_is_shown_with_its_step():
    """The assertion names the layout, the step and both losses; NaN is never equal to anything."""
    plain = _Trained(losses=[3.0, 2.0, 1.0], parameters={"w": torch.ones(2)})
    near = _Trained(losses=[3.0, 2.0, 1.0 + 1e-8], parameters={"w": torch.ones(2) + 1e-7})
    match = _compare("zero3", plain, near, 1e-6, 1e-6)
    assert 0 < match.max_loss_difference < 1e-7
    far = _Trained(losses=[3.0, 2.5, 1.0], parameters={})
    with pytest.raises(AssertionError, match=r"zero3 departs from plain PyTorch at step 2 of 3.*0\.25 relative"):
        _compare("zero3", plain, far, 1e-6, None)
    broken = _Trained(losses=[3.0, float("nan"), 1.0], parameters={})
    with pytest.raises(AssertionError, match="step 2"):
        _compare("zero3", plain, broken, 1e-6, None)
    scaled = _Trained(losses=plain.losses, parameters={}, norms=[2.0])
    with pytest.raises(AssertionError, match="the gradient norms differ by 1 relative"):
        _compare("zero3", _Trained(losses=plain.losses, parameters={}, norms=[1.0]), scaled, 1e-6, None)
    drifted = _Trained(losses=plain.losses, parameters={"w": torch.tensor([1.0, 1.5])})
    with pytest.raises(AssertionError, match="1 of 1 final parameters"):
        _compare("zero3", plain, drifted, 1e-6, 1e-3)
    lost = _Trained(losses=plain.losses, parameters={"v": torch.ones(2)})
    with pytest.raises(AssertionError, match=r"lacks \['w'\] and has \['v'\]"):
        _compare("zero3", plain, lost, 1e-6, 1e-3)


def test_the_way_of_a_parameter_is_compared_with_what_training_changed():
    """Small beside its values and large beside its way: only the second tells that a parameter was not updated."""
    went = _Trained(losses=[1.0], parameters={"w": torch.tensor([1.0, 1.001])}, start={"w": torch.ones(2)})
    stayed = _Trained(losses=[1.0], parameters={"w": torch.ones(2)})
    assert _compare("zero3", went, stayed, 1e-6, 1e-2).max_way_difference == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(AssertionError, match="1 of 1 parameters have gone another way"):
        _compare("zero3", went, stayed, 1e-6, None, 0.5)


def test_a_reference_in_parts_is_the_whole_batch_but_for_rounding(ranks: Ranks):
    """Plain PyTorch on the ranks' slices: the same training, also with micro-batches."""
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    options = {"layout": "zero2", "world_size": 2, "accumulate": 2, "steps": 3, "ranks": ranks}
    whole, parts = (
        same_training(tiny, batches, reference=how, parameter_tol=1e-6, **options) for how in ("whole", "parts")
    )
    assert parts.reference_losses == pytest.approx(whole.reference_losses, rel=1e-6)
    with pytest.raises(UsageError, match="it is 'whole' or 'parts'"):
        same_training(tiny, batches, reference="part", **options)
