"""Runs the converter's command line: python -m converter moe.pt moe.bin"""

import signal
import sys

from colibri.errors import ColibriError, printable
from colibri.program import Parser, choice, guard_imports, integer, number, run, writing_stdout

INTERRUPTED = "interrupted; nothing was written"

if __name__ == "__main__":  # during the imports
    guard_imports("python -m converter", INTERRUPTED)

import argparse
import contextlib
from collections import Counter, namedtuple
from pathlib import Path

import numpy as np
from tqdm import tqdm

from colibri import __version__, headers
from converter import (
    bin_writer,
    config,
    few_bits,
    forms,
    hub,
    inputs,
    inspection,
    interleave,
    mapped,
    sources,
    text_files,
    v1,
)

DESCRIPTION = "Turns a PyTorch checkpoint of a Mixture-of-Experts model into a Colibri .bin."
EXAMPLES = """\
examples:
  python -m converter Qwen3-30B-A3B/ qwen3.bin
      a Hugging Face folder: config.json, and safetensors or
      pytorch_model.bin, in shards or not
  python -m converter Qwen/Qwen3-30B-A3B@main qwen3.bin
      a model of the Hugging Face Hub, with or without a revision
  python -m converter mixtral.pt mixtral.bin
      with mixtral.json or config.json beside it
  python -m converter Qwen3-30B-A3B/ --inspect
      what it is, how large it becomes, whether it fits here, what is missing
  python -m converter moe.pt moe.bin --k 2 --activation gelu --renormalize
      a stack of MoE layers without a config file
  python -m converter moe.pt moe.bin --dry-run
      what would be written: bytes, memory, tensors
  python -m converter moe.pt layer3.bin --format v1 --layer 3 \\
      --k 2 --activation gelu --renormalize
      one layer in the version 1 format
  python -m converter old-v1.bin new.bin --hidden 4096 --ffn 14336 \\
      --activation gelu --renormalize
      a version 1 file made version 2

Nothing in the checkpoint is executed, memory stays below 256 MiB plus the
largest matrix, and the output appears complete or not at all. Exit status:
0 done, 2 an error (one line on stderr), 130 interrupted.
"""

FORMATS = ("v2", "v1")
INTERPRETER_BYTES = 24 << 20  # anonymous memory of Python with numpy
TENSOR_BYTES = 4 << 10        # of one tensor's description while the checkpoint is read


def parser():
    p = Parser("converter", description=DESCRIPTION, epilog=EXAMPLES)
    p.add_argument("checkpoint", help="a .pt of torch.save, a .safetensors, a Hugging Face or DeepSpeed-MoE folder, a "
                   "version 1 .bin, or the id of a model on the Hugging Face Hub")
    p.add_argument("output", nargs="?", help="the .bin to write")
    p.add_argument("--config", metavar="FILE",
                   help="config.json of the model (default: NAME.json, then config.json, beside the checkpoint)")
    p.add_argument("--k", type=integer(), help="experts per token")
    p.add_argument("--activation", help="silu, gelu (exact) or relu")
    p.add_argument("--renormalize", action=argparse.BooleanOptionalAction,
                   help="divide the k weights by their sum, or not")
    p.add_argument("--num-groups", type=integer(), help="groups of experts, of which a token chooses some (default: 1)")
    p.add_argument("--topk-groups", type=integer(), help="groups that a token may choose from (default: 1)")
    p.add_argument("--routed-scaling", type=number(), help="factor of the k weights (default: 1)")
    names = "|".join(forms.DTYPES_ASKED)
    p.add_argument("--dtype", type=choice(forms.DTYPES_ASKED), default="keep", metavar=names,
                   help="of the matrices (default: keep the checkpoint's, exactly; float64 becomes f32). int4: the "
                        "experts, with int8 beside them")
    p.add_argument("--expert-dtype", type=choice(forms.DTYPES_ASKED), metavar="DTYPE",
                   help="of the experts' matrices alone")
    p.add_argument("--dense-dtype", type=choice(forms.DTYPES_ASKED), metavar="DTYPE",
                   help="of all others; with int4, embedding and LM head are int8")
    p.add_argument("--group", type=choice(("32", "64", "128")), metavar="32|64|128",
                   help="columns of a row that share a scale in int4 and int8 (default: 64, or the checkpoint's)")
    p.add_argument("--format", type=choice(FORMATS), default="v2", metavar="|".join(FORMATS),
                   help="v1: one layer, f16, 2-matrix experts (default: v2)")
    p.add_argument("--layer", type=integer(), help="the layer that --format v1 writes")
    p.add_argument("--hidden", type=integer(), help="hidden size of a version 1 input")
    p.add_argument("--ffn", type=integer(),
                   help="rows of an expert's up matrix, of a version 1 input and of experts joined in Megatron's "
                        "weight1")
    p.add_argument("--inspect", action="store_true", help="say what the checkpoint is, and write nothing")
    p.add_argument("--json", action="store_true", help="with --inspect: as JSON")
    p.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")
    p.add_argument("--force", action="store_true", help="replace an existing output")
    p.add_argument("--version", action="version", version=f"colibri {__version__}")
    return p


# What a checkpoint is: everything that its conversion depends on.
Plan = namedtuple("Plan", "input family fields bare where config text renamed unknown absent compute")


def understand(options):
    """Returns the Plan of a checkpoint, before its tensors are sorted."""
    flags = {field: getattr(options, field) for field in config.ASKED}
    settings = config.load(options.config, options.checkpoint)
    unknown, absent = ([], []) if options.inspect else (None, None)  # --inspect lists what is otherwise an error
    if v1.is_v1(options.checkpoint):
        others = config.missing_flags(settings, flags, ["activation", "renormalize"])
        tensors, flags["k"] = v1.read(options.checkpoint, options.hidden, options.ffn, options.k, others)
        found = inputs.Input(tensors, [], [], {})
    else:
        found = inputs.read(options.checkpoint, absent)
        if options.hidden is not None or (options.ffn is not None and not sources.are_joined(found.tensors)):
            raise ColibriError("--hidden, --ffn",
                               "only for a version 1 .bin, which has no dimensions, and --ffn for experts joined "
                               "in weight1", fix="drop them")
    tensors = sources.stripped(found.tensors, options.checkpoint)
    renamed = len(tensors.keys() - found.tensors.keys())
    bare = "model_type" not in settings.values
    if bare:
        family, sizes = _bare_family(tensors, found.lost, options.checkpoint)
        fields = config.bare_fields(family, sizes, settings, flags, unknown)
        if sources.are_joined(tensors) and fields["num_experts"]:
            sources.check_joined(fields, options.ffn or settings.get(config.SIZES["ffn"]), options.checkpoint, unknown)
        found.warnings.extend(sources.doubts(family, settings, flags, options.checkpoint))
    else:
        family, fields = sources.header_fields(settings)
        config.check_flags(fields, settings, flags)
    inputs.check_lost(sources.needed(sources.stripped(found.lost, options.checkpoint), family, fields), absent)
    config.check_limits(fields, settings.where or options.checkpoint)
    text = text_files.read(None if bare else settings.where, fields["vocab_size"])
    found.warnings.extend(text.warnings)
    fields.update(text.fields)
    return Plan(found._replace(tensors=tensors), family, fields, bare, options.checkpoint, settings.where, text,
                renamed, unknown, absent, forms.compute_dtype(settings, tensors))


def _bare_family(tensors, lost, where):
    """Returns sources.bare_family's answer. Where it finds no family, a lost tensor is named first, since it may be
    why.
    """
    try:
        return sources.bare_family(tensors, where)
    except ColibriError:
        inputs.check_lost(lost, None)
        raise


def convert(options):
    """Does what the options ask for: checks them, reads the checkpoint, then reports or writes."""
    _check_options(options)
    mapped.forget()
    if not (options.inspect or options.dry_run):
        bin_writer.check_output(Path(options.output), options.force)
    options.checkpoint = hub.resolve(options.checkpoint)
    plan = understand(options)
    if options.inspect:
        return say(inspection.inspect(plan, forms.asked(options), options.json))
    output = Path(options.output)
    if output.is_file() and inputs.is_input(output, Path(options.checkpoint), plan.config):
        raise ColibriError(output, "is the checkpoint itself or a file of it", fix="choose another output")
    fields, family = plan.fields, plan.family
    bound = sources.sources(family, plan.input.tensors, fields, plan.where, sources.MOE if plan.bare else None)
    for warning in plan.input.warnings:
        say(" ".join(warning.splitlines()), sys.stderr)
    if options.format == "v1":
        return v1.convert(family, fields, bound, options)
    if options.layer is not None:
        raise ColibriError("--layer", options.layer, "only with --format v1", "drop it")
    choice = forms.choose(forms.asked(options), bound.sources, fields, plan.compute, plan.where)
    for note in choice.notes:
        say(note, sys.stderr)
    fields.update(forms.header_fields(choice))
    header, directory = bin_writer.plan(fields, *plan.text.sections)
    label = forms.label(choice)
    if options.dry_run:
        return say(_report(plan, header, directory, label, bound.ignored))

    kinds = {tensor.name: tensor.type for tensor in headers.default().tensors(header)}

    def contents(name):
        return _contents(name, bound.sources[name], header, kinds[name])
    with (bin_writer.replacing(output, int(header["file_bytes"]), options.force) as file,
          progress_bar(int(directory["bytes"].sum()), output) as bar):
        bin_writer.write(file, header, directory, contents, bar.update, plan.text.sections)
        sources.check_storages(bound.sources)
    left_out = plan.input.left_out + bound.ignored
    say(f"{output}: {int(header['file_bytes'])} bytes, {len(directory)} tensors, {family.name}, "
          f"{_count(fields['num_layers'], 'layer')} of {_count(fields['num_experts'], 'expert')}, k={fields['k']}, "
          f"{label}"
          + (f"; left out: {', '.join(left_out[:8])}{' ...' if len(left_out) > 8 else ''}" if left_out else ""))


def say(text, file=None):
    """Prints lines without the control characters that names from a checkpoint may hold."""
    with contextlib.nullcontext() if file else writing_stdout():
        print("\n".join(map(printable, text.split("\n"))), file=file)


def _check_options(options):
    if options.json and not options.inspect:
        raise ColibriError("--json", "given", "only with --inspect", "drop it")
    if options.inspect and options.output:
        raise ColibriError(options.output, "an output with --inspect, which writes nothing", fix="drop one of them")
    few = [name for name in ("expert_dtype", "dense_dtype", "group") if getattr(options, name)]
    if options.format == "v1" and few:
        raise ColibriError(f"--{few[0].replace('_', '-')}", getattr(options, few[0]),
                           "none with --format v1, which is f16", "drop it")
    if not options.inspect and not options.output:
        parser().error("the following arguments are required: output")


def progress_bar(num_bytes, output):
    """Returns a bar that shows on a terminal only, so that a log or a pipe gets errors alone."""
    return tqdm(total=num_bytes, desc=str(output), unit="B", unit_scale=True, disable=None, leave=False)


def _count(number, what):
    return f"{number} {what}" + ("s" if number != 1 else "")


def _contents(name, experts, header, kind):
    """Returns (the scale of a tensor, its stored arrays)."""
    if len(experts[0][0].shape) == 1:
        return 0, interleave.vector(experts)
    form, gated = headers.form_of(kind, header), headers.is_gated(name, header)
    if headers.is_few(form.dtype):
        return few_bits.content(experts, form, gated)
    return 0, interleave.panels(experts, few_bits.DTYPES[form.dtype], gated)


def _report(plan, header, directory, dtype, ignored):
    """Returns the dry run's text."""
    prefixes = f" ({plan.renamed} names without their prefix)" if plan.renamed else ""
    lines = [f"family: {plan.family.name}{prefixes}"]
    census = Counter((sources.template(name), tensor.shape, tensor.dtype)
                     for name, tensor in plan.input.tensors.items())
    lines += [f"  {count:6} x {name} {list(shape)} {kind}" for (name, shape, kind), count in census.items()]
    lines += [f"  left out: {name}" for name in plan.input.left_out + ignored]
    widest = max(int(entry["shape"][entry["rank"] - 1]) for entry in directory if entry["rank"] > 1)
    peak = (INTERPRETER_BYTES + TENSOR_BYTES * len(plan.input.tensors)
            + 2 * bin_writer.BATCH_BYTES + 6 * 8 * interleave.PANEL_ROWS * widest)  # blocks of 64 rows
    lines.append("model: " + ", ".join(f"{name}={np.array(header[name]).item()}" for name in (
        "num_layers", "num_experts", "k", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab_size")))
    lines.append(f"would write: {int(header['file_bytes'])} bytes, {len(directory)} tensors, {dtype}")
    lines.append(f"peak memory: about {peak >> 20} MiB")
    return "\n".join(lines)


def main(arguments=None):
    """Runs the command line and returns the exit status."""
    return run(lambda: convert(parser().parse_args(arguments)), INTERRUPTED, (signal.SIGTERM, signal.SIGHUP))


if __name__ == "__main__":
    sys.exit(main())
