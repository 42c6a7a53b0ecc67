"""Tools in what the endpoints take: on offer, demanded, and called in earlier answers."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_NAME_CHARS = 256
MAX_TOOLS = 128
MAX_CALLS = 128  # of one message

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class ToolFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function on offer; without parameters it takes none."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    """The function that must be called."""

    name: FunctionName


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Struct, kw_only=True):
    """What was called; the arguments are the text of a JSON object."""

    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    arguments: str = ""


class MadeCall(Struct, kw_only=True):
    """A call in an earlier answer."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    type: Literal["function"] = "function"


Tools = Annotated[list[OfferedTool], Meta(max_length=MAX_TOOLS)]
MadeCalls = Annotated[list[MadeCall], Meta(max_length=MAX_CALLS)]
