from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from qwenimage_tpu.contact_sheet import CELL_WIDTH, MARGIN, column_count, contact_sheet, wrap
from qwenimage_tpu.generate import GenerateResult
from qwenimage_tpu.options import GenerateOptions
from qwenimage_tpu.pictures import save_contact_sheet
from qwenimage_tpu.request import check_contact_sheet

COLOURS = ("red", "green", "blue", "yellow")


def cells(count: int, size: int = 96) -> list[Image.Image]:
    return [Image.new("RGB", (size, size), colour) for colour in COLOURS[:count]]


def test_pictures_in_reading_order_with_captions_below():
    sheet = np.asarray(contact_sheet(cells(4), ["one", "two", "three", "four"]), np.int16)
    step = CELL_WIDTH + MARGIN
    below = sheet[MARGIN + CELL_WIDTH : MARGIN + CELL_WIDTH + 20, MARGIN:step]
    assert below.min() == 0, "no caption"
    middles = [sheet[y, x] for y in (100, sheet.shape[0] - 100) for x in (100, step + 100)]
    assert np.array_equal(middles, [[255, 0, 0], [0, 128, 0], [0, 0, 255], [255, 255, 0]])


@pytest.mark.parametrize(("size", "width"), [(96, 192), (64, 192), (1024, 1024)])
def test_small_pictures_are_enlarged(size: int, width: int):
    assert contact_sheet(cells(1, size), ["x"]).width == width + 2 * MARGIN


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (2, 2), (4, 2), (7, 3), (8, 4), (9, 3), (12, 4)])
def test_columns(count: int, columns: int):
    assert column_count(count) == columns


def test_captions_are_wrapped_between_words():
    font = ImageFont.load_default(14)
    lines = wrap("a small red star on a navy background", font, 100)
    assert " ".join(lines) == "a small red star on a navy background"
    assert len(lines) > 1
    assert all(font.getlength(line) <= 100 for line in lines)
    assert wrap("incomprehensibilities", font, 10) == ["incomprehensibilities"]
    assert wrap("", font, 10) == [""]


def test_what_does_not_fit_a_sheet():
    with pytest.raises(ValueError, match="there are 2 pictures and 1 captions"):
        contact_sheet(cells(2), ["one"])
    with pytest.raises(ValueError, match=r"must have one size, but have \[\(96, 96\), \(64, 64\)\]"):
        contact_sheet([*cells(1), *cells(1, 64)], ["one", "two"])


def test_the_file_names_all_prompts(tmp_path: Path):
    options = GenerateOptions(prompts=("one", "two"), images_per_prompt=2, seed=5)
    result = GenerateResult(cells(4), torch.zeros(4, 1, 1), {}, None, options)
    path = save_contact_sheet(result, tmp_path / "new" / "sheet.png", model="demo")
    with Image.open(path) as sheet:
        information: dict[Any, Any] = sheet.info
    assert information["prompt"] == "one\ntwo"
    assert information["seed"] == "5"


@pytest.mark.parametrize("name", ["sheet", "sheet.jpg", ""])
def test_a_sheet_is_one_png_file(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=r"contact sheet is one PNG file, but .* end it in .png"):
        check_contact_sheet(tmp_path / name)
