"""The face recipe: what is drawn, which images ranks and workers get, verification, checkpoints with other identities,
and the command."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import pickle
import shutil
import signal
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

import shardfold as sf
from shardfold.errors import CheckpointError, ConfigError
from shardfold.testing import Ranks
from shardfold.tools.recipes.face import _matcher as matcher
from shardfold.tools.recipes.face import study, verification
from shardfold.tools.recipes.face._drawing import png
from shardfold.tools.recipes.face._findings import batch_orders
from shardfold.tools.recipes.face._transforms import change_of
from shardfold.tools.recipes.face.cards import PUBLISHED, on_cards
from shardfold.tools.recipes.face.drawn import DrawnFaces
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.face.images import EpochSampler, ImageBatches, sources, unchanged
from shardfold.tools.recipes.face.needs import SETTINGS, Need, Needs
from shardfold.tools.recipes.face.remarks import head_share, here, remarks
from shardfold.tools.recipes.face.row import StudyRow
from shardfold.tools.recipes.face.train import FaceRun, pca, report, steps, train
from shardfold.tools.recipes.face.vit import FaceModel

HEADS = ("sharded", "replicated")
SMALL: dict[str, Any] = {
    "identities": 11, "shots": 4, "held_out": 5, "size": "16", "patch": 8, "width": 16, "layers": 2, "heads": 2,
    "embedding": 12, "batch": 4, "steps": 3, "warmup": 0, "far": "0.1",
}  # fmt: skip


def config(**options: Any) -> FaceConfig:
    """Small, without what would do nothing: of faces that are not drawn, and of backbones that have their own sizes."""
    idle: list[str] = ["identities", "shots"] if options.get("data") is not None else []
    if str(options.get("backbone")).startswith(("timm:", "transformers:swin")):
        idle += ["patch", "width", "layers", "heads"]
    return FaceConfig.load({**{name: value for name, value in SMALL.items() if name not in idle}, **options})


# -- images


def test_faces_follow_from_their_numbers() -> None:
    """An image is the same in whatever batch it is drawn; shots, identities, seeds and sets differ."""
    faces = DrawnFaces(5, 3, size=(16, 20), channels=3)
    images, labels = faces.draw([0, 1, 4, 14])
    assert images.shape == (4, 3, 16, 20) and labels.tolist() == [0, 0, 1, 4]
    assert (faces.draw([14])[0][0] == images[3]).all()
    others = [images[0], images[1], images[2], DrawnFaces(5, 3, size=(16, 20), channels=3, seed=1).draw([0])[0][0]]
    others.append(DrawnFaces(5, 3, size=(16, 20), channels=3, first=9).draw([0])[0][0])
    assert all((a != b).mean() > 0.3 for i, a in enumerate(others) for b in others[:i])


def noisy(image: Tensor) -> Tensor:
    return image + 0.1 * torch.randn(image.shape)


def _loaded(rank: int, workers: int, change: Any = None) -> list[tuple[list[int], list[bytes]]]:
    source, _ = sources(config())
    sampler = EpochSampler(len(source.labels), 4, seed=0, rank=rank, num_ranks=2)
    loader = sf.Loader(
        ImageBatches(source, augment=True, seed=0, change=change), sampler, num_workers=workers, collate_fn=unchanged
    )
    return [
        (labels.tolist(), [each.numpy().tobytes() for each in images])
        for _ in range(2)
        for images, labels in loader
    ]  # fmt: skip


@pytest.mark.soak
def test_workers_of_every_rank_draw_different_changes() -> None:
    """Two ranks with a worker process each: all images of two epochs are different ones, and those that a run without
    workers has."""
    said = [_loaded(rank, 1) for rank in range(2)]
    images = [image for batches in said for _, batch in batches for image in batch]
    assert len(set(images)) == len(images) == 2 * 44
    assert said == [_loaded(rank, 0) for rank in range(2)]


@pytest.mark.soak
def test_workers_of_every_rank_draw_different_transforms() -> None:
    """So it is with transforms that draw from PyTorch's generator, as torchvision's, which is alike in each worker."""
    said = [_loaded(rank, 2, noisy) for rank in range(2)]
    images = [image for batches in said for _, batch in batches for image in batch]
    assert len(set(images)) == len(images) == 2 * 44
    assert said == [_loaded(rank, 0, noisy) for rank in range(2)]


def test_a_transform_draws_by_image_and_epoch() -> None:
    """What a transform draws follows from the image and the epoch, and leaves PyTorch's generator as it is; one that
    changes the size is told."""
    source, _ = sources(config())
    batches = ImageBatches(source, augment=True, seed=0, change=noisy)
    before = torch.get_rng_state()
    one, two, again, other = (batches.__getitems__([index])[0] for index in (3, 3 + 44, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    plain = ImageBatches(source, augment=False, seed=0).__getitems__([3, 4])[0]
    assert torch.equal(one, again) and not torch.equal(one, two)
    assert not torch.allclose(one - plain[:1], other - plain[1:])
    with pytest.raises(ConfigError, match="it keeps rows and columns"):
        ImageBatches(source, augment=True, seed=0, change=lambda image: image[:, 1:]).__getitems__([0])


def test_torchvision_is_asked_for_by_name() -> None:
    """Its v2 transforms keep an image's shape; where it cannot be imported that is said."""
    try:
        importlib.import_module("torchvision.transforms.v2")
    except Exception:
        with pytest.raises(ConfigError, match=r"shardfold\[vision\]"):
            change_of(config(transforms="torchvision"))
        pytest.skip("torchvision cannot be imported beside this torch")
    change = change_of(config(transforms="torchvision"))
    assert change is not None and change(torch.rand(1, 16, 20)).shape == (1, 16, 20)


def test_changes_differ_between_epochs() -> None:
    """The same image is another one in the next epoch, and the same where an epoch is read again."""
    source, _ = sources(config())
    batches = ImageBatches(source, augment=True, seed=0)
    one, two, again = (batches.__getitems__([index])[0] for index in (3, 3 + 44, 3))
    assert torch.equal(one, again) and not torch.equal(one, two)


def test_folder_of_images(tmp_path: Path) -> None:
    """A folder for each identity; some identities are kept apart; what is no image is told by name."""
    image = pytest.importorskip("PIL.Image")
    for name in "abcdef":
        (tmp_path / name).mkdir()
        for shot in range(2):
            image.fromarray(np.full((20, 30), 40 * shot, np.uint8)).save(tmp_path / name / f"{shot}.png")
    seen, held = sources(config(data=tmp_path, size="16x12"))
    assert sorted([*seen.names, *held.names]) == list("abcdef") and len(held.names) == 3
    assert seen.read([0, 1]).shape == (2, 1, 16, 12) and seen.labels.tolist() == [0, 0, 1, 1, 2, 2]
    (tmp_path / seen.names[0] / "0.png").write_bytes(b"none")
    (tmp_path / "a" / "._0.png").write_bytes(b"a system's own")
    (tmp_path / "a" / "1.png").rename(tmp_path / "a" / "x.png")
    (tmp_path / "a" / "1.png").mkdir()
    again, _ = sources(config(data=tmp_path, size="16x12"))
    assert len(again.labels) == len(seen.labels)
    with pytest.raises(ConfigError, match=r"the image .*0\.png' cannot be read: it is not an image; remove it"):
        again.read([0])
    for name in held.names:
        (tmp_path / name / "0.png").write_bytes(b"none")
    first = sorted(f"{name}/0.png" for name in (seen.names[0], *held.names))[0]
    words = rf"4 of 12 images cannot be read: '\S*{first}' \(it is not an image\), .* and others; remove them"
    with pytest.raises(ConfigError, match=words):
        again.read([0])
    with pytest.raises(ConfigError, match=r"has 0 identities .* at least 4 are needed"):
        sources(config(data=tmp_path / "a"))
    shutil.rmtree(tmp_path / "a")
    for name in "bcde":
        (tmp_path / name / "0.png").unlink()
    with pytest.raises(ConfigError, match="has 1 identity with two images or more, of 5 in all"):
        sources(config(data=tmp_path))


def _by_identity(folder: Path) -> None:
    """The same images of 5 identities, one of which has a single image, as folders, shards and parquet."""
    images = {
        f"{name}/{shot}": np.full((9, 7), 40 * shot + ord(name), np.uint8) for name in "abcd" for shot in range(3)
    }
    images["e/0"] = images["a/0"]
    for key, pixels in images.items():
        (folder / "folders" / key[0]).mkdir(parents=True, exist_ok=True)
        (folder / "folders" / f"{key}.png").write_bytes(png(pixels))
    (folder / "shards").mkdir()
    for part in range(2):
        with tarfile.open(folder / "shards" / f"{part}.tar", "w") as shard:
            for key, pixels in list(images.items())[part::2]:
                whose = (key[0].encode(), "cls") if part else (json.dumps({"identity": key[0]}).encode(), "json")
                for data, kind in ((png(pixels), "png"), whose):
                    member = tarfile.TarInfo(f"{key.replace('/', '-')}.{kind}")
                    member.size = len(data)
                    shard.addfile(member, io.BytesIO(data))


def test_shards_are_read_as_folders_are(tmp_path: Path) -> None:
    """The same identities, of which one has a single image and is left out, and the same pixels; an image
    of which nothing says whose it is, and a file that is no shard, are told by name."""
    pytest.importorskip("PIL.Image")
    _by_identity(tmp_path)
    (seen, held), (other, apart) = (sources(config(data=tmp_path / kind)) for kind in ("folders", "shards"))
    assert seen.names == other.names and held.names == apart.names and len(seen.names) == len(held.names) == 2
    mine, theirs = (np.sort(each.read([5, 0, 3, 1, 2, 4]), axis=0) for each in (seen, other))
    assert (mine == theirs).all() and seen.labels.tolist() == other.labels.tolist() == [0, 0, 0, 1, 1, 1]
    with tarfile.open(tmp_path / "shards" / "2.tar", "w") as shard:
        shard.addfile(tarfile.TarInfo("alone.png"), io.BytesIO())
    with pytest.raises(ConfigError, match=r"does not say whose image 'alone\.png' is"):
        sources(config(data=tmp_path / "shards"))
    (tmp_path / "none.tar").write_bytes(b"none" * 200)
    with tarfile.open(tmp_path / "zipped.tar", "w:gz") as shard:
        shard.addfile(tarfile.TarInfo("a.png"), io.BytesIO())
    with tarfile.open(tmp_path / "empty.tar", "w") as shard:
        shard.addfile(tarfile.TarInfo("a.cls"), io.BytesIO())
    shutil.copytree(tmp_path / "folders" / "a", tmp_path / "flat")
    (tmp_path / "zipped").mkdir()
    shutil.copy(tmp_path / "zipped.tar", tmp_path / "zipped" / "a.tar.gz")
    with tarfile.open(tmp_path / "bare.tar", "w") as shard:
        member = tarfile.TarInfo("a.cls")
        member.size = 1
        shard.addfile(member, io.BytesIO(b"3"))
    (tmp_path / "cut.tar").write_bytes((tmp_path / "shards" / "0.tar").read_bytes()[: 4 * 512 + 100])
    for name, words in (
        ("none.tar", "cannot be read"), ("folders/a/0.png", "images come from a folder with"),
        ("zipped.tar", "cannot be read: it is compressed, unpack it"), ("empty.tar", r"'a\.cls' in .* is empty"),
        ("flat", "has images, '0.png' and 2 others, but not in a folder for each identity"),
        ("zipped", "has 'a.tar.gz', which is compressed: unpack it"),
        ("bare.tar", r"bare\.tar': there are no images inside"),
        ("cut.tar", "behind 2,048 bytes it is damaged, or was cut off there"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            sources(config(data=tmp_path / name))


def test_parquet_is_read_as_folders_are(tmp_path: Path) -> None:
    """In several row groups and files, as bytes and as a struct with bytes; a column that is missing is told, with
    those that there are."""
    pytest.importorskip("PIL.Image")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    _by_identity(tmp_path)
    files = sorted((tmp_path / "folders").glob("*/*.png"))
    (tmp_path / "parquet").mkdir()
    for part in range(2):
        mine = files[part::2]
        images = [each.read_bytes() if part else {"bytes": each.read_bytes(), "path": each.name} for each in mine]
        whose = [ord(each.parent.name) - 97 for each in mine]
        table = pyarrow.table({("image", "img")[part]: images, "label": whose})  # each file names its own columns
        parquet.write_table(table, tmp_path / "parquet" / f"{part}.parquet", row_group_size=2)
    seen, held = sources(config(data=tmp_path / "folders"))
    other, apart = (pickle.loads(pickle.dumps(each)) for each in sources(config(data=tmp_path / "parquet")))
    for a, b in ((seen, other), (held, apart)):
        assert [str(ord(name) - 97) for name in a.names] == list(b.names)
        assert (np.sort(a.read(range(6)), axis=0) == np.sort(b.read(range(6)), axis=0)).all()
    parquet.write_table(pyarrow.table({"image": [b""], "who": [1]}), tmp_path / "wrong.parquet")
    with pytest.raises(ConfigError, match="has the columns image, who"):
        sources(config(data=tmp_path / "wrong.parquet"))
    parquet.write_table(pyarrow.table({"image": [b"", b""], "id": ["a", None]}), tmp_path / "wrong.parquet")
    with pytest.raises(ConfigError, match=r"row 1 of .*wrong\.parquet' has no id"):
        sources(config(data=tmp_path / "wrong.parquet"))
    images = {"image": [None, *[files[0].read_bytes()] * 7], "id": [*"aabbccdd"]}
    parquet.write_table(pyarrow.table(images), tmp_path / "wrong.parquet")
    with pytest.raises(ConfigError, match=r"the image 'row 0 of .*cannot be read: the column 'image' has no bytes of"):
        for each in sources(config(data=tmp_path / "wrong.parquet")):
            each.read(range(4))


@pytest.mark.soak
def test_digits_that_training_never_saw(tmp_path: Path) -> None:
    """Real images: scikit-learn's digits, of which 5 are trained on, and pairs of the others are told apart."""
    with patch.dict(os.environ):  # which it sets variables in
        why = "scikit-learn, whose digits these are, is not installed"
        datasets = pytest.importorskip("sklearn.datasets", reason=why)
    digits = datasets.load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        (tmp_path / str(label)).mkdir(exist_ok=True)
        (tmp_path / str(label) / f"{number}.png").write_bytes(png((pixels * 15.9).astype(np.uint8)))
    run = FaceRun(config(data=tmp_path, held_out=5, steps=120, batch=32, patch=4, width=32, lr=3e-3))
    before, batches = run.verify(), run.batches()
    for _ in range(120):
        run.step(batches)
    after = run.verify()
    run.engine.close()
    assert set(run.images.names) | set(run.held_out.names) == set("0123456789")
    assert after.accepted[0] > before.accepted[0] + 0.05


# -- verification


def embedded(n: int, identities: int, seed: int = 0) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    labels = np.sort(draw.integers(identities, size=n))
    centres = draw.standard_normal((identities, 8))
    return (centres[labels] + 0.7 * draw.standard_normal((n, 8))).astype(np.float32), labels


def all_pairs(x: Any, labels: Any) -> tuple[Any, Any]:
    scores = verification.cosine_scores(x)
    whole = np.concatenate([scores(at, min(at + 512, len(x))) for at in range(0, len(x), 512)])
    above = np.triu_indices(len(x), 1)
    return whole[above], (labels[:, None] == labels)[above]


def curve(scores: Any, same: Any) -> tuple[Any, Any]:
    """False- and true-accept rates at each threshold that there is, as scikit-learn's `roc_curve` defines them."""
    try:
        with patch.dict(os.environ):  # which it sets variables in
            from sklearn.metrics import roc_curve  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        at = np.unique(scores)[::-1]
        wrong, right = (len(s) - np.searchsorted(np.sort(s), at, side="left") for s in (scores[~same], scores[same]))
        return np.r_[0, wrong / (~same).sum()], np.r_[0, right / same.sum()]
    return roc_curve(same, scores, drop_intermediate=False)[:2]


@pytest.mark.parametrize(("n", "ties"), [(1415, False), (300, True)])
def test_precision_is_that_of_all_pairs(n: int, ties: bool) -> None:
    """On 10^6 pairs, and where many scores are equal, Precision at each rate is that of the whole curve, exactly."""
    x, labels = embedded(n, n // 14)
    x = np.round(x) if ties else x
    rates = [0.1, 0.01, 0.001, 0.5, 0.9999, 1e-7]
    found = verification.verify(verification.cosine_scores(x), labels, rates, chunk=512)
    scores, same = all_pairs(x, labels)
    assert found.genuine + found.impostor == len(scores) and (n < 1000 or len(scores) > 10**6)
    wrong, right = curve(scores, same)
    assert found.accepted == [right[np.searchsorted(wrong, rate, side="right") - 1] for rate in rates]
    assert str(found).startswith(f"{100 * found.accepted[0]:.2f}@0.1, ")


@pytest.mark.soak
def test_intervals_hold_what_they_are_of() -> None:
    """Intervals over identities lie around the value, and are narrower with more identities."""
    few, many = (
        verification.verify(verification.cosine_scores(x), labels, [0.1], bootstrap=60)
        for x, labels in (embedded(100, 10), embedded(1000, 100))
    )
    for found in (few, many):
        low, high = found.intervals[0]
        assert low < found.accepted[0] < high
    assert np.diff(few.intervals[0]) > np.diff(many.intervals[0])


def test_identification_looks_up_the_first_image() -> None:
    """Of 3 identities with 2 images: two probes are nearest to their own first image, one is to another's."""
    x = np.array([[1, 0], [0.9, 0.1], [0, 1], [0.1, 0.9], [-1, 0], [0.5, 0.6]], np.float32)
    labels = np.array([0, 0, 1, 1, 2, 2])
    assert verification.identification(verification.cosine_scores(x), labels) == [2 / 3, 1.0]


@pytest.mark.soak
def test_matcher_learns_what_is_alike() -> None:
    """The matcher is symmetric, and as good as cosine on embeddings that were drawn for cosine."""
    x, labels = embedded(600, 60)
    found = matcher.fit(x, labels)
    y, held = embedded(200, 20, seed=1)
    scores = matcher.scores_of(found, y)
    assert np.allclose(scores(0, 200), scores(0, 200).T, atol=1e-4)
    learned = verification.verify(scores, held, [0.1]).accepted[0]
    assert learned > verification.verify(verification.cosine_scores(y), held, [0.1]).accepted[0] - 0.1


# -- model and training


def test_model_takes_images_of_any_size() -> None:
    """Sides that are no multiple of a patch, and another resolution than the model was made for."""
    model = FaceModel(config(size="18x13", channels=3), 7).eval()
    assert model(torch.zeros(2, 3, 18, 13)).shape == model(torch.zeros(2, 3, 30, 40)).shape == (2, 12)


def test_backbones_of_packages() -> None:
    """A type of model of transformers has its place, with values that follow from the seed; names that are none are
    told."""
    pytest.importorskip("transformers")
    runs = [FaceRun(config(backbone="transformers:vit", seed=seed)) for seed in (0, 0, 1)]
    name = "backbone.model.embeddings.position_embeddings"
    one, again, other = (run.engine.state_dict()[name].clone() for run in runs)
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert math.isfinite(runs[0].step(runs[0].batches())["loss"])
    for run in runs:
        run.engine.close()
    model = FaceModel(config(backbone="transformers:vit"), 7)
    assert model(torch.zeros(3, 1, 16, 16), torch.arange(3)).isfinite()
    for backbone, words in (
        ("transformers:none", "no type of model"),
        ("transformers:bert", "does not read images"),
        ("resnet", "it is vit, transformers:NAME"),
    ):
        with pytest.raises(ConfigError, match=words):
            FaceModel(config(backbone=backbone), 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": "18x16", "patch": 4}, "patches of 4 x 4 do not divide images of 18 x 16 pixels, .* --size 16x16,"),
        ({"patch": 32}, "patches of 32 x 32 do not divide images of 16 x 16 pixels"),
        ({"heads": 3}, "width 16 does not divide into 3 heads"),
        ({"backbone": "transformers:swin", "patch": 4}, "no images of 16 x 16 pixels in patches of 4 .Runtime.*--size"),
    ],
)
def test_sizes_that_a_package_s_backbone_does_not_take_are_named(options: dict[str, Any], words: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=words):
        FaceModel(config(**{"backbone": "transformers:vit", **options}), 7)


@pytest.mark.parametrize(
    ("options", "study", "words"),
    [
        ({"data": "nowhere"}, False, "there is no file or folder 'nowhere'"),
        ({"resume": "nowhere"}, False, "there is no 'nowhere': give --resume a checkpoint"),
        ({"resume": "nowhere"}, True, "there is no 'nowhere': give --resume the folder of a study"),
        ({"procs": 12}, False, "splits 11 identities over 12 processes, .* give --head replicated, --procs 11 at most"),
        ({"procs": 12}, True, "and some would have none: give --procs 11 at most, or more identities"),
        ({"layout": "zero3"}, True, "leave out --layout"),
    ],
)
def test_what_does_not_do_is_refused_before_anything_starts(options: dict[str, Any], study: bool, words: str) -> None:
    """By the settings alone, without PyTorch or a process; a backbone of no package when they are read."""
    with pytest.raises(ConfigError, match=words):
        config(**options).check_start(study=study)
    with pytest.raises(ConfigError, match="it is vit, transformers:NAME"):
        config(backbone="vit:small")


def _too_few() -> str:
    with pytest.raises(ConfigError) as error:
        FaceRun(config(identities=2))
    return str(error.value)


def test_a_head_that_leaves_a_rank_without_classes_is_refused(ranks: Ranks) -> None:
    """In words of the command, before an engine is made."""
    assert ranks.run(_too_few, world_size=3)[0] == (
        "--head sharded splits 2 identities over 3 processes, and some would have none: give --head replicated, "
        "--procs 2 at most, or more identities."
    )


def _losses(head: str) -> list[float]:
    torch.set_default_dtype(torch.float64)
    try:
        run = FaceRun(config(head=head, steps=40))
        batches = run.batches()
        for _ in range(40):
            run.step(batches)
    finally:
        torch.set_default_dtype(torch.float32)
    run.engine.close()
    return run.losses


@pytest.mark.soak
def test_heads_have_the_same_curve(ranks: Ranks) -> None:
    """With classes split over two ranks and with all on each the losses of 40 steps are the same, to 1e-9 in fp64: what
    takes them apart in fp32 is rounding alone."""
    split, whole = (ranks.run(_losses, head, world_size=2)[0] for head in HEADS)
    assert len(whole) == 40 and whole[-1] < whole[0]
    assert split == pytest.approx(whole, rel=1e-9)


def _curve(head: str) -> list[float]:
    run = FaceRun(config(head=head, steps=400, warmup=100, identities=101, batch=16, width=32))
    batches = run.batches()
    for _ in range(12):
        run.step(batches)
    run.engine.close()
    return run.losses


@pytest.mark.soak
def test_heads_have_the_same_curve_in_fp32(ranks: Ranks) -> None:
    """Of a ViT and 101 classes, which two ranks do not divide: losses of 12 steps of a warm-up are the same to 1e-5.

    At Adam's full rate from the first step on they are 4e-5 apart by then: where a gradient is almost 0 its update is
    as large as any other, and rounding decides its sign."""
    split, whole = (ranks.run(_curve, head, world_size=2)[0] for head in HEADS)
    assert split == pytest.approx(whole, rel=1e-5)


@pytest.mark.soak
def test_training_beats_what_was_not_trained() -> None:
    """On identities that training never saw, Precision at 0.1 is far above that of the same model before training, and
    above that of pixels' principal components."""
    settings = FaceConfig.load({"procs": 1, "identities": 300, "held_out": 50, "steps": 300, "far": "0.1,0.01"})
    run = FaceRun(settings)
    assert not {*run.images.names} & {*run.held_out.names}
    before, batches = run.verify(), run.batches()
    for _ in range(300):
        run.step(batches)
    after = run.verify()
    run.engine.close()
    pixels = pca(run.images.read(range(0, 2400, 2)), run.held_out.read(range(400)))
    linear = verification.verify(verification.cosine_scores(pixels), run.held_out.labels, settings.rates())
    assert after.accepted[0] > before.accepted[0] + 0.4
    assert after.accepted[0] > linear.accepted[0] + 0.1 and after.accepted[1] > linear.accepted[1]


def _saved(folder: Path) -> None:
    run = FaceRun(config())
    batches = run.batches()
    run.step(batches)
    run.save(folder, wait=True)
    run.engine.close()


def _resumed(path: Path, identities: int) -> tuple[list[str], dict[str, Any]]:
    images = sources(config(identities=identities))
    names: Any = images[0].names
    if identities < 11:  # those that stay are not the first ones
        names[:] = [f"drawn-0-{11 - 1 - number}" for number in range(identities)]
    run = FaceRun(config(identities=identities), images)
    with run.engine.gathered("head.weight"):
        pass
    notes = run.resume(path)
    state = {name: value.clone() for name, value in run.engine.state_dict().items()}
    batches = run.batches()
    run.step(batches)
    run.engine.close()
    return notes, state


@pytest.mark.parametrize("identities", [14, 5])  # appended; removed
def test_checkpoints_load_with_other_identities(ranks: Ranks, tmp_path: Path, identities: int) -> None:
    """Of 11 identities on 2 ranks to 14 on 3: the old ones keep their centres; to 5 in another order: they find
    them."""
    ranks.run(_saved, tmp_path, world_size=2)
    path = tmp_path / "checkpoints" / "step-000001"
    centres = sf.Checkpoint(path).parameter("head.weight")
    said = ranks.run(_resumed, path, identities, world_size=3)
    found = torch.cat([state["head.weight"] for _, state in said])
    if identities > 11:
        assert torch.equal(found[:11], centres) and found[11:].abs().min() > 0
        assert "11 identities go on, 3 are new, 0 left." in said[0][0][1]
    else:
        assert torch.equal(found, centres.flip(0)[:5])
        assert "5 identities go on, 0 are new, 6 left." in said[0][0][1]


def test_rows_are_checked(ranks: Ranks, tmp_path: Path) -> None:
    """Rows of a parameter that is not there, of another number, and that the checkpoint does not have."""
    ranks.run(_saved, tmp_path, world_size=1)
    said = ranks.run(_refused_rows, tmp_path / "checkpoints" / "step-000001", world_size=1)[0]
    assert "Did you mean 'head.weight'" in said[0] and "has 3 rows" in said[1] and "has 11 rows" in said[2]
    assert "rows['head.weight'] is 'all'" in said[3] and "other' is no checkpoint of `train face`" in said[4]


def _refused_rows(path: Path) -> list[str]:
    run, said = FaceRun(config()), []
    for rows in ({"heads.weight": [0]}, {"head.weight": [0, 1, 2]}, {"head.weight": [99] * 11}, {"head.weight": "all"}):
        with pytest.raises((CheckpointError, ConfigError)) as error:
            run.engine.load(path, rows=rows)
        said.append(str(error.value))
    run.engine.save(path / "other", wait=True)
    with pytest.raises(ConfigError) as error:
        run.resume(path / "other")
    run.engine.close()
    return [*said, str(error.value)]


def test_a_backbone_of_16_bits_has_a_head_and_statistics_in_fp32() -> None:
    run = FaceRun(config(precision="bf16"))
    run.step(run.batches())
    module = run.engine.module
    assert {p.dtype for p in module.backbone.parameters()} == {torch.bfloat16}
    assert module.head.weight.dtype == module.neck.norm.running_var.dtype == torch.float32
    run.engine.close()


def _trained(out: Path) -> None:
    train(config(out=out, matcher=True))


@pytest.mark.soak
def test_a_run_writes_what_it_found(ranks: Ranks, tmp_path: Path) -> None:
    """On two ranks with a matcher: settings, losses, Precision of the trained and untrained model and of pixels,
    embeddings and pictures."""
    ranks.run(_trained, tmp_path / "run", world_size=2)
    said = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [*said["precision_at_far"]] == ["trained", "untrained", "PCA of pixels", "trained, ResNet matcher"]
    assert len(said["losses"]) == 3 and len(said["intervals"]) == 1
    held = np.load(tmp_path / "run" / "embeddings.npz")
    assert held["embeddings"].shape == (20, 12) and held["labels"].tolist() == [i // 4 for i in range(20)]
    written = {each.name for each in (tmp_path / "run").iterdir()}
    assert {"config.json", "metrics.jsonl", "roc.png", "faces.png"} <= written
    assert FaceConfig.load(json.loads((tmp_path / "run" / "config.json").read_text())).steps == 3


# -- the study


@pytest.mark.soak
def test_largest_batch_fits_and_one_more_does_not() -> None:
    """For what a setting takes, at whichever point of a step that is the most; and the planner's own function finds
    the same."""
    need = Need(((1000, 30), (1500, 10)))
    for allowed in (1510, 1999, 1000_000):
        batch = need.largest(allowed, most=10**9)
        assert need.of(batch) <= allowed < need.of(batch + 1)
    assert need.largest(1400) == 0 and need.largest(10**9) == 512
    for head in HEADS:
        needs = Needs(config(head=head), 11, 2)
        allowed = needs.of("base").of(20)
        for name in SETTINGS:
            assert needs.of(name).largest(allowed) == needs.largest(name, allowed) >= 20


@pytest.mark.soak
def test_a_split_head_is_planned_with_its_part_of_the_classes() -> None:
    """Of 2000 classes each of two ranks has 1000: parameters, gradients and moments of the others are not planned, and
    not divided once more."""
    whole, split = (Needs(config(head=head, identities=2000), 2000, 2).of("base").of(2) for head in HEADS[::-1])
    assert whole - split >= 1000 * 12 * 4 * 4


def test_the_page_says_what_is_not_in_the_order_of_the_report() -> None:
    """Batches in the report's order are told as such; of two that are not, which and why."""
    batches = {name: said.batch for name, said in PUBLISHED.items()}
    assert "no two settings" in batch_orders({("large", "sharded"): batches}, [])[0].text
    ten = [(name, "sharded", batch) for name, batch in batches.items()]
    _, said = batch_orders({("large", "sharded"): {**batches, "stage 3": 500}, ("small", "sharded"): batches}, ten)
    assert said.title == "Not reproduced: stage 3 above stage 2 + offload"
    assert said.text.startswith("Not so: large budget, classes split. The reason: stage 3 keeps 1 / N of all")
    assert said.text.endswith(
        "On 10 ranks, computed, classes split: stage 2 + offload 584, stage 3 600; so it would be there."
    )


def test_the_study_refuses_what_it_chooses_itself() -> None:
    """Layout, offload and head are its own choice; two precisions are not planned; what is no study is not gone on."""
    for options, words in (
        ({"layout": "zero3", "save_every": 5}, "leave out --layout, --save-every"),
        ({"precision": "bf16"}, "leave out --precision"),
        ({"resume": Path("nowhere")}, "'nowhere' is not the folder of a study"),
    ):
        with pytest.raises(ConfigError, match=words):
            study.study(config(**options))


@pytest.mark.soak
def test_a_model_of_the_reports_size_on_its_cards() -> None:
    """121.5 million parameters; what the report saved is saved in the computed figures too: stage 2 holds less than the
    base at its batch, offload leaves room for more images under both stages, and a split head for more still."""
    parameters, whole = on_cards("replicated")
    _, split = on_cards("sharded")
    assert parameters == pytest.approx(121.5e6, rel=0.01)
    found = {each.name: each for each in whole}
    assert found.keys() == PUBLISHED.keys()
    assert found["stage 2"].mb < found["base"].mb
    assert found["base"].batch < found["stage 2"].batch < found["stage 2 + offload"].batch
    assert found["stage 3"].batch < found["stage 3 + offload"].batch
    assert all(a.batch < b.batch and a.rate > 0 for a, b in zip(whole, split, strict=True))


def _study(out: Path, resume: Path | None, **options: Any) -> None:
    study.study(config(out=out, resume=resume, steps=2, batch=16, **options))


@pytest.mark.soak
def test_the_study_writes_a_page_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """All settings under both budgets, as Markdown, JSON and one page without links to anything. Where it was stopped
    it goes on: what is there is not trained again; with other settings it is refused."""
    ranks.run(_study, tmp_path / "study", None, world_size=2)
    text = (tmp_path / "study" / "study.json").read_text()
    rows = json.loads(text)["rows"]
    assert len(rows) == 2 * 2 * len(SETTINGS) and all(row["used"] <= row["allowed"] for row in rows)
    page = (tmp_path / "study" / "study.html").read_text()
    assert "http" not in page and page.count("data:image/png") == 1 and page.count("<svg") == 3
    assert all(row["command"] in page for row in rows)
    kept = json.loads(text)
    kept["rows"] = kept["rows"][:18]
    (tmp_path / "study" / "study.json").write_text(json.dumps(kept))
    ranks.run(_study, tmp_path / "again", tmp_path / "study", world_size=2)
    again = json.loads((tmp_path / "again" / "study.json").read_text())["rows"]
    assert again[:18] == rows[:18] and again[18]["seconds"] != rows[18]["seconds"]
    with pytest.raises(ConfigError, match=r"has procs 2, so it cannot go on with 1"):
        study.earlier_rows(config(resume=tmp_path / "study", steps=2, batch=16))


def _measured_by_one() -> float | None:
    import torch.distributed as dist

    return head_share(config(), 30, 4) if dist.get_rank() == 0 else None


def test_one_rank_measures_the_head_while_the_others_go_on(ranks: Ranks) -> None:
    """Its batch normalization over all ranks waited for ranks that had nothing to do with it, to the end of the group's
    time limit."""
    share, other = ranks.run(_measured_by_one, world_size=2)
    assert share is not None and 0 <= share < 1 and other is None


@pytest.mark.soak
def test_remarks_have_this_machines_figures() -> None:
    """Ahead costs memory, bf16 saves some, and the head has a share of the seconds; rates are ratios of the rows."""
    found = here(config(), 30, 2, 8)
    assert found.ahead >= found.alone > 0 and found.half < found.full and 0 <= found.head < 1
    rows = [_row(name, head, rate) for name, head, rate in
            (("base", "replicated", 10.0), ("base", "sharded", 15.0), ("stage 3", "replicated", 8.0),
             ("stage 3", "sharded", 16.0))]  # fmt: skip
    said = dict(remarks(rows, found._replace(head=0.61, full=4 * 2**20, half=2**21)))
    assert list(said) == ["R1", "R2", "R3", "R5", "R6"]
    assert "1.50 to 2.00 times the images/s" in said["R1"] and "(-50%)" in said["R5"]
    assert "stage 3 with classes split (16 images/s; 50.00@0.1 kept apart, the best of all 50.00)" in said["R2"]
    assert "share of 0.39, 1.10" in said["R6"] and "would be 10% overall" in said["R6"]


def _row(setting: str, head: str, rate: float) -> StudyRow:
    return StudyRow(
        setting=setting, head=head, budget="large", allowed=1, used=1, at_base=1, host=0, measured=0, batch=1,
        images_per_s=rate, steps=1, seconds=1.0, loss=1.0, losses=[], precision={"kept apart": {"0.1": 0.5}}, curve=[],
        command="",
    )  # fmt: skip


@pytest.mark.soak
def test_a_run_that_is_stopped_says_so(tmp_path: Path) -> None:
    """At which step, and how it goes on."""
    seen, held = sources(config())

    class Stops:
        names, labels = seen.names, seen.labels
        reads = 0

        def read(self, indices: Any) -> Any:
            Stops.reads += 1
            if Stops.reads == 3:
                signal.raise_signal(signal.SIGINT)
            return seen.read(indices)

    run, said = FaceRun(config(steps=50, save_every=50), (Stops(), held)), io.StringIO()
    console = Console(file=said, width=200)
    assert steps(run, tmp_path, console)
    found = run.verify()
    report(run, tmp_path, console, found, found, run.embeddings(held), None)
    run.engine.close()
    assert run.done == 3 and "Stopping after step 3 of 50" in said.getvalue()
    assert f"Interrupted at step 3 of 50; --resume {tmp_path} goes on." in said.getvalue()
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"]


def test_commands_of_the_study_are_whole() -> None:
    """Each option that is not the default, on or off, is in the command, and the command line reads it back."""
    given = config(augment=False, offload="host", cosine=0.2)
    words = study.command_of(given, 3).split()
    assert words[:3] == ["shardfold", "train", "face"] and "--no-augment" in words and "--procs" in words
    read = {a[2:].replace("-", "_"): b for a, b in pairwise(words) if a.startswith("--") and not b.startswith("--")}
    assert FaceConfig.load({**read, "augment": False}).model_dump() == {**given.model_dump(), "procs": 3}
