"""Read the one sort of pickle that PyTorch writes for a state dict, without running any of it.

`pickletools` only reads the arguments of opcodes; each one, and each global that is named, must be
on the short list below before the first is followed. Nothing is imported or called: globals are
names, and what they would build is a plain record. Used by `torch_file`.
"""

import pickletools
from collections.abc import Iterator
from io import BytesIO
from typing import Any, NamedTuple

from swiftjax.errors import CheckpointError

MAX_PICKLE_BYTES = 16 * 2**20  # a thousand tensors take about 100 kB

ORDERED_DICT = "collections OrderedDict"
REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
REBUILD_PARAMETER = "torch._utils _rebuild_parameter"
STORAGES = {  # numpy's names
    "torch DoubleStorage": "float64",
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}
GLOBALS = {ORDERED_DICT, REBUILD_TENSOR, REBUILD_PARAMETER, *STORAGES}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
NUMBERS_AND_TEXT = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"}
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
PUTS, GETS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
OPCODES = {
    *CONSTANTS, *NUMBERS_AND_TEXT, *SHORT_TUPLES, *PUTS, *GETS,
    "PROTO", "MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "GLOBAL", "BINPERSID",
    "REDUCE", "BUILD", "SETITEM", "SETITEMS", "APPEND", "APPENDS", "STOP",
}  # fmt: skip


_BY_CODE = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}


class Global(NamedTuple):
    """A name of the short list, as the pickle spells it: module, space, name."""

    name: str


class Storage(NamedTuple):
    """A file of the archive: `numel` values of one type."""

    key: str
    dtype: str
    numel: int


class StridedView(NamedTuple):
    """A tensor: where it begins in its storage, and its strides; all in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Mark:
    pass


def read_state_dict(data: bytes, where: str) -> dict[str, StridedView]:
    """Give the tensors of a pickled state dict by name.

    Raises CheckpointError naming the first opcode or global that is not on the list, and for
    whatever else is wrong.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{where} has {len(data)} bytes; at most {MAX_PICKLE_BYTES} are read")
    try:
        for _ in _opcodes(data, where):
            pass  # all of them are on the list
        value = _follow(_opcodes(data, where))
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{where} is no pickled state dict: {error!s:.200}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a {type(value).__name__}, not a dict of tensors")
    for name, tensor in value.items():
        if not isinstance(tensor, StridedView):
            raise CheckpointError(
                f"{where}: entry {name:.200} is no tensor but a {type(tensor).__name__}; only a "
                "plain state dict is read"
            )
    return value


def _opcodes(data: bytes, where: str) -> Iterator[tuple[str, Any]]:
    """Opcodes up to the first STOP; one that is not on the list is refused before it is read."""
    stream = BytesIO(data)
    while code := stream.read(1):
        opcode = _BY_CODE.get(code)
        if opcode is None:
            raise ValueError(f"no opcode is {code!r}")
        if opcode.name not in OPCODES:
            raise CheckpointError(_refused(where, f"the opcode {opcode.name}"))
        if opcode.name == "GLOBAL":
            yield opcode.name, _read_global(stream, where)
        else:
            yield opcode.name, None if opcode.arg is None else opcode.arg.reader(stream)
        if opcode.name == "STOP":
            return


def _read_global(stream: BytesIO, where: str) -> str:
    """Two lines as they are: `pickletools` would look for escapes in them."""
    name = b" ".join(stream.readline().removesuffix(b"\n") for _ in range(2)).decode("latin-1")
    if name not in GLOBALS:
        raise CheckpointError(_refused(where, f"{name!r:.200}"))
    return name


def _refused(where: str, what: str) -> str:
    return (
        f"{where} asks for {what}, which a dict of tensors does not need and which could run code: "
        "it is not read. Give safetensors instead"
    )


def _follow(opcodes: Iterator[tuple[str, Any]]) -> Any:
    """Follow opcodes that were checked. Raises ValueError and its like for a senseless order."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for name, argument in opcodes:
        if name in NUMBERS_AND_TEXT:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in PUTS:
            memo[argument] = stack[-1]
        elif name in GETS:
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(Global(argument))
        elif name == "MARK":
            stack.append(_Mark())
        elif name.startswith("EMPTY"):
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
        elif name == "TUPLE":
            stack.append(tuple(_since_mark(stack)))
        elif name in SHORT_TUPLES:
            stack[-SHORT_TUPLES[name] :] = [tuple(_last(stack, SHORT_TUPLES[name]))]
        elif name != "PROTO":
            if name == "STOP":
                return stack.pop()
            _ACTIONS[name](stack)
    raise ValueError("it has no end")


def _last(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise ValueError("too little on the stack")
    return stack[-count:]


def _since_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while not isinstance(item := stack.pop(), _Mark):
        items.append(item)
    return items[::-1]


def _append(stack: list[Any], items: list[Any]) -> None:
    _of_type(stack[-1], list).extend(items)


def _set_items(stack: list[Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key without a value")
    for name in items[::2]:
        _of_type(name, str)  # a tuple of tuples of itself takes for ever to hash
    _of_type(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))


def _build(stack: list[Any]) -> None:
    """Attributes of an OrderedDict, such as a state dict's _metadata: dropped."""
    stack.pop()
    _of_type(stack[-1], dict)


def _persistent(stack: list[Any]) -> None:
    kind, storage, key, _, numel = _of_type(stack.pop(), tuple)
    if kind != "storage" or not isinstance(storage, Global):
        raise ValueError("a persistent id that is no storage")
    stack.append(Storage(_of_type(key, str), STORAGES[storage.name], _size(numel)))


def _reduce(stack: list[Any]) -> None:
    arguments, function = _of_type(stack.pop(), tuple), stack.pop()
    if function == Global(ORDERED_DICT) and not arguments:
        stack.append({})
    elif function == Global(REBUILD_TENSOR):
        storage, offset, shape, strides = arguments[:4]
        sizes = tuple(map(_size, _of_type(shape, tuple)))
        steps = tuple(map(_size, _of_type(strides, tuple)))
        if len(sizes) != len(steps):
            raise ValueError("a tensor with other strides than dimensions")
        stack.append(StridedView(_of_type(storage, Storage), _size(offset), sizes, steps))
    elif function == Global(REBUILD_PARAMETER):
        stack.append(_of_type(arguments[0], StridedView))
    else:
        raise ValueError("a call of something that is not to be called")


def _of_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is tuple and type(value) is not tuple):
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} has to be")
    return value


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**48:
        raise ValueError("an impossible size")
    return value


_ACTIONS = {
    "APPEND": lambda stack: _append(stack, [stack.pop()]),
    "APPENDS": lambda stack: _append(stack, _since_mark(stack)),
    "SETITEM": lambda stack: _set_items(stack, [stack.pop(), stack.pop()][::-1]),
    "SETITEMS": lambda stack: _set_items(stack, _since_mark(stack)),
    "BUILD": _build,
    "BINPERSID": _persistent,
    "REDUCE": _reduce,
}
