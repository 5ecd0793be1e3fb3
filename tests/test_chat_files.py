"""What a folder's files say of chats, from the converter into the .bin: templates, special tokens, sampling."""

import json

import numpy as np
import pytest
from converter_files import MIXTRAL_CONFIG, mixtral_arrays
from synthetic import seal
from test_converter import convert, refusal
from test_inputs import folder_of, inspected

from colibri import headers
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError

CONFIG, JINJA, JSON, TOOL = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json",
                             "chat_templates/tool_use.jinja")
ANOTHER = "{}: another chat template than {}, which is taken"


@pytest.fixture
def written(tmp_path):
    """A function: a folder with these files; a dict as its JSON."""
    def write(**files):
        folder = folder_of(tmp_path / "model", mixtral_arrays(), MIXTRAL_CONFIG)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else
                             (content if isinstance(content, str) else json.dumps(content)).encode())
        return folder
    return write


@pytest.fixture
def settings_of(tmp_path, capfd, written):
    """A function: (the Settings of a folder with these files, what was warned of)."""
    def make(**files):
        folder = written(**files)
        convert(folder, tmp_path / "a.bin")
        return Checkpoint(tmp_path / "a.bin").settings, capfd.readouterr().err.replace(f"{folder}/", "").splitlines()
    return make


@pytest.mark.parametrize("files, templates, warnings", [
    ({}, {}, []), ({CONFIG: {}}, {}, []), ({CONFIG: {"chat_template": None}}, {}, []),
    ({CONFIG: {"chat_template": "a\r\n\"é{{ 1 }}\ud83d"}}, {"default": "a\r\n\"é{{ 1 }}\ud83d"}, []),
    ({CONFIG: {"chat_template": ""}}, {"default": ""}, []),
    ({CONFIG: {"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}},
     {"default": "a", "rag": "b"}, []),
    ({CONFIG: {"chat_template": {"default": "a", "tool_use": "b"}}}, {"default": "a", "tool_use": "b"}, []),
    ({JINJA: "line\r\nend\n"}, {"default": "line\nend\n"}, []),
    ({JINJA: "a", TOOL: "b", "chat_templates/x y.jinja": "c", "chat_templates/no.txt": "d"},
     {"default": "a", "tool_use": "b", "x y": "c"}, []),
    ({TOOL: "b", CONFIG: {"chat_template": "a"}}, {"tool_use": "b"}, [ANOTHER.format(CONFIG, JINJA)]),
    ({JSON: {"chat_template": "a"}}, {"default": "a"}, []),
    ({JSON: {"chat_template": "a"}, CONFIG: {"chat_template": "a"}, JINJA: "a"}, {"default": "a"}, []),
    ({JSON: {"chat_template": "a"}, CONFIG: {"chat_template": "b"}}, {"default": "b"}, [ANOTHER.format(JSON, CONFIG)]),
    ({JINJA: "a", CONFIG: {"chat_template": "b"}, JSON: {"chat_template": "c"}}, {"default": "a"},
     [ANOTHER.format(CONFIG, JINJA), ANOTHER.format(JSON, JINJA)])])
def test_templates(settings_of, files, templates, warnings):
    settings, said = settings_of(**files)
    assert (settings.chat_templates, settings.sampling, said) == (templates, {}, warnings)


MAP = "special_tokens_map.json"
OBJECT = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "special": True}


@pytest.mark.parametrize("files, tokens", [
    ({CONFIG: {"bos_token": "<s>", "pad_token": None, "add_bos_token": True, "additional_special_tokens": ["<x>"]}},
     {"bos_token": "<s>"}),
    ({CONFIG: {"unk_token": OBJECT, "image_token": "<i>", "clean": "x", "padding_side": "left"}},
     {"unk_token": "</s>", "image_token": "<i>"}),
    ({CONFIG: {"extra_special_tokens": {"audio_token": "<a>", "boi": "<b>"}}}, {"audio_token": "<a>", "boi": "<b>"}),
    ({CONFIG: {"bos_token": "<s>", "cls_token": "<c>"}, MAP: {"bos_token": {"content": "<t>"}, "pad_token": "<p>"}},
     {"bos_token": "<t>", "cls_token": "<c>", "pad_token": "<p>"}),
    ({CONFIG: {"bos_token": "<s>", "added_tokens_decoder": {}}, MAP: {"bos_token": "<t>"}}, {"bos_token": "<s>"}),
    ({MAP: {"mask_token": "<m>"}}, {"mask_token": "<m>"})])
def test_special_tokens(settings_of, files, tokens):
    assert settings_of(**files, **{JINJA: ""})[0].special_tokens == tokens


@pytest.mark.parametrize("values, sampling, warnings", [
    ({}, {}, []), ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {}, []), ({"do_sample": None}, {}, []),
    ({"do_sample": True}, {"temperature": 1.0}, []),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
     {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, []),
    ({"do_sample": True, "temperature": 1, "top_p": 1, "top_k": 0}, {"temperature": 1, "top_p": 1, "top_k": 0}, []),
    ({"do_sample": True, "temperature": 0, "top_k": None}, {"temperature": 0}, []),
    ({"temperature": 0.6, "top_p": 0.9}, {},
     [("generation_config.json: temperature=0.6 without do_sample=true; the model's text is greedy unless a request "
       "says otherwise")])])
def test_sampling(settings_of, values, sampling, warnings):
    settings, said = settings_of(**{"generation_config.json": values})
    assert (settings.sampling, settings.chat_templates, said) == (sampling, {}, warnings)


TEXTS = "a template's text, or a list of names and templates"


@pytest.mark.parametrize("files, message", [
    ({CONFIG: {"chat_template": 5}},
     f"{CONFIG}: chat_template=5, expected {TEXTS}; correct it"),
    ({CONFIG: {"chat_template": [{"name": "a"}]}},
     f'{CONFIG}: chat_template={{"a": null}}, expected {TEXTS}; correct it'),
    ({CONFIG: {"chat_template": ["x"]}},
     f'{CONFIG}: chat_template=["x"], expected {TEXTS}; correct it'),
    ({CONFIG: {"chat_template": [{"name": "a", "template": "x"}, {"name": "a", "template": "y"}]}},
     f"{CONFIG}: chat_template: 'a' twice, expected each name once; leave one out"),
    ({JSON: {"chat_template": [[]]}},
     f"{JSON}: chat_template=[[]], expected {TEXTS}; correct it"),
    ({JINJA: b"a\xff"}, f"{JINJA}: byte 0xff at 1, expected UTF-8; download it again"),
    ({TOOL: "x" * ((16 << 20) + 1)}, f"{TOOL}: 16777217 bytes, expected at most 16777216"),
    ({"generation_config.json": {"do_sample": 1}},
     "generation_config.json: do_sample=1, expected true or false; correct it"),
    ({"generation_config.json": {"temperature": True}},
     "generation_config.json: temperature=true, expected 0 (greedy) to 1e30; correct it"),
    ({"generation_config.json": {"do_sample": True, "top_p": 0}},
     "generation_config.json: top_p=0, expected more than 0 and at most 1; correct it"),
    ({"generation_config.json": {"top_k": 1.5}},
     "generation_config.json: top_k=1.5, expected 0 (all) to 2^31 - 1; correct it"),
    ({"generation_config.json": {"temperature": -1}},
     "generation_config.json: temperature=-1, expected 0 (greedy) to 1e30; correct it")])
def test_catalogue(tmp_path, capfd, written, files, message):
    folder = written(**files)
    assert refusal(capfd, folder, tmp_path / "a.bin").replace(f"{folder}/", "").rstrip("\n") == message


def test_a_template_that_is_no_file(tmp_path, capfd, written):
    folder = written()
    (folder / JINJA).symlink_to("nothing")
    assert refusal(capfd, folder, tmp_path / "a.bin") == (
        f"{folder}/{JINJA}: not a regular file, nor a link to one, expected a chat template; remove it\n")


def test_what_is_read_is_not_replaced(capfd, written):
    folder = written(**{JINJA: "a"})
    assert "or a file of it" in refusal(capfd, folder / "pytorch_model.bin", folder / JINJA, "--force")


def test_inspection(written, capfd):
    folder = written(**{JINJA: "a", TOOL: "b", "generation_config.json": {"do_sample": True, "top_k": 5}})
    figures = inspected(capfd, folder)
    assert figures["chat_templates"] == ["default", "tool_use"] and figures["sampling"] == {"temperature": 1.0,
                                                                                            "top_k": 5}


# The section in the .bin

STRUCTS = headers.default().structs


@pytest.fixture
def model(tmp_path, written):
    convert(written(**{JINJA: "template", "tokenizer.json": {"some": "json"},
                       "generation_config.json": {"do_sample": True}}),
            tmp_path / "a.bin")
    return tmp_path / "a.bin"


def changed(model, **fields):
    """The model with header fields changed, under a right checksum; a function of what is there, or a value."""
    data = bytearray(model.read_bytes())
    header = np.frombuffer(data, STRUCTS["BinHeader"], 1).copy()
    for name, value in fields.items():
        header[name] = value(int(header[name][0])) if callable(value) else value
    end = int(header["directory_offset"][0]) + int(header["num_tensors"][0]) * STRUCTS["BinTensor"].itemsize
    data[:end] = seal(header.tobytes() + bytes(data[header.nbytes:end]))
    model.write_bytes(data)
    return model


def test_a_file_of_before_has_no_settings(tmp_path, written):
    convert(written(), tmp_path / "a.bin")
    checkpoint = Checkpoint(tmp_path / "a.bin")
    assert checkpoint.header["settings_bytes"] == checkpoint.header["settings_offset"] == 0
    assert checkpoint.settings == ({}, {}, {})


@pytest.mark.parametrize("fields, message", [
    ({"settings_crc32": lambda crc32: crc32 ^ 1}, "settings_crc32=0x"),
    ({"settings_offset": lambda offset: offset + 1}, "settings_offset="),
    ({"settings_offset": 1 << 62}, "settings_offset=4611686018427387904, expected a multiple of 4096, and"),
    ({"settings_offset": 4096}, "begins at byte 4096"), ({"settings_bytes": 1 << 40}, "settings_offset="),
    ({"settings_bytes": lambda size: size - 1}, "settings_crc32="), ({"settings_offset": 0}, "begins at byte 0"),
    ({"settings_bytes": 0, "settings_offset": 0}, "belong to nothing")])
def test_damage(model, fields, message):
    Checkpoint(model)
    with pytest.raises(ColibriError, match=message):
        Checkpoint(changed(model, **fields))


@pytest.mark.parametrize("content, message", [
    (b"{", "settings that are no JSON object of texts and numbers, expected what the converter writes; convert again"),
    (b"[]", "settings that are no JSON"), (b"\xff", "settings that are no JSON"), (b"[" * 5000,
                                                                                   "settings that are no JSON"),
    (b'{"chat_templates": {"default": 5}}', "settings that are no JSON"), (b'{"chat_templates": []}',
                                                                           "settings that are no JSON"),
    (b'{"special_tokens": {"bos_token": null}}', "settings that are no JSON"), (b'{"sampling": {"top_k": true}}',
                                                                                "settings that are no JSON"),
    (b'{"sampling": {"top_k": 1.5}}', "sampling: top_k: 1.5, expected 0 or -1 .all. to 2.31 - 1; convert again"),
    (b'{"sampling": {"temperature": NaN}}', "sampling: temperature: nan, expected 0"), (b'{"sampling": 5}',
                                                                                        "settings that are no JSON")])
def test_settings_that_are_none(model, content, message):
    import zlib
    start = Checkpoint(model).header["settings_offset"]
    data = bytearray(model.read_bytes())
    data[start:] = content + bytes(-len(content) % 4096)
    model.write_bytes(data)
    with pytest.raises(ColibriError, match=f"a.bin: {message}"):
        Checkpoint(changed(model, settings_bytes=len(content), settings_crc32=zlib.crc32(content),
                           file_bytes=len(data)))


def test_what_later_converters_add(model):
    import zlib
    content = b'{"sampling": {"temperature": 0.5, "mirostat": 2}, "response_schema": {"a": 1}}'
    start = Checkpoint(model).header["settings_offset"]
    data = bytearray(model.read_bytes())
    data[start:] = content + bytes(-len(content) % 4096)
    model.write_bytes(data)
    checkpoint = Checkpoint(changed(model, settings_bytes=len(content), settings_crc32=zlib.crc32(content),
                                    file_bytes=len(data)))
    assert checkpoint.settings == ({}, {}, {"temperature": 0.5})
