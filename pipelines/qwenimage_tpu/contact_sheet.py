"""Put many pictures into one, in a grid, each with its prompt below it."""

import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

# Smaller pictures are enlarged to this width, in pixels, so that their captions can be read.
CELL_WIDTH = 192
FONT_SIZE = 14
LINE_SPACING = 1.25
MARGIN = 8
PAPER, INK = "white", "black"


def contact_sheet(images: Sequence[Image.Image], captions: Sequence[str]) -> Image.Image:
    """One RGB picture; images of one size, in reading order, captions wrapped to their width.

    Raises ValueError for no images, for images of several sizes, or if there is not one caption for each.
    """
    if not images or len(images) != len(captions):
        raise ValueError(
            f"a contact sheet needs at least one picture, and a caption for each, but there are"
            f" {len(images)} pictures and {len(captions)} captions"
        )
    if len({image.size for image in images}) > 1:
        raise ValueError(
            f"the pictures of a contact sheet must have one size, but have {[image.size for image in images]}"
        )
    scale = math.ceil(CELL_WIDTH / images[0].width)
    width, height = images[0].width * scale, images[0].height * scale
    font = ImageFont.load_default(FONT_SIZE)
    texts = [wrap(caption, font, width) for caption in captions]
    line_height = math.ceil(LINE_SPACING * FONT_SIZE)
    text_height = line_height * max(len(lines) for lines in texts)
    columns = column_count(len(images))
    rows = math.ceil(len(images) / columns)
    cell_width, cell_height = width + MARGIN, height + text_height + 2 * MARGIN
    sheet = Image.new("RGB", (columns * cell_width + MARGIN, rows * cell_height + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    for index, (image, lines) in enumerate(zip(images, texts, strict=True)):
        x = MARGIN + index % columns * cell_width
        y = MARGIN + index // columns * cell_height
        sheet.paste(image.resize((width, height), Image.Resampling.LANCZOS), (x, y))
        for number, line in enumerate(lines):
            middle = x + width / 2, y + height + MARGIN / 2 + number * line_height
            pen.text(middle, line, fill=INK, font=font, anchor="ma")
    return sheet


def column_count(count: int) -> int:
    """About as many columns as rows; a few more if that leaves no hole in the last row."""
    square = math.ceil(math.sqrt(count))
    whole = [columns for columns in range(square, 2 * square) if count % columns == 0]
    return min(whole, default=square)


def wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Break the text between words into lines of at most `width` pixels; a longer word keeps its line."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
