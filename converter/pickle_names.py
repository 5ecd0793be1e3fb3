"""Lists what a checkpoint's pickle may name: how torch rebuilds tensors, and metadata of training, which is dropped.

Each name stands for an inert token. Nothing is imported, and a call is a few steps here, whatever its arguments are.
"""

from collections import namedtuple

from converter.zip_reader import shown

MAX_METADATA = 16  # keys of a tensor's metadata, more than torch writes

StorageRef = namedtuple("StorageRef", "dtype key numel view_offset view_numel")
# A tensor as the pickle describes it. problem: why it cannot be read, or None. negated: its numbers are minus those of
# its storage.
Rebuilt = namedtuple("Rebuilt", "problem storage offset shape strides dtype negated", defaults=[None] * 5 + [False])
Opaque = namedtuple("Opaque", "what")  # an object whose contents are dropped
StorageType = namedtuple("StorageType", "dtype")
DType = namedtuple("DType", "name")
Inert = namedtuple("Inert", "name")
Function = namedtuple("Function", "build")  # build(*arguments): the value of a call
Class = namedtuple("Class", "build")  # build(): an empty instance

STORAGES = {"FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
            "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16",
            "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
            "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128", "QInt8Storage": "qint8",
            "QUInt8Storage": "quint8", "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2",
            "QUInt2x4Storage": "quint2x4"}
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
          "uint64", "bool", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "quint4x2", "quint2x4")
# The classes of plain tensors, and other constants of torch.
TENSOR_CLASSES = {("torch", "Tensor"), ("torch._tensor", "Tensor"), ("torch.nn.parameter", "Parameter"),
                  ("torch.nn.parameter", "Buffer")}
CONSTANTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "per_tensor_affine",
             "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric", "per_channel_affine_float_qparams")
# Functions of torch that rebuild what is no plain block of numbers.
PROBLEMS = {"_rebuild_meta_tensor_no_storage": "a meta tensor", "_rebuild_qtensor": "a quantized tensor",
            "_rebuild_sparse_tensor": "a sparse tensor", "_rebuild_sparse_csr_tensor": "a sparse tensor",
            "_rebuild_nested_tensor": "a nested tensor", "_rebuild_wrapper_subclass": "a tensor subclass",
            "_rebuild_device_tensor_from_numpy": "a tensor of another device",
            "_rebuild_xla_tensor": "a tensor of another device"}

# Modules of Python 2, and modules that have moved -> the names used here.
MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "pathlib._local": "pathlib",
           "numpy._core.multiarray": "numpy.core.multiarray", "numpy._core.numeric": "numpy.core.numeric",
           "lightning.fabric.utilities.data": "lightning_fabric.utilities.data",
           "lightning.pytorch.callbacks.model_checkpoint": "pytorch_lightning.callbacks.model_checkpoint",
           "lightning.pytorch.callbacks.early_stopping": "pytorch_lightning.callbacks.early_stopping"}
# Classes, and functions that make an object. No such object can hold the model, so each is dropped whole.
DROPPED = {
    "_codecs": "encode", "_io": "BytesIO StringIO", "argparse": "Namespace", "collections": "Counter deque",
    "builtins": "Ellipsis bool bytearray bytes complex float frozenset int list long object range set slice str "
                "tuple unicode xrange",
    "datetime": "date datetime time timedelta timezone", "decimal": "Decimal", "fractions": "Fraction",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath", "types": "SimpleNamespace",
    "uuid": "SafeUUID UUID",
    "numpy": "bool_ complex128 complex64 dtype float16 float32 float64 int16 int32 int64 int8 str_ uint16 uint32 "
             "uint64 uint8",
    "numpy.core.multiarray": "scalar",
    "numpy.random": "__RandomState_ctor", "numpy.random._mt19937": "MT19937", "numpy.random._pcg64": "PCG64",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence", "re": "_compile",
    "torch": "device", "torch.serialization": "_get_layout", "torch.torch_version": "TorchVersion",
    "accelerate.utils.dataclasses": "DistributedType",
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum", "deepspeed.utils.tensor_fragment": "fragment_address",
    "megatron.core.enums": "ModelType",
    "megatron.core.transformer.enums": "AttnBackend AttnMaskType AttnType LayerType",
    "megatron.model.enums": "AttnMaskType AttnType LayerType ModelType PositionEmbeddingType",
    "omegaconf.base": "ContainerMetadata Metadata", "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.nodes": "AnyNode BooleanNode BytesNode EnumNode FloatNode IntegerNode PathNode StringNode",
    "pytorch_lightning.callbacks.early_stopping": "EarlyStopping",
    "pytorch_lightning.callbacks.model_checkpoint": "ModelCheckpoint",
    "transformers.trainer_utils": "EvaluationStrategy HubStrategy IntervalStrategy SaveStrategy SchedulerType",
    "transformers.training_args": "OptimizerNames", "typing": "Any"}
# Subclasses of dict, whose items pickle writes as a dict's.
DICTS = {"addict.addict": "Dict", "collections": "defaultdict", "easydict": "EasyDict",
         "lightning_fabric.utilities.data": "AttributeDict", "pytorch_lightning.utilities.parsing": "AttributeDict",
         "yacs.config": "CfgNode"}
TENSOR, OBJECT, NUMPY_ARRAY = Inert("Tensor"), Opaque("an object"), Opaque("a numpy array")


def token(module, name):
    """Returns the token of a name, or None where it is not on the list."""
    return ALLOWED.get((MODULES.get(module, module), name))


def key_of(key):
    """Returns a dict key that is cheap to hash. A tuple is replaced: it could be a tower of shared tuples."""
    return key if type(key) in (str, int, float, bool, bytes, type(None)) else object()


def _tensor(storage, offset, shape, strides):
    return Rebuilt(None, storage, offset, shape, strides)


def _tensor_v2(storage, offset, shape, strides, requires_grad=False, hooks=None, metadata=None):
    return _with_bits(Rebuilt(None, storage, offset, shape, strides), metadata)


def _tensor_v3(storage, offset, shape, strides, requires_grad, hooks, dtype, metadata=None):
    if type(dtype) is not DType:
        raise TypeError
    return _with_bits(Rebuilt(None, storage, offset, shape, strides, dtype.name), metadata)


def _with_bits(rebuilt, metadata):
    """Returns the tensor as its metadata has it: {"neg": True} makes it a view that negates its storage."""
    if metadata is None:
        return rebuilt
    if type(metadata) is not dict or len(metadata) > MAX_METADATA:
        return Rebuilt("a tensor with metadata that is not torch's")
    bits = [key for key, value in metadata.items() if value]
    unknown = [key for key in bits if key != "neg"]
    if unknown:
        return Rebuilt(f"a tensor with the {shown(str(unknown[0]))} bit")
    return rebuilt._replace(negated=bool(bits))


def _parameter(data, *rest):
    if type(data) is not Rebuilt:
        raise TypeError
    return data


def instance(kind, *arguments):
    """Returns an empty instance of a class. That of a dict gets its items later, never by arguments."""
    if type(kind) is not Class or kind.build is dict and any(type(a) in (dict, list, tuple) for a in arguments):
        raise TypeError
    return kind.build()


def _ordered_dict(pairs=()):
    if type(pairs) is dict:
        return dict(pairs)
    if any(type(pair) not in (list, tuple) for pair in pairs):
        raise TypeError
    return {key_of(key): value for key, value in pairs}


def _opaque(*rest):
    return OBJECT


def _problem(what):
    return Function(lambda *rest: Rebuilt(what))


ORDERED_DICT = Function(_ordered_dict)
PARAMETER_WITH_STATE = Function(_parameter)
FROM_TYPE = Function(None)  # calls another function, for a tensor with attributes or of a subclass
ALLOWED = {
    **{(module, name): Class(_opaque) for module, line in DROPPED.items() for name in line.split()},
    **{(module, name): Class(dict) for module, line in DICTS.items() for name in line.split()},
    **{("torch._utils", name): _problem(what) for name, what in PROBLEMS.items()},
    **{("torch", name): StorageType(dtype) for name, dtype in STORAGES.items()},
    **{("torch", name): DType(name) for name in DTYPES},
    **{("torch", name): Inert(name) for name in CONSTANTS},
    **dict.fromkeys(TENSOR_CLASSES, TENSOR),
    ("builtins", "dict"): ORDERED_DICT,
    ("collections", "OrderedDict"): ORDERED_DICT,
    ("copyreg", "_reconstructor"): Function(instance),
    ("copyreg", "__newobj__"): Function(instance),
    ("numpy", "ndarray"): Class(lambda: NUMPY_ARRAY),
    ("numpy.core.multiarray", "_reconstruct"): Function(lambda *rest: NUMPY_ARRAY),
    ("numpy.core.numeric", "_frombuffer"): Function(lambda *rest: NUMPY_ARRAY),
    ("torch", "Size"): Function(lambda shape=(): shape),
    ("torch._utils", "_rebuild_tensor"): Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Function(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Function(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Function(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): PARAMETER_WITH_STATE,
    ("torch._tensor", "_rebuild_from_type_v2"): FROM_TYPE,
    ("torch.nested._internal.nested_tensor", "NestedTensor"): _problem("a nested tensor"),
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): _problem("a nested tensor"),
    ("torch.nn.parameter", "UninitializedParameter"): _problem("an uninitialized parameter"),
    ("torch.storage", "UntypedStorage"): StorageType("uint8"),
}
