"""Who takes part and where, decided from text: host files, filters, Slurm, MPI, options. Nothing is started."""

from __future__ import annotations

import shlex
import signal
import socket
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from shardfold.comm.answered import Answered, StoreLine, answered
from shardfold.errors import ConfigError
from shardfold.launch import _remote as remote
from shardfold.launch import death, hosts, scheduler
from shardfold.launch._open_run import OpenRun
from shardfold.launch._rendezvous import (
    Attempts,
    Endpoint,
    FixedRendezvous,
    RankWaits,
    RendezvousTimeoutError,
    join_store,
    meeting_of,
    open_store,
)
from shardfold.launch.decision import Hosts, Node, Rank, decide, exported
from shardfold.launch.options import Options, option_fields, streams
from shardfold.plan.patience import Patience
from shardfold.tiers.limit import Throttling, memory_limit

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
POOLS = st.dictionaries(NAMES, st.integers(1, 8), min_size=1, max_size=5)


@given(POOLS, st.lists(st.sampled_from(["", "   ", "# a comment", "\t# slots=3"])), st.randoms())
def test_a_host_file_gives_back_its_hosts_in_order(pool: dict[str, int], fillers: list[str], random):
    lines = [
        f"  {host}\t slots={slots}{random.choice(['', '  # its GPUs', ' max_slots=9'])}" for host, slots in pool.items()
    ]
    for filler in fillers:
        lines.insert(random.randrange(len(lines) + 1), filler)
    assert hosts.parse_hostfile(lines) == OrderedDict(pool)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("# nothing\n\n", "empty"),
        ("worker-0 slots=4\nworker-1 slot=4", "line 2: 'worker-1 slot=4'"),
        ("worker-0", "line 1"),
        ("worker-0 slots=", "line 1"),
        ("worker-0 slots=four", "line 1"),
        ("this is bad slots=16", "line 1"),
        ("a slots=4\n\nb slots=2\na slots=2", "line 4: there are multiple entries for a"),
    ],
)
def test_a_bad_host_file_is_refused_with_its_line(tmp_path: Path, text: str, says: str):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as error:
        hosts.fetch_hostfile(path)
    assert isinstance(error.value, ConfigError) and str(path) in str(error.value)


def test_no_host_file_is_no_hosts(tmp_path: Path):
    assert hosts.fetch_hostfile(tmp_path / "absent") is None


@given(POOLS, st.data())
def test_what_is_included_and_what_is_excluded_are_all(pool: dict[str, int], data: st.DataObject):
    """For any filter: including it and excluding it split the slots in two, each in the file's order."""
    named = data.draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, unique=True))
    parts: list[str] = []
    for host in named:
        slots = data.draw(st.lists(st.integers(0, pool[host] - 1), unique=True))
        parts.append(f"{host}:{','.join(map(str, slots))}" if slots else host)
    text = "@".join(parts)
    included = hosts.parse_inclusion_exclusion(pool, text, "")
    excluded = hosts.parse_inclusion_exclusion(pool, "", text)
    assert isinstance(included, OrderedDict)
    for host, count in pool.items():
        assert sorted(included.get(host, []) + excluded.get(host, [])) == list(range(count))
    for left in (included, excluded):
        assert list(left) == [host for host in pool if host in left]
        assert all(slots == sorted(slots) and slots for slots in left.values())


def test_filters_as_documented():
    pool = OrderedDict([("worker-0", 4), ("worker-1", 4)])
    both = OrderedDict([("worker-0", [0, 1, 2, 3]), ("worker-1", [0, 2])])
    assert hosts.parse_inclusion_exclusion(pool, "worker-0@worker-1:0,2", "") == both
    assert hosts.parse_inclusion_exclusion(pool, "", "worker-1:0")["worker-1"] == [1, 2, 3]
    assert hosts.parse_inclusion_exclusion(pool, "", "worker-0") == OrderedDict([("worker-1", [0, 1, 2, 3])])
    assert hosts.parse_inclusion_exclusion(pool, "worker-0:1@worker-0:0,1", "") == OrderedDict([("worker-0", [0, 1])])
    info = {"worker-0": [0, 1]}
    assert hosts.parse_resource_filter(info) == OrderedDict(info)


@pytest.mark.parametrize(
    ("include", "exclude", "says"),
    [
        ("a", "b", "mutually exclusive"),
        ("c", "", "'c' not found"),
        ("a:7", "", "No slot '7'.*'a'"),
        ("", "a:0,9", "No slot '9'"),
        ("a:x", "", "not of the form"),
        ("a:", "", "not of the form"),
        ("@a", "", "not of the form"),
    ],
)
def test_bad_filters_are_refused(include: str, exclude: str, says: str):
    with pytest.raises(ValueError, match=says):
        hosts.parse_inclusion_exclusion({"a": 2, "b": 2}, include, exclude)


def test_first_hosts_and_slots_are_taken():
    slots = {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert hosts.apply_num_nodes_and_gpus(slots, 1, 2) == {"a": [0, 1]}
    assert hosts.apply_num_nodes_and_gpus(slots, -1, -1) == slots
    for nodes, gpus in ((3, -1), (-1, 4)):
        with pytest.raises(ConfigError, match="but"):
            hosts.apply_num_nodes_and_gpus(slots, nodes, gpus)


def test_environment_files():
    lines = ["", "# what NCCL says", "NCCL_DEBUG=INFO", "export A=b=c", "Q='two words'", "EMPTY="]
    expected = {"NCCL_DEBUG": "INFO", "A": "b=c", "Q": "two words", "EMPTY": ""}
    assert hosts.parse_environment_file(lines) == expected
    with pytest.raises(ConfigError, match="line 1"):
        hosts.parse_environment_file(["NCCL_DEBUG"])


def test_variables_for_the_other_hosts(tmp_path: Path):
    """Those of libraries, not this machine's GPUs; a file's win, a later folder's over an earlier one's."""
    first, second = tmp_path / "home", tmp_path / "here"
    for folder, text in ((first, "A=1\nNCCL_DEBUG=WARN\n"), (second, "A=2\n")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)
    here = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "x", "CUDA_VISIBLE_DEVICES": "1", "SHELL": "/bin/sh"}
    assert exported(here, [first, second]) == {"NCCL_DEBUG": "WARN", "PYTHONPATH": "x", "A": "2"}


@pytest.mark.parametrize(
    ("slots", "visible", "result"),
    [([0, 2], None, "0,2"), ([0, 2], "4,5,6", "4,6"), ([1], "GPU-a, GPU-b", "GPU-b"), ([0], "3", "3")],
)
def test_visible_devices_are_honoured(slots: list[int], visible: str | None, result: str):
    assert hosts.visible_devices(slots, visible) == result


def test_a_slot_beyond_the_visible_devices_is_refused():
    with pytest.raises(ConfigError, match=r"slot 2.*shows 2 devices"):
        hosts.visible_devices([0, 2], "0,1")


@given(st.lists(st.integers(0, 20), unique=True, min_size=1))
def test_cores(cores: list[int]):
    assert hosts.parse_cores(",".join(map(str, cores))) == cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,1", "0-2,1", "-1"])
def test_bad_cores_are_refused(text: str):
    with pytest.raises(ConfigError, match="bind-core-list"):
        hosts.parse_cores(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("gpu[01-03,7],login1", ["gpu01", "gpu02", "gpu03", "gpu7", "login1"]),
        ("r[1-2]n[0-1]-ib", ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"]),
        ("a[8-11]", ["a8", "a9", "a10", "a11"]),
    ],
)
def test_slurm_node_lists(text: str, expected: list[str]):
    assert scheduler.expand_nodelist(text) == expected


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 3))
def test_slurm_ranges(first: int, more: int, width: int):
    numbers = [str(number).zfill(width) for number in range(first, first + more + 1)]
    text = f"node[{numbers[0]}-{numbers[-1]}]"
    assert scheduler.expand_nodelist(text) == [f"node{number}" for number in numbers]


@pytest.mark.parametrize("text", ["", "n[1", "n[2-1]", "n[a]"])
def test_bad_node_lists_are_refused(text: str):
    with pytest.raises(ConfigError, match="node list"):
        scheduler.expand_nodelist(text)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_slurm_tasks_per_node(counts: list[int], times: int):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count in counts)
    assert scheduler.expand_tasks(text) == [count for count in counts for _ in range(times)]


def slurm(rank: int, tasks: str, nodes: str) -> dict[str, str]:
    """What srun tells task `rank`."""
    counts = scheduler.expand_tasks(tasks)
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(len(places)),
        "SLURM_NODEID": str(places[rank][0]),
        "SLURM_LOCALID": str(places[rank][1]),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_JOB_NUM_NODES": str(len(counts)),
    }


def test_slurm_with_a_task_for_each_rank():
    plans = [decide(Options(), slurm(rank, "2(x2),1", "a[1-2],b")) for rank in range(5)]
    environments = [plan.environment for plan in plans if isinstance(plan, Rank)]
    assert [each["RANK"] for each in environments] == list("01234")
    assert [each["LOCAL_RANK"] for each in environments] == list("01010")
    assert [each["LOCAL_WORLD_SIZE"] for each in environments] == list("22221")
    assert [each["GROUP_RANK"] for each in environments] == list("00112")
    assert {each["WORLD_SIZE"] for each in environments} == {"5"}
    assert {each["MASTER_ADDR"] for each in environments} == {"a1"}
    (port,) = {int(each["MASTER_PORT"]) for each in environments}
    assert 20000 <= port < 30000


@pytest.mark.parametrize("given", [{"nproc_per_node": "2"}, {"max_restarts": 1}, {"tee": "3"}])
def test_what_needs_an_agent_is_refused_where_slurm_starts_each_rank(given: dict):
    with pytest.raises(ConfigError, match=r"Slurm has started 4 processes.*has no meaning"):
        decide(Options(**given), slurm(0, "2(x2)", "a,b"))


def test_slurm_with_a_task_on_each_node():
    plans = [decide(Options(nproc_per_node="4"), slurm(rank, "1(x2)", "a[1-2]")) for rank in range(2)]
    assert [plan.rank for plan in plans if isinstance(plan, Node)] == [0, 1]
    assert [plan.name for plan in plans if isinstance(plan, Node)] == ["a1", "a2"]
    first, second = plans
    assert isinstance(first, Node) and isinstance(second, Node)
    assert (
        (first.host, first.port, first.nodes) == (second.host, second.port, second.nodes) == ("a1", first.port, (2, 2))
    )


def test_slots_of_a_host_file_go_to_the_node_of_that_name(tmp_path: Path):
    path = tmp_path / "hosts"
    path.write_text("b slots=2\na slots=4\n")  # Slurm's order is another
    options = Options(hostfile=str(path), exclude="a:0")
    plans = [decide(options, slurm(rank, "1(x2)", "a,b")) for rank in range(2)]
    assert [(plan.name, plan.slots) for plan in plans if isinstance(plan, Node)] == [("a", (1, 2, 3)), ("b", (0, 1))]


def test_one_task_of_several_nodes_is_refused_to_run_alone():
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    with pytest.raises(ConfigError, match=r"has 2 nodes.*srun --ntasks-per-node=1"):
        decide(Options(), batch)
    assert isinstance(decide(Options(standalone=True), batch), Node)
    plan = decide(Options(launcher="slurm"), batch)
    assert isinstance(plan, Hosts) and len(plan.slots) == 2


def test_mpi():
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    hydra = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    for each in (names, hydra):
        one_machine = dict(zip(each, "1212", strict=True))
        plan = decide(Options(), one_machine)
        assert isinstance(plan, Rank) and plan.local_rank == 1
        assert plan.environment["MASTER_ADDR"] == "127.0.0.1" and plan.environment["WORLD_SIZE"] == "2"
        spread = dict(zip(each, "3412", strict=True))
        with pytest.raises(ConfigError, match="give --master-addr"):
            decide(Options(), spread)
        plan = decide(Options(master_addr="h"), spread)
        assert isinstance(plan, Rank) and plan.environment["GROUP_RANK"] == "1"
        per_node = decide(Options(master_addr="h"), dict(zip(each, "1201", strict=True)))
        assert isinstance(per_node, Node) and per_node.rank == 1 and per_node.nodes == (2, 2)
    with pytest.raises(ConfigError, match="MPI_LOCALRANKID"):
        decide(Options(), {"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_no_scheduler_is_one_node():
    assert decide(Options(), {}) == Node()
    assert decide(Options(num_gpus=2, master_port=1234), {}) == Node("2", port=1234)
    assert decide(Options(), slurm(0, "1", "a")) == Node()


def test_torchruns_options():
    plan = decide(Options(nnodes="2", node_rank=1, master_addr="h", nproc_per_node="gpu"), {})
    assert plan == Node("gpu", None, (2, 2), 1, "static", "h", 29500)
    given = {"MASTER_ADDR": "m", "MASTER_PORT": "5"}
    assert decide(Options(nnodes="2", node_rank=0), given) == Node(None, None, (2, 2), 0, "static", "m", 5)
    assert decide(Options(rdzv_backend="c10d", rdzv_endpoint="localhost:0"), {}) == Node()
    elastic = Options(nnodes="1:4", rdzv_backend="c10d", rdzv_endpoint="[::1]:99")
    assert decide(elastic, {}) == Node(None, None, (1, 4), None, "c10d", "::1", 99)


def test_host_file_plans(tmp_path: Path):
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=3\n")
    plan = decide(Options(hostfile=str(path)), {})
    assert plan == Hosts(OrderedDict([("a", [0, 1]), ("b", [0, 1, 2])]), "ssh", True)
    by_hand = decide(Options(hostfile=str(path), no_ssh=True, node_rank=1, num_gpus=2), {})
    assert by_hand == Node("2", (0, 1), (2, 2), 1, "static", "a", 29500, "b")
    path.write_text("localhost slots=2\n")
    assert decide(Options(hostfile=str(path)), {}) == Node("2", (0, 1))
    assert isinstance(decide(Options(hostfile=str(path), force_multi=True), {}), Hosts)
    path.write_text("a slots=2\nb slots=3\n")
    for options in (Options(hostfile=str(path), no_ssh=True), Options(hostfile=str(path), no_ssh=True, node_rank=2)):
        with pytest.raises(ConfigError, match="--node-rank"):
            decide(options, {})
    with pytest.raises(ConfigError, match="no host file"):
        decide(Options(hostfile="absent"), {})
    with pytest.raises(ConfigError, match="no slot"):
        decide(Options(hostfile=str(path), exclude="a@b"), {})


def test_gpus_of_this_machine():
    assert decide(Options(include="localhost:1,3"), {}) == Node("2", (1, 3))
    assert decide(Options(exclude="localhost:0"), {"CUDA_VISIBLE_DEVICES": "5,6"}) == Node("1", (1,))
    with pytest.raises(ConfigError, match="No slot '2'"):
        decide(Options(exclude="localhost:2"), {"CUDA_VISIBLE_DEVICES": "5,6"})
    with pytest.raises(ConfigError, match="give --hostfile"):
        decide(Options(include="worker-0"), {})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nproc_per_node": "2", "num_gpus": 3}, "mean the same"),
        ({"nproc_per_node": "many"}, "auto, gpu or cpu"),
        ({"nproc_per_node": "0"}, "from 1"),
        ({"num_gpus": 0}, "--num-gpus is 0"),
        ({"nnodes": "2:1"}, "--nnodes"),
        ({"nnodes": "1:2"}, "--rdzv-backend c10d"),
        ({"nnodes": "2", "num_nodes": 3}, "mean the same"),
        ({"nnodes": "2", "node_rank": 2}, "the last is 1"),
        ({"num_gpus": 2, "include": "a"}, "leave out --num-nodes"),
        ({"launcher": "mvapich"}, "mvapich"),
        ({"launcher": "slrum"}, "Did you mean 'slurm'"),
        ({"launcher": "slurm", "no_ssh": True}, "--no-ssh"),
        ({"rdzv_backend": "c01d"}, "Did you mean 'c10d'"),
        ({"rdzv_backend": "c10d", "nnodes": "2"}, "--rdzv-endpoint"),
        ({"rdzv_backend": "c10d", "nnodes": "2", "rdzv_endpoint": "h:1", "node_rank": 1}, "leave out --node-rank"),
        ({"rdzv_conf": "timeout"}, "join_timeout=600"),
        ({"standalone": True, "nnodes": "2"}, "--standalone"),
        ({"module": True, "no_python": True}, "contradict"),
        ({"bind_core_list": "0"}, "--bind-cores-to-rank"),
        ({"enable_each_rank_log": "d", "tee": "3"}, "leave out"),
        ({"tee": "4"}, "--tee is '4'"),
        ({"redirects": "0:1,x"}, "--redirects"),
        ({"master_port": 70000}, "65535"),
        ({"monitor_interval": 0.0}, "above 0"),
        ({"local_ranks_filter": "0,x"}, "--local-ranks-filter"),
    ],
)
def test_options_that_contradict_are_refused_in_a_sentence(given: dict, says: str):
    with pytest.raises(ConfigError, match=says) as error:
        Options(**given)
    assert "\n" not in str(error.value)


def test_streams_by_local_rank():
    assert [streams("0:1,2:3", rank, "-t") for rank in range(3)] == [1, 0, 3]
    assert streams("3", 5, "-t") == 3


def test_options_survive_being_written_as_a_command_line():
    """What srun and mpirun start is told the same, but for what says where to start it."""
    words = Options(nproc_per_node="2", max_restarts=3, module=True, launcher="slurm").argv("launcher")
    assert words == ["--nproc-per-node=2", "--max-restarts=3", "--module"]
    assert all(each.metadata["help"] for each in option_fields())


def test_what_srun_and_mpirun_are_called_with():
    slots = OrderedDict([("a", [0, 1]), ("b", [0])])
    options = Options(hostfile="/h", launcher_args="--time 5", max_restarts=1)
    for launcher, start in {
        "slurm": "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 --nodelist=a,b --time 5",
        "openmpi": "mpirun -np 2 --host a:1,b:1 --map-by ppr:1:node -x PATH --time 5",
        "mpich": "mpirun -n 2 -ppn 1 -hosts a,b -genvall --time 5",
    }.items():
        words = remote.scheduler_command(Hosts(slots, launcher, True), options, ["x.py", "--y"], ["PATH"])
        assert shlex.join(words).startswith(start)
        assert words[-2:] == ["x.py", "--y"] and "--hostfile=/h" in words and "--max-restarts=1" in words
        assert ("--master-addr=a" in words) == (launcher != "slurm")
    one = remote.scheduler_command(Hosts(OrderedDict([("b", [1, 2])]), "slurm", True), options, ["x.py"])
    assert "--include=localhost:1,2" in one and "--standalone" in one and "--hostfile=/h" not in one


def met(patience: float, count: int = 3) -> list[Attempts]:
    """So many nodes in an attempt."""
    nodes = [Attempts(None, f"host-{rank}", None, None, 60.0, Patience(patience)) for rank in range(count)]  # pyright: ignore[reportArgumentType]
    for rank, node in enumerate(nodes):
        node.node_rank, node.num_nodes = rank, count
        node.store = (
            open_store("127.0.0.1", 0) if rank == 0 else join_store("127.0.0.1", nodes[0].store.port, timeout=60.0)
        )
        node.store.set(f"shardfold/beat/{rank}", f"host-{rank}:0")
    return nodes


def test_agents_agree_on_the_earliest_death_in_whatever_order_they_tell():
    """The echo of a failure is told first, its cause later, one node has nothing to tell: all name the cause."""
    nodes = met(30.0)
    echo, cause = death.Death(0, 6, "host-0", 1, at=12.5), death.Death(3, 6, "host-1", 7, at=12.25)
    assert [node.heard() for node in nodes] == [None] * 3
    nodes[0].tell(echo)
    nodes[0].tell_no_more()
    nodes[2].tell_no_more()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(nodes[rank].first) for rank in (0, 2)]
        assert nodes[1].heard() == echo  # the first word is enough to end the ranks
        nodes[1].tell(cause)
        assert not any(each.done() for each in asked)
        nodes[1].tell_no_more()
        assert [each.result(60) for each in asked] == [cause, cause]
    assert nodes[1].first() == cause


def test_of_deaths_who_failed_by_itself_is_the_cause_and_else_who_left_the_others():
    """Whatever the order in which they ended, by clocks of several hosts."""
    echo, left = death.Death(0, 3, "host-0", 1, at=1.0, follows=True), death.Death(1, 3, "host-1", 0, at=3.0)
    failed, lost = death.Death(2, 3, "host-2", 1, at=4.0), death.Death(-1, 0, "host-2", 0, at=5.0)
    gone = [death.Death(rank, 3, f"host-{rank}", -9, at=rank, lost="step 3 is not whole") for rank in range(2)]
    each = ((echo, left), left), ((echo, left, failed), failed), ((echo, left, lost), lost), ((*gone, echo), gone[1])
    for told, cause in each:
        nodes = met(30.0)
        for node, each in zip(nodes, told, strict=False):
            node.tell(each)
        for node in nodes:
            node.tell_no_more()
        assert [node.first() for node in nodes] == [cause] * 3
    assert gone[1].sentence("") == "Error: rank 1 on host host-1: killed by SIGKILL, and step 3 is not whole."


def test_a_host_that_was_ended_from_here_is_not_lost(tmp_path: Path):
    """All hosts would be started again, as for one that is gone; ssh that somebody else ends is such a one."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 600\n")
    ssh.chmod(0o755)
    ours, others = (remote.RemoteAgent(name, Options(ssh=str(ssh)), []) for name in ("a", "b"))
    ours.kill()
    others.process.kill()
    for each in (ours, others):
        each.process.communicate()
    assert not remote.is_lost(ours) and remote.is_lost(others)


def test_agents_tell_each_other_for_whom_their_ranks_wait_and_for_whom_in_vain():
    """As often as they give signs of life."""
    nodes = met(30.0)
    nodes[0].prepare(nodes[0].store)

    def beat() -> None:
        for node in nodes:
            node._beaten = 0.0  # it is time for a sign of life
            node.beat(lambda _: False)

    beat()
    said = RankWaits(frozenset({0}), frozenset({4}), idle=2, why="it waited for rank 4", noticed=True)
    assert nodes[1].awaited(said) == RankWaits()
    assert nodes[2].awaited(RankWaits(frozenset({1}), idle=2)) == RankWaits()  # node 0 has not read it yet
    assert nodes[0].awaited(RankWaits()) == ({0, 1}, {4}, -1, said.why, True)
    assert nodes[2].awaited(RankWaits()) == RankWaits()  # not asked again yet
    beat()
    assert nodes[1].awaited(said) == ({0, 1}, {4}, -1, said.why, True)
    assert nodes[0].awaited(RankWaits(idle=2)) == ({0, 1}, {4}, 2, said.why, True)


def test_the_store_of_an_attempt_moves_to_another_node():
    """Who had it is lost, all is said anew, and the node that has it now looks for the others' signs of life."""
    nodes = met(0.4)
    nodes[0].prepare(nodes[0].store)
    assert not nodes[1].finish()
    store = open_store("127.0.0.1", 0)
    nodes[1].prepare(store)
    for node in nodes[1:]:
        node.move_to(store, 1, ("", 0))
        assert node.without() == {0} and not node.heard()
    assert nodes[1].beat(lambda _: False) is None  # nobody has been looked at yet
    assert not nodes[2].finish() and nodes[1].finish() and nodes[2].finish()
    asked: list[int] = []
    began = time.monotonic()
    while not asked and time.monotonic() < began + 30:
        nodes[1].beat(lambda node: not asked.append(node))
    assert asked == [2] and nodes[1].without() == {0, 2}
    asked.clear()
    while not asked and time.monotonic() < began + 60:  # the launcher on node 1 says nothing any more
        nodes[2].beat(lambda node: not asked.append(node))
    assert asked == [1]


def test_who_did_not_answer_where_the_store_could_have_moved_is_lost_once_enough_others_have_come():
    """Nobody waits for it once more."""
    nodes, asked = met(600.0, 5), list[int]()
    store = open_store("127.0.0.1", 0)
    nodes[2].prepare(store)
    for node in nodes[2:]:
        node.voting = range(5)
        node.move_to(store, 2, ("", 0), [1])
    for node in (nodes[3], nodes[2], nodes[4], nodes[2]):
        node._beaten = 0.0  # it is time for a sign of life
        assert not asked
        node.beat(lambda each: not asked.append(each))
    assert asked == [1]


def test_a_run_is_a_node_s_own_as_long_as_a_majority_is_heard_of():
    """On the node that has the store as on the others, and no later than a majority was."""
    nodes = met(600.0)
    nodes[0].prepare(nodes[0].store)
    assert min(node.ours_since for node in nodes) > 0  # nobody votes yet

    def beat(*each: int) -> float:
        for node in each:
            nodes[node]._beaten = 0.0  # it is time for a sign of life
            nodes[node].voting = (0, 1, 2)
            nodes[node].beat(lambda _: True)
        return time.monotonic()

    first = time.monotonic()
    began = beat(0, 2)
    assert nodes[0].ours_since < began  # it has heard nobody
    last = beat(1, 0)
    assert first <= nodes[0].ours_since <= began
    beat(0, 0)
    assert nodes[0].ours_since <= last
    beat(2, 2)
    assert nodes[2].ours_since <= last
    heard = nodes[2].ours_since
    beat(1, 0, 2)
    assert heard < nodes[2].ours_since
    sign, store = "shardfold/beat/1", nodes[0].store
    before, stood = store.get(sign), beat(1)
    late = store.get(sign)
    store.set(sign, before)
    beat(0)  # it has stood still, and its store brings what was sent before only behind its first look
    store.set(sign, late)
    beat(0)
    assert nodes[0].ours_since <= stood


class Silent:
    """Where nodes meet, which does not answer for now."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def num_nodes_waiting(self) -> int:
        self.over.wait(60)
        raise RendezvousConnectionError("gone")


def test_who_gets_no_answer_gives_signs_of_life_over_another_connection():
    """Here the answer is that one has come."""
    nodes = met(3.0)
    before = nodes[0].store.get("shardfold/beat/1")

    def answer() -> str:
        while (sign := nodes[0].store.get("shardfold/beat/1")) == before:
            time.sleep(0.01)
        return sign.decode()

    line = nodes[1].line_to("127.0.0.1", nodes[0].store.port)
    assert answered(answer, 60.0, line).startswith("host-1:")


def test_who_gives_up_a_store_that_answers_after_all_tells_the_others(monkeypatch: pytest.MonkeyPatch):
    """Over another connection; they would name one of their ranks, which fails because those of this host end."""
    nodes = met(30.0)  # that connection has a twentieth of it
    nodes[1]._place = "127.0.0.1", nodes[0].store.port

    line, asked = StoreLine(), threading.Event()
    with pytest.raises(RuntimeError):
        answered(lambda: asked.wait(60), 0.01, line)
    monkeypatch.setattr(nodes[1], "store", Answered(nodes[1].store, 60.0, line))
    assert nodes[0].heard() is None
    nodes[1].tell_no_more()
    told = nodes[0].heard()
    assert told is not None and told.sentence("") == "Error: the launcher on host host-1 does not answer any more."
    assert nodes[0]._has_told(1)
    asked.set()


def test_an_endpoint_that_does_not_answer_holds_nobody_up():
    """And that it is gone matters only where the ranks would have to meet there once more."""
    inner = Silent()
    endpoint = Endpoint(inner)  # pyright: ignore[reportArgumentType]
    assert endpoint.num_nodes_waiting(needed=True) == 0
    inner.over.set()
    asking = endpoint._asking
    assert asking is not None
    asking.join()
    assert endpoint.num_nodes_waiting(needed=False) == 0
    with pytest.raises(RendezvousConnectionError):
        endpoint.num_nodes_waiting(needed=True)


def test_steps_of_one_job_are_runs_of_their_own():
    """What two of them hold of a folder are no attempts of one."""
    job = {"SLURM_JOB_ID": "7"}
    names = [scheduler.scheduler_step({**job, **more}) for more in ({}, {"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"})]
    assert names == ["7", "7.0", "7.1"] and scheduler.scheduler_step({"SLURM_STEP_ID": "0"}) == "none"


def test_a_node_that_gives_no_sign_of_life_is_told_of_in_its_place_and_nobody_waits_for_it():
    """Those whose ranks have failed for want of it name it, also where another node has found that it is lost."""
    nodes = met(0.4)
    for node in nodes[:2]:
        node.tell(death.Death(node.node_rank, 6, node.host, 1, at=12.5, follows=True))
        node.tell_no_more()
    with ThreadPoolExecutor(2) as pool:
        found = [each.result(60) for each in [pool.submit(node.first) for node in nodes[:2]]]
    assert [(each.rank, each.host) for each in filter(None, found)] == [(-1, "host-2")] * 2
    for node in nodes[:2]:
        node.leave()
    began = time.monotonic()
    nodes[0].let_leave(30.0)
    assert time.monotonic() - began < 30


def test_nodes_that_met_by_a_store_that_is_gone_do_not_wait_for_it():
    """torch's handler waits for a thread of its own, and that one for an answer: without end, if the host is gone."""
    asked, over = threading.Event(), threading.Event()

    class Waits(FixedRendezvous):
        def shutdown(self) -> bool:
            asked.wait(20.0)
            over.set()
            return True

    inner = Waits("127.0.0.1", None, 0, 1, "job", 60.0, Patience(3.0))
    store = open_store("127.0.0.1", 0)
    node = Attempts(inner, "host", "127.0.0.1", None, 60.0, Patience(3.0), ("127.0.0.1", store.port))
    for _ in range(2):
        assert node.next_rendezvous().world_size == 1
    with socket.socket() as frozen:  # its kernel still takes connections
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        node.meets = there = frozen.getsockname()
        node.opened = OpenRun(*there, "job", 2, node.patience)
        with pytest.raises(RendezvousTimeoutError, match="nobody answers at"):
            node.next_rendezvous()
        frozen.setblocking(False)
        frozen.accept()[0].close()
        with pytest.raises(BlockingIOError):  # it was asked once
            frozen.accept()
    assert node.shutdown() and not over.is_set()
    asked.set()


def test_a_node_that_has_not_heard_of_a_majority_for_long_does_not_wait_to_tell_that_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
):
    """Nobody hears it, and it has waited for the patience."""
    leaves, over = threading.Event(), threading.Event()

    class Waits(FixedRendezvous):
        def shutdown(self) -> bool:
            leaves.wait(20.0)
            over.set()
            return True

    monkeypatch.setattr("shardfold.launch._rendezvous.LEAVES", 60.0)
    inner = Waits("127.0.0.1", None, 0, 1, "job", 60.0, Patience(3.0))
    node = Attempts(inner, "host", "127.0.0.1", None, 60.0, Patience(3.0))
    node.voting, node._majority = (0, 1, 2), (time.monotonic() - 3.1, time.monotonic())
    assert node.shutdown() and not over.is_set()
    leaves.set()
    node._majority = time.monotonic(), time.monotonic()
    assert node.shutdown() and over.is_set()


def test_a_store_that_never_answers_is_told_in_a_sentence():
    """TEST-NET-1 is nobody's (RFC 5737)."""
    node = Node("1", None, (1, 2), None, "c10d", "192.0.2.1", 29400)
    with pytest.raises(ConfigError, match=r"^the store at 192\.0\.2\.1:29400, where nodes meet, cannot be reached"):
        meeting_of(node, "host", "job", {"join_timeout": "1"}, Patience(1.0))


def test_a_death_in_words():
    killed = death.Death(3, 8, "b", -9, 231 * 10**9, 241 * 10**9, "cgroup memory.events")
    assert killed.sentence("; the other 7 ranks were ended") == (
        "Error: rank 3 on host b: killed by SIGKILL, kernel OOM (cgroup memory.events), RSS 231.0 of 241.0 GB; "
        "the other 7 ranks were ended."
    )
    assert death.Death(0, 1, "b", 3).sentence("") == "Error: rank 0 on host b: exited with status 3."
    told = death.Death(0, 2, "b", 1, why="rank 1 has closed its engine").sentence("; the other rank was ended")
    assert told == (
        "Error: rank 1 has closed its engine; so rank 0 on host b: exited with status 1; the other rank was ended."
    )
    assert death.Death.from_json(killed.to_json()) == killed
    lost = death.Death(-1, 0, "b", 0)
    assert lost.sentence("; all ranks were ended").startswith(
        "Error: the launcher on host b does not answer any more; "
    )
    few = death.Death(-1, 0, "b", 0, why="fewer than half of the hosts are left")
    assert few.sentence("") == "Error: fewer than half of the hosts are left."
    assert [death.others_told(others, {}) for others in range(2)] == ["", "; the other rank was ended"]
    two = {3: -signal.SIGKILL, 1: -signal.SIGTERM}
    assert death.others_told(2, two) == "; ranks 1, 3 were killed by signals too"
    assert death.others_told(4, {1: -9}) == "; rank 1 was killed by SIGKILL too; the other 3 ranks were ended"


class Kernel:
    """What it tells of its memory and of process 5, in files of either version of control groups."""

    def __init__(self, folder: Path, version: int) -> None:
        self.proc, self.mounted = folder / "proc", folder / "cgroup"
        self.group = self.mounted / ("memory" if version == 1 else "") / "job" / "step"
        self.limit, self.events = (
            ("memory.limit_in_bytes", "memory.oom_control") if version == 1 else ("memory.max", "memory.events")
        )
        for place in (self.proc / "self", self.proc / "5", self.group):
            place.mkdir(parents=True)
        for pid in ("self", "5"):
            lines = "4:memory:/job/step\n3:cpu:/\n" if version == 1 else "0::/job/step\n"
            (self.proc / pid / "cgroup").write_text(lines)
        (self.proc / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 5 kB\nMemAvailable:     80 kB\n")
        (self.proc / "5/status").write_text("Name:\tx\nVmRSS:\t     77 kB\n")

    def kill(self, count: int, in_group: int | None = None) -> None:
        """So many were killed on this machine so far, and in the group of process 5."""
        (self.proc / "vmstat").write_text(f"oom_kill {count}\n")
        if in_group is not None:
            (self.group / self.events).write_text(f"oom 2\noom_kill {in_group}\n")

    def watch(self) -> death.OomWatch:
        """One that has looked at process 5 once."""
        watch = death.OomWatch(self.proc, self.mounted)
        watch.look([5, 6])
        return watch


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_as_much_as_control_groups_leave(tmp_path: Path, version: int) -> None:
    """Of both versions, also an outer one."""
    kernel = Kernel(tmp_path, version)
    assert death.resident(5, kernel.proc) == 77 * 1024 and death.resident(6, kernel.proc) == 0
    assert memory_limit(kernel.proc, kernel.mounted) == 1000 * 1024
    (kernel.group / kernel.limit).write_text("9223372036854771712\n" if version == 1 else "max\n")
    (kernel.group.parent / kernel.limit).write_text("5000\n")
    assert memory_limit(kernel.proc, kernel.mounted) == 5000


@pytest.mark.parametrize("version", [1, 2])
def test_how_long_control_groups_have_kept_a_process_from_computing(tmp_path: Path, version: int) -> None:
    """Of both versions, also an outer one."""
    kernel = Kernel(tmp_path, version)
    (kernel.proc / "self/cgroup").write_text("4:cpu,cpuacct:/job/step\n" if version == 1 else "0::/job/step\n")
    group = kernel.mounted / ("cpu,cpuacct" if version == 1 else "") / "job" / "step"
    group.mkdir(parents=True, exist_ok=True)
    assert Throttling(kernel.proc, kernel.mounted).seconds() == 0
    for folder, seconds in ((group, 2), (group.parent, 3)):
        told = f"throttled_time {seconds}000000000" if version == 1 else f"throttled_usec {seconds}000000"
        (folder / "cpu.stat").write_text(f"nr_throttled 1\n{told}\n")
    assert Throttling(kernel.proc, kernel.mounted).seconds() == pytest.approx(5.0)


@pytest.mark.parametrize("version", [1, 2])
def test_a_process_is_killed_for_want_of_memory_if_its_group_counts_one_more(tmp_path: Path, version: int) -> None:
    """One of another job that is killed meanwhile is counted on the machine, and not there."""
    kernel = Kernel(tmp_path, version)
    kernel.kill(3, in_group=1)
    watch = kernel.watch()
    kernel.kill(4, in_group=1)
    assert watch.witness(5, 10**9) == "" and watch.witness(6, 10**9) == ""
    kernel.kill(5, in_group=2)
    assert watch.witness(5, 1) == f"cgroup {kernel.events}"


def test_the_machine_counts_a_process_that_held_as_much_as_was_left(tmp_path: Path) -> None:
    """Where no group counts. Another one was killed if there was more."""
    kernel = Kernel(tmp_path, 2)
    kernel.kill(3)
    watch = kernel.watch()
    assert watch.witness(5, 80 * 1024) == ""
    kernel.kill(4)
    assert watch.witness(5, 80 * 1024) == "/proc/vmstat"
    assert watch.witness(5, 79 * 1024) == ""


def test_the_log_of_the_kernel_names_who_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked instead of all counts, and for what it has said since the watch began."""
    kernel = Kernel(tmp_path, 2)
    kernel.kill(3, in_group=1)
    (kernel.proc / "self/ns").mkdir()
    (kernel.proc / "self/ns/pid").touch()
    monkeypatch.setattr(death, "FIRST_NAMESPACE", (kernel.proc / "self/ns/pid").stat().st_ino)
    log = tmp_path / "kmsg"
    said = "3,1,2,-;Memory cgroup out of memory: Killed process {} (python) total-vm:1kB\n"
    log.write_text(said.format(5))
    watch = death.OomWatch(kernel.proc, kernel.mounted, log)
    watch.look([5])
    kernel.kill(4, in_group=2)
    with log.open("a") as more:
        more.write(said.format(55) + said.format(7))
    assert watch.witness(5, 10**9) == "" and watch.witness(7, 1) == "kernel log"
    monkeypatch.setattr(death, "FIRST_NAMESPACE", 1)  # of numbers that are not those of the log
    watch = death.OomWatch(kernel.proc, kernel.mounted, log)
    watch.look([5])
    kernel.kill(5, in_group=3)
    assert watch.witness(5, 1) == "cgroup memory.events"
