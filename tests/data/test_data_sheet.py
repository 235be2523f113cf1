import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlesam.data.catalogue import load
from fedlesam.data.contact_sheet import contact_sheet
from fedlesam.data.dataset import DataSet, Images


def data(classes: int, channels: int = 3, dtype: torch.dtype = torch.uint8) -> DataSet:
    x = torch.zeros(2 * classes, channels, 16, 16)
    x[:, 0] = 200
    y = torch.arange(2 * classes) % classes
    names = tuple(f"class $_{{{i}}} with a long name" for i in range(classes))
    part = Images(x.to(dtype), y)
    return DataSet("made", part, part, names, (0.5,) * channels, (0.5,) * channels)


def test_digits(tmp_path: Path) -> None:
    path = contact_sheet(load("digits"), tmp_path / "new" / "sheet.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width > 300
        assert image.height > 300
    assert [child.name for child in path.parent.iterdir()] == ["sheet.png"]


@pytest.mark.parametrize(("classes", "channels"), [(1, 1), (7, 2), (23, 3), (101, 3)])
def test_any_number_of_classes(classes: int, channels: int, tmp_path: Path) -> None:
    contact_sheet(data(classes, channels), tmp_path / "x.png")
    contact_sheet(data(2, channels, torch.float32), tmp_path / "x.png", per_class=1)


def test_colours_are_right(tmp_path: Path) -> None:
    with Image.open(contact_sheet(data(1), tmp_path / "x.png")) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    assert ((pixels == (200, 0, 0)).all(1)).sum() > 1000


def test_class_without_images(tmp_path: Path) -> None:
    made = data(3)
    contact_sheet(replace(made, train=Images(made.train.x[:1], made.train.y[:1])), tmp_path / "x.png")


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        contact_sheet(load("digits"), tmp_path / "file" / "x.png")


def test_names_are_cheap() -> None:
    """The list of names does not wait for torch."""
    program = "import sys, fedlesam.data.catalogue; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
