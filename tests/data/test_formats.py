"""Every form of a data set loads to the same arrays."""

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import (
    Made,
    cifar_archive,
    cifar_folder,
    cifar_python,
    images,
    python2_pickle,
    tar,
    write_binary,
    write_folders,
    write_idx,
    write_parquet,
    write_python,
)

from fedlesam.data import NAMES, load
from fedlesam.data._check import check
from fedlesam.data.augment import flip_and_crop
from fedlesam.data.dataset import DataSet
from fedlesam.data.formats.find import PACKAGED

SHARED = Path(__file__).parents[3] / "shared" / "data"

FORMS = {
    "binary archive": partial(write_binary, packed=True),
    "binary archive, extracted": partial(write_binary, packed=False),
    "python archive": partial(write_python, packed=True),
    "python archive, extracted": partial(write_python, packed=False),
    "parquet": write_parquet,
    "class folders": write_folders,
}


def same(data: DataSet, made: Made) -> bool:
    pairs = [(data.train.x, made.train_x), (data.train.y, made.train_y)]
    pairs += [(data.test.x, made.test_x), (data.test.y, made.test_y)]
    return data.classes == made.classes and all(np.array_equal(tensor.numpy(), array) for tensor, array in pairs)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_forms_are_equal(name: str, tmp_path: Path) -> None:
    made = images(name)
    fingerprints = set()
    for i, (form, write) in enumerate(FORMS.items()):
        root = tmp_path / str(i)
        write(root, made)
        found = check(name, root)
        assert found.form == form
        assert same(found.data, made)
        assert found.data.train.x.dtype == torch.uint8
        assert found.data.augment is flip_and_crop
        fingerprints.add(found.data.fingerprint)
    assert len(fingerprints) == 1


def test_preference_and_what_was_passed_over(tmp_path: Path) -> None:
    made = [images("cifar10", seed) for seed in range(6)]
    for (form, write), one in reversed(list(zip(FORMS.items(), made, strict=True))):
        write(tmp_path, one)
        found = check("cifar10", tmp_path)
        assert found.form == form
        assert same(found.data, one)
    assert [text.split(" in ")[0] for text in found.passed_over] == list(FORMS)[1:]
    assert any("binary archive (also there: binary archive, extracted" in line for line in found.lines())


def test_incomplete_form_gives_way_to_a_complete_one(tmp_path: Path) -> None:
    made = images("cifar10")
    write_python(tmp_path, made, packed=False)
    write_parquet(tmp_path, made)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    assert check("cifar10", tmp_path).form == "parquet"


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol(protocol: int, tmp_path: Path) -> None:
    made = images("cifar10")
    files = cifar_python(made, lambda value: pickle.dumps(value, protocol))
    folder = cifar_folder(made, "python")
    archive = tmp_path / "cifar10" / cifar_archive(made, "python")
    archive.parent.mkdir()
    archive.write_bytes(tar({f"./{folder}/{name}": data for name, data in files.items()}))
    assert same(load("cifar10", tmp_path), made)


def test_pickled_columns_first(tmp_path: Path) -> None:
    made = images("cifar10")

    def pickled(value: dict[str, Any]) -> bytes:
        return python2_pickle({key: np.asfortranarray(v) if key == "data" else v for key, v in value.items()})

    (tmp_path / "cifar-10-batches-py").mkdir()
    for name, data in cifar_python(made, pickled).items():
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(data)
    assert same(load("cifar10", tmp_path), made)


def test_parquet_as_hubs_store_it(tmp_path: Path) -> None:
    made = images("cifar10")
    write_parquet(tmp_path / "plain_text", made, image="image", shards=3)
    assert same(load("cifar10", tmp_path), made)


def test_official_folders_by_number(tmp_path: Path) -> None:
    made = images("cifar100")
    write_folders(tmp_path, made, tuple(map(str, range(100))))
    assert same(load("cifar100", tmp_path), made)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dotted", [True, False])
def test_idx(name: str, packed: bool, dotted: bool, tmp_path: Path) -> None:
    made = images(name)
    write_idx(tmp_path / name, made, packed, dotted)
    data = load(name, tmp_path)
    assert same(data, made)
    assert data.augment is None
    assert check(name, tmp_path / name).files[0].official is False


def test_folder(tmp_path: Path) -> None:
    made = images("cifar10")
    write_folders(tmp_path, made)
    (tmp_path / "train" / "cat" / ".hidden").write_text("")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("")
    (tmp_path / "train" / "README").write_text("")
    data = load(f"folder:{tmp_path}")
    assert same(data, made)
    x = made.train_x.astype(np.float64) / 255
    assert np.allclose(data.mean, x.mean((0, 2, 3)))
    assert np.allclose(data.std, x.std((0, 2, 3)))
    assert data.normalise(data.train.x).std(dim=(0, 2, 3)).allclose(torch.ones(3), atol=1e-3)


def test_folder_of_grey_images(tmp_path: Path) -> None:
    made = images("mnist")
    write_folders(tmp_path, made)
    assert same(load(f"folder:{tmp_path}"), made)


def test_constant_folder_can_be_normalised(tmp_path: Path) -> None:
    made = images("mnist")
    made.train_x[:] = 7
    write_folders(tmp_path, made)
    data = load(f"folder:{tmp_path}")
    assert bool(data.normalise(data.train.x).abs().max() < 1e-6)


def test_normalisation_is_the_papers(tmp_path: Path) -> None:
    made = images("cifar10")
    write_binary(tmp_path, made, packed=True)
    data = load("cifar10", tmp_path)
    mean, std = np.array([0.491, 0.482, 0.447]), np.array([0.247, 0.243, 0.262])
    wanted = (made.train_x / 255 - mean[:, None, None]) / std[:, None, None]
    assert np.allclose(data.normalise(data.train.x).numpy(), wanted, atol=1e-5)


def test_normalise_leaves_its_input(tmp_path: Path) -> None:
    x = torch.rand(3, 1, 8, 8)
    before = x.clone()
    load("digits").normalise(x)
    assert torch.equal(x, before)


def test_digits_and_names() -> None:
    assert len(load("digits").train) == 1437
    assert check("digits").form == "embedded"
    assert list(NAMES)[:5] == ["digits", "cifar10", "cifar100", "mnist", "fashion-mnist"]
    with pytest.raises(ValueError, match="did you mean 'cifar100'"):
        load("cifar-100")


def test_shared_cifar10(tmp_path: Path) -> None:
    """The test part alone, in both places: the whole takes ten seconds to decode."""
    real = SHARED / "cifar10" / "test.parquet"
    if not real.is_file():
        pytest.skip("the shared copy of CIFAR-10 is not here")
    for part in ("train", "test"):
        (tmp_path / f"{part}.parquet").symlink_to(real)
    found = check("cifar10", tmp_path)
    assert found.train_counts == (1000,) * 10
    assert found.data.shape == (3, 32, 32)
    normal = found.data.normalise(found.data.train.x)
    assert normal.mean().abs() < 0.1
    assert abs(float(normal.std()) - 1) < 0.1


def test_fashion_mnist_of_debian() -> None:
    if not (PACKAGED / "fashion-mnist").is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    found = check("fashion-mnist")
    assert found.train_counts == (6000,) * 10
    assert found.test_counts == (1000,) * 10
    assert all(file.official for file in found.files)
    with pytest.raises(ValueError, match="this is fashion-mnist, not mnist"):
        load("mnist", PACKAGED / "fashion-mnist")


def test_names_are_cheap() -> None:
    """The list of names does not wait for torch."""
    program = "import sys, fedlesam.data.catalogue; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
