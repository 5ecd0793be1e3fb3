"""Makes the report of --inspect: what a checkpoint is, how large it becomes, whether it fits here, and what is missing.
"""

import json
import os
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from math import prod

from colibri import headers
from colibri.errors import ColibriError
from converter import bin_writer, few_bits, forms, rope, sources

GPU_DTYPES = ("f16", "bf16")  # whose products a GPU has
POSITIONS = 512  # of the session that is counted


def inspect(plan, wanted, as_json):
    """Returns the report's text, a table or JSON. wanted: a forms.Asked."""
    figures = describe(plan, wanted)
    return json.dumps(figures) if as_json else "\n".join(_lines(figures))


def describe(plan, wanted):
    """Returns the report as a dict. plan: a Plan of __main__."""
    fields, tensors = plan.fields, plan.input.tensors
    bound = sources.bind(plan.family, tensors, fields, plan.where, sources.MOE if plan.bare else None)
    masked = {**fields, **{name: headers.mask(fields[name]) for name in ("dense_layers", "window_layers")}}
    table = [tensor for tensor in headers.default().tensors(masked) if tensor.name not in rope.TENSORS]
    k = None if "--k" in plan.unknown else fields["k"]
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    choice = forms.choose(wanted, bound.sources, fields, plan.compute, plan.where, plan.unknown)
    formats = {}
    for name in (plan.compute, "fp8", "int8", "int4"):
        with suppress(ColibriError):  # where --dtype NAME is one
            other = forms.choose(forms.alike(name), bound.sources, fields, plan.compute, plan.where)
            formats[name] = _sizes(plan, other)
    total = sum(prod(tensor.shape) for tensor in table)
    idle = sum(prod(tensor.shape) for tensor in table if len(tensor.shape) == 3) * (
        fields["num_experts"] - fields["k"]) // fields["num_experts"]
    return {"family": plan.family.name, "layers": fields["num_layers"], "dense_layers": len(fields["dense_layers"]),
            "experts": fields["num_experts"], "k": k,
            "shared_ffn": fields["shared_ffn"], "hidden": fields["hidden"], "ffn": fields["ffn"],
            "heads": fields["num_heads"], "kv_heads": fields["num_kv_heads"], "head_dim": fields["head_dim"],
            "vocabulary": fields["vocab_size"], "context": fields["max_positions"],
            "rope_theta": round(float(fields["rope_theta"]), 6), "parameters": total,
            "active_parameters": k and total - idle,
            "tensors": len(tensors), "dtypes": dict(dtypes),
            "checkpoint_bytes": sum(prod(tensor.shape) * tensor.numpy_dtype.itemsize for tensor in tensors.values()),
            "bin_dtype": forms.label(choice) or plan.compute, **_sizes(plan, choice), "formats": formats,
            "end_tokens": plan.text.eos, "tokenizer": bool(plan.text.sections[0]),
            "chat_templates": list(plan.text.settings["chat_templates"]), "sampling": plan.text.settings["sampling"],
            "missing": [f"a choice of {flag}" for flag in plan.unknown] + plan.absent + bound.missing,
            "notes": choice.notes,
            "extra": bound.extra, "left_out": plan.input.left_out + bound.ignored}


def _sizes(plan, choice):
    """Returns the figures of a file in the forms of a Choice: its bytes, what it needs, and where it fits."""
    fields = {**plan.fields, **forms.header_fields(choice)}
    header, _ = bin_writer.plan(fields, *plan.text.sections)
    masked = {**fields, **{name: headers.mask(fields[name]) for name in ("dense_layers", "window_layers")}}
    needed, memory, gpu = int(header["file_bytes"]) + _state_bytes(masked), _memory_bytes(), _gpu_bytes()
    on_gpu = all(few_bits.DTYPES[form.dtype] in GPU_DTYPES for form in choice.forms.values() if form)
    return {"bin_bytes": int(header["file_bytes"]), "needed_bytes": needed, "memory_bytes": memory,
            "fits": needed <= memory, "gpu_memory_bytes": gpu, "fits_gpu": gpu and on_gpu and needed <= gpu,
            "runs_on_gpu": on_gpu}


def _lines(figures):
    def short(items):
        return (", ".join(map(str, items[:5])) + (f" and {len(items) - 5} more" if len(items) > 5 else "")) or "none"

    def gib(size):
        return f"{size} ({size / 2 ** 30:.2f} GiB)"
    fit, gpu_fit = ("yes" if figures[name] else "no" for name in ("fits", "fits_gpu"))
    rows = {"family": figures["family"],
            "layers": f"{figures['layers']}, {figures['dense_layers']} of them without experts",
            "experts": f"{figures['experts']} a layer, k={figures['k'] or 'unknown'}"
                       + (", and a shared one" if figures["shared_ffn"] else ""),
            "sizes": ", ".join(f"{name}={figures[name]}" for name in ("hidden", "ffn", "heads", "kv_heads", "head_dim",
                                                                      "vocabulary", "context", "rope_theta")),
            "parameters": f"{figures['parameters']}, {figures['active_parameters'] or 'unknown'} active for a token",
            "dtypes": ", ".join(f"{count} x {name}" for name, count in figures["dtypes"].items()),
            "checkpoint bytes": gib(figures["checkpoint_bytes"]),
            ".bin bytes": f"{gib(figures['bin_bytes'])} in {figures['bin_dtype']}",
            "with --dtype": ", ".join(f"{name} {gib(sizes['bin_bytes'])}{', too large' * (not sizes['fits'])}"
                                      for name, sizes in figures["formats"].items()),
            "fits this machine": f"{fit}: {gib(figures['needed_bytes'])} with one session, of "
                                 f"{gib(figures['memory_bytes'])}",
            "fits this GPU": "none found" if figures["gpu_memory_bytes"] is None else
                             f"{gpu_fit}: its memory is {gib(figures['gpu_memory_bytes'])}"
                             + ("" if figures["runs_on_gpu"] else ", but it runs f16 and bf16 alone"),
            "text": f"tokenizer.json {'found' if figures['tokenizer'] else 'not found'}, ends at "
                    f"{short(figures['end_tokens'])}",
            "chat templates": short(figures["chat_templates"]),
            "sampling": short([f"{name} {value}" for name, value in figures["sampling"].items()]),
            "missing": short(figures["missing"]), "extra": short(figures["extra"]),
            "left out": short(figures["left_out"])}
    return [f"{name + ':':<20}{value}" for name, value in rows.items()]


def _state_bytes(fields):
    """Returns what a library for this model would work in, with one session of POSITIONS."""
    baked = headers.default().structs["Config"].names
    own = headers.Headers({name: fields[name] for name in baked if name in fields})
    return sum(own.state_bytes(fields, 1, POSITIONS))


def _memory_bytes():
    """Returns the machine's memory, or a container's part of it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as file:
        limits.append(int(file.read()))
    return min(limits)


def _gpu_bytes():
    """Returns the first GPU's memory as its driver's own tool gives it, or None where there is none."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return None
    with suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
        told = subprocess.run([tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"], timeout=20,
                              capture_output=True, check=True, text=True)
        return int(told.stdout.split()[0]) << 20
    return None
