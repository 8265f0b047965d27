"""The files of a release: `make dist` builds an sdist and a wheel of the last commit, into dist/.

The same commit gives the same bytes. Sources come from `git archive`, so nothing that is not committed gets in; times
are those of the commit (``SOURCE_DATE_EPOCH``); the wheel is built from what the sdist has; and as setuptools writes
times and owners of the files that it finds into an sdist, :func:`settled` writes that anew. Nothing is uploaded.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(sources: Path, out: Path, *, epoch: int) -> tuple[Path, Path]:
    """The sdist and the wheel of a folder of sources; the folder itself is changed by setuptools."""
    out.mkdir(parents=True, exist_ok=True)
    sdist = out / _backend("build_sdist", sources, out, epoch)
    settled(sdist, epoch)
    with tempfile.TemporaryDirectory() as room, tarfile.open(sdist) as archive:
        archive.extractall(room, filter="data")
        (unpacked,) = Path(room).iterdir()
        return sdist, out / _backend("build_wheel", unpacked, out, epoch)


def _backend(hook: str, sources: Path, out: Path, epoch: int) -> str:
    """Call what pip would call, in the folder of the sources; the name of what it made."""
    code = "import setuptools.build_meta as backend, sys; print(getattr(backend, sys.argv[1])(sys.argv[2]))"
    done = subprocess.run(
        [sys.executable, "-c", code, hook, str(out.resolve())],
        cwd=sources, env=os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{hook} failed:\n{done.stderr}")
    return done.stdout.split()[-1]


def settled(sdist: Path, epoch: int) -> None:
    """Write an sdist anew: sorted, every time the same one, owned by nobody in particular."""
    plain = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        packed.write(plain.getvalue())


def commit(room: Path) -> int:
    """Put the last commit's files into a folder; the commit's time."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(room, filter="data")
    said = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(said.stdout)


def main() -> None:
    with tempfile.TemporaryDirectory() as room:
        epoch = commit(Path(room))
        source = (Path(room) / "src/shardfold/plan/version.py").read_text(encoding="utf-8")
        version = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0]
        changes = (Path(room) / "CHANGELOG.md").read_text(encoding="utf-8")
        if not re.search(rf"^## \[{re.escape(version)}\] - ", changes, re.MULTILINE):
            raise SystemExit(f"CHANGELOG.md of the last commit has no section '## [{version}] - DATE'")
        made = build(Path(room), ROOT / "dist", epoch=epoch)
    for file in made:
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(ROOT)}")
    sys.exit(
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, made)], check=False).returncode
    )


if __name__ == "__main__":
    main()
