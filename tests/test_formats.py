"""Weights of few bits: their panels, and the sizes that C and Python compute of them."""

import subprocess

import numpy as np
import pytest
from reference_formats import FORMS, FP8, INT4, MXFP4, dequantise, e4m3, name, pack, random_matrix, unpack

from colibri import headers
from colibri.headers import NATIVE, Form

SHAPES = [(3, 1), (64, 64), (65, 100), (130, 257), (1, 31), (2, 70, 33)]
WIDE = [Form(dtype, 0, 0) for dtype in (0, 1, 2)]


@pytest.mark.parametrize("form", FORMS, ids=name)
@pytest.mark.parametrize("shape", SHAPES)
def test_panels_are_taken_apart_again(form, shape):
    codes, scales, zeros = random_matrix(np.random.default_rng(0), form, *shape)
    panels = pack(form, codes, scales, zeros)
    assert panels.shape[-1] == headers.panel_values(form, shape[-1])["panel_bytes"]
    for before, after in zip((codes, scales, zeros), unpack(form, panels, *shape[-2:])):
        assert before is None and after is None or np.array_equal(before.reshape(after.shape), after)


def test_where_a_byte_stands():
    """One weight each, by hand."""
    int4, mxfp4 = Form(INT4, 64, 1), Form(MXFP4, 32, 0)
    codes = np.zeros((70, 75), np.uint8)
    codes[66, 64 + 5] = 9
    panels = pack(int4, codes, np.full((70, 2), 1.5, np.float16), np.full((70, 2), 3, np.uint8))
    assert panels.shape == (2, 1, 2 * (128 + 64) + 8 * 256 + 2 * 256)
    group = panels[1, 0, 128 + 64 + 8 * 256:]
    assert group[:128].view(np.float16)[:7].tolist() == [1.5] * 6 + [0] and group[128:192][5:7].tolist() == [3, 8]
    assert group[192:][4 * 2 + 1] == 9 << 4 and group[192 + 256:][2 * 4 + 3] == 0x33  # column 69, and columns 75, 79
    value = dequantise(int4, codes, np.full((70, 2), 1.5, np.float16), np.full((70, 2), 3, np.uint8), 0.5)
    assert value[66, 69] == (9 - 3) * 1.5 * 0.5 and value[0, 0] == -3 * 1.5 * 0.5
    mx = dequantise(mxfp4, np.array([[7, 15, 1]], np.uint8), np.array([[128]], np.uint8))
    assert mx.tolist() == [[12, -12, 1]]
    assert e4m3()[[0x38, 0x7e, 0x01, 0x80]].tolist() == [1, 448, 2 ** -9, 0] and np.isnan(e4m3()[[0x7f, 0xff]]).all()
    assert dequantise(Form(FP8, 128, 0), np.array([[0x7e]], np.uint8), np.float32([[2]])).tolist() == [[896]]


def test_c_and_python_agree_on_sizes(tmp_path):
    forms, columns = [*WIDE, *FORMS], [1, 4, 5, 31, 32, 33, 64, 100, 128, 129, 2880]
    source = tmp_path / "sizes.c"
    source.write_text('#include <stdio.h>\n#include "panels.h"\nint main(void) {\n' + "\n".join(
        f'{{ Form form = {{{form.dtype}, {form.group}, {form.zero_points}}}; printf("%ld %ld\\n", '
        f"(long)panel_offset(form, {count}, 3, 2, 1), (long)(form.group ? group_offset(form, 1) : 0)); }}"
        for form in forms for count in columns) + "\n}\n")
    subprocess.run(["gcc", "-I", NATIVE, source, "-o", tmp_path / "sizes"], check=True)
    seen = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout.split("\n")
    for line, (form, count) in zip(seen, [(form, count) for form in forms for count in columns], strict=False):
        whole = headers.panel_values(form, form.group)["panel_bytes"] if form.group else 0
        assert line == f"{7 * headers.panel_values(form, count)['panel_bytes']} {whole}", (form, count)
