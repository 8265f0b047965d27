"""What every test can rely on: a warm pool of ranks, and that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch

from shardfold import accelerator
from shardfold.testing import Ranks
from shardfold.testing.ranks import PRELOAD as RANKS_PRELOAD
from tests.support import mutants, selection
from tests.support.gpu.setting import SIM, GivenDevice

COLLECTED = pytest.StashKey[set[str]]()
"""The cases of all files that are looked at, those that do not run among them."""
NUM_RANKS = 4
LONG_RUN = 200  # tests
# Of the last four the models of transformers and PyTorch's compiler and checkpoints are made: each of eight ranks would
# import them by itself, in two seconds of a core.
PRELOAD = (
    "transformers", "transformers.models.auto.configuration_auto", "shardfold.tools.recipes.gpt",
    "networkx", "scipy.optimize", "torch._inductor.compile_fx", "torch.distributed.checkpoint",
)  # fmt: skip
HAS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()  # Linux, as most kernels are built
SETTLE = 5.0  # seconds for what a test ended to be gone

# Set by torch when it is first imported in full, whichever test happens to be the one that does.
IMPORT_ENVIRONMENT = {"TORCHINDUCTOR_CACHE_DIR"}

# What the tests marked `gpu` run on; `sim` rehearses them, in a process of pytest that has the simulated device then.
TESTED = os.environ.get("SHARDFOLD_TEST_DEVICE", "cuda")

# Several processes share the cores, and the threads of one that compute little spend the others' time waiting.
# `make numerics` asks for more, as sums are then cut elsewhere; workers read the same variable.
THREADS = os.environ.get("SHARDFOLD_TEST_THREADS", "1")
torch.set_num_threads(int(THREADS))
os.environ["OMP_NUM_THREADS"] = THREADS  # of the programs that tests start
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # no test hangs on a name server (see docs/launch.md)
# For the same reason no example has a time to keep, nor has finding one.
hypothesis.settings.register_profile(
    "shared", max_examples=50, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared")


# Nothing of what collection makes is garbage, and looking for it again and again takes a quarter of its time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(700, 10, 50)  # the oldest are looked through less often: it took a tenth of the planner's tests
    gc.enable()


@pytest.fixture(scope="session")
def _preload(request: pytest.FixtureRequest) -> list[str]:
    """What every process of a long run comes to need, and takes five seconds to import; not what imports accelerate,
    which looks only then whether there is a DeepSpeed.

    The server starts at once: a test that has processes of its own may be the first, and would start it without these.
    """
    if len(request.session.items) <= LONG_RUN:
        return []
    multiprocessing.set_forkserver_preload([*RANKS_PRELOAD, *PRELOAD, "pytest"])
    forkserver.ensure_running()
    return list(PRELOAD)


@pytest.fixture(scope="session")
def _pool(_preload: list[str]) -> Iterator[Ranks]:
    with Ranks(NUM_RANKS, preload=_preload) as pool:
        yield pool


@pytest.fixture(scope="session")
def _sim_pool(_preload: list[str]) -> Iterator[Ranks]:
    with Ranks(NUM_RANKS, device="sim", preload=_preload) as pool:
        yield pool


@pytest.fixture(scope="session")
def sim_ranks(_sim_pool: Ranks) -> Ranks:
    """The same with the simulated device, which stays in a process that has it."""
    return _sim_pool


@pytest.fixture(scope="session")
def ranks(_pool: Ranks) -> Ranks:
    """A pool of four warm workers that the whole session shares; started when a test first runs something in it."""
    return _pool


@pytest.fixture
def gpu() -> Iterator[GivenDevice]:
    """The device of a test that is marked `gpu`. On the simulated one nothing may be out of order."""
    if TESTED != SIM:
        yield GivenDevice(TESTED, None)
        return
    with importlib.import_module("shardfold.testing.simulated").simulated() as sim:
        yield GivenDevice(SIM, sim)
        sim.expect_clean()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(_pool: Ranks, _sim_pool: Ranks) -> Iterator[None]:
    """Fail a test that leaks processes, threads, environment variables or a process group.

    It is set up before the test's own fixtures, so it looks after they have cleaned up.
    """
    pools = (_pool, _sim_pool)
    environment, threads, processes = dict(os.environ), set(threading.enumerate()), _children(pools)
    yield
    leaks = _leaked_processes(pools, processes) + _leaked_threads(threads)
    leaks += _leaked_environment(environment) + _leaked_process_group() + _leaked_settings()
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", type=selection.part_of, metavar="K/N", help="the K-th of N parts of what is collected: every N-th"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks, what the command line says of marks, and a part of what is left.

    Neighbours take about as long as each other: every N-th of them makes parts that are about equal.
    """
    config.stash[COLLECTED] = {item.nodeid for item in items}
    _mark(items)
    yield
    if part := config.getoption("--part"):
        items[:] = items[part]


def _mark(items: list[pytest.Item]) -> None:
    needed = {f"tests/{test}" for fault in mutants.read() for test in fault.tests}
    for item, runs in zip(items, selection.by_default(list(map(_case, items)), needed), strict=True):
        if not runs:
            item.add_marker(pytest.mark.soak)


def _case(item: pytest.Item) -> selection.Case:
    sampled, params = item.get_closest_marker("sampled"), item.callspec.params if hasattr(item, "callspec") else {}
    return selection.Case(
        item.nodeid,
        layout=params.get("layout"),
        product=item.get_closest_marker("product") is not None,
        one_in=sampled.args[0] if sampled else 1,
        soak=item.get_closest_marker("soak") is not None,
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _is_there(TESTED):
        pytest.skip(f"needs a device of the type {TESTED}")


def _is_there(kind: str) -> bool:
    if kind == SIM:
        return importlib.import_module("shardfold.testing.simulated").is_supported()
    return kind != "cpu" and accelerator.is_known(torch.device(kind)) and accelerator.count(torch.device(kind)) > 0


def _children(pools: Sequence[Ranks]) -> set[psutil.Process]:
    """This process's descendants, but for the pools and the two helpers that multiprocessing keeps."""
    helpers = {
        forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
        *(pid for pool in pools for pid in pool.pids),
    }
    found: set[psutil.Process] = set()
    for pid in _descendants(os.getpid()) - helpers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
    return {child for child in found if _running(child)}


def _descendants(pid: int) -> set[int]:
    """Asked of the kernel, which knows them: psutil reads every process of the machine, twice for each test."""
    if not HAS_CHILDREN:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            found |= {int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()}
    return found.union(*map(_descendants, found))


def _running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # a zombie waits for its parent, not for us
    except psutil.NoSuchProcess:
        return False


def _leaked_processes(pools: Sequence[Ranks], before: set[psutil.Process]) -> list[str]:
    multiprocessing.active_children()  # reaps those that have ended
    new = _children(pools) - before
    if not new:
        return []
    _, alive = psutil.wait_procs(list(new), timeout=SETTLE)
    leaks = [f"process {process.pid}" for process in alive if _running(process)]
    for process in alive:
        process.kill()
    return leaks


def _leaked_threads(before: set[threading.Thread]) -> list[str]:
    # tqdm's looks after all bars of a process, and begins with the first: one of PyTorch's compiler or of transformers.
    new = {thread for thread in set(threading.enumerate()) - before if thread.name != "tqdm_monitor"}
    for thread in new:
        thread.join(SETTLE)
    return [f"thread {thread.name!r}" for thread in new if thread.is_alive()]


def _leaked_environment(before: dict[str, str]) -> list[str]:
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    leaks = sorted(changed - IMPORT_ENVIRONMENT - {"PYTEST_CURRENT_TEST"})
    for name in leaks:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}" for name in leaks]


def _leaked_process_group() -> list[str]:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return []
    dist.destroy_process_group()
    return ["a default process group"]


def _leaked_settings() -> list[str]:
    found = sys.modules.get("shardfold.compat.deepspeed.runtime.activation_checkpointing.checkpointing")
    if found is None or not found.is_configured():
        return []
    found._State.settings, found._State.configured = found.Settings(), False
    return ["a configured activation checkpointing"]
