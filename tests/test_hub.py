"""converter/hub.py: ids of the Hugging Face Hub, by the real package from a cache, and by one that stands in for it."""

import fnmatch
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from converter_files import MIXTRAL_CONFIG, mixtral_arrays, write_pt
from test_converter import convert, refusal
from test_inputs import inspected, write_safetensors

from colibri.checkpoint import Checkpoint
from converter import hub

ARRAYS, OTHERS = mixtral_arrays(seed=3), mixtral_arrays(seed=4)
HASHES = {"main": "a" * 40, "v2": "b" * 40}


def model(folder, arrays=ARRAYS, write=write_safetensors, name="model.safetensors"):
    """A repository's files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MIXTRAL_CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    (folder / "tokenizer.json").write_text('{"some": "json"}')
    if write:
        write(folder / name, arrays)
    return folder


def expected(tmp_path):
    """The .bin of the same files in a plain folder."""
    convert(model(tmp_path / "plain"), tmp_path / "plain.bin")
    return (tmp_path / "plain.bin").read_bytes()


# The Hub's own package, offline

def cached(tmp_path):
    """A cache as the package lays it out: blobs by their hash, and links to them in a folder for each commit."""
    base = tmp_path / "cache" / "models--some-org--Some.Model"
    (base / "blobs").mkdir(parents=True)
    (base / "refs").mkdir()
    for arrays, (revision, commit) in zip((ARRAYS, OTHERS), HASHES.items()):
        (base / "refs" / revision).write_text(commit)
        folder = model(base / "snapshots" / commit, arrays)
        for file in list(folder.iterdir()):
            blob = base / "blobs" / f"{commit[0]}{file.name}"
            shutil.move(file, blob)
            file.symlink_to(os.path.relpath(blob, folder))
    return base


def run(tmp_path, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(tmp_path / "cache"),
                   "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-m", "converter", *map(str, arguments)], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, check=False)


def test_a_model_of_the_cache(tmp_path):
    cached(tmp_path)
    plain, output = expected(tmp_path), tmp_path / "a.bin"
    for name, same in (("some-org/Some.Model", True), ("some-org/Some.Model@main", True),
                       ("some-org/Some.Model@v2", False), (f"some-org/Some.Model@{HASHES['v2']}", False)):
        done = run(tmp_path, name, output, "--force")
        assert (done.returncode, done.stderr) == (0, "") and (output.read_bytes() == plain) is same
    figures = json.loads(run(tmp_path, "some-org/Some.Model", "--inspect", "--json").stdout)
    assert (figures["family"], figures["end_tokens"], figures["tokenizer"]) == ("mixtral", [3], True)


@pytest.mark.parametrize("name, error", [
    ("some-org/Other", ("no such path, not in the Hub's cache, and the Hub is not reached, expected one of them; check "
                       "name and network, unset HF_HUB_OFFLINE, or name a folder")),
    ("some-org/Some.Model@v3", ("no such path, not in the Hub's cache, and the Hub is not reached, expected one of "
                               "them; check name and network, unset HF_HUB_OFFLINE, or name a folder")),
    ("some-org/Some--Model", ("no such path, and no id of the Hugging Face Hub, expected ORG/NAME or "
                             "ORG/NAME@REVISION; check the name")),
    ("some-org/model.pt", "No such file or directory, expected a readable checkpoint file; check the path"),
    ("some/org/model", "No such file or directory, expected a readable checkpoint file; check the path")])
def test_what_the_cache_has_not(tmp_path, name, error):
    cached(tmp_path)
    for arguments in (["a.bin"], ["--inspect"]):
        done = run(tmp_path, name, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{name}: {error}\n")
    assert not (tmp_path / "a.bin").exists()


def test_a_path_goes_before_an_id(tmp_path):
    model(tmp_path / "some-org" / "Some.Model", OTHERS)
    cached(tmp_path)
    done = run(tmp_path, "some-org/Some.Model", "a.bin")
    assert done.returncode == 0 and (tmp_path / "a.bin").read_bytes() != expected(tmp_path)


# A package that stands in for it

@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A repository, of which the package in sys.modules copies what is asked for; .asked has (id, revision)."""
    monkeypatch.chdir(tmp_path)
    repository = SimpleNamespace(folder=tmp_path / "remote", local=tmp_path / "local", asked=[], error=None)

    def snapshot_download(repo_id, revision=None, allow_patterns=None):
        repository.asked.append((repo_id, revision))
        if repository.error:
            raise repository.error
        for file in repository.folder.rglob("*"):
            name = str(file.relative_to(repository.folder))
            if file.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (repository.local / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, repository.local / name)
        return str(repository.local)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    return repository


def test_only_what_is_read_is_fetched(tmp_path, remote):
    model(remote.folder)
    write_pt(remote.folder / "pytorch_model.bin", OTHERS)
    for name in ("consolidated.safetensors", "original/model.safetensors", "README.md", "model.gguf", "onnx/model.onnx",
                 "flax_model.msgpack", "tf_model.h5", "tokenizer_config.json", "chat_template.json"):
        (remote.folder / name).parent.mkdir(exist_ok=True)
        (remote.folder / name).write_bytes(b"{}")
    convert("org/name@v2", tmp_path / "a.bin")
    assert {*remote.asked} == {("org/name", "v2")}
    assert (tmp_path / "a.bin").read_bytes() == expected(tmp_path)
    assert sorted(str(file.relative_to(remote.local)) for file in remote.local.rglob("*")) == [
        "chat_template.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json"]


def test_chat_templates_are_fetched(tmp_path, remote):
    model(remote.folder)
    (remote.folder / "chat_templates").mkdir()
    for name in ("chat_template.jinja", "chat_templates/tool_use.jinja", "special_tokens_map.json"):
        (remote.folder / name).write_text('{"bos_token": "<s>"}')
    convert("org/name", tmp_path / "a.bin")
    settings = Checkpoint(tmp_path / "a.bin").settings
    assert settings.chat_templates == dict.fromkeys(("default", "tool_use"), '{"bos_token": "<s>"}')
    assert settings.special_tokens == {"bos_token": "<s>"}


@pytest.mark.parametrize("shards", [False, True])
def test_pickles_are_fetched_where_there_are_no_safetensors(tmp_path, remote, shards):
    model(remote.folder, write=None)
    if shards:
        weight_map = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(ARRAYS)}
        for shard in {*weight_map.values()}:
            write_pt(remote.folder / shard, {name: ARRAYS[name] for name in ARRAYS if weight_map[name] == shard})
        (remote.folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        write_pt(remote.folder / "pytorch_model.bin", ARRAYS)
    convert("org/name", tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == expected(tmp_path)


def test_shards_of_other_names_are_fetched_by_their_index(tmp_path, remote):
    model(remote.folder, write=None)
    weight_map = {name: f"part[{1 + i % 2}].safetensors" for i, name in enumerate(ARRAYS)}
    for shard in {*weight_map.values()}:
        write_safetensors(remote.folder / shard, {name: ARRAYS[name] for name in ARRAYS if weight_map[name] == shard})
    (remote.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert("org/name", tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == expected(tmp_path)


def test_inspect_takes_an_id(capfd, remote):
    model(remote.folder)
    assert inspected(capfd, "org/name")["family"] == "mixtral"


def test_an_adapter_and_files_of_other_programs(capfd, tmp_path, remote):
    model(remote.folder, write=None)
    (remote.folder / "model.Q4.gguf").write_bytes(b"GGUF")
    remote.local.mkdir()
    assert refusal(capfd, "org/name", tmp_path / "a.bin") == (
        "org/name: no model*.safetensors and no pytorch_model*.bin there, or not in the Hub's cache where the Hub is "
        "not "
        "reached, expected one of them; download them, or name the model itself where this holds GGUF or ONNX files\n")
    (remote.folder / "adapter_config.json").write_text("{}")
    write_safetensors(remote.folder / "adapter_model.safetensors", {"lora_A": np.ones((2, 3), "f2")})
    assert "a LoRA or other PEFT adapter" in refusal(capfd, "org/name", tmp_path / "a.bin")


def error_of(name, *bases):
    return type(name, bases or (Exception,), {})


NOT_FOUND = error_of("RepositoryNotFoundError")


@pytest.mark.parametrize("error, line", [
    (NOT_FOUND("401 Client Error\nmore"), ("no such path, and no such model on the Hugging Face Hub, expected one of "
                                           "them; check the name; a private model needs hf auth login")),
    (error_of("GatedRepoError", NOT_FOUND)("403"), ("a gated model, expected access to it; ask for it on the model's "
                                                    "page, then run hf auth login")),
    (error_of("RevisionNotFoundError")("404"), ("no such revision, expected a branch, a tag or a commit after @; check "
                                                "it")),
    (error_of("IncompleteSnapshotError", error_of("LocalEntryNotFoundError"))("x"), (
        "only a part of it is in the Hub's cache, and the Hub is not reached, expected all of it; check the network, "
        "or name a folder")),
    (OSError(28, "No space left on device"), ("OSError: [Errno 28] No space left on device, expected the model from "
                                              "the Hugging Face Hub; try again, or name a folder")),
    (error_of("ProxyError")(""), ("ProxyError: , expected the model from the Hugging Face Hub; try again, or name a "
                                 "folder")),
])
def test_errors_of_the_hub_are_one_line(capfd, tmp_path, remote, monkeypatch, error, line):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    remote.error = error
    assert refusal(capfd, "org/name", tmp_path / "a.bin") == f"org/name: {line}\n"


def test_without_the_package(capfd, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refusal(capfd, "org/name", tmp_path / "a.bin") == (
        "org/name: no such path, and no huggingface_hub to look for that model, expected one of them; pip install "
        "huggingface_hub, or git clone the model and name its folder\n")


def test_an_existing_output_is_refused_before_anything_is_fetched(capfd, tmp_path, remote):
    (tmp_path / "a.bin").write_bytes(b"old")
    assert "exists already" in refusal(capfd, "org/name", tmp_path / "a.bin") and not remote.asked


@pytest.mark.parametrize("name", ["model", "./org/name", "/org/name", "org/name/", "org/name.safetensors", "a b/c",
                                  "org/name.GGUF.gguf", "org/na me", "org/name@", "../name", ""])
def test_what_is_no_id_is_a_path(name, remote):
    assert hub.resolve(name) == name and not remote.asked
