"""A board is closed: who has no token, asks for another site or under another name, or names a path, gets nothing; and
run folders are anybody's."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardfold.errors import ConfigError
from shardfold.launch.run_records import STATUS, OwnRecord
from shardfold.tools.board.board import token_of
from shardfold.tools.board.board_config import BoardConfig
from tests.tools.board.support import HERE, SAID, TOKEN, AskedBoard, Client, board_process, made_run

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, beside a secret."""
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "secret").mkdir()
    (folder / "secret" / "config.json").write_text('{"word": "swordfish"}')
    (folder / "secret" / "metrics.jsonl").write_text('{"step": 1, "loss": 99.0}\n')
    made_run(folder / "runs" / "a")
    (folder / "runs" / "link").symlink_to(folder / "secret")
    return folder


@pytest.fixture(scope="module")
def board(place: Path) -> AskedBoard:
    return AskedBoard(place / "runs")


PATHS = ("/api/runs", "/api/runs/x", "/api/curves?id=x&key=loss", "/api/forms", "/api/csv?id=x&key=loss")
WITHOUT: dict[str, dict[str, str]] = {
    "nothing": {},
    "an empty token": {"Authorization": "Bearer "},
    "another token": {"Authorization": "Bearer " + TOKEN[:-1] + "x"},
    "the token's beginning": {"Authorization": "Bearer " + TOKEN[:-1]},
    "a longer token": {"Authorization": "Bearer " + TOKEN + "x"},
    "no scheme": {"Authorization": TOKEN},
    "basic": {"Authorization": "Basic " + TOKEN},
    "a cookie of another name": {"Cookie": f"board={TOKEN}"},
    "letters that are not ASCII": {"Authorization": "Bearer tök"},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", WITHOUT)
def test_who_has_no_token_is_told_nothing(headers: str, path: str, board: AskedBoard) -> None:
    reply = board.ask("GET", path, headers=WITHOUT[headers])
    assert reply.status_code == 401 and "token" in reply.json()["error"]["message"]


def test_a_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_have(board: AskedBoard) -> None:
    wrong = board.ask("GET", "/?token=wrong", headers={})
    assert "set-cookie" not in wrong.headers
    right = board.ask("GET", f"/?token={TOKEN}", headers={})
    assert right.status_code == 303 and right.headers["location"] == "/" and TOKEN not in right.headers["location"]
    cookie = right.headers["set-cookie"]
    assert "httponly" in cookie.lower() and "samesite=strict" in cookie.lower()
    assert board.ask("GET", "/api/runs", headers={"Cookie": cookie.partition(";")[0]}).status_code == 200
    for given, status in (({"token": TOKEN}, 204), ({"token": "x"}, 401), ({"token": 3}, 401), ({}, 401)):
        reply = board.ask("POST", "/api/session", headers={"X-Shardfold-Board": "1"}, body=given)
        assert reply.status_code == status and ("set-cookie" in reply.headers) == (status == 204)


HOSTS = {
    "evil.example": 403,
    "evil.example:8765": 403,
    "127.0.0.1.evil.example": 403,
    "localhost.evil.example": 403,
    "evil@localhost": 403,
    "0.0.0.0:8765": 403,
    "[::ffff:10.0.0.1]:8765": 403,
    "localhost:8765, evil.example": 403,
    "localhost/../evil": 403,
    "": 403,
    "localhost:8765": 200,
    "127.0.0.1:1": 200,
    "[::1]:8765": 200,
}


@pytest.mark.parametrize("host", HOSTS)
def test_other_names_of_this_machine_are_refused(host: str, board: AskedBoard) -> None:
    """A page whose name was bound to 127.0.0.1 behind its loading asks under that name."""
    assert board.ask("GET", "/api/runs", headers={**SAID, "Host": host}).status_code == HOSTS[host]
    assert board.ask("GET", "/", headers={"Host": host}).status_code == HOSTS[host]


ORIGINS = {
    "https://evil.example": 403,
    "null": 403,
    "http://127.0.0.1": 403,
    "http://127.0.0.1:8766": 403,
    "http://localhost:8765": 403,  # as the address is 127.0.0.1:8765
    "http://127.0.0.1:8765.evil.example": 403,
    "http://evil.example#127.0.0.1:8765": 403,
    HERE: 200,
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_pages_of_other_sites_may_not_ask(origin: str, board: AskedBoard) -> None:
    reply = board.ask("GET", "/api/runs", headers={**SAID, "Origin": origin})
    assert reply.status_code == ORIGINS[origin] and "access-control-allow-origin" not in reply.headers
    reply = board.ask("POST", "/api/check", headers={**SAID, "Origin": origin}, body={"recipe": "none"})
    assert reply.status_code == (403 if ORIGINS[origin] == 403 else 400)


def test_a_page_of_another_site_may_not_ask_first(board: AskedBoard) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert board.ask("OPTIONS", "/api/start", headers=asked).status_code == 403
    reply = board.ask("OPTIONS", "/api/start", headers={})
    assert reply.status_code == 405 and "access-control-allow-origin" not in reply.headers


FORMS: dict[str, tuple[dict[str, str], bytes, int]] = {
    "a form": ({"Content-Type": "application/x-www-form-urlencoded"}, b"recipe=lm", 415),
    "a file's form": ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x--", 415),
    "plain text": ({"Content-Type": "text/plain"}, b'{"recipe": "lm"}', 415),
    "no kind": ({}, b'{"recipe": "lm"}', 415),
    "no JSON": (JSON, b"{", 400),
    "a list": (JSON, b"[]", 400),
    "a number": (JSON, b"3", 400),
    "nan": (JSON, b'{"recipe": NaN}', 400),
    "deep": (JSON, b"[" * 10**5, 400),
    "no text": (JSON, b"\xff\xfe", 400),
    "large": (JSON, b'{"recipe": "' + b"x" * 2**20 + b'"}', 413),
    "a recipe that is none": (JSON, b'{"recipe": "../../bin/sh"}', 400),
    "a recipe that is no text": (JSON, b'{"recipe": {"$ne": 1}}', 400),
    "a path of its own": (JSON, b'{"recipe": "lm", "settings": {"out": "/etc/run"}}', 400),
    "another run's checkpoint": (JSON, b'{"recipe": "lm", "settings": {"resume": "/etc"}}', 400),
    "settings that are none": (JSON, b'{"recipe": "lm", "settings": "--out=/etc"}', 400),
    "a name out of the folder": (JSON, b'{"recipe": "lm", "name": "../x"}', 400),
    "an absolute name": (JSON, b'{"recipe": "lm", "name": "/tmp/x"}', 400),
    "a hidden name": (JSON, b'{"recipe": "lm", "name": ".x"}', 400),
    "a name that is an option": (JSON, b'{"recipe": "lm", "name": "--debug"}', 400),
    "a name with a zero": (JSON, b'{"recipe": "lm", "name": "a\\u0000b"}', 400),
    "a name with a new line": (JSON, b'{"recipe": "lm", "name": "a\\nb"}', 400),
    "a name that is taken": (JSON, b'{"recipe": "lm", "name": "a"}', 400),
    "a host file that is none": (JSON, b'{"recipe": "lm", "name": "b", "hostfile": "/dev/null"}', 400),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_posted_is_what_the_page_posts(form: str, board: AskedBoard, place: Path) -> None:
    headers, body, status = FORMS[form]
    before = sorted(os.listdir(place / "runs"))
    reply = board.ask("POST", "/api/start", headers={**SAID, **headers}, body=body)
    assert reply.status_code == status and reply.json()["error"]["message"], reply.text
    without = {name: value for name, value in SAID.items() if name != "X-Shardfold-Board"}
    reply = board.ask("POST", "/api/start", headers={**without, **headers}, body=body)
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "no_header"
    assert sorted(os.listdir(place / "runs")) == before


RUNS = (
    "..",
    "../secret",
    "%2e%2e%2fsecret",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2fetc%2fpasswd",
    "a",
    "link",
    "%00",
    "a%00.json",
    "....//secret",
    "%c0%ae%c0%ae",
    "\\..\\secret",
    "x" * 4000,
    "0" * 16,
)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("what", ["", "/log", "/samples"])
def test_no_request_names_a_path(what: str, run: str, board: AskedBoard) -> None:
    """A run is known by a digest of where it is; a link out of the folder is none."""
    reply = board.ask("GET", f"/api/runs/{run}{what}")
    assert reply.status_code in (404, 405), reply.text
    assert "swordfish" not in reply.text and "root:" not in reply.text
    if not what:
        for asked in (f"/api/curves?id={run}&key=loss", f"/api/csv?id={run}&key=loss", f"/api/differences?id={run}"):
            reply = board.ask("GET", asked)
            assert reply.status_code == 404 and "99" not in reply.text.replace(run, ""), reply.text


@pytest.mark.parametrize(
    "name", ["..%2fboard.py", "%2e%2e/board.py", "board.py", "%2fetc%2fpasswd", "", "board.html%00"]
)
def test_the_page_has_its_own_files_only(name: str, board: AskedBoard) -> None:
    assert board.ask("GET", f"/page/{name}", headers={}).status_code == 404


@pytest.mark.parametrize(
    "query",
    ["key=loss", "id={a}", "id={a}&key=loss&by=loss", "id={a}&key=loss&from=x", "id={a}&key=loss&pixels=-1"]
    + ["id={a}&key=loss&pixels=9" + "9" * 30, "id={a}" + "&key=loss%d" * 0 + "".join(f"&key={n}" for n in range(40))]
    + ["id={a}&key=loss&from=nan", "".join(f"id={n}&" for n in range(1001)) + "key=loss"],
)
def test_what_curves_are_not_is_refused(query: str, board: AskedBoard) -> None:
    reply = board.ask("GET", "/api/curves?" + query.format(a=board.id("a")))
    assert reply.status_code == 400 and reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("after", ["x", "1.2.3", "-1", "9" * 5000, "%00", "a.0.999999999", "_", "_".join("abc"), "é"])
def test_a_cursor_that_is_none_tells_all(after: str, board: AskedBoard) -> None:
    a = board.id("a")
    told = board.get("/api/curves", {"id": a, "key": "loss", "after": after})
    assert told["series"][0]["whole"] and len(told["series"][0]["points"]) == 10
    assert len(board.get("/api/runs", {"after": after})["runs"]) == 1


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "HEAD", "POST"])
def test_other_methods_do_nothing(method: str, board: AskedBoard) -> None:
    assert board.ask(method, "/api/runs").status_code in ((200,) if method == "HEAD" else (405,))


def test_every_reply_is_closed(board: AskedBoard) -> None:
    """Nothing runs but the page's own files, and no other site has it in a frame."""
    for path, headers in (("/", {}), ("/page/board.js", {}), ("/api/runs", SAID), ("/api/x", SAID), ("/api/runs", {})):
        reply = board.ask("GET", path, headers=headers)
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff" and "server" not in reply.headers
        assert reply.headers["referrer-policy"] == "no-referrer"
    page = board.ask("GET", "/", headers={})
    assert "script-src 'self';" in page.headers["content-security-policy"] and "<script>" not in page.text
    assert TOKEN not in page.text


READ_ONLY = ("check", "plan", "start", "runs/{a}/stop", "runs/{a}/stop-now", "runs/{a}/resume", "runs/{a}/chat")


@pytest.mark.parametrize("path", READ_ONLY)
def test_a_board_that_only_shows_changes_nothing(path: str, place: Path) -> None:
    board = AskedBoard(place / "runs", read_only=True)
    reply = board.ask("POST", "/api/" + path.format(a=board.id("a")), body={"recipe": "lm", "settings": {}})
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "read_only"
    assert board.get("/api/runs")["runs"][0]["can"] == []


# -- run folders


PIPES: list[int] = []


def hostile_pipes(run: Path) -> None:
    for name in ("config.json", "metrics.jsonl", "summary.json", "samples.jsonl", "output.log", "chat.log", "chat.key"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        PIPES.append(os.open(run / name, os.O_RDWR | os.O_NONBLOCK))
        os.write(PIPES[-1], b'{"step": 1, "loss": 99, "word": "swordfish"}\n')


def hostile_links(run: Path) -> None:
    secret = run.parent.parent / "outside"
    secret.write_text('{"step": 1, "loss": 99, "word": "swordfish"}\n')
    for name in ("config.json", "metrics.jsonl", "summary.json", "samples.jsonl", "output.log"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
    (run / "checkpoints").symlink_to("/")


def hostile_devices(run: Path) -> None:
    for name in ("config.json", "metrics.jsonl", "summary.json", "output.log"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to("/dev/zero")


def hostile_folders(run: Path) -> None:
    for name in ("config.json", "metrics.jsonl", "summary.json", "samples.jsonl", "output.log"):
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()


def hostile_json(run: Path) -> None:
    (run / "config.json").write_text('{"layout": {"a": [1]}, "recipe": 3, "steps": 1e999, "procs": "many"}')
    (run / "summary.json").write_text('{"memory": {"x": 1}, "traffic": 3, "steps": "x", "n": NaN}')
    (run / "samples.jsonl").write_text('[]\n{"answer": 3, "prompt": {"x": 1}, "reward": "x"}\n{"text": null}\nx\n')


def hostile_depth(run: Path) -> None:
    for name in ("config.json", "summary.json", "samples.jsonl", "metrics.jsonl"):
        (run / name).write_text('{"a":' * 50_000 + "\n")
    (run / "config.json").write_text('{"a":' * 700 + "1" + "}" * 700)
    (run / "summary.json").write_text('{"memory": ' + "[" * 700 + "]" * 700 + "}")


def hostile_width(run: Path) -> None:
    (run / "config.json").write_text(json.dumps({"x" * 5 * 2**20: 1}))
    with (run / "metrics.jsonl").open("ab") as file:
        file.truncate(40 * 2**20)  # a line of nothing that is never read whole


def hostile_numbers(run: Path) -> None:
    (run / "metrics.jsonl").write_text(
        '{"step": 1' + "0" * 400 + ', "loss": 1}\n{"step": 2, "loss": 1e999}\n{"step": "3", "loss": true}\n'
        '{"step": 4, "loss": ' + "9" * 5000 + '}\n{"step": NaN, "loss": 1}\n{"step": 5, "loss": [1]}\nnull\n\n'
        '{"step": -Infinity, "loss": -Infinity}\n{"step": 6, "loss": 0.5}\n'
    )


def hostile_names(run: Path) -> None:
    for name in ("<img src=x onerror=alert(1)>", "\x1b[31m", "\n", "\u202e", "'\";--", "${PATH}"):
        (run / name).write_text("x")
    (run / b"\xff\xfe".decode(errors="surrogateescape")).write_text("x")
    made_run(run.parent / "<b>\x1b[2J\xff".encode().decode("latin-1"))
    os.mkdir(os.fsencode(run.parent) + b"/\xff\xfe")
    (run.parent / os.fsdecode(b"\xff\xfe") / STATUS).write_bytes(b"")


def hostile_log(run: Path) -> None:
    line = b"\x1b]0;title\x07<script>alert(1)</script>\r\n"
    (run / "output.log").write_bytes(bytes(range(256)) * 400 + line + b"x" * 2**20 + b"\n" + line)


def hostile_status(run: Path) -> None:
    """Its processes are said to be the first one and this one."""
    said = [{"rank": rank, "ranks": 2, "phase": "training", "pid": pid} for rank, pid in ((-1, 1), (0, os.getpid()))]
    text = [json.dumps({**each, "host": socket.gethostname(), "boot": "", "words": "<b>"}) for each in said]
    (run / STATUS).write_bytes(b"".join(each.encode().ljust(1024) for each in text))


HOSTILE: list[Callable[[Path], None]] = [
    hostile_pipes,
    hostile_links,
    hostile_devices,
    hostile_folders,
    hostile_json,
    hostile_depth,
    hostile_width,
    hostile_numbers,
    hostile_names,
    hostile_log,
    hostile_status,
]


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_a_run_folder_may_be_anybodys(make: Callable[[Path], None], tmp_path: Path) -> None:
    """It is shown as far as it goes; nothing waits, no other file is told, and the other run is as it is."""
    run = made_run(tmp_path / "runs" / "bad")
    made_run(tmp_path / "runs" / "good")
    make(run)
    board = AskedBoard(tmp_path / "runs")
    rows = board.get("/api/runs")["runs"]
    texts = [json.dumps(rows)]
    assert next(row for row in rows if row["name"] == "good")["loss"] == 1.0
    for row in rows:
        for path in ("", "/log", "/samples"):
            texts.append(board.ask("GET", f"/api/runs/{row['id']}{path}").text)
        texts.append(board.get(f"/api/runs/{row['id']}/log")["text"])  # JSON escapes what a terminal would act on
        for by in ("step", "tokens", "seconds"):
            asked = {"id": row["id"], "key": ["loss", "lr"], "by": by}
            while (told := board.get("/api/curves", asked))["read"] < 1:
                pass
            assert len(told["series"]) == 2
            texts.append(json.dumps(told))
        texts.append(board.ask("GET", "/api/csv", params={"id": row["id"], "key": "loss"}).text)
        for act in ("stop", "stop-now", "resume", "chat"):
            reply = board.ask("POST", f"/api/runs/{row['id']}/{act}", body={})
            assert reply.status_code in (400, 409), (act, reply.text) if act != "chat" else True
    while PIPES:
        os.close(PIPES.pop())
    assert not any("swordfish" in text or "root:" in text or "\x1b" in text for text in texts)


def test_a_process_that_only_has_the_number_is_not_stopped(tmp_path: Path) -> None:
    """Records name a process that lives and has another run: as after the number was given to somebody else."""
    made_run(tmp_path / "a")
    own = OwnRecord(tmp_path / "a", 0, 1)  # its lock says that it lives
    own.write(phase="training")
    other = board = None
    try:
        from shardfold.tools.board import _run_control

        seen: list[Any] = []
        board = AskedBoard(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_run_control, "_handle", lambda pid, path: seen.append(_run_control.__dict__) or None)
            assert board.ask("POST", f"/api/runs/{board.id('a')}/stop", body={}).status_code == 409 and seen
        assert _run_control._handle(os.getppid(), tmp_path / "a" / STATUS) is None
        handle = _run_control._handle(os.getpid(), tmp_path / "a" / STATUS)
        assert handle is not None
        os.close(handle)
    finally:
        own.close()
        del other


# -- the command


def test_a_board_is_this_machines_own(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="ssh -L"):
            BoardConfig.load({"host": host})
    for root in ("board", "/board/"):
        with pytest.raises(ConfigError, match="root-path"):
            BoardConfig.load({"root_path": root})


def test_a_token_file_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "state" / "token"
    made = token_of(path)
    assert token_of(path) == made and len(made) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token_of(None) != token_of(None)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="--token-file"):
        token_of(path)


def test_a_proxy_may_have_it_under_a_path(place: Path) -> None:
    board = AskedBoard(place / "runs", root_path="/board")
    for path in ("/api/runs", "/board/api/runs"):
        assert board.ask("GET", path).status_code == 200
    reply = board.ask("GET", f"/board/?token={TOKEN}", headers={})
    assert reply.headers["location"] == "/board/" and "Path=/board" in reply.headers["set-cookie"]
    assert board.ask("GET", "/boardapi/runs").status_code == 404


RAW = {
    "no host": b"GET /api/runs HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    "dots": b"GET /page/../../board.py HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "an address as path": b"GET http://evil.example/api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a long head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10**6 + b"\r\n\r\n",
    "two lengths": b"POST /api/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "a length that is none": b"POST /api/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    "no path": b"GET\r\n\r\n",
}


def test_over_a_socket_nothing_is_told_and_all_goes_on(place: Path) -> None:
    with board_process(place / "runs") as (process, url):
        port = int(url.rpartition(":")[2])
        for what, said in RAW.items():
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                try:
                    connection.sendall(said)
                    answer = connection.recv(65536)
                except ConnectionError:
                    answer = b""
            status = answer.partition(b" ")[2][:3]
            assert status in (b"", b"400", b"401", b"403", b"404", b"431"), (what, answer[:300])
        assert Client(url).told("/api/runs")["runs"][0]["name"] == "a"
        assert Client(url).ask("/api/runs", headers={}).status_code == 401
        with socket.create_connection(("127.0.0.1", port)) as idle:  # who says nothing holds nobody
            process.terminate()
            assert process.wait(30) == 0
            idle.close()
