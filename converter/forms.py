"""Chooses how each class of matrices is stored: the experts', the dense ones, and embedding and LM head."""

from collections import Counter, namedtuple

from colibri import headers
from colibri.errors import ColibriError
from colibri.headers import Form
from converter import few_bits, interleave
from converter.few_bits import CODES, DTYPES
from converter.tensor import Quantized

WIDE = ("f16", "bf16", "f32")
DTYPES_ASKED = ("keep", "int4", "int8", "fp8", *WIDE)
GROUPS = (128, 64, 32)
CLASSES = {"expert": "experts", "dense": "dense matrices", "embed": "embedding and LM head"}
# forms: {class: Form, or None where there are no such matrices}. compute: the dtype of operands beside few bits.
Choice = namedtuple("Choice", "forms compute notes")
# What the options ask for: a dtype for each class, and a group or None.
Asked = namedtuple("Asked", "expert dense embed group")


def asked(options):
    """Returns the Asked of the command line's options."""
    dense = options.dense_dtype or ("int8" if options.dtype == "int4" else options.dtype)
    group = int(options.group) if options.group else None
    found = Asked(options.expert_dtype or options.dtype, dense, "int8" if dense == "int4" else dense, group)
    if found.group and not {"keep", "int4", "int8"} & {found.expert, found.dense}:
        raise ColibriError("--group", found.group, "only with matrices in int4 or int8", "drop it")
    return found


def alike(dtype):
    """Returns the Asked of --dtype alone."""
    return Asked(dtype, "int8" if dtype == "int4" else dtype, "int8" if dtype == "int4" else dtype, None)


def choose(wanted, sources, fields, compute, where, unknown=None):
    """Returns the Choice for a checkpoint's matrices.

    wanted: an Asked. sources: those of a Bound. compute: the checkpoint's own 16-bit dtype. unknown: a list that gets
    the options of choices which nothing settles; without a list, such a choice is an error.
    """
    kinds = {tensor.name: tensor.type.removesuffix("_t") for tensor in headers.default().tensors(
        {**fields, "dense_layers": headers.mask(fields["dense_layers"])})}
    matrices, notes, forms = {name: [] for name in CLASSES}, [], {}
    for name, experts in sources.items():
        if kinds[name] in CLASSES:
            matrices[kinds[name]] += [tensor for parts in experts for tensor in parts]
    for name in CLASSES:
        dtype, forms[name] = getattr(wanted, name), None
        if matrices[name]:
            forms[name] = _form(name, dtype, wanted.group, matrices[name], compute, where, notes, unknown)
        elif name in kinds.values():  # all of them missing
            forms[name] = _plain_form(compute if dtype == "keep" else dtype, wanted.group)
    return Choice(forms, compute, notes)


def _form(name, dtype, group, matrices, compute, where, notes, unknown):
    """Returns the Form of one class of matrices."""
    if dtype in WIDE:
        return _plain_form(dtype)
    kinds = Counter(tensor.dtype if isinstance(tensor, Quantized) else "wide" for tensor in matrices)
    if len(kinds) == 1 and "wide" not in kinds and dtype in ("keep", *kinds):
        return _kept_form(next(iter(kinds)), group, matrices, where)
    if dtype != "keep":
        form = _plain_form(dtype, group)
        twice = [tensor for tensor in matrices if isinstance(tensor, Quantized) and not few_bits.is_kept(tensor, form)]
        if twice:
            notes.append(f"{where}: {twice[0].name}: {twice[0].dtype}, is rounded a second time, to {dtype}, with "
                         f"{len(twice) - 1} more")
        return form
    if kinds.keys() != {"wide"}:
        few = next(tensor for tensor in matrices if isinstance(tensor, Quantized))
        other = next(tensor for tensor in matrices if tensor.dtype != few.dtype)
        notes.append(f"{where}: {few.name}: {few.dtype}, but {other.name}: {other.dtype}: all of the {CLASSES[name]} "
                     f"become {compute}")
        return _plain_form(compute)
    return _plain_form(_shared_dtype(matrices, where, unknown))


def _plain_form(dtype, group=None):
    """Returns the Form of wide weights, or of weights that are searched for."""
    return Form(CODES[dtype], 0 if dtype in WIDE else 128 if dtype == "fp8" else group or 64, 0)


def _kept_form(dtype, group, matrices, where):
    """Returns the Form that holds all of the matrices, which are of one dtype of few bits, as they are."""
    groups = {"fp8": (128,), "mxfp4": (32,)}.get(dtype) or ((group,) if group else GROUPS)
    for size in groups:
        if all(few_bits.fits(tensor, size) for tensor in matrices):
            zeros = dtype in ("int4", "int8") and any(tensor.needs_zeros for tensor in matrices)
            return Form(CODES[dtype], size, int(zeros))
    tensor = next(tensor for tensor in matrices if not few_bits.fits(tensor, groups[-1]))
    raise ColibriError(where, f"{tensor.name}: {dtype} in groups of {tensor.group} columns",
                       f"a multiple of {groups[-1]}, or a whole row",
                       "leave --group out" if group in GROUPS[:2] else few_bits.NO_CHOICE)


def _shared_dtype(matrices, where, unknown):
    """Returns the dtype that wide matrices share."""
    counts = Counter(interleave.KEPT[tensor.dtype] for tensor in matrices)
    kept = interleave.KEPT[matrices[0].dtype]
    other = next((tensor for tensor in matrices if interleave.KEPT[tensor.dtype] != kept), None)
    if other is None:
        return kept
    if unknown is None:
        raise ColibriError(where, f"{other.name}: dtype={other.dtype}", f"{matrices[0].dtype} as in {matrices[0].name}",
                           "choose one with --dtype")
    unknown += ["--dtype"] * ("--dtype" not in unknown)
    return counts.most_common(1)[0][0]


def compute_dtype(settings, tensors):
    """Returns a checkpoint's own 16-bit dtype: as its config says, or as most of its tensors are, or f16.

    settings: the config's Values.
    """
    named = settings.values.get("torch_dtype") or settings.values.get("dtype")
    counts = Counter(interleave.FLOATS.get(tensor.dtype) for tensor in tensors.values())
    most = max(("f16", "bf16"), key=lambda name: counts[name])
    named = interleave.FLOATS.get(str(named).removeprefix("torch."))
    return named if named in ("f16", "bf16") else most


def header_fields(choice):
    """Returns the fields of BinHeader that say how matrices are stored."""
    forms = choice.forms
    is_few = any(form and headers.is_few(form.dtype) for form in forms.values())
    first = next((form.dtype for form in forms.values() if form), CODES[choice.compute])
    usual = Form(CODES[choice.compute] if is_few else first, 0, 0)
    fields = {"weight_dtype": usual.dtype, "compute_dtype": is_few * (CODES[choice.compute] + 1)}
    dense = forms["dense"] or usual
    for name, form, default in (("expert", forms["expert"], usual), ("dense", dense, usual),
                                ("embed", forms["embed"], dense)):
        form = form if form and form != default else Form(-1, 0, 0)
        fields.update({f"{name}_dtype": form.dtype + 1, f"{name}_group": form.group,
                       f"{name}_zero_points": form.zero_points})
    return fields


def label(choice):
    """Returns how matrices are stored in words: "bf16", "int4 (groups of 64), but bf16 beside the experts"."""
    texts = {name: _text(form) for name, form in choice.forms.items() if form}
    expert, dense, embed = (texts.get(name) for name in CLASSES)
    others = [f"but {dense} beside the experts"] if expert and dense and dense != expert else []
    others += [f"{embed} in embedding and LM head"] if embed and embed != (dense or expert) else []
    return ", ".join([expert or dense or embed, *others])


def _text(form):
    extra = [f"groups of {form.group}"] * (DTYPES[form.dtype] in ("int4", "int8")) + ["zero points"] * form.zero_points
    return DTYPES[form.dtype] + (f" ({', '.join(extra)})" if extra else "")
