"""Reads what a config.json says of quantized weights, and refuses by name what Colibri cannot keep."""

from collections import namedtuple

from converter.values import Values

# method: of quantization_config, or None. bits: the widths of packed integers. groups: how many columns share a scale,
# 0 for a whole row. block: how many rows and columns share one fp8 scale. zero_offset: what is added to a stored zero
# point.
Scheme = namedtuple("Scheme", "method bits groups block zero_offset")
NONE = Scheme(None, (), (), [128, 128], 0)
METHODS = {}


def scheme(c):
    """Returns the Scheme of a model. c: its config's Values."""
    key = "compression_config" if "quantization_config" not in c.values else "quantization_config"
    c.accept(f"{key}.quant_method", [*METHODS])
    if key not in c.values or c.values[key] is None:
        return NONE
    q = Values(c.values[key], c.where, f"{key}.")
    return METHODS[q.need("quant_method", str)](q)


def method(name):
    """Adds a quant_method to the table."""
    def add(read):
        METHODS[name] = read
        return read
    return add


@method("fp8")
def fp8(q):
    q.accept("fmt", ["e4m3", "float8_e4m3fn"])
    return NONE._replace(method="fp8", block=_block(q, "weight_block_size"))


@method("mxfp4")
def mxfp4(q):
    return NONE._replace(method="mxfp4")


@method("gptq")
def gptq(q):
    q.accept("bits", [4, 8])
    for key in ("checkpoint_format", "format"):
        q.accept(key, ["gptq", "gptq_v2"])
    q.accept("is_marlin_format", [False])
    q.accept("pack_dtype", ["int32"])
    layout = q.get("checkpoint_format|format", str, "gptq")
    return NONE._replace(method="gptq", bits=(q.need("bits"),), groups=_group(q), zero_offset=int(layout == "gptq"))


@method("awq")
def awq(q):
    q.accept("bits", [4])
    for key in ("version", "checkpoint_format", "format"):
        q.accept(key, ["gemm", "GEMM"])
    q.accept("zero_point", [True])
    q.accept("pack_dtype", ["int32"])
    return NONE._replace(method="awq", bits=(4,), groups=_group(q))


@method("compressed-tensors")
def compressed_tensors(q):
    q.accept("quantization_status", ["compressed"])
    formats = ["pack-quantized", "float-quantized"]
    q.accept("format", [*formats, "mixed-precision"])
    q.accept("sparsity_config.format", ["dense"])
    if q.get("transform_config", dict, {}).get("config_groups"):
        raise q.bad("transform_config", q.values["transform_config"], "none, since its rotations are not supported")
    bits, groups, block = set(), set(), NONE.block
    for name, values in q.get("config_groups", dict, {}).items():
        if type(values) is not dict:
            raise q.bad("config_groups", q.values["config_groups"], "an object of objects")
        group = Values(values, q.where, f"{q.prefix}config_groups.{name}.")
        group.accept("format", formats)
        if group.get("format", str, q.get("format", str)) == "float-quantized":
            group.accept("weights.type", ["float"])
            group.accept("weights.num_bits", [8])
            block = _block(group, "weights.block_structure")
        else:
            group.accept("weights.type", ["int"])
            group.accept("weights.num_bits", [4, 8])
            group.accept("weights.strategy", ["group", "channel"])
            bits.add(group.need("weights.num_bits"))
        groups.add(_group(Values(group.get("weights", dict, {}), q.where, f"{group.prefix}weights."))[0])
    return NONE._replace(method="compressed-tensors", bits=tuple(sorted(bits)), groups=tuple(sorted(groups)),
                         block=block)


def _group(q):
    """Returns group_size as the only one, 0 for -1, which a config may give for a whole row."""
    size = q.values.get("group_size")
    return (0,) if size in (-1, None) else (q.need("group_size"),)


def _block(q, key):
    block = q.get(key, list, NONE.block)
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise q.bad(key, block, "two sizes")
    return block
