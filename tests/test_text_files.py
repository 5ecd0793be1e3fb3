"""Text by a folder's files, from the converter into the .bin: tokenizer, BOS, end tokens; and what is warned of."""

import json

import pytest
from converter_files import MIXTRAL_CONFIG, mixtral_arrays
from test_converter import convert, refusal
from test_inputs import folder_of

from colibri.checkpoint import Checkpoint

BOS, EOS = "<s>", "</s>"
VOCAB = {"<unk>": 0, BOS: 1, EOS: 2, "a": 3, "b": 4}
TOKENIZER = {"added_tokens": [{"id": 5, "content": "<end>"}], "model": {"type": "BPE", "vocab": VOCAB, "merges": []}}
TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": BOS, "type_id": 0}},
                                                     {"Sequence": {"id": "A", "type_id": 0}}]}


@pytest.fixture
def made(tmp_path, capfd):
    """A function: (the Checkpoint, the warnings) of a folder with these files and end tokens in its config.json."""
    def convert_with(eos=None, **files):
        folder = folder_of(tmp_path / "model", mixtral_arrays(), {**MIXTRAL_CONFIG, "eos_token_id": eos}, **files)
        convert(folder, tmp_path / "a.bin")
        return Checkpoint(tmp_path / "a.bin"), capfd.readouterr().err.replace(f"{folder}/", "").splitlines()
    return convert_with


def refused(tmp_path, capfd, eos=None, **files):
    folder = folder_of(tmp_path / "model", mixtral_arrays(), {**MIXTRAL_CONFIG, "eos_token_id": eos}, **files)
    return refusal(capfd, folder, tmp_path / "a.bin").replace(f"{folder}/", "").rstrip("\n")


@pytest.mark.parametrize("bos_token", [BOS, {"__type": "AddedToken", "content": BOS, "lstrip": False}])
def test_bos(made, bos_token):
    checkpoint, warnings = made(tokenizer=TOKENIZER, tokenizer_config={"add_bos_token": True, "bos_token": bos_token})
    assert (checkpoint.bos, checkpoint.header["add_bos"], checkpoint.header["bos_id"], warnings) == (1, 1, 1, [])


@pytest.mark.parametrize("config", [{}, {"bos_token": BOS}, {"add_bos_token": False, "bos_token": BOS},
                                    {"add_bos_token": None}, {"add_bos_token": False, "bos_token": None}])
def test_no_bos(made, config):
    checkpoint, warnings = made(tokenizer=TOKENIZER, tokenizer_config=config)
    assert (checkpoint.bos, checkpoint.header["add_bos"], checkpoint.header["bos_id"], warnings) == (None, 0, 0, [])


def test_bos_without_a_tokenizer(made):
    assert made(tokenizer_config={"add_bos_token": True, "bos_token": BOS})[0].bos is None


@pytest.mark.parametrize("processor", [
    TEMPLATE, {"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE]},
    {"type": "RobertaProcessing", "sep": [EOS, 2], "cls": [BOS, 1]}])
def test_bos_that_the_files_do_not_agree_on(made, processor):
    checkpoint, warnings = made(tokenizer={**TOKENIZER, "post_processor": processor},
                                tokenizer_config={"add_bos_token": False, "bos_token": BOS})
    assert checkpoint.bos is None and warnings == [
        ("tokenizer_config.json: add_bos_token=false, but tokenizer.json puts '<s>' before a prompt; so does "
        "Colibri, but for a request with add_special_tokens=false")]


@pytest.mark.parametrize("config, expected", [
    ({"eos_token_id": 2}, [7, 2]), ({"eos_token_id": [3, 7, 5]}, [7, 3, 5]), ({"eos_token_id": None}, [7]), (None,
                                                                                                             [7])])
@pytest.mark.parametrize("named", [None, "<end>", "b"])
def test_end_tokens_of_all_files(made, config, expected, named):
    """The union; a token that is a vocabulary's and one that was added."""
    files = {} if config is None else {"generation_config": config}
    checkpoint, warnings = made(7, tokenizer=TOKENIZER, tokenizer_config={"eos_token": named}, **files)
    end = TOKENIZER["added_tokens"][0]["id"] if named == "<end>" else 4
    assert checkpoint.eos == expected + [token for token in [end] if named and token not in expected]
    assert warnings == [] and json.loads(checkpoint.tokenizer) == TOKENIZER


def test_eight_end_tokens_and_no_more(made, tmp_path, capfd):
    assert made([*range(6)], generation_config={"eos_token_id": [5, 6, 7]})[0].eos == [*range(8)]
    (tmp_path / "more").mkdir()
    assert refused(tmp_path / "more", capfd, [*range(10, 18)], tokenizer=TOKENIZER,
                   tokenizer_config={"eos_token": EOS}) == (
        "tokenizer_config.json: eos_token='</s>' is one token more that ends a text than 8, expected at most 8 in "
        "config.json, generation_config.json and tokenizer_config.json together; leave one out")


@pytest.mark.parametrize("files", [{}, {"tokenizer": TOKENIZER}])
def test_an_end_token_that_is_none(made, files):
    checkpoint, warnings = made(2, tokenizer_config={"eos_token": "<eot>"}, **files)
    assert checkpoint.eos == [2]
    assert warnings == [("tokenizer_config.json: eos_token='<eot>', expected a token of tokenizer.json; no text ends "
                        "there")]


@pytest.mark.parametrize("vocab", [VOCAB, [[text, -1.0] for text in VOCAB]])
def test_tokens_beyond_the_embedding(made, vocab):
    added = [{"id": 5, "content": "<end>"}, {"id": 12, "content": "<image>"}, {"id": 11, "content": "<audio>"}]
    _, warnings = made(tokenizer={"added_tokens": added, "model": {"vocab": vocab}})
    assert warnings == [("tokenizer.json: tokens beyond vocab_size=11: 2, the first is '<audio>', 11; a prompt that "
                        "holds one is refused")]


NO_TOKENIZER = ("tokenizer.json: {} bytes that are no tokenizer.json, expected a JSON object with a vocabulary of "
                "text and numbers; download it again, or remove it")
CATALOGUE = [
    ({"eos": "</s>"}, "config.json: eos_token_id=</s>, expected token numbers; correct it"),
    ({"eos": [2, -1]}, "config.json: eos_token_id=[2, -1], expected token numbers; correct it"),
    ({"generation_config": {"eos_token_id": [True]}},
     "generation_config.json: eos_token_id=[True], expected token numbers; correct it"),
    ({"tokenizer_config": {"eos_token": 5}}, "tokenizer_config.json: eos_token=5, expected a token's text; correct it"),
    ({"tokenizer_config": {"bos_token": {"text": "x"}}},
     "tokenizer_config.json: bos_token={\"text\": \"x\"}, expected a token's text; correct it"),
    ({"tokenizer_config": {"add_bos_token": "yes"}},
     'tokenizer_config.json: add_bos_token="yes", expected true or false; correct it'),
    ({"tokenizer_config": {"add_bos_token": 1}}, ("tokenizer_config.json: add_bos_token=1, expected true or false; "
                                                 "correct it")),
    ({"tokenizer": TOKENIZER, "tokenizer_config": {"add_bos_token": True}},
     ("tokenizer_config.json: bos_token=null, expected a token of tokenizer.json below vocab_size=11 with "
     "add_bos_token=true; correct it")),
    ({"tokenizer": TOKENIZER, "tokenizer_config": {"add_bos_token": True, "bos_token": "<x>"}},
     ('tokenizer_config.json: bos_token="<x>", expected a token of tokenizer.json below vocab_size=11 with '
     "add_bos_token=true; correct it")),
    ({"tokenizer": {"added_tokens": [{"id": 11, "content": BOS}]},
      "tokenizer_config": {"add_bos_token": True, "bos_token": BOS}},
     ('tokenizer_config.json: bos_token="<s>", which is 11, expected a token of tokenizer.json below vocab_size=11 '
      'with '
     "add_bos_token=true; correct it")),
    *(({"tokenizer": wrong}, NO_TOKENIZER.format(len(json.dumps(wrong)))) for wrong in (
        [], 5, {"model": [1]}, {"model": {"vocab": 7}}, {"model": {"vocab": {"a": "1"}}}, {"model": {"vocab": [[]]}},
        {"added_tokens": [{"id": 1}]}, {"added_tokens": [{"id": 1.5, "content": "a"}]}, {"model": {"vocab": [["a"],
                                                                                                             [{}]]}},
        {"post_processor": {"single": [{"SpecialToken": {}}]}}, {"post_processor": [1]},
        {"post_processor": {"cls": 5}}))]


@pytest.mark.parametrize("files, message", CATALOGUE)
def test_catalogue(tmp_path, capfd, files, message):
    assert refused(tmp_path, capfd, **files) == message


def test_what_is_read_is_not_replaced(tmp_path, capfd):
    folder = folder_of(tmp_path / "model", mixtral_arrays(), tokenizer_config={})
    assert "or a file of it" in refusal(capfd, folder / "pytorch_model.bin", folder / "tokenizer_config.json",
                                        "--force")
